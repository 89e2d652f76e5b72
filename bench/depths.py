"""Depths that accepted paths through draft trees reach, and intervals of shares."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from titan.bench.samples import Spread
from titan.core.step import Acceptance, StepPlan

Z_95 = 1.959963984540054
"""The normal quantile of a 95 % interval."""


@dataclass(slots=True)
class DepthCounts:
    """Counts of draft trees and of what was accepted of them; `observe` is an observer of an engine."""

    trees: Counter[int] = field(default_factory=Counter)  # those that reach a depth
    accepted: Counter[int] = field(default_factory=Counter)  # those of which a node of a depth was accepted

    def observe(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Count the rows of a step that emitted tokens."""
        for i, path in enumerate(acceptance.paths):
            if plan.reaches_root(i):
                self.trees.update(range(1, 1 + max(acceptance.trees[i].topology.depths, default=0)))
                self.accepted.update(range(1, len(path) + 1))

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
