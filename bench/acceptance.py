"""How deep drafts are accepted: counts per depth with confidence intervals, taken from outside while an engine steps."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from titan.core.step import Acceptance, StepPlan

Z_95 = 1.959963984540054
"""The normal quantile of a 95 % interval."""


class Interval(NamedTuple):
    """Limits of a share, both between 0 and 1."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class DepthAcceptance:
    """One depth: of ``num_trees`` draft trees that reach it, ``num_accepted`` had a node of this depth accepted.

    For chains the rate is accepted / proposed draft tokens.
    """

    depth: int
    num_trees: int
    num_accepted: int
    rate: float
    interval: Interval  # 95 %, as if trees were independent


class AcceptanceCounts:
    """Counts draft trees and accepted paths; pass `observe` to an engine's ``observers``."""

    def __init__(self) -> None:
        self.tree_depths: Counter[int] = Counter()  # trees by their depth; 0 = nothing was drafted
        self.path_depths: Counter[int] = Counter()  # by the depth of their accepted path
        self.num_tries = 0  # nodes, roots among them, that verification reached and that have children
        self.num_descents = 0  # of these, how often a child was accepted
        self.num_nodes = 0  # draft tokens

    def observe(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Count the rows of a step that emitted tokens."""
        for i, path in enumerate(acceptance.paths):
            if not plan.reaches_root(i):
                continue
            tree = acceptance.trees[i]
            self.tree_depths[tree.topology.max_depth] += 1
            self.path_depths[len(path)] += 1
            self.num_nodes += tree.num_nodes
            inner = set(tree.topology.inner.tolist())
            self.num_tries += sum(node in inner for node in (-1, *path))
            self.num_descents += len(path)

    def add(self, other: AcceptanceCounts) -> None:
        """Take in the counts of another run."""
        self.tree_depths += other.tree_depths
        self.path_depths += other.path_depths
        self.num_nodes += other.num_nodes
        self.num_tries += other.num_tries
        self.num_descents += other.num_descents

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per request and target step, final token included; tokens after a stop count too."""
        return 1 + self.num_descents / self.path_depths.total() if self.path_depths else 1.0

    @property
    def alpha(self) -> float:
        """Share of reached nodes with children of which a child was accepted: the acceptance of one more depth."""
        return self.num_descents / self.num_tries if self.num_tries else 0.0

    def per_depth(self) -> list[DepthAcceptance]:
        """Acceptance from depth 1 to the deepest tree."""
        rows = []
        for depth in range(1, max(self.tree_depths, default=0) + 1):
            num_trees = sum(count for reach, count in self.tree_depths.items() if reach >= depth)
            num_accepted = sum(count for reach, count in self.path_depths.items() if reach >= depth)
            interval = wilson_interval(num_accepted, num_trees)
            rows.append(DepthAcceptance(depth, num_trees, num_accepted, num_accepted / num_trees, interval))
        return rows


def wilson_interval(num_successes: int, num_trials: int, z: float = Z_95) -> Interval:
    """The score interval of a binomial share: Wilson, "Probable inference", Journal of the American Statistical Association, 1927.

    Args:
        num_successes: 0 to ``num_trials``.
        num_trials: at least 1.
        z: normal quantile of the confidence, two-sided.

    Raises:
        ValueError: the counts are not allowed.
    """
    if not 0 <= num_successes <= num_trials or num_trials == 0:
        raise ValueError(f"{num_successes} successes in {num_trials} trials are not allowed: at least one trial, and no fewer")
    share = num_successes / num_trials
    scale = 1 + z * z / num_trials
    center = (share + z * z / (2 * num_trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / num_trials + z * z / (4 * num_trials**2))
    return Interval(max(0.0, center - half), min(1.0, center + half))
