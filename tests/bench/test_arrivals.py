"""Arrival times: their distribution, with a p-value and a negative control, and traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from titan.bench.workloads import TraceEntry, draw_arrivals, read_trace, read_variation

NUM_ARRIVALS = 20_000


@pytest.mark.parametrize("variation", [0.5, 1.0, 3.0])
def test_gaps_have_the_variation_asked_for_a_mean_of_a_second_and_at_one_are_exponential(variation: float) -> None:
    arrivals = draw_arrivals(variation, NUM_ARRIVALS, seed=3)
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0 and len(arrivals) == NUM_ARRIVALS
    assert gaps.mean() == pytest.approx(1, rel=5 * variation / NUM_ARRIVALS**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.08)
    assert (stats.kstest(gaps, stats.expon().cdf).pvalue > 0.01) == (variation == 1)  # exponential, of a Poisson process
    assert arrivals[:50] == draw_arrivals(variation, 50, seed=3) != draw_arrivals(variation, 50, seed=2)


def test_processes_are_read_and_what_is_none_is_refused() -> None:
    assert [read_variation(text) for text in ("poisson", "bursty", "bursty:5")] == [1.0, 3.0, 5.0]
    for text in ("uniform", "bursty:x", "bursty:0", "bursty:-1", "bursty:nan", "poisson:2", ""):
        with pytest.raises(ValueError, match=f"arrivals '{text}' are not allowed: they must be poisson, bursty, bursty:VARIATION"):
            read_variation(text)


def test_a_trace_is_read_in_order_and_counts_from_its_first_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("# time, prompt, output\n12.5, 4, 1\n\n10.5 8 4\n 10.5,\t16, 2\n")
    assert read_trace(path) == [TraceEntry(0.0, 8, 4), TraceEntry(0.0, 16, 2), TraceEntry(2.0, 4, 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"# nothing\n", r"^trace '.*trace\.csv' is empty"),
        (b"0 8 4\n1 8\n", "line 2: '1 8' is not allowed: it must be time in seconds, prompt tokens, output tokens"),
        (b"0 0 4\n", "1 or more of each"),
        (b"nan 8 4\n", "is not allowed"),
        (b"\x7fELF\xff\xfe\x80", r"^trace '.*trace\.csv' cannot be read as text in UTF-8"),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "trace.csv").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / "trace.csv")
