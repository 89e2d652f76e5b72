"""Leviathan et al. 2023 against what it counts and an engine whose acceptance is dialled; counts by hand; intervals of scipy."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest
from stepping import host_trees, make_engine, submit
from zoo import VOCAB_SIZE, Zoo, random_prompts

from titan import SamplingParams
from titan.bench.predict import AcceptanceCounts, expected_tokens, wilson_share
from titan.core.step import Acceptance
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.draft.replay import ReplayDrafter


def enumerated_tokens(alpha: float, gamma: int) -> float:
    """The mean over all outcomes of ``gamma`` coins: tokens up to the first rejection, and the final token."""
    total = 0.0
    for coins in product([True, False], repeat=gamma):
        probability = 1.0
        for coin in coins:
            probability *= alpha if coin else 1 - alpha
        total += probability * (1 + (coins.index(False) if False in coins else gamma))
    return total


@pytest.mark.parametrize("gamma", [0, 1, 2, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.85, 1.0])
def test_expected_tokens_are_the_mean_over_all_outcomes(alpha: float, gamma: int) -> None:
    assert expected_tokens(alpha, gamma) == pytest.approx(enumerated_tokens(alpha, gamma))


def test_paths_through_trees_are_counted_by_depth() -> None:
    # two children of the root, one of which has a child
    fork = DraftTree(np.arange(3, dtype=np.int64), np.array([-1, 0, -1], np.int32))
    trees = [fork, fork, fork, EMPTY_TREE, fork]  # the last is that of a prefill chunk, which is no step
    counts = AcceptanceCounts()
    plan: Any = SimpleNamespace(reaches_root=lambda i: i < 4)
    counts.observe(plan, Acceptance(host_trees(trees), [[0, 1], [2], [], [], []], [[0]] * 5, [None] * 5))
    assert counts.details == {"trees per depth": [3, 3], "accepted per depth": [2, 1]}
    # tried: three roots, and node 0 once; accepted: three nodes; of the four steps one is without a tree
    assert counts.figures["alpha"] == 3 / 4
    assert counts.figures["expected tokens/step"] == (1 + 3 * enumerated_tokens(3 / 4, 2)) / 4
    assert AcceptanceCounts(num_steps=1).figures == {"expected tokens/step": 1.0}  # nothing was drafted


@pytest.mark.parametrize(("num_successes", "num_trials"), [(0, 1), (1, 1), (0, 40), (13, 40), (40, 40), (700, 1000)])
def test_intervals_are_those_of_scipy(num_successes: int, num_trials: int) -> None:
    expected = binomtest(num_successes, num_trials).proportion_ci(0.95, method="wilson")
    share = wilson_share(num_successes, num_trials)
    assert (share.share, share.low, share.high) == pytest.approx((num_successes / num_trials, expected.low, expected.high))
    assert format(share, ".2f") == f"{num_successes / num_trials:.2f} [{expected.low:.2f}, {expected.high:.2f}]"


def test_alpha_and_tokens_of_an_engine_are_those_that_its_draft_was_dialled_to(zoo: Zoo) -> None:
    alpha, gamma, prompts = 0.7, 4, random_prompts(16, max_len=12)
    params = [SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)] * len(prompts)
    plain = make_engine(zoo.path("llama"))
    requests = submit(plain, prompts, params)
    while plain.scheduler.has_unfinished:
        plain.step()
    recordings = {tuple(request.prompt_token_ids): request.output_token_ids for request in requests}
    draft = ReplayDrafter(recordings, acceptance=alpha, vocab_size=VOCAB_SIZE, max_draft_tokens=gamma)
    engine, counts = make_engine(zoo.path("llama"), draft), AcceptanceCounts()
    engine.observers.append(counts.observe)
    submit(engine, prompts, params)
    while engine.scheduler.has_unfinished:
        engine.step()
    tried, metrics = wilson_share(counts.accepted.total(), counts.num_tries, z=3.3), engine.metrics()
    assert tried.low < alpha < tried.high and tried.high - tried.low < 0.15
    assert counts.figures["expected tokens/step"] == pytest.approx(metrics.mean_acceptance_length, rel=0.05)
    assert counts.details["accepted per depth"] == metrics.accepted_per_depth
    assert counts.details["trees per depth"] == metrics.proposed_per_depth  # of chains
