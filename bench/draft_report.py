"""The report of a measurement of drafts: its answer, tables and plots, and what the columns mean."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from titan.bench.charts import LineChart, Series, StackedBars
from titan.bench.draft_bench import DraftBench
from titan.bench.draft_rows import PARTS, compare, find_depths, rank, setting_name
from titan.bench.report import Report, count, figure_table
from titan.bench.samples import Row, Spread, make_rows

COLUMNS = {
    "tokens/s": "±.0f",
    "x no draft": "±.2f",
    "predicted x": ".2f",
    "tokens/step": ".2f",
    "expected tokens/step": ".2f",
    "alpha": ".2f",
    "draft passes": ".1f",
    "ms/draft pass": ".2f",
    "ms/target pass": ".2f",
    "verify/decode": ".2f",
    "ms/step": ".2f",
    "host": ".1%",
    "trees, batch, acceptance": ".1%",
    "equal outputs": ".0%",
}
DEPTHS = {"trees": ".0f"} | {f"depth {depth}": ".2f" for depth in range(1, 7)}
NOTES = (
    "x no draft: median over the rounds of the ratio within a round, ± half the range; over workloads the geometric mean. tokens/s "
    "count the wall time of a run, prefill included; times of steps and passes are those after the prefill.",
    "predicted x: E / (drafting + verification), in target passes without draft tokens, E = (1 - alpha^(gamma+1)) / (1 - alpha), "
    "after Leviathan et al. 2023 (equation 1, theorem 3.8), with the measured alpha, the acceptance of one more depth; the host's "
    "work outside the passes, and prefill, are not in it. verify/decode: a target pass with draft tokens over one without.",
    "tokens/step: mean acceptance length, final token included; expected: what alpha alone gives. depth d: of the trees that reach "
    "depth d, the share of which a node of that depth was accepted; intervals of Wilson 1927, as if trees were independent.",
)


def make_report(args: argparse.Namespace, bench: DraftBench, title: str, *notes: str) -> Report:
    """Lay out what was measured so far."""
    kind, samples = bench.kind, compare(bench.samples, bench.kind)
    rows, depths = make_rows(samples), find_depths(samples)
    ranking = rank(rows, kind)
    best = {each.labels["temperature"]: each for each in reversed(ranking)}
    places = [f"at temperature {t:g} {best[t].labels[kind]} ({best[t].figures['x no draft']:.2f} x no draft)" for t in sorted(best)]
    about = (
        f"{args.model}, {args.dtype}; {count(args.concurrency, 'request')} at once, {count(args.waves, 'request')} per slot, "
        f"prompts of {args.prompt_len} tokens, {args.output_len} generated; {count(args.repeats, 'interleaved round')}."
    )
    predicted = [
        (str(row.labels[kind]), row.figures["predicted x"].median, row.figures["x no draft"])
        for row in rows
        if "predicted x" in row.figures
    ]
    labels = list(rows[0].labels) if rows else []
    return Report(
        title,
        f"Fastest {kind} by tokens/s: {'; '.join(places)}." if places else f"No {kind} could be compared with no draft.",
        {"rows": rows, "ranking": ranking, "depths": depths, "samples": samples},
        [
            figure_table("Speed and costs", rows, labels, COLUMNS),
            figure_table("Acceptance per depth, with 95 % intervals", depths, labels, DEPTHS),
            figure_table("Ranking", ranking, ["temperature", kind, "why"], {"x no draft": ".2f"}),
        ],
        [
            speed_up_chart("Speed-up, measured over predicted", "predicted x", predicted, "points"),
            *step_charts(rows, kind),
        ],
        [about, *notes, *NOTES],
        bench.problems,
    )


def speed_up_chart(title: str, x_label: str, points: Iterable[tuple[str, float, Spread]], style: str) -> LineChart:
    """Draw speed-ups over no draft, each with the name of its series and x."""
    series: dict[str, list[tuple[float, Spread]]] = {}
    for name, x, y in points:
        series.setdefault(name, []).append((x, y))
    drawn = [
        Series(name, [(x, y.median) for x, y in mine], [(y.minimum, y.maximum) for _, y in mine]) for name, mine in series.items()
    ]
    return LineChart(title, x_label, "x no draft", drawn, style)


def step_charts(rows: Sequence[Row], kind: str) -> list[StackedBars]:
    """The parts of each draft's steps; no chart where steps are not timed."""
    steps = {f"{row.labels[kind]}, {setting_name(row.labels)}": row.figures for row in rows if "ms/step" in row.figures}
    parts = {part: [figures["ms/step"].median * figures[part].median for figures in steps.values()] for part in PARTS}
    return [StackedBars("Parts of a step", "ms", list(steps), parts)] if steps else []
