"""What a stream of requests that arrive at their own times says about the engine that served it: goodput, and saturation.

An engine is saturated where its queue grows by more than chance explains while the second half of the requests arrives: by more
than a tenth of them and two standard deviations. The numbers in flight at two moments are taken as Poisson distributed, with one
more than those at the first moment as their mean (one more, so that an engine idle just then has some noise as well); each has
this mean as its variance, times the gaps' coefficient of variation where that is above 1, because bursts vary more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, takewhile
from statistics import mean, pstdev

from titan.bench.runs import RequestRun
from titan.bench.samples import Row, Sample, Spread, make_rows

RATE = "rate, requests/s"
"""The label of the rate at which requests arrive."""
TOLERATED_GROWTH = 0.1
"""Share of the second half of the requests by which the queue may grow, noise apart."""
NUM_DEVIATIONS = 2.0
"""Standard deviations of the queue's own noise by which it may grow on top."""
ATTAINED = 0.9
"""Share of requests within the service-level target from which a rate counts as served well."""
UNKNOWN = Spread.of([math.nan])
"""Of a stream that is too short to say: neither followed nor saturated."""
SERVED = f"{ATTAINED:.0%} within target up to"


def load_figures(requests: Sequence[RequestRun], to_first_token: float, between_tokens: float) -> dict[str, float]:
    """Say how an engine bore a stream.

    Args:
        requests: in the order of their arrivals, at least one.
        to_first_token: most seconds within the service-level target.
        between_tokens: also, on average over a request.

    Returns:
        "goodput/s": requests within the target per second from the first arrival to the last token (Zhong et al., "DistServe",
        2024); "within target": their share; "left at the end": requests in the engine when the last one arrives; "followed":
        finished over arrived, while the second half arrives; "excess": requests by which the queue grows in that time, beyond a
        tenth of them and two standard deviations. The last two are missing where a stream is too short to say, for "excess" because
        its first request is still there when the second half begins, so that the queue would grow in any engine.
    """
    num_late = len(requests) // 2
    first, middle, last = requests[0].arrival, requests[-num_late - 1].arrival, requests[-1].arrival
    num_good = sum(
        (each.to_first_token or 0.0) <= to_first_token and (each.between_tokens or 0.0) <= between_tokens for each in requests
    )
    figures = {
        "goodput/s": num_good / (max(each.finished for each in requests) - first),
        "within target": num_good / len(requests),
        "left at the end": sum(each.finished > last for each in requests),
    }
    if num_late:
        figures["followed"] = sum(middle < each.finished <= last for each in requests) / num_late
    if requests[0].finished <= middle:
        before, after = (sum(each.arrival <= moment < each.finished for each in requests) for moment in (middle, last))
        gaps = [right.arrival - left.arrival for left, right in pairwise(requests)]
        deviation = math.sqrt(2 * (before + 1) * max(1.0, pstdev(gaps) / mean(gaps)))
        figures["excess"] = after - before - TOLERATED_GROWTH * num_late - NUM_DEVIATIONS * deviation
    return figures


def find_limits(rows: Sequence[Row]) -> list[Row]:
    """Find where engines stop following, in requests per second.

    Args:
        rows: in ascending rates, with the figures of `load_figures` and "requests/s".

    Returns:
        A row per engine. "follows up to": rates up to here were all followed; "saturated from": the first rate whose excess is
        above 0; `SERVED`: rates up to here had `ATTAINED` of the requests within the target; "most finished": at any rate. What
        no rate was is missing.
    """
    found = []
    for engine in dict.fromkeys(row.labels["engine"] for row in rows):
        mine = [row for row in rows if row.labels["engine"] == engine]
        followed = list(takewhile(lambda row: row.figures.get("excess", UNKNOWN).median <= 0, mine))
        saturated = [row for row in mine if row.figures.get("excess", UNKNOWN).median > 0]
        served = list(takewhile(lambda row: row.figures["within target"].median >= ATTAINED, mine))
        limits = {"follows up to": followed[-1:], "saturated from": saturated[:1], SERVED: served[-1:]}
        figures = {name: float(row.labels[RATE]) for name, limit in limits.items() for row in limit}
        figures["most finished"] = max(row.figures["requests/s"].median for row in mine)
        found.append(Sample({"engine": engine}, 0, figures))
    return make_rows(found)
