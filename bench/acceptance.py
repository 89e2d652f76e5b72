"""How often drafts are accepted: tries counted from outside while an engine steps, and shares with confidence intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

from titan.core.step import Acceptance, StepPlan

Z_95 = 1.959963984540054
"""The normal quantile of a 95 % interval."""


@dataclass(slots=True)
class Tries:
    """Nodes that verification reached and that have children, roots among them, and how many of these had a child accepted."""

    num_tries: int = 0
    num_accepted: int = 0

    @property
    def alpha(self) -> float:
        """The acceptance of one more depth; there must be tries."""
        return self.num_accepted / self.num_tries

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
    """A binomial share and its score interval: Wilson, "Probable inference", Journal of the American Statistical Association, 1927.

    Args:
        num_successes: 0 to ``num_trials``.
        num_trials: at least 1.
        z: normal quantile of the confidence, two-sided.
    """
    share = num_successes / num_trials
    scale = 1 + z * z / num_trials
    center = (share + z * z / (2 * num_trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / num_trials + z * z / (4 * num_trials**2))
    return Share(share, max(0.0, center - half), min(1.0, center + half))
