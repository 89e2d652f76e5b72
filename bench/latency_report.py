"""How latencies under load are shown: the answer, plots over the rate, and tables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from titan.bench.charts import LineChart, Series, cumulative_points
from titan.bench.open_loop import ATTAINED, RATE, SERVED, find_limits
from titan.bench.report import Report, count, figure_table
from titan.bench.samples import Row, Sample, group_samples, join_details, make_rows, with_ratio

NO_DRAFT = "no draft"
LABELS = ("engine", RATE)
LATENCIES = {
    **{f"latency P{percent}, ms": "±.0f" for percent in (50, 90, 99)},
    **{f"P{percent} / no draft": "±.2f" for percent in (50, 99)},
    "tokens/step": ".2f",
}
TOKEN_TIMES = {
    **{f"first token P{percent}, ms": "±.0f" for percent in (50, 90, 99)},
    **{f"between tokens P{percent}, ms": "±.1f" for percent in (50, 90, 99)},
}
LOADS = {
    "requests/s": "±.2f",
    "tokens/s": "±.0f",
    "goodput/s": "±.2f",
    "within target": "±.0%",
    "followed": ".0%",
    "left at the end": ".0f",
    "excess": "+.1f",
}
LIMITS = dict.fromkeys(("follows up to", "saturated from", SERVED, "most finished"), ".2f")


def latency_report(args: argparse.Namespace, samples: Sequence[Sample], problems: Sequence[str]) -> Report:
    """Lay out what `titan.bench.latency.LatencyBench` measured; ``args`` are its options."""
    for percent in (50, 99):
        samples = with_ratio(samples, f"P{percent} / no draft", f"latency P{percent}, ms", engine=NO_DRAFT)
    rows = make_rows(samples)
    limits = find_limits(rows)
    tables = [
        figure_table("Saturation, requests/s", limits, ["engine"], LIMITS),
        figure_table("Load", rows, LABELS, LOADS),
        figure_table("Latency", rows, LABELS, LATENCIES),
        figure_table("Time to the first token, and between tokens", rows, LABELS, TOKEN_TIMES),
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
    """What the answer says, latencies and throughput over the rate; and the distribution of the latency at each rate."""
    charts = [
        _over_rate("Requests within the target", "share of requests", rows, {"within target": ""}),
        _over_rate("Goodput", "requests within the target/s", rows, {"goodput/s": ""}),
        _over_rate("Latency", "ms", rows, {"latency P50, ms": ", P50", "latency P99, ms": ", P99"}),
        _over_rate("Time to first token, P99", "ms", rows, {"first token P99, ms": ""}),
        _over_rate("Requests finished", "requests/s", rows, {"requests/s": ""}),
    ]
    for rate in dict.fromkeys(row.labels[RATE] for row in rows):
        groups = group_samples(each for each in samples if each.labels[RATE] == rate)
        series = [Series(str(each[0].labels["engine"]), cumulative_points(join_details(each, "latency, s"))) for each in groups]
        charts.append(LineChart(f"Latency at {rate:g} requests/s", "seconds", "share of requests", series, style="steps"))
    return charts


def _over_rate(title: str, y_label: str, rows: Sequence[Row], figures: Mapping[str, str]) -> LineChart:
    """A line per engine and figure; ``figures`` are what the names of the lines end with, by figure."""
    series = []
    for engine in dict.fromkeys(row.labels["engine"] for row in rows):
        for figure, suffix in figures.items():
            spreads = {float(row.labels[RATE]): row.figures[figure] for row in rows if row.labels["engine"] == engine}
            points = [(rate, spread.median) for rate, spread in spreads.items()]
            ranges = [(spread.minimum, spread.maximum) for spread in spreads.values()]
            series.append(Series(f"{engine}{suffix}", points, ranges))
    return LineChart(title, RATE, y_label, series)
