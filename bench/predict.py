"""What theory makes of acceptance: the tokens of a step, the speed-up that they allow, and intervals of shares.

Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, section 3: if every draft token is accepted
with the same probability alpha, independently of the others, a step with gamma of them emits

    E = (1 - alpha ** (gamma + 1)) / (1 - alpha)        (their equation 1)

tokens, and its speed-up is E / (gamma * c + 1) with c the cost of a draft pass over that of a target pass (their theorem 3.8).
Here the costs are measured, and a verification need not cost what a decode costs, so that it is E / (drafting + verification), both
in decodes. What the host does between the passes is in neither.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from titan.bench.samples import Spread
from titan.core.step import Acceptance, StepPlan

Z_95 = 1.959963984540054
"""The normal quantile of a 95 % interval."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens of a step with ``gamma`` draft tokens in a chain, final token included (Leviathan et al. 2023, equation 1)."""
    return sum(alpha**depth for depth in range(gamma + 1))


@dataclass(slots=True)
class DepthCounts:
    """Counts of draft trees and of what was accepted of them; `observe` is an observer of an engine."""

    num_steps: int = 0  # of requests
    num_tries: int = 0  # nodes that verification reached and that have children, roots among them
    trees: Counter[int] = field(default_factory=Counter)  # those that reach a depth
    accepted: Counter[int] = field(default_factory=Counter)  # those of which a node of a depth was accepted

    def observe(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Count the rows of a step that emitted tokens."""
        for i, path in enumerate(acceptance.paths):
            if plan.reaches_root(i):
                topology = acceptance.trees[i].topology
                inner = set(topology.inner.tolist())
                self.num_steps += 1
                self.num_tries += sum(node in inner for node in (-1, *path))
                self.trees.update(range(1, 1 + max(topology.depths, default=0)))
                self.accepted.update(range(1, len(path) + 1))

    @property
    def figures(self) -> dict[str, float]:
        """Alpha, the acceptance of one more depth, where it was tried, and the tokens of a step that it alone gives."""
        alpha = self.accepted.total() / self.num_tries if self.num_tries else 0.0
        num_drafted = sum(alpha**depth * count for depth, count in self.trees.items())
        expected = {"expected tokens/step": 1 + num_drafted / self.num_steps}
        return {"alpha": alpha, **expected} if self.num_tries else expected

    @property
    def details(self) -> dict[str, list[int]]:
        """Both counts per depth, from depth 1 on."""
        counts = {"trees per depth": self.trees, "accepted per depth": self.accepted}
        return {name: [count[depth] for depth in sorted(self.trees)] for name, count in counts.items()}


def wilson_share(num_successes: float, num_trials: float) -> Spread:
    """A binomial share of at least one trial with its score interval of 95 %.

    Wilson, "Probable inference", Journal of the American Statistical Association, 1927.
    """
    share = num_successes / num_trials
    scale = 1 + Z_95 * Z_95 / num_trials
    center = (share + Z_95 * Z_95 / (2 * num_trials)) / scale
    half = Z_95 / scale * math.sqrt(share * (1 - share) / num_trials + Z_95 * Z_95 / (4 * num_trials**2))
    return Spread(share, max(0.0, center - half), min(1.0, center + half), int(num_trials))
