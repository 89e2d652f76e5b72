"""Answer, tables and plots of a throughput run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from titan.bench.charts import LineChart, Series, StackedBars, cumulative_points
from titan.bench.modes import MODES, TITAN, TITAN_DRAFT, TITAN_SINGLE
from titan.bench.report import Report, Table, count, figure_table
from titan.bench.samples import Row, Sample, Spread, group_samples, join_details, make_rows, sum_details, with_ratio

LABELS = ("dtype", "mode", "at once")
GAIN, P50, P99, STRETCH = f"x {TITAN}", f"P50 x {TITAN}", f"P99 x {TITAN}", f"step x {TITAN}"
"""Ratios to continuous batching without a draft: tokens/s, percentiles of the latency, time of a step."""
HEADLINE = {
    f"x {TITAN_SINGLE}": ("tokens/s over no batching", 9.3),
    GAIN: ("tokens/s over continuous batching", 1.5),
    P50: ("P50 latency over continuous batching", 0.53),
    P99: ("P99 latency over continuous batching", 0.39),
}
"""Of the Titan design, on large models and GPUs, by the figure that stands here in its place."""
SPEED = {"tokens/s": "±.1f", GAIN: "±.2f", "requests/s": ".2f", "tokens/step": ".2f", "equal outputs": "±.1%", "load": ".2f"}
LATENCY = {
    **{f"latency P{percent}, ms": ".1f" for percent in (50, 90, 99)},
    P50: "±.2f",
    P99: "±.2f",
    **{f"{kind} P{percent}, ms": ".1f" for kind in ("first token", "between tokens") for percent in (50, 99)},
}
MACHINE = {
    **dict.fromkeys(("CPU", "GPU", "KV mean", "KV peak"), ".0%"),
    "batch": ".1f",
    "ms/step": ".2f",
    "tokens/step": ".2f",
    STRETCH: "±.2f",
}
STEP = {
    "context": ".0f",
    "ms/decode step": "±.2f",
    **dict.fromkeys(("host", "draft", "target", "attention"), "±.0%"),
    "trees, batch, acceptance": ".1%",
    "ms/target pass": ".2f",
    "draft passes": ".1f",
    "ms/draft pass": ".2f",
}


def throughput_report(
    args: argparse.Namespace, samples: Sequence[Sample], problems: Sequence[str], versions: Mapping[str, str]
) -> Report:
    """Lay out what `titan.bench.throughput.ThroughputBench` measured; ``args`` are its options."""
    samples = with_ratios(samples)
    rows = make_rows(samples)
    return Report(
        "Parts of a decode step" if args.profile else "Throughput",
        throughput_answer(rows),
        {"rows": rows, "samples": samples},
        throughput_tables(rows),
        charts=throughput_charts(rows, samples),
        notes=[
            _describe(args),
            *(f"- {mode}: {MODES[mode].description}" for mode in dict.fromkeys(str(row.labels["mode"]) for row in rows)),
        ],
        warnings=list(dict.fromkeys(problems)),
        versions=versions,
    )


def with_ratios(samples: Sequence[Sample]) -> list[Sample]:
    """Add "x MODE" of tokens/s for every other mode, and the other ratios to `TITAN`."""
    for mode in dict.fromkeys(str(each.labels["mode"]) for each in samples):
        samples = with_ratio(samples, f"x {mode}", "tokens/s", mode=mode)
    for name, figure in ((P50, "latency P50, ms"), (P99, "latency P99, ms"), (STRETCH, "ms/step")):
        samples = with_ratio(samples, name, figure, mode=TITAN)
    return list(samples)


def throughput_answer(rows: Sequence[Row]) -> str:
    """What speculation gains; of a run without it, the fastest mode; of a profile, how much of a step the host takes."""
    gains = [
        f"{row.figures[GAIN]:±.2fx} at {_place(row)}" for row in rows if row.labels["mode"] == TITAN_DRAFT and GAIN in row.figures
    ]
    if gains:
        return f"Tokens/s with speculation over none: {', '.join(gains)}."
    rates = [(row.figures["tokens/s"], row) for row in rows if "tokens/s" in row.figures]
    if rates:
        rate, best = max(rates, key=lambda pair: pair[0].median)
        return f"Fastest: {best.labels['mode']}, {rate:±.1f} tokens/s at {_place(best)}."
    hosts = [row.figures["host"].median for row in rows]
    return f"The host takes {min(hosts):.0%} to {max(hosts):.0%} of a step." if hosts else "Nothing was measured."


def throughput_tables(rows: Sequence[Row]) -> list[Table]:
    """Speed, Titan over every other mode, latency, machine, parts of a step, and the headline; those that have figures."""
    timed, profiled = ([row for row in rows if figure in row.figures] for figure in ("tokens/s", "host"))
    mine = [row for row in timed if row.labels["mode"] in (TITAN, TITAN_DRAFT)]
    drafts = {row.labels["dtype"]: row for row in sorted(mine, key=_at_once) if row.labels["mode"] == TITAN_DRAFT}
    tables = [
        figure_table("Throughput", timed, LABELS, SPEED),
        figure_table("Titan over the others, tokens/s", mine, LABELS, {f"x {row.labels['mode']}": "±.2f" for row in timed}),
        figure_table("Latency", timed, LABELS, LATENCY),
        figure_table("Machine", timed, LABELS, MACHINE),
        figure_table("Parts of a decode step", profiled, LABELS, STEP),
        headline_table(list(drafts.values())),
    ]
    return [table for table in tables if table.rows]


def headline_table(drafts: Sequence[Row]) -> Table:
    """The headline of the Titan design beside rows of `TITAN_DRAFT`, a column each."""
    cells = [
        [text, f"{headline:g}", *(format(row.figures[figure], "±.2f") if figure in row.figures else "-" for row in drafts)]
        for figure, (text, headline) in HEADLINE.items()
    ]
    return Table("The Titan design's headline", ["figure", "headline", *map(_place, drafts)], cells if drafts else [])


def throughput_charts(rows: Sequence[Row], samples: Sequence[Sample]) -> list[LineChart | StackedBars]:
    """Plots of timed runs, of profiles, and of acceptance, where there are any."""
    charts: list[LineChart | StackedBars] = []
    for dtype in dict.fromkeys(str(row.labels["dtype"]) for row in rows):
        mine = sorted((row for row in rows if row.labels["dtype"] == dtype), key=_at_once)
        timed, profiled = ([row for row in mine if figure in row.figures] for figure in ("tokens/s", "host"))
        if timed:
            charts += [_rate_chart(dtype, timed), _latency_chart(dtype, samples)]
        if profiled:
            charts.append(_step_chart(dtype, profiled))
    drafts = [group for group in group_samples(samples) if group[0].labels["mode"] == TITAN_DRAFT and group[0].details]
    return [*charts, _depth_chart(drafts)] if drafts else charts


def _rate_chart(dtype: str, rows: Sequence[Row]) -> LineChart:
    rates: dict[str, list[tuple[int, Spread]]] = {}
    for row in rows:
        rates.setdefault(str(row.labels["mode"]), []).append((_at_once(row), row.figures["tokens/s"]))
    series = [
        Series(mode, [(at_once, rate.median) for at_once, rate in mine], [(rate.minimum, rate.maximum) for _, rate in mine])
        for mode, mine in rates.items()
    ]
    return LineChart(f"Throughput, {dtype}", "requests at once", "tokens/s", series, is_log_x=True)


def _latency_chart(dtype: str, samples: Sequence[Sample]) -> LineChart:
    groups = [group for group in group_samples(samples) if group[0].labels["dtype"] == dtype]
    most = max(_at_once(group[0]) for group in groups)
    latencies = {str(group[0].labels["mode"]): join_details(group, "latency, s") for group in groups if _at_once(group[0]) == most}
    series = [Series(mode, cumulative_points(values)) for mode, values in latencies.items()]
    title = f"Latency of requests, {dtype}, {most} at once"
    return LineChart(title, "seconds", "share of the requests", series, style="steps")


def _step_chart(dtype: str, rows: Sequence[Row]) -> StackedBars:
    bars = [f"{row.labels['mode']}\n{row.labels['at once']} at once" for row in rows]
    steps = [row.figures["ms/decode step"].median for row in rows]
    parts = {
        part: [row.figures[part].median * step for row, step in zip(rows, steps, strict=True)]
        for part in ("host", "draft", "target")
    }
    return StackedBars(f"Where a decode step's time goes, {dtype}", "ms per step", bars, parts)


def _depth_chart(drafts: Sequence[Sequence[Sample]]) -> LineChart:
    series = []
    for group in drafts:
        counts = zip_longest(*(sum_details(group, f"{kind} per depth") for kind in ("accepted", "proposed")), fillvalue=0.0)
        shares = [(i + 1, accepted / proposed) for i, (accepted, proposed) in enumerate(counts) if proposed]
        series.append(Series(_place(group[0]), shares))
    return LineChart("Acceptance per depth", "depth of the draft token", "accepted / proposed", series)


def _at_once(each: Row | Sample) -> int:
    return int(each.labels["at once"])


def _place(each: Row | Sample) -> str:
    return f"{each.labels['at once']} at once in {each.labels['dtype']}"


def _describe(args: argparse.Namespace) -> str:
    return (
        f"{args.model}, draft {args.draft_model} with at most {args.max_draft_tokens} draft tokens; prompts ({args.prompts}) of "
        f"{args.prompt_len} tokens, {args.output_len} generated, {count(args.waves, 'request')} per slot, all there from the "
        f"start; temperature 0, end of sequence ignored; medians of {count(args.rounds, 'interleaved round')} with half their "
        f'range (one round has none); "equal outputs" are equal to those of {TITAN}; KV is the share of blocks for '
        f'{count(max(args.concurrency), "request")}; drafts gain tokens/step over "{STRETCH}"; parts are shares of a decode step, '
        f"of which attention is in draft and target."
    )
