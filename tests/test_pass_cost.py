"""The followed costs of passes, against curves that are known."""

from collections.abc import Callable

import numpy as np
import pytest
from stepping import make_request

from titan.adaptive.controller import NUM_PLAIN
from titan.adaptive.costs import COLD_PLAIN_STEPS, FIRST_DRAFT, Costs
from titan.adaptive.host_time import COLD_STEPS, FIRST_MORE, HostTime
from titan.adaptive.load import Candidate, Load, Outcome
from titan.adaptive.pace import Pace
from titan.adaptive.pass_cost import FOLLOWED, PassCost
from titan.adaptive.value import Yield
from titan.core.draft_history import AcceptanceCounts
from titan.core.step import StepPlan

SIZES, SECONDS = (1, 2, 4, 8, 16), (1.0, 1.1, 1.4, 2.0, 3.2)


def cost(**options: bool) -> PassCost:
    return PassCost(SIZES, SECONDS, 1e-3, **options)


@pytest.mark.parametrize(("rows", "context", "seconds"), [(1, 0, 1.0), (3, 0, 1.25), (16, 100, 3.3), (24, 0, 4.4), (6, 50, 1.75)])
def test_curve_is_linear_between_and_beyond_sizes(rows: int, context: int, seconds: float) -> None:
    assert cost().predict(rows, context) == pytest.approx(seconds)


def test_curve_that_ends_flat_rises_beyond_as_it_did_on_average() -> None:
    assert PassCost((1, 3, 5), (1.0, 2.0, 2.0)).predict(9, 0) == 3.0


def test_padded_sizes_and_a_measurement_that_fell() -> None:
    assert cost(is_padded=True).predict(5, 0) == 2.0
    assert PassCost((1, 2), (2.0, 1.5)).predict(2, 0) == 2.0  # never falls


@pytest.mark.parametrize("outlier", [1.0, 5.0])
def test_noise_and_outliers_hardly_move_it(outlier: float) -> None:
    rng, passes = np.random.default_rng(0), cost()
    seen = []
    for _ in range(400):
        passes.note(8, 0, 2.0 * float(rng.lognormal(0, 0.05)) * (outlier if rng.random() < 0.02 else 1.0))
        seen.append(passes.predict(8, 0))
    assert np.abs(np.array(seen[50:]) / 2.0 - 1).max() < 0.15


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_machine_of_another_speed_is_seen_at_all_sizes_and_forgotten(factor: float) -> None:
    passes = cost()
    for _ in range(20):
        passes.note(1, 0, 1.0)
        passes.note(8, 0, 2.0)
    for speed in (factor, 1.0):
        for _ in range(40):
            passes.note(8, 0, 2.0 * speed)
        assert passes.predict(8, 0) == pytest.approx(2.0 * speed, rel=0.05)
        assert passes.predict(1, 0) == pytest.approx(speed, rel=0.2)


def test_a_step_in_the_true_curve_is_learned() -> None:
    passes = cost()
    for _ in range(150):
        passes.note(8, 0, 2.0)
        passes.note(16, 0, 6.0)
    assert passes.predict(8, 0) == pytest.approx(2.0, rel=0.05)
    assert passes.predict(16, 0) == pytest.approx(6.0, rel=0.05)


def test_model_that_rests_follows_the_pace_of_the_other() -> None:
    passes, other = cost(), cost()
    for seconds in [2.0] * 40 + [3.0] * 60:
        passes.follow(other.note(8, 0, seconds), other.pace, 1)
    assert passes.predict(8, 0) == pytest.approx(2.0 * 1.5**FOLLOWED, rel=0.1)
    for _ in range(40):
        passes.note(8, 0, 12.0)
    passes.follow(0.0, other.pace, 10_000)
    assert passes.predict(8, 0) == pytest.approx(3.0, rel=0.15), "what held it up may be over"


def load(n: int, missing: int = 1) -> Load:
    return Load([Candidate(AcceptanceCounts(), 6, missing, 256, True)] * n, n, 0)


@pytest.mark.parametrize(("num_steps", "most"), [(COLD_STEPS, 1.01), (40, 1.25)])
def test_first_steps_of_their_kind_teach_little(num_steps: int, most: float) -> None:
    """A step with drafts takes 1.25 times as long as the curves say, as cold ones do: it is believed once it goes on."""
    costs = Costs(cost(), cost())
    for _ in range(20):
        costs.note_plain(load(4), 4, 0.5, 1.4)
    for _ in range(num_steps):
        costs.note_drafting(load(4), Outcome(4, 2, 1, 4, 1.25 * 3.9, 1.25 * 1.4, 1.25 * 2.0), [1] * 4)
    assert costs.draft is not None
    for ratio in (costs.target.predict(8, 0) / 2.0, costs.draft.predict(4, 0) / 1.4):
        assert most - 0.1 < ratio < most + 0.02


def test_of_steps_that_are_learned_from_together_only_the_first_count_as_cold() -> None:
    costs = Costs(cost(), cost())
    for _ in range(20):
        costs.note_plain(load(4), 4, 0.5, 1.4)
    n = 5 * COLD_STEPS
    costs.note_drafting(load(4), Outcome(4 * n, 2 * n, n, 4 * n, n * 1.25 * 3.9, n * 1.25 * 1.4, n * 1.25 * 2.0), [1] * 4, n)
    assert costs.draft is not None
    for ratio in (costs.target.predict(8, 0) / 2.0, costs.draft.predict(4, 0) / 1.4):
        assert 1.14 < ratio < 1.21  # four fifths of 1.25, and one of 1


def teach(costs: Costs, num_rounds: int, plain: Callable[[int], float]) -> None:
    """Rounds of 16 steps with drafts that take what the curves say, and some without: of each, how many times as long it takes."""
    for _ in range(num_rounds):
        costs.note_drafting(load(4), Outcome(64, 32, 16, 64, 16 * 3.9, 16 * 1.4, 16 * 2.0), [1] * 4, 16)
        for factor in map(plain, range(NUM_PLAIN)):
            costs.note_plain(load(4), 4, factor * 0.5, factor * 1.4)


def test_plain_steps_between_drafts_tell_what_they_take_now() -> None:
    """The first of them find cold caches, which tell nothing: neither that such steps take longer nor that they do not."""
    costs = Costs(cost(), cost())
    for factor in (1.0, 7 / 6):
        teach(costs, 60, lambda i, factor=factor: 1.4 * factor if i < COLD_PLAIN_STEPS else factor)
        assert costs.host.predict(4) == pytest.approx(factor * 0.5, rel=0.01)
        assert costs.plain_seconds(load(4)) == pytest.approx(factor * 1.9, rel=0.03)


def test_caches_that_stay_warm_without_drafts_say_nothing_of_passes_with_drafts() -> None:
    costs = Costs(cost(), cost())
    teach(costs, 40, lambda _: 0.7)
    assert costs.plain_seconds(load(4)) == costs.decode_seconds(load(4)) == pytest.approx(0.7 * 1.9, rel=0.03)
    assert costs.target.predict(8, 0) == pytest.approx(2.0, rel=0.15)
    costs.target.age(10_000)  # what was spared may be over
    assert costs.target.predict(4, 0, is_warm=True) == pytest.approx(costs.target.predict(4, 0), rel=1e-3)


def test_a_machine_that_is_slow_is_not_taken_for_one_whose_caches_are_cold() -> None:
    passes = cost()
    for _ in range(60):
        passes.note(4, 0, 1.5 * 1.4, is_warm=True)
    assert passes.predict(4, 0) == passes.predict(4, 0, is_warm=True) == pytest.approx(1.5 * 1.4, rel=0.02)


def test_what_long_passes_took_counts_less_after_steps_that_say_nothing_of_them() -> None:
    """As there are none of them where nothing is drafted."""
    found = list[float]()
    for num_unseen in (0, 2000):
        costs = Costs(cost(), None)
        for _ in range(40):
            costs.target.note(16, 0, 3 * 3.2)
            costs.target.note(4, 0, 1.4)
        costs.note_plain(Load((), 100, 0), 4, 1.0, 24.0, num_unseen)
        found.append(costs.target.predict(16, 0) / 3.2)
    assert found[0] > 2.5 and found[1] < 2.0


def test_one_slow_pass_after_many_that_were_alike_is_not_believed() -> None:
    costs = Costs(cost(), None)
    teach(costs, 4, lambda _: 1.0)
    costs.note_plain(load(4), 4, 0.5, 1.4, 256)
    costs.note_plain(load(4), 4, 0.5, 3 * 1.4)
    assert costs.plain_seconds(load(4)) < 0.5 + 1.2 * 1.4


def test_what_drafting_took_of_the_host_counts_less_after_steps_without() -> None:
    costs = Costs(cost(), None)
    for _ in range(20):
        costs.note_plain(load(4), 4, 0.5, 1.4)
    for _ in range(40):
        costs.note_drafting(load(4), Outcome(4, 2, 0, 0, 2.0 + 8.0, 0.0, 2.0), [1] * 4)
    before = costs.host.predict(4, 4)
    costs.note_plain(load(4), 4, 0.5, 1.4, 60_000)
    assert costs.host.predict(4, 4) == pytest.approx(0.5 * (1 + FIRST_MORE), rel=0.05)
    assert before > 3 * costs.host.predict(4, 4)


def test_host_time_of_the_first_step_that_drafts_is_that_of_a_cold_one() -> None:
    """For long, there may be no other: reviews say nothing of it."""
    costs = Costs(cost(), cost())
    for _ in range(20):
        costs.note_plain(load(4), 4, 0.5, 1.4)
    costs.note_drafting(load(4), Outcome(4, 2, 1, 4, 1.4 + 2.0 + 1.1, 1.4, 2.0), [1] * 4)
    assert costs.host.predict(4) == pytest.approx(0.5)
    assert costs.host.predict(4, 4) == pytest.approx(0.5 + 0.6 / FIRST_DRAFT)


def test_host_takes_the_lesser_of_the_first_steps_and_clips_later_ones() -> None:
    host = HostTime()
    for seconds in (9.0, 2.0, 1.0, 3.0):
        assert not host.knows(3), "it still falls"
        host.note(3, 0, seconds)
    assert host.knows(3) and host.predict(3) == 1.0 and host.predict(3, 3) == 1.0 + FIRST_MORE  # nothing has drafted yet
    host.note(3, 0, 100.0)
    assert host.predict(3) == 1.125


def test_host_takes_longer_the_more_requests_draft() -> None:
    host = HostTime()
    host.note(8, 0, 1.0)
    host.note(8, 4, 1.5)
    assert [host.predict(8, count) for count in (0, 4, 8, 16, 2, 1)] == pytest.approx([1.0, 1.5, 1.75, 2.0, 4 / 3, 1.25])


def test_yield_is_the_return_that_was_seen_over_that_which_was_planned() -> None:
    brings = Yield()
    for _ in range(2000):
        brings.note(3, 4.0)
    assert brings.factor == pytest.approx(3 / 4, abs=0.01)
    brings.fade(300)
    assert 0.75 < brings.factor < 0.85
    brings.fade(10**5)
    assert brings.factor == 1.0


@pytest.mark.parametrize(
    ("num_decodes", "context", "most", "limit"),
    [(4, 0, 500, 46), (4, 100, 500, 36), (30, 0, 500, 20), (60, 0, 500, 16), (4, 0, 40, 40), (60, 0, 5, 5)],
)
def test_the_prompt_tokens_of_a_step_are_those_that_its_time_allows(num_decodes: int, context: int, most: int, limit: int) -> None:
    """A pass takes 1 + rows / 100 + context / 1000 seconds, and a step should take 1.5."""
    assert Pace(PassCost((1, 101), (1.01, 2.01), 1e-3), 1.5 + 1e-9).prefill_limit(num_decodes, context, most) == limit


def test_drafts_that_are_over_take_nothing_from_prompts() -> None:
    never, once = (Pace(PassCost((1, 101), (0.99, 1.99), 1e-3), 1.5) for _ in range(2))
    requests = [make_request() for _ in range(4)]
    plan = StepPlan(requests, [1] * 4, [2] * 4, [2] * 4)
    for _ in range(20):
        once.note(plan, 4, 8, 1.3, 1.1)
    assert once.prefill_limit(4, 0, 500) < 0.8 * never.prefill_limit(4, 0, 500)
    for _ in range(400):
        for each in (never, once):
            each.note(plan, 4, 0, 1.03, 1.03)
    assert once.prefill_limit(4, 0, 500) == pytest.approx(never.prefill_limit(4, 0, 500), rel=0.05)


def test_drafts_and_the_rest_of_a_step_leave_less_for_prompts() -> None:
    """Its context is what the plan had before it was committed."""
    pace = Pace(PassCost((1, 101), (0.99, 1.99), 1e-3), 1.5)
    requests = [make_request() for _ in range(4)]
    before = pace.prefill_limit(4, 0, 500)
    for _ in range(200):
        plan = StepPlan(requests, [1] * 4, [2] * 4, [2] * 4)
        for num_computed_tokens in (25, 28):
            for each in requests:
                each.num_computed_tokens = num_computed_tokens
            assert plan.num_context_tokens == 100
        pace.note(plan, 4, 8, 0.98 + 0.12 + 0.1 + 0.1, 0.98 + 0.12 + 0.1)  # 12 rows, 100 tokens, and a tenth of a second
    after = pace.prefill_limit(4, 0, 500)
    assert (before, after) == (48, 30)
