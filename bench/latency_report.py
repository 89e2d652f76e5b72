"""What requests that arrive at their own times say about the engine that served them: goodput and saturation, and their report.

An engine is saturated where its queue grows by more than chance explains while the second half of the requests arrives: by more
than a tenth of them and two standard deviations. The numbers in flight at two moments are taken as Poisson distributed, with one
more than those at the first moment as their mean (one more, so that an engine idle just then has some noise as well); each has
this mean as its variance, times the gaps' coefficient of variation where that is above 1, because bursts vary more.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import pairwise, takewhile
from statistics import mean, pstdev

from titan.bench.charts import LineChart, Series, cumulative_points, figure_chart
from titan.bench.report import Report, count, figure_table
from titan.bench.runs import RequestRun
from titan.bench.samples import NO_DRAFT, Row, Sample, Spread, group_samples, join_details, make_rows, with_ratio

RATE = "rate, requests/s"
"""The label of the rate at which requests arrive."""
ATTAINED = 0.9
"""Share of requests within the service-level target from which a rate counts as served well."""
UNKNOWN = Spread.of([math.nan])
"""Spread of a stream that is too short to say: neither followed nor saturated."""
SERVED = f"{ATTAINED:.0%} within target up to"
LIMITS = dict.fromkeys(("follows up to", "saturated from", SERVED, "most finished"), ".2f")
LOADS = {
    "requests/s": "±.2f",
    "tokens/s": "±.0f",
    "goodput/s": "±.2f",
    "within target": "±.0%",
    "followed": ".0%",
    "excess": "+.1f",
}
LATENCIES = {
    **{f"latency P{percent}, ms": "±.0f" for percent in (50, 90, 99)},
    **{f"P{percent} / no draft": "±.2f" for percent in (50, 99)},
    "tokens/step": ".2f",
}
TOKEN_TIMES = {
    **{f"first token P{percent}, ms": "±.0f" for percent in (50, 90, 99)},
    **{f"between tokens P{percent}, ms": "±.1f" for percent in (50, 90, 99)},
}


def load_figures(requests: Sequence[RequestRun], to_first_token: float, between_tokens: float) -> dict[str, float]:
    """Say how an engine bore a stream.

    Args:
        requests: in the order of their arrivals, at least one.
        to_first_token: most seconds within the service-level target.
        between_tokens: also, on average over a request.

    Returns:
        "goodput/s": requests within the target per second from the first arrival to the last token (Zhong et al., "DistServe",
        2024); "within target": their share; "followed": finished over arrived, while the second half arrives; "excess": requests
        by which the queue grows in that time, beyond a tenth of them and two standard deviations. The last two are missing where a
        stream is too short to say, for "excess" because its first request is still there when the second half begins, so that the
        queue would grow in any engine.
    """
    num_late = len(requests) // 2
    first, middle, last = requests[0].arrival, requests[-num_late - 1].arrival, requests[-1].arrival
    num_good = sum(
        (each.to_first_token or 0.0) <= to_first_token and (each.between_tokens or 0.0) <= between_tokens for each in requests
    )
    figures = {"goodput/s": num_good / (max(each.finished for each in requests) - first), "within target": num_good / len(requests)}
    if num_late:
        figures["followed"] = sum(middle < each.finished <= last for each in requests) / num_late
    if requests[0].finished <= middle:
        before, after = (sum(each.arrival <= moment < each.finished for each in requests) for moment in (middle, last))
        gaps = [right.arrival - left.arrival for left, right in pairwise(requests)]
        deviation = math.sqrt(2 * (before + 1) * max(1.0, pstdev(gaps) / mean(gaps)))
        figures["excess"] = after - before - 0.1 * num_late - 2 * deviation
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


def latency_report(args: argparse.Namespace, samples: Sequence[Sample], problems: Sequence[str]) -> Report:
    """Lay out what `titan.bench.latency.LatencyBench` measured; ``args`` are its options."""
    for percent in (50, 99):
        samples = with_ratio(samples, f"P{percent} / no draft", f"latency P{percent}, ms", engine=NO_DRAFT)
    rows = make_rows(samples)
    limits, labels = find_limits(rows), ["engine", RATE]
    tables = [
        figure_table("Saturation, requests/s", limits, ["engine"], LIMITS),
        figure_table("Load", rows, labels, LOADS),
        figure_table("Latency", rows, labels, LATENCIES),
        figure_table("Time to the first token, and between tokens", rows, labels, TOKEN_TIMES),
    ]
    notes = [
        f"{args.model}, {args.dtype}; arrivals: {args.arrivals}; prompts of {args.prompt_len} tokens, outputs of {args.output_len} "
        f"(a trace has its own); at most {args.max_batch_size} at once; {count(args.repeats, 'interleaved round')}.",
        f"within target: first token after at most {args.slo_ttft:g} s, then at most {args.slo_tbt:g} s between tokens on "
        "average; goodput: requests within the target per second; requests/s: finished.",
        "followed: requests finished while the second half arrives, over that half; excess: requests by which the queue grows "
        "in it beyond a tenth of it and two standard deviations of its noise, above 0 the engine is saturated; -: the stream "
        "is too short to say. Latencies count from the arrival; P99 of few requests is close to the slowest one.",
    ]
    results = {"rows": rows, "limits": limits, "samples": samples}
    return Report("Latency under load", latency_answer(limits), results, tables, latency_charts(rows, samples), notes, problems)


def latency_answer(limits: Sequence[Row]) -> str:
    """Up to which rate each engine serves its requests within the target."""
    served = {row.labels["engine"]: row.median(SERVED) for row in limits}
    found = [f"{f'up to {rate:g} requests/s' if rate else 'at no rate tried'} with {engine}" for engine, rate in served.items()]
    return f"At least {ATTAINED:.0%} of the requests are within the target {', '.join(found)}."


def latency_charts(rows: Sequence[Row], samples: Sequence[Sample]) -> list[LineChart]:
    """What the answer says, and latencies, over the rate; and the distribution of the latency at each rate."""
    figures = {"Requests within the target": "within target", "Median latency": "latency P50, ms", "Tail": "latency P99, ms"}
    charts = [figure_chart(title, rows, RATE, figure, "engine") for title, figure in figures.items()]
    for rate in dict.fromkeys(row.labels[RATE] for row in rows):
        groups = group_samples(each for each in samples if each.labels[RATE] == rate)
        series = [Series(str(each[0].labels["engine"]), cumulative_points(join_details(each, "latency, s"))) for each in groups]
        charts.append(LineChart(f"Latency at {rate:g} requests/s", "seconds", "share of requests", series, style="steps"))
    return charts
