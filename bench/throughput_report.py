"""Answer, tables and plots of a throughput run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

from titan.bench.charts import LineChart, Series, cumulative_points, figure_chart
from titan.bench.modes import MODES, TITAN, TITAN_DRAFT, TITAN_SINGLE
from titan.bench.report import Report, Table, count, figure_table
from titan.bench.samples import Row, Sample, group_samples, join_details, make_rows, with_ratio

LABELS = ("dtype", "mode", "at once")
GAIN, P50, P99, STRETCH = f"x {TITAN}", f"P50 x {TITAN}", f"P99 x {TITAN}", f"step x {TITAN}"
"""Ratios to continuous batching without a draft: tokens/s, percentiles of the latency, time of a step."""
HEADLINE = {
    f"x {TITAN_SINGLE}": ("tokens/s over no batching", "9.3"),
    GAIN: ("tokens/s over continuous batching", "1.5"),
    P50: ("P50 latency over continuous batching", "0.53"),
    P99: ("P99 latency over continuous batching", "0.39"),
}
"""Figures of the Titan design, on large models and GPUs, by the one that stands here in their place."""
SPEED = {"tokens/s": "±.1f", GAIN: "±.2f", "requests/s": ".2f", "tokens/step": ".2f", "equal outputs": ".1%"}
LATENCY = {
    **{f"latency P{percent}, ms": ".1f" for percent in (50, 90, 99)},
    P50: "±.2f",
    P99: "±.2f",
    **{f"{kind} P{percent}, ms": ".1f" for kind in ("first token", "between tokens") for percent in (50, 99)},
}
MACHINE = {**dict.fromkeys(("CPU", "GPU", "KV mean", "KV peak"), ".0%"), "batch": ".1f", "ms/step": ".2f", STRETCH: "±.2f"}
STEP = {
    "context": ".0f",
    "ms/step": "±.2f",
    **dict.fromkeys(("host", "draft", "target"), ".0%"),
    "trees, batch, acceptance": ".1%",
    **dict.fromkeys(("ms/target pass", "ms/pass at least", "pass x least"), ".2f"),
    "draft passes": ".1f",
    "ms/draft pass": ".2f",
}


def throughput_report(
    args: argparse.Namespace,
    samples: Sequence[Sample],
    profiles: Sequence[Sample],
    problems: Sequence[str],
    versions: Mapping[str, str],
) -> Report:
    """Lay out what `titan.bench.throughput.ThroughputBench` measured; ``args`` are its options."""
    samples = with_ratios(samples)
    rows, parts = make_rows(samples), make_rows(profiles)
    modes = dict.fromkeys(str(row.labels["mode"]) for row in [*rows, *parts])
    return Report(
        "Parts of a decode step" if args.profile else "Throughput",
        throughput_answer(rows, parts),
        {"rows": rows, "parts": parts, "samples": samples, "profiles": profiles},
        throughput_tables(rows, parts),
        charts=throughput_charts(rows, samples),
        notes=[_describe(args), *(f"- {mode}: {MODES[mode].description}" for mode in modes)],
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


def throughput_answer(rows: Sequence[Row], parts: Sequence[Row]) -> str:
    """What speculation gains; of a run without it, the fastest mode; of a profile, how much of a step the host takes."""
    if not rows:
        hosts = [row.figures["host"].median for row in parts]
        return f"The host takes {min(hosts):.0%} to {max(hosts):.0%} of a step." if hosts else "Nothing was measured."
    gains = [
        f"{row.figures[GAIN]:±.2fx} with {_place(row)}" for row in rows if row.labels["mode"] == TITAN_DRAFT and GAIN in row.figures
    ]
    if gains:
        return f"Tokens/s with speculation over none: {', '.join(gains)}."
    best = max(rows, key=lambda row: row.figures["tokens/s"].median)
    return f"Fastest: {best.labels['mode']}, {best.figures['tokens/s']:±.1f} tokens/s with {_place(best)}."


def throughput_tables(rows: Sequence[Row], parts: Sequence[Row]) -> list[Table]:
    """Speed, Titan over every other mode, latency, machine, parts of a step, and the headline; those that have figures."""
    mine = [row for row in rows if row.labels["mode"] in (TITAN, TITAN_DRAFT)]
    tables = [
        figure_table("Throughput", rows, LABELS, SPEED),
        figure_table("Titan over the others, tokens/s", mine, LABELS, {f"x {row.labels['mode']}": "±.2f" for row in rows}),
        figure_table("Latency", rows, LABELS, LATENCY),
        figure_table("Machine", rows, LABELS, MACHINE),
        figure_table("Parts of a decode step", parts, LABELS, STEP),
        headline_table([row for row in rows if row.labels["mode"] == TITAN_DRAFT]),
    ]
    return [table for table in tables if table.rows]


def headline_table(drafts: Sequence[Row]) -> Table:
    """The headline of the Titan design beside rows of `TITAN_DRAFT`: a column per dtype, with the most requests."""
    columns = {row.labels["dtype"]: row for row in sorted(drafts, key=_at_once)}.values()
    cells = [
        [text, headline, *(format(row.figures[figure], "±.2f") if figure in row.figures else "-" for row in columns)]
        for figure, (text, headline) in HEADLINE.items()
    ]
    return Table("The Titan design's headline", ["figure", "headline", *map(_place, columns)], cells if drafts else [])


def throughput_charts(rows: Sequence[Row], samples: Sequence[Sample]) -> list[LineChart]:
    """Per dtype, tokens/s over the requests at once, and the distribution of the latency with the most of them."""
    charts = []
    for dtype in dict.fromkeys(row.labels["dtype"] for row in rows):
        mine = sorted((row for row in rows if row.labels["dtype"] == dtype), key=_at_once)
        speeds = figure_chart(f"Throughput, {dtype}", mine, "at once", "tokens/s", "mode")
        most = _at_once(mine[-1])
        groups = [group for group in group_samples(samples) if group[0].labels["dtype"] == dtype and _at_once(group[0]) == most]
        latencies = [Series(str(each[0].labels["mode"]), cumulative_points(join_details(each, "latency, s"))) for each in groups]
        title = f"Latency of requests, {dtype}, {most} at once"
        charts += [
            replace(speeds, x_label="requests at once", is_log_x=True),
            LineChart(title, "seconds", "share of the requests", latencies, style="steps"),
        ]
    return charts


def _at_once(each: Row | Sample) -> int:
    return int(each.labels["at once"])


def _place(each: Row) -> str:
    return f"{count(_at_once(each), 'request')} at once in {each.labels['dtype']}"


def _describe(args: argparse.Namespace) -> str:
    return (
        f"{args.model}, draft {args.draft_model} with at most {args.max_draft_tokens} draft tokens; prompts ({args.prompts}) of "
        f"{args.prompt_len} tokens, {args.output_len} generated, {count(args.waves, 'request')} per slot, all there from the "
        f"start; temperature 0, end of sequence ignored; medians of {count(args.rounds, 'interleaved round')} with half their "
        f'range (one round has none); "equal outputs" are equal to those of {TITAN}; KV is the share of blocks for '
        f'{count(max(args.concurrency), "request")}; a draft gains tokens/step divided by "{STRETCH}"; host, draft and target are '
        f"shares of a decode step."
    )
