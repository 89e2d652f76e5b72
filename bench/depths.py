"""Depths that accepted paths through draft trees reach, and intervals of shares."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from titan.bench.samples import Spread
from titan.core.arrays import Ints
from titan.core.step import Acceptance, StepPlan

Z_95 = 1.959963984540054
"""The normal quantile of a 95 % interval."""


@dataclass(slots=True)
class DepthCounts:
    """Counts of draft trees and of what was accepted of them; `observe` is an observer of an engine."""

    # per step: where the nodes of each row begin, and the last ones end; depths of nodes; lengths of paths, -1 = emitted nothing
    steps: list[tuple[Ints, Ints, list[int]]] = field(default_factory=list)

    def observe(self, plan: StepPlan, acceptance: Acceptance) -> None:  # noqa: ARG002
        """Keep what is counted later, as the time of this is the step's."""
        lengths = [len(path) if emitted else -1 for path, emitted in zip(acceptance.paths, acceptance.token_ids, strict=True)]
        self.steps.append((acceptance.trees.start_loc, acceptance.trees.nodes.depths.copy(), lengths))

    @property
    def details(self) -> dict[str, list[int]]:
        """Per depth, from 1 on: trees that reach it, and those of which a node of it was accepted; of rows that emitted tokens."""
        trees, accepted = Counter[int](), Counter[int]()
        for start_loc, depths, lengths in self.steps:
            for (start, end), length in zip(pairwise(start_loc.tolist()), lengths, strict=True):
                if length >= 0:
                    trees.update(range(1, 1 + int(depths[start:end].max(initial=0))))
                    accepted.update(range(1, 1 + length))
        counts = {"trees per depth": trees, "accepted per depth": accepted}
        return {name: [count[depth] for depth in sorted(trees)] for name, count in counts.items()}


def wilson_share(num_successes: float, num_trials: float) -> Spread:
    """A binomial share of at least one trial with its score interval of 95 %.

    Wilson, "Probable inference", Journal of the American Statistical Association, 1927.
    """
    share = num_successes / num_trials
    scale = 1 + Z_95 * Z_95 / num_trials
    center = (share + Z_95 * Z_95 / (2 * num_trials)) / scale
    half = Z_95 / scale * math.sqrt(share * (1 - share) / num_trials + Z_95 * Z_95 / (4 * num_trials**2))
    return Spread(share, max(0.0, center - half), min(1.0, center + half), int(num_trials))
