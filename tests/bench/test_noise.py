"""Medians and spreads of repeated runs."""

from __future__ import annotations

import pytest

from titan.bench.noise import Spread, in_rounds, ratio_spread


def test_a_spread_is_median_and_range() -> None:
    spread = Spread.of([4.0, 1.0, 2.0])
    assert spread == Spread(2.0, 1.0, 4.0, 3)
    assert spread.half_range == 0.75
    assert spread.format(1) == "2.0 ±75 %"


def test_a_single_round_does_not_claim_to_have_no_noise() -> None:
    assert Spread.of([81.25]).format(1) == "81.2"
    assert Spread.of([81.25, 81.25]).format(1) == "81.2 ±0 %"


def test_no_rounds_have_no_spread() -> None:
    with pytest.raises(ValueError, match=r"values=\[\] is empty"):
        Spread.of([])


def test_variants_take_turns() -> None:
    assert list(in_rounds("AB", 2)) == [(0, "A"), (0, "B"), (1, "A"), (1, "B")]


def test_the_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    slow, fast = {0: 10.0, 1: 1.0, 2: 100.0}, {0: 20.0, 1: 3.0, 2: 110.0}
    assert ratio_spread(fast, slow) == Spread(2.0, 1.1, 3.0, 3)  # the ratio of the medians would be 11


def test_only_rounds_that_both_have_are_compared() -> None:
    assert ratio_spread({0: 4.0, 1: 9.0}, {1: 3.0, 2: 1.0}) == Spread(3.0, 3.0, 3.0, 1)
    assert ratio_spread({0: 4.0}, {1: 3.0}) is None
