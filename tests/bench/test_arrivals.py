"""Arrival times: their distribution, with a p-value and a negative control, and traces."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from titan.bench.arrivals import ArrivalProcess, TraceEntry, mean_rate, read_trace, stretch

NUM_ARRIVALS = 20_000


def gaps(process: ArrivalProcess, rate: float, num_arrivals: int = NUM_ARRIVALS) -> list[float]:
    times = list(islice(process.times(rate, seed=3), num_arrivals + 1))
    assert times[0] == 0
    return np.diff(times).tolist()


def test_gaps_of_a_poisson_process_are_exponential_and_those_of_bursts_are_not() -> None:
    assert stats.kstest(gaps(ArrivalProcess(), 4.0), stats.expon(scale=0.25).cdf).pvalue > 0.01
    assert stats.kstest(gaps(ArrivalProcess(3.0), 4.0), stats.expon(scale=0.25).cdf).pvalue < 1e-6


@pytest.mark.parametrize("variation", [0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_variation_asked_for(variation: float) -> None:
    found = gaps(ArrivalProcess(variation), 5.0)
    assert np.mean(found) == pytest.approx(0.2, rel=5 * variation / NUM_ARRIVALS**0.5)
    assert np.std(found) / np.mean(found) == pytest.approx(variation, rel=0.08)


def test_another_rate_stretches_the_same_draws() -> None:
    slow, fast = (list(islice(ArrivalProcess(2.0).times(rate, seed=1), 50)) for rate in (1.0, 4.0))
    assert np.allclose(slow, np.array(fast) * 4)
    assert slow != list(islice(ArrivalProcess(2.0).times(1.0, seed=2), 50))


@pytest.mark.parametrize(("text", "variation"), [("poisson", 1.0), ("bursty", 3.0), ("bursty:5", 5.0)])
def test_processes_are_read(text: str, variation: float) -> None:
    assert ArrivalProcess.parse(text) == ArrivalProcess(variation)


@pytest.mark.parametrize("text", ["uniform", "bursty:x", "bursty:0", "bursty:-1", "bursty:nan", "poisson:2", ""])
def test_a_process_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"arrivals '{text}'"):
        ArrivalProcess.parse(text)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        next(ArrivalProcess().times(rate, seed=0))


def test_a_trace_is_read_and_counts_from_its_first_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("# time, prompt, output\n10.5, 8, 4\n\n10.5 16 2\n12.5,\t4, 1\n")
    assert read_trace(path) == [TraceEntry(0.0, 8, 4), TraceEntry(0.0, 16, 2), TraceEntry(2.0, 4, 1)]


def test_a_stretched_trace_has_the_rate_and_keeps_its_pattern() -> None:
    trace = [TraceEntry(0.0, 8, 4), TraceEntry(1.0, 9, 5), TraceEntry(4.0, 10, 6)]
    assert mean_rate([entry.time for entry in trace]) == 0.5
    assert stretch(trace, 2.0) == [TraceEntry(0.0, 8, 4), TraceEntry(0.25, 9, 5), TraceEntry(1.0, 10, 6)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("0 8 4\n1 8\n", "line 2: '1 8' is not allowed"),
        ("0 8 4 9\n", "three numbers"),
        ("0 0 4\n", "at least one token"),
        ("nan 8 4\n", "three numbers"),
        ("a 8 4\n", "line 1"),
        ("1 8 4\n0 8 4\n", "line 2: '0 8 4' goes back in time"),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_a_trace_that_is_no_text_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "trace.bin").write_bytes(b"\x7fELF\xff\xfe\x80")
    with pytest.raises(ValueError, match=r"^trace '.*trace\.bin' is not allowed: the file is no text in UTF-8"):
        read_trace(tmp_path / "trace.bin")


def test_requests_that_all_come_at_once_have_no_rate() -> None:
    with pytest.raises(ValueError, match="have no rate"):
        mean_rate([1.0, 1.0])
