"""Replay proposes what was recorded, corrupted as often as asked."""

from __future__ import annotations

import numpy as np
import pytest
from stepping import AMPLE, greedy, make_engine, make_request, run_all
from zoo import VOCAB_SIZE, Zoo, random_prompts

from titan.core.request import Request
from titan.core.step import StepPlan
from titan.draft.replay import ReplayDrafter

RECORDING = list(range(10, 40))


def request_of(seed: int, num_output: int) -> Request:
    return make_request([1, 2], None, RECORDING[:num_output], seed=seed)


def test_proposals_continue_the_recording_of_a_prompt_from_where_the_output_is() -> None:
    requests = [request_of(0, num_output) for num_output in (0, 7, 28, 30)]
    plan = StepPlan(requests, [1] * 4, [4, 2, 4, 4], [4] * 4)
    trees = ReplayDrafter({(1, 2): RECORDING}, acceptance=1.0, vocab_size=50, max_draft_tokens=4).propose(plan)
    assert [tree.token_ids.tolist() for tree in trees] == [RECORDING[:4], RECORDING[7:9], RECORDING[28:], []]
    assert all(tree.topology.is_chain for tree in trees)
    others = ReplayDrafter({(7,): RECORDING}, acceptance=1.0, vocab_size=50, max_draft_tokens=4)
    assert [tree.num_nodes for tree in others.propose(plan)] == [0] * 4


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
def test_tokens_are_kept_as_often_as_asked_and_reproducibly(acceptance: float) -> None:
    drafter = ReplayDrafter({(1, 2): RECORDING}, acceptance=acceptance, vocab_size=40, max_draft_tokens=6)
    plan = StepPlan([request_of(seed, 20) for seed in range(1000)], [1] * 1000, [6] * 1000, [6] * 1000)
    trees = drafter.propose(plan)
    token_ids, recorded = np.stack([tree.token_ids for tree in trees]), np.array(RECORDING[20:26])
    is_kept = token_ids == recorded
    assert (is_kept | (token_ids == (recorded + 1) % 40)).all()
    assert is_kept.mean(0) == pytest.approx([acceptance] * 6, abs=0.05)
    assert np.array_equal(np.stack([tree.token_ids for tree in drafter.propose(plan)]), token_ids)


def test_the_engines_acceptance_rate_is_the_dialled_one(zoo: Zoo) -> None:
    """A draft token counts only behind accepted ones: the expected number accepted of 4 is 0.7 + 0.7^2 + 0.7^3 + 0.7^4."""
    prompts = random_prompts(20, seed=6, max_len=20)
    params = [greedy(60, ignore_eos=True)] * 20
    recorded = run_all(make_engine(zoo.path("llama"), **AMPLE), prompts, params)
    recordings = {tuple(prompt): output for prompt, output in zip(prompts, recorded, strict=True)}
    drafter = ReplayDrafter(recordings, acceptance=0.7, vocab_size=VOCAB_SIZE, max_draft_tokens=4)
    engine = make_engine(zoo.path("llama"), drafter, **AMPLE)
    run_all(engine, prompts, params)
    metrics = engine.metrics()
    assert metrics.mean_acceptance_length == pytest.approx(1 + sum(0.7**depth for depth in range(1, 5)), rel=0.07)
    assert metrics.accepted_per_depth[0] / metrics.proposed_per_depth[0] == pytest.approx(0.7, abs=0.05)
