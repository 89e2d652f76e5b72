"""What samples of drafts add up to: speed-ups, measured and predicted; acceptance per depth; and the ranking, with its reasons."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean, mean

from titan.bench.charts import figure_chart
from titan.bench.draft_bench import DraftBench
from titan.bench.predict import wilson_share
from titan.bench.report import Report, count, figure_table
from titan.bench.samples import NO_DRAFT, Row, Sample, Spread, group_samples, make_rows, sum_details, with_ratio

PARTS = {"draft": "drafting", "target": "verification", "host": "the host"}
"""Shares of a step by figure, and what they are for."""
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
DEPTHS = {"trees": ".0f"} | {f"depth {depth}": "[.2f" for depth in range(1, 7)}
NOTES = (
    "x no draft: median over the rounds of the ratio within a round, ± half the range; over workloads the geometric mean. tokens/s "
    "count the wall time of a run, prefill included; times of steps and passes are those after the prefill.",
    "predicted x: E / (drafting + verification), in target passes without draft tokens, E = (1 - alpha^(gamma+1)) / (1 - alpha), "
    "after Leviathan et al. 2023 (equation 1, theorem 3.8), with the measured alpha, the acceptance of one more depth; the host's "
    "work outside the passes, and prefill, are not in it. verify/decode: a target pass with draft tokens over one without.",
    "tokens/step: mean acceptance length, final token included; expected: what alpha alone gives. depth d: of the trees that reach "
    "depth d, the share that had a node so deep accepted, and its 95 % interval (Wilson 1927), as if trees were independent.",
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
        replace(row, labels={**row.labels, "predicted x": row.figures["predicted x"].median})
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
            figure_table("Acceptance per depth", depths, labels, DEPTHS),
            figure_table("Ranking", ranking, ["temperature", kind, "why"], {"x no draft": ".2f"}),
        ],
        [figure_chart("Speed-up, measured over predicted", predicted, "predicted x", "x no draft", kind, "points")],
        [about, *notes, *NOTES],
        bench.problems,
    )


def compare(samples: Sequence[Sample], kind: str) -> list[Sample]:
    """Add what compares samples with those of no draft in their rounds: speed-ups, ratios of times, and predicted speed-ups.

    Args:
        samples: of `titan.bench.draft_bench.DraftBench`.
        kind: the label that names drafts.
    """
    for name, figure in {"x no draft": "tokens/s", "x ms/step": "ms/step", "verify/decode": "ms/target pass"}.items():
        samples = with_ratio(samples, name, figure, **{kind: NO_DRAFT})
    found = []
    for each in samples:
        figures = dict(each.figures)
        if "verify/decode" in figures:
            verification = figures["ms/target pass"]
            drafting = figures.get("draft passes", 0.0) * figures.get("ms/draft pass", 0.0)
            decode = verification / figures["verify/decode"]
            figures["predicted x"] = figures["expected tokens/step"] * decode / (drafting + verification)
        found.append(replace(each, figures=figures))
    return found


def find_depths(samples: Sequence[Sample]) -> list[Row]:
    """Per draft, of the "trees" that reach "depth 1", "depth 2" and so on, the share of which a node so deep was accepted."""
    found = []
    for group in group_samples(samples):
        trees, accepted = sum_details(group, "trees per depth"), sum_details(group, "accepted per depth")
        if trees:
            counts = enumerate(zip(accepted, trees, strict=True), 1)
            shares = {f"depth {depth}": wilson_share(*each) for depth, each in counts}
            found.append(Row(group[0].labels, {"trees": Spread.of(trees[:1]), **shares}))
    return found


def rank(rows: Sequence[Row], kind: str) -> list[Row]:
    """Order the drafts of each temperature by their speed-up, a geometric mean over workloads, and say what others lack."""
    groups: dict[tuple[float, str], list[Row]] = {}
    for row in rows:
        if "x no draft" in row.figures:
            groups.setdefault((float(row.labels["temperature"]), str(row.labels[kind])), []).append(row)
    drafts = [(*labels, _overall(mine)) for labels, mine in groups.items()]
    drafts.sort(key=lambda each: (each[0], -each[2]["x no draft"]))
    best = {temperature: figures for temperature, _, figures in reversed(drafts)}
    return make_rows(
        Sample({"temperature": temperature, kind: name, "why": _why(figures, best[temperature])}, 0, figures)
        for temperature, name, figures in drafts
    )


def _overall(rows: Sequence[Row]) -> dict[str, float]:
    """A draft over all workloads; a step and its parts are in steps without a draft, and missing where steps are not timed."""
    figures = {
        "x no draft": geometric_mean(row.figures["x no draft"].median for row in rows),
        "tokens/step": mean(row.figures["tokens/step"].median for row in rows),
    }
    timed = [row.figures for row in rows if "x ms/step" in row.figures]
    if timed:
        figures |= {part: mean(each["x ms/step"].median * each[part].median for each in timed) for part in PARTS}
        figures["x ms/step"] = sum(figures[part] for part in PARTS)
    return figures


def _why(mine: Mapping[str, float], best: Mapping[str, float]) -> str:
    """What makes the best one fast; of others the larger of two factors: fewer tokens per step, or longer steps."""
    reason = f"emits {mine['tokens/step']:.2f} tokens per step"
    is_timed = "x ms/step" in mine and "x ms/step" in best
    if mine is best:
        pays = "pay" if mine["x no draft"] > 1 else "do not pay"
        length = f", which {pays} for steps that take {mine['x ms/step']:.2f} x as long as without a draft" if is_timed else ""
        return reason + length
    reason += f", the fastest {best['tokens/step']:.2f}"
    fewer_by = best["tokens/step"] / mine["tokens/step"]
    longer_by = mine["x ms/step"] / best["x ms/step"] if is_timed else 0.0
    if longer_by > max(1.0, fewer_by):
        cause = PARTS[max(PARTS, key=lambda part: mine[part] - best[part])]
        lengths = f"{mine['x ms/step']:.2f} x a step without a draft, the fastest's {best['x ms/step']:.2f}"
        reason = f"its steps take {lengths}, mostly for {cause}"
    elif is_timed and fewer_by <= 1:
        reason = "no worse per step in these figures: behind within the noise"
    return f"{reason}; slower than no draft" if mine["x no draft"] < 1 else reason
