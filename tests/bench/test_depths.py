"""Depths of accepted paths: counts by hand and of an engine; intervals of scipy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest
from stepping import host_trees, make_engine, submit
from zoo import Zoo, random_prompts

from titan import SamplingParams
from titan.bench.depths import DepthCounts, wilson_share
from titan.core.step import Acceptance
from titan.core.trees import EMPTY_TREE, DraftTree


def test_paths_through_trees_are_counted_by_depth() -> None:
    # two children of the root, one of which has a child
    fork = DraftTree(np.arange(3, dtype=np.int64), np.array([-1, 0, -1], np.int32))
    trees = host_trees([fork, fork, fork, EMPTY_TREE, fork])  # the last is that of a prefill chunk, which is no step
    trees = trees.on_host([column.numpy() for column in trees.nodes])
    counts = DepthCounts()
    plan: Any = None
    counts.observe(plan, Acceptance(trees, [[0, 1], [2], [], [], []], [*[[0]] * 4, []], [None] * 5))
    assert counts.details == {"trees per depth": [3, 3], "accepted per depth": [2, 1]}


@pytest.mark.parametrize(("num_successes", "num_trials"), [(0, 1), (1, 1), (0, 40), (13, 40), (40, 40), (700, 1000)])
def test_intervals_are_those_of_scipy(num_successes: int, num_trials: int) -> None:
    expected = binomtest(num_successes, num_trials).proportion_ci(0.95, method="wilson")
    share = wilson_share(num_successes, num_trials)
    assert (share.median, share.minimum, share.maximum) == pytest.approx((num_successes / num_trials, expected.low, expected.high))


def test_counts_of_an_engine_are_those_that_it_keeps_itself(zoo: Zoo) -> None:
    engine, counts = make_engine(zoo.path("llama"), zoo.path("llama~"), draft_tree="chain"), DepthCounts()
    engine.observers.append(counts.observe)
    submit(engine, random_prompts(8, max_len=12), [SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)] * 8)
    while engine.scheduler.has_unfinished:
        engine.step()
    metrics = engine.metrics()
    assert counts.details == {"trees per depth": metrics.proposed_per_depth, "accepted per depth": metrics.accepted_per_depth}
    assert sum(metrics.accepted_per_depth) > 50
