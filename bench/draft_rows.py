"""What samples of drafts add up to: speed-ups, measured and predicted; acceptance per depth; and the ranking, with its reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, mean
from typing import Any

from titan.bench.predict import wilson_share
from titan.bench.samples import Label, Row, Sample, group_samples, sum_details, with_ratio

NO_DRAFT = "no draft"
PARTS = {"draft": "drafting", "target": "verification", "host": "the host"}
"""Shares of a step by figure, and what they are for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A row of a table whose figures are no spreads over rounds."""

    labels: Mapping[str, Label]
    figures: Mapping[str, Any]


def compare(samples: Sequence[Sample], kind: str) -> list[Sample]:
    """Add what compares samples with those of no draft in their rounds: speed-ups, ratios of times, and predicted speed-ups.

    Args:
        samples: of `titan.bench.draft_bench.DraftBench`.
        kind: the label that names drafts.
    """
    for name, figure in {"x no draft": "tokens/s", "x ms/step": "ms/step", "verify/decode": "ms/target pass"}.items():
        samples = with_ratio(samples, name, figure, **{kind: NO_DRAFT})
    return [_with_prediction(each) if "verify/decode" in each.figures else each for each in samples]


def _with_prediction(sample: Sample) -> Sample:
    """Add the speed-up of `titan.bench.predict`, from a verification and drafting in decodes."""
    figures = sample.figures
    verification = figures["verify/decode"]
    drafting = figures.get("draft passes", 0.0) * figures.get("ms/draft pass", 0.0) * verification / figures["ms/target pass"]
    return replace(sample, figures={**figures, "predicted x": figures["expected tokens/step"] / (drafting + verification)})


def setting_name(labels: Mapping[str, Label]) -> str:
    """Name what drafts are compared in, such as "code, temperature 0"."""
    workload = [str(labels["workload"])] if "workload" in labels else []
    return ", ".join([*workload, f"temperature {labels['temperature']:g}"])


def find_depths(samples: Sequence[Sample]) -> list[Finding]:
    """Per draft, of the "trees" that reach "depth 1", "depth 2" and so on, the share of which a node so deep was accepted."""
    found = []
    for group in group_samples(samples):
        trees, accepted = sum_details(group, "trees per depth"), sum_details(group, "accepted per depth")
        if trees:
            counts = enumerate(zip(accepted, trees, strict=True), 1)
            shares = {f"depth {depth}": wilson_share(*each) for depth, each in counts}
            found.append(Finding(group[0].labels, {"trees": trees[0], **shares}))
    return found


def rank(rows: Sequence[Row], kind: str) -> list[Finding]:
    """Order the drafts of each temperature by their speed-up, a geometric mean over workloads, and say what others lack."""
    groups: dict[tuple[float, str], list[Row]] = {}
    for row in rows:
        if "x no draft" in row.figures:
            groups.setdefault((float(row.labels["temperature"]), str(row.labels[kind])), []).append(row)
    drafts = [(*labels, _overall(mine)) for labels, mine in groups.items()]
    drafts.sort(key=lambda each: (each[0], -each[2]["x no draft"]))
    best = {temperature: figures for temperature, _, figures in reversed(drafts)}
    return [
        Finding({"temperature": temperature, kind: name, "why": _why(figures, best[temperature])}, figures)
        for temperature, name, figures in drafts
    ]


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
    emits = f"emits {mine['tokens/step']:.2f} tokens per step"
    is_timed = "x ms/step" in mine and "x ms/step" in best
    if mine is best:
        pays = "pay" if mine["x no draft"] > 1 else "do not pay"
        costs = f", which {pays} for steps that take {mine['x ms/step']:.2f} x as long as without a draft" if is_timed else ""
        return emits + costs
    reason = f"{emits}, the fastest {best['tokens/step']:.2f}"
    if is_timed:
        fewer_by = math.log(best["tokens/step"] / mine["tokens/step"])
        longer_by = math.log(mine["x ms/step"] / best["x ms/step"])
        if max(fewer_by, longer_by) <= 0:
            return "no worse per step in these figures: behind within the noise"
        if fewer_by < longer_by:
            cause = PARTS[max(PARTS, key=lambda part: mine[part] - best[part])]
            lengths = f"{mine['x ms/step']:.2f} x a step without a draft, the fastest's {best['x ms/step']:.2f}"
            reason = f"its steps take {lengths}, mostly for {cause}"
    return f"{reason}; slower than no draft" if mine["x no draft"] < 1 else reason
