"""The followed costs of passes, against curves that are known."""

import numpy as np
import pytest

from titan.adaptive.cost import HostTime, PassCost
from titan.adaptive.pace import Pace, StepLoad

SIZES, SECONDS = (1, 2, 4, 8, 16), (1.0, 1.1, 1.4, 2.0, 3.2)


def cost(**options: bool) -> PassCost:
    return PassCost(SIZES, SECONDS, 1e-3, **options)


@pytest.mark.parametrize(("rows", "context", "seconds"), [(1, 0, 1.0), (3, 0, 1.25), (16, 100, 3.3), (24, 0, 4.4), (6, 50, 1.75)])
def test_curve_is_linear_between_and_beyond_sizes(rows: int, context: int, seconds: float) -> None:
    assert cost().predict(rows, context) == pytest.approx(seconds)


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


def test_host_takes_the_lesser_of_the_first_steps_and_clips_later_ones() -> None:
    host = HostTime()
    for seconds in (9.0, 1.0):
        assert not host.knows(False, 3)
        host.note(False, 3, seconds)
    assert host.knows(False, 2) and host.predict(False, 3) == host.predict(True, 3) == 1.0
    host.note(False, 3, 100.0)
    assert host.predict(False, 3) == 1.125


@pytest.mark.parametrize(
    ("num_decodes", "context", "most", "limit"),
    [(4, 0, 500, 46), (4, 100, 500, 36), (30, 0, 500, 20), (60, 0, 500, 16), (4, 0, 40, 40), (60, 0, 5, 5)],
)
def test_the_prompt_tokens_of_a_step_are_those_that_its_time_allows(num_decodes: int, context: int, most: int, limit: int) -> None:
    """A pass takes 1 + rows / 100 + context / 1000 seconds, and a step should take 1.5."""
    assert Pace(PassCost((1, 101), (1.01, 2.01), 1e-3), 1.5 + 1e-9).prefill_limit(num_decodes, context, most) == limit


def test_drafts_and_the_rest_of_a_step_leave_less_for_prompts() -> None:
    pace = Pace(PassCost((1, 101), (0.99, 1.99), 1e-3), 1.5)
    before = pace.prefill_limit(4, 0, 500)
    for _ in range(200):
        pace.note(StepLoad(4, 4, 0), 8, 0.98 + 0.12 + 0.1, 0.98 + 0.12)  # 12 rows, and a tenth of a second
    after = pace.prefill_limit(4, 0, 500)
    assert (before, after) == (48, 30)
