"""Counts of acceptance on trees that can be counted by hand, and intervals against scipy's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest
from stepping import host_trees

from titan.bench.acceptance import AcceptanceCounts, wilson_interval
from titan.core.step import Acceptance
from titan.core.trees import EMPTY_TREE, DraftTree


def tree(parents: list[int]) -> DraftTree:
    return DraftTree(np.arange(len(parents), dtype=np.int64), np.array(parents, np.int32))


def observe(counts: AcceptanceCounts, trees: list[DraftTree], paths: list[list[int]], unreached: int = -1) -> None:
    plan: Any = SimpleNamespace(reaches_root=lambda i: i != unreached)
    counts.observe(plan, Acceptance(host_trees(trees), paths, [[0]] * len(paths), [None] * len(paths)))


def test_paths_through_trees_are_counted_by_depth() -> None:
    counts = AcceptanceCounts()
    fork = tree([-1, 0, -1])  # two children of the root, one of which has a child
    observe(counts, [fork, fork, fork, EMPTY_TREE], [[0, 1], [2], [], []])
    assert [(each.depth, each.num_trees, each.num_accepted) for each in counts.per_depth()] == [(1, 3, 2), (2, 3, 1)]
    # reached with children: three roots and node 0 once; descents: three
    assert (counts.num_tries, counts.num_descents, counts.alpha) == (4, 3, 0.75)
    assert counts.mean_acceptance_length == 1 + 3 / 4
    assert counts.tree_depths == {2: 3, 0: 1}


def test_a_prefill_chunk_that_does_not_reach_the_root_is_no_step() -> None:
    counts = AcceptanceCounts()
    observe(counts, [tree([-1]), EMPTY_TREE], [[0], []], unreached=1)
    assert counts.mean_acceptance_length == 2.0


def test_counts_add_up() -> None:
    first, second = AcceptanceCounts(), AcceptanceCounts()
    observe(first, [tree([-1, 0])], [[0]])
    observe(second, [tree([-1])], [[]])
    first.add(second)
    assert [(each.num_trees, each.num_accepted) for each in first.per_depth()] == [(2, 1), (1, 0)]
    assert (first.num_tries, first.num_descents, first.num_nodes) == (3, 1, 3)


def test_nothing_drafted_has_no_depths() -> None:
    counts = AcceptanceCounts()
    observe(counts, [EMPTY_TREE], [[]])
    assert counts.per_depth() == [] and counts.alpha == 0.0 and counts.mean_acceptance_length == 1.0


@pytest.mark.parametrize(("num_successes", "num_trials"), [(0, 1), (1, 1), (0, 40), (13, 40), (40, 40), (700, 1000)])
def test_intervals_are_those_of_scipy(num_successes: int, num_trials: int) -> None:
    expected = binomtest(num_successes, num_trials).proportion_ci(0.95, method="wilson")
    assert wilson_interval(num_successes, num_trials) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.parametrize(("num_successes", "num_trials"), [(0, 0), (2, 1), (-1, 3)])
def test_counts_that_cannot_be_are_refused(num_successes: int, num_trials: int) -> None:
    with pytest.raises(ValueError, match="are not allowed"):
        wilson_interval(num_successes, num_trials)
