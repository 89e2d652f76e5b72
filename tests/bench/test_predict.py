"""The formulas of Leviathan et al. 2023, against what they count, and against an engine whose acceptance is dialled."""

from __future__ import annotations

from itertools import product

import pytest
from stepping import make_engine, submit
from zoo import VOCAB_SIZE, Zoo, random_prompts

from titan import SamplingParams
from titan.bench.acceptance import AcceptanceCounts, wilson_interval
from titan.bench.predict import PassCosts, expected_tokens, mean_expected_tokens, predicted_speed_up
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


def test_steps_of_different_depth_are_averaged() -> None:
    assert mean_expected_tokens(0.5, {0: 1, 2: 3}) == pytest.approx((1 + 3 * 1.75) / 4)
    assert mean_expected_tokens(0.5, {}) == 1.0


def test_it_is_theorem_3_8_where_a_verification_costs_what_a_decode_costs() -> None:
    alpha, gamma, cost_ratio = 0.8, 4, 0.1
    costs = PassCosts(decode=2.0, verify=2.0, draft_pass=2.0 * cost_ratio, num_draft_passes=gamma)
    theorem = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * cost_ratio + 1))
    assert predicted_speed_up(expected_tokens(alpha, gamma), costs) == pytest.approx(theorem)


def test_a_dearer_verification_takes_from_the_speed_up() -> None:
    assert predicted_speed_up(3.0, PassCosts(decode=1.0, verify=2.0, draft_pass=0.25, num_draft_passes=4)) == 1.0


@pytest.mark.parametrize(("alpha", "gamma"), [(-0.1, 1), (1.1, 1), (0.5, -1)])
def test_what_is_no_probability_or_length_is_refused(alpha: float, gamma: int) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        expected_tokens(alpha, gamma)


def test_alpha_and_tokens_of_an_engine_are_those_that_its_draft_was_dialled_to(zoo: Zoo) -> None:
    alpha, gamma, output_len = 0.7, 4, 64
    prompts = random_prompts(16, max_len=12)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    plain = make_engine(zoo.path("llama"))
    requests = submit(plain, prompts, [params] * len(prompts))
    while plain.scheduler.has_unfinished:
        plain.step()
    recordings = {tuple(request.prompt_token_ids): request.output_token_ids for request in requests}
    draft = ReplayDrafter(recordings, acceptance=alpha, vocab_size=VOCAB_SIZE, max_draft_tokens=gamma)
    engine, counts = make_engine(zoo.path("llama"), draft), AcceptanceCounts()
    engine.observers.append(counts.observe)
    submit(engine, prompts, [params] * len(prompts))
    while engine.scheduler.has_unfinished:
        engine.step()
    low, high = wilson_interval(counts.num_descents, counts.num_tries, z=3.3)
    assert low < alpha < high and high - low < 0.15
    metrics = engine.metrics()
    assert counts.mean_acceptance_length == pytest.approx(metrics.mean_acceptance_length, rel=0.02)
    assert mean_expected_tokens(counts.alpha, counts.tree_depths) == pytest.approx(metrics.mean_acceptance_length, rel=0.05)
    assert [each.num_accepted for each in counts.per_depth()] == metrics.accepted_per_depth
    assert [each.num_trees for each in counts.per_depth()] == metrics.proposed_per_depth
