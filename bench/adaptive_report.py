"""Answer, table and plots of `titan bench adaptive`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import geometric_mean

import numpy as np

from titan.bench.charts import LineChart, figure_chart
from titan.bench.report import Report, count, figure_table
from titan.bench.samples import Row, Sample, Spread, group_samples, make_rows, with_ratio

OFF, FIXED, ADAPTIVE = "off", "fixed", "adaptive"
"""Settings; the second is followed by a number of draft tokens."""
ALL = "all"
"""Label of the geometric mean over all numbers of requests at once, setting by setting."""
GAIN, SHARE = "x off", "x best fixed"
COLUMNS = {"tokens/s": "±.1f", GAIN: "[.2f", SHARE: "[.2f", "nodes/step": ".2f", "tokens/step": ".2f", "ms/step": "±.2f"}
NUM_RESAMPLES = 10_000


def adaptive_report(args: argparse.Namespace, samples: Sequence[Sample], problems: Sequence[str]) -> Report:
    """Lay out what `titan.bench.adaptive.AdaptiveBench` measured; ``args`` are its options."""
    samples = compare([*samples, *mean_samples(samples)])
    rows = interval_rows(samples)
    kind = " with shuffled weights" if args.hopeless else ", wrong for every second request" if args.mixed else ""
    what = f"the first {args.first_steps} steps of new engines" if args.first_steps else f"{args.output_len} generated"
    notes = [
        f"{args.model}, draft {args.draft_model}{kind}, {args.dtype}; prompts of {args.prompt_len} tokens, {what}; "
        f"{count(args.rounds, 'interleaved round')}.",
        f"{GAIN}, {SHARE}: median over the rounds of the ratio within a round, and its 95 % bootstrap interval; the best fixed "
        f"setting is the one with the most tokens/s there. {ALL}: geometric mean over the requests at once, so that {SHARE} is "
        "that of the best single one. nodes/step: draft tokens verified per request and step; tokens/step: emitted.",
    ]
    results: dict[str, Sequence[Row | Sample]] = {"rows": rows, "samples": samples}
    tables = [figure_table("Tokens/s", rows, ["at once", "setting"], COLUMNS)]
    return Report("Adaptive speculation", adaptive_answer(rows), results, tables, adaptive_charts(rows), notes, problems)


def mean_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Geometric mean of tokens/s over the requests at once, per setting and round that has all of them; none of a single one."""
    places = {each.labels["at once"] for each in samples}
    groups: dict[tuple[str, int], list[float]] = {}
    for each in samples:
        groups.setdefault((str(each.labels["setting"]), each.round_id), []).append(each.figures["tokens/s"])
    return [
        Sample({"at once": ALL, "setting": setting}, round_id, {"tokens/s": geometric_mean(rates)})
        for (setting, round_id), rates in groups.items()
        if len(rates) == len(places) > 1
    ]


def compare(samples: Sequence[Sample]) -> list[Sample]:
    """Add the ratios of tokens/s to those of `OFF`, and of the fixed setting whose median is the highest at as many at once."""
    found: list[Sample] = []
    for at_once in dict.fromkeys(each.labels["at once"] for each in samples):
        mine = with_ratio([each for each in samples if each.labels["at once"] == at_once], GAIN, "tokens/s", setting=OFF)
        fixed = [row for row in make_rows(mine) if str(row.labels["setting"]).startswith(FIXED)]
        if fixed:
            best = max(fixed, key=lambda row: row.figures["tokens/s"].median)
            mine = with_ratio(mine, SHARE, "tokens/s", setting=best.labels["setting"])
        found += mine
    return found


def interval_rows(samples: Sequence[Sample]) -> list[Row]:
    """Rows whose ratios have intervals in place of ranges."""
    rows = []
    for row, group in zip(make_rows(samples), group_samples(samples), strict=True):
        values = {name: [each.figures[name] for each in group if name in each.figures] for name in (GAIN, SHARE)}
        intervals = {name: bootstrap_median(mine) for name, mine in values.items() if mine}
        rows.append(replace(row, figures={**row.figures, **intervals}))
    return rows


def bootstrap_median(values: Sequence[float]) -> Spread:
    """The median with its 95 % percentile interval; always the same for the same values.

    Efron, "Bootstrap methods: another look at the jackknife", 1979.
    """
    resamples = np.random.default_rng(0).choice(values, (NUM_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(resamples, axis=1), [2.5, 97.5])
    return Spread(float(np.median(values)), float(low), float(high), len(values))


def adaptive_answer(rows: Sequence[Row]) -> str:
    """What adaptive speculation gains over none and over fixed numbers of draft tokens."""
    mine = [row for row in rows if row.labels["setting"] == ADAPTIVE]
    texts = []
    for figure, other in {GAIN: "no speculation", SHARE: "the best fixed number"}.items():
        found = [f"{row.figures[figure].median:.2f}x at {row.labels['at once']}" for row in mine if figure in row.figures]
        texts += [f"{', '.join(found)} over {other}"] if found else []
    return f"Tokens/s of adaptive speculation: {'; '.join(texts)}." if texts else "Adaptive speculation could not be compared."


def adaptive_charts(rows: Sequence[Row]) -> list[LineChart]:
    """Tokens/s and draft tokens over the requests at once."""
    mine = sorted((row for row in rows if row.labels["at once"] != ALL), key=lambda row: int(row.labels["at once"]))
    figures = {"Tokens/s": "tokens/s", "Draft tokens per request and step": "nodes/step"}
    charts = [figure_chart(title, mine, "at once", figure, "setting") for title, figure in figures.items()]
    return [replace(each, x_label="requests at once", is_log_x=True) for each in charts]
