"""Arrival times: their distribution, with a p-value and a negative control."""

from __future__ import annotations

import numpy as np
from scipy import stats

from titan.bench.workloads import draw_arrivals


def test_gaps_are_exponential_with_a_mean_of_a_second() -> None:
    arrivals = draw_arrivals(20_000, seed=3)
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0 and len(arrivals) == 20_000
    assert stats.kstest(gaps, stats.expon().cdf).pvalue > 0.01 > stats.kstest(1.03 * gaps, stats.expon().cdf).pvalue
    assert arrivals[:50] == draw_arrivals(50, seed=3) != draw_arrivals(50, seed=2)
