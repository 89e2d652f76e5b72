"""Samples, the rows and ratios that they add up to, and what requests and runs tell."""

from __future__ import annotations

import pytest

from titan.bench.runs import RequestRun, Run, latency_figures, share_equal, with_equal_outputs
from titan.bench.samples import Sample, Spread, make_rows, rotated, with_ratio


def sample(mode: str, round_id: int, **figures: float) -> Sample:
    return Sample({"mode": mode, "at once": 8}, round_id, figures)


def test_a_spread_is_median_and_range_and_a_single_round_does_not_claim_to_have_no_noise() -> None:
    spread = Spread.of([4.0, 1.0, 2.0])
    assert spread == Spread(2.0, 1.0, 4.0, 3)
    assert (f"{spread:.1f}", f"{spread:±.1f}", f"{Spread.of([0.5, 0.5]):±.0%}") == ("2.0", "2.0 ±75 %", "50% ±0 %")
    assert (f"{Spread.of([81.25]):±.1f}", f"{spread:[.1f}") == ("81.2", "2.0 [1.0, 4.0]")


def test_a_row_sums_up_the_rounds_that_have_a_figure() -> None:
    slow, fast = make_rows([sample("slow", 0, speed=1.0), sample("fast", 0, speed=3.0), sample("slow", 1, speed=2.0, KV=0.5)])
    assert slow.labels == {"mode": "slow", "at once": 8} and fast.labels["mode"] == "fast"
    assert slow.figures == {"speed": Spread(1.5, 1.0, 2.0, 2), "KV": Spread(0.5, 0.5, 0.5, 1)}
    assert (slow.median("speed"), fast.median("KV")) == (1.5, None)


def test_the_ratio_is_the_median_of_the_ratios_within_the_rounds_that_both_have() -> None:
    samples = [sample("slow", i, speed=value) for i, value in enumerate([10.0, 1.0, 100.0])]
    samples += [sample("fast", i, speed=value) for i, value in enumerate([20.0, 3.0, 110.0, 7.0, 8.0])]
    rows = make_rows(with_ratio([*samples, sample("slow", 4)], "x slow", "speed", mode="slow"))
    assert "x slow" not in rows[0].figures
    assert rows[1].figures["x slow"] == Spread(2.0, 1.1, 3.0, 3)  # the ratio of the medians would be 0.8


def test_each_round_begins_with_the_next_variant() -> None:
    assert ["".join(rotated("abc", round_id)) for round_id in range(5)] == ["abc", "bca", "cab", "cba", "acb"]
    assert rotated("", 1) == []


def test_requests_tell_their_times_where_they_are_known() -> None:
    request = RequestRun([1, 2, 3], finished=5.0, first_token=4.0, arrival=1.0)
    assert (request.latency, request.to_first_token, request.between_tokens) == (4.0, 3.0, 0.5)
    assert RequestRun([1], 1.0, 1.0).between_tokens is None and RequestRun([1, 2], 1.0, None).to_first_token is None
    figures = latency_figures([RequestRun([1], value / 1e3, None) for value in range(101)])
    assert figures == pytest.approx({"latency P50, ms": 50, "latency P90, ms": 90, "latency P99, ms": 99})


def test_equal_outputs_are_counted_in_place() -> None:
    def run(*token_ids: list[int]) -> Run:
        return Run([RequestRun(each, 1.0, None) for each in token_ids], 2.0)

    assert share_equal(run([1, 2], [3], [4]), run([1, 2], [3, 4], [4])) == pytest.approx(2 / 3)
    runs = [run([1]), run([2])]
    first, second = with_equal_outputs([sample("a", 0, speed=1.0), sample("b", 0)], runs, runs[1])
    assert (first.figures, second.figures) == ({"speed": 1.0, "equal outputs": 0.0}, {"equal outputs": 1.0})
    assert run([1, 2], [3]).rates == {"tokens/s": 1.5, "requests/s": 1.0}
