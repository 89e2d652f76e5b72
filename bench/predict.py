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
from collections.abc import Sequence
from dataclasses import dataclass

from titan.core.step import Acceptance, StepPlan

Z_95 = 1.959963984540054
"""The normal quantile of a 95 % interval."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens of a step with ``gamma`` draft tokens in a chain, final token included (Leviathan et al. 2023, equation 1)."""
    return mean_expected_tokens(alpha, [1] * gamma, 1)


def mean_expected_tokens(alpha: float, num_trees: Sequence[float], num_steps: float) -> float:
    """`expected_tokens` over steps whose trees differ in depth.

    Args:
        alpha: probability that one more depth is accepted.
        num_trees: that reach each depth, from depth 1 on.
        num_steps: of a request, those without a tree among them.
    """
    return 1 + sum(alpha**depth * count for depth, count in enumerate(num_trees, 1)) / num_steps


@dataclass(slots=True)
class Tries:
    """Counts of what verification reached and accepted; their ratio is alpha, the acceptance of one more depth."""

    num_tries: int = 0  # nodes reached that have children, roots among them
    num_accepted: int = 0  # children accepted, of each at most one

    def observe(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Count the rows of a step that emitted tokens; an observer for `titan.engine.Engine`."""
        for i, path in enumerate(acceptance.paths):
            if plan.reaches_root(i):
                inner = set(acceptance.trees[i].topology.inner.tolist())
                self.num_tries += sum(node in inner for node in (-1, *path))
                self.num_accepted += len(path)


@dataclass(frozen=True, slots=True)
class Share:
    """A share and its interval, all between 0 and 1."""

    share: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.share:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def wilson_share(num_successes: float, num_trials: float, z: float = Z_95) -> Share:
    """A binomial share of at least one trial with its score interval, of two-sided confidence by its normal quantile ``z``.

    Wilson, "Probable inference", Journal of the American Statistical Association, 1927.
    """
    share = num_successes / num_trials
    scale = 1 + z * z / num_trials
    center = (share + z * z / (2 * num_trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / num_trials + z * z / (4 * num_trials**2))
    return Share(share, max(0.0, center - half), min(1.0, center + half))
