"""Plots as SVG by matplotlib: lines, steps and points, in the ink of the page, be it light or dark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any

from titan.bench.samples import Row, Spread

COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a7f00", "#999999")
"""Told apart by colour-blind readers; Okabe and Ito 2008, the yellow darkened. Series beyond them are dashed and hollow."""
LINE_STYLES: dict[str, dict[str, Any]] = {
    "lines": {"marker": "o"},
    "steps": {"drawstyle": "steps-post"},
    "points": {"marker": "o", "linestyle": ""},
}
INK = "#010203"
"""Stands for the page's own colour of text until the drawing is done."""
INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """Points under one name; ``ranges`` are, per point, the lowest and highest y, drawn as a bar."""

    name: str
    points: Sequence[Point]
    ranges: Sequence[Point] = ()


@dataclass(frozen=True, slots=True)
class LineChart:
    """Series over a common x axis.

    ``style`` is "lines" (with markers), "steps" (for cumulative shares) or "points". The y axis begins at 0.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    style: str = "lines"
    is_log_x: bool = False


def figure_chart(title: str, rows: Iterable[Row], x: str, figure: str, label: str, style: str = "lines") -> LineChart:
    """Plot a figure over the label ``x``, a series per value of another label; rows without the figure are left out."""
    groups: dict[str, list[tuple[float, Spread]]] = {}
    for row in rows:
        if figure in row.figures:
            groups.setdefault(str(row.labels[label]), []).append((float(row.labels[x]), row.figures[figure]))
    series = [
        Series(name, [(at, spread.median) for at, spread in mine], [(spread.minimum, spread.maximum) for _, spread in mine])
        for name, mine in groups.items()
    ]
    return LineChart(title, x, figure, series, style)


def cumulative_points(values: Sequence[float]) -> list[Point]:
    """The empirical distribution of ``values``: (x, share of values that are at most x), for a chart of style "steps"."""
    return [(value, (i + 1) / len(values)) for i, value in enumerate(sorted(values))]


def render_chart(chart: LineChart) -> str:
    """Draw a chart as an ``<svg>`` element, always the same text for the same chart."""
    from matplotlib import rc_context  # only a page with plots needs it
    from matplotlib.figure import Figure
    from matplotlib.rcsetup import cycler

    look: dict[str, Any] = {"axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False}
    look["axes.prop_cycle"] = cycler(linestyle=["-", "--"], fillstyle=["full", "none"]) * cycler(color=COLORS)
    with rc_context(dict.fromkeys(INKED, INK) | look | {"svg.fonttype": "none", "svg.hashsalt": "titan"}):
        figure = Figure(figsize=(6.2, 3.8))
        axes = figure.add_subplot(xlabel=chart.x_label, ylabel=chart.y_label)
        xs = sorted({x for each in chart.series for x, _ in each.points})
        if chart.is_log_x:
            axes.set_xscale("log", base=2)
        if chart.is_log_x or len(xs) <= 5:
            axes.set_xticks(xs, [f"{x:.4g}" for x in xs])
        for each in (each for each in chart.series if each.points):
            points = [(each.points[0][0], 0.0), *each.points] if chart.style == "steps" else each.points
            [line] = axes.plot(*zip(*points, strict=True), label=each.name, **LINE_STYLES[chart.style])
            if each.ranges:
                lows, highs = zip(*each.ranges, strict=True)
                axes.vlines([x for x, _ in each.points], lows, highs, colors=line.get_color(), alpha=0.6)
        axes.update_datalim([(x, 0.0) for x in xs])  # else the margin on top is one of the range of the data, and cuts markers
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.15)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
        text = StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", bbox_inches="tight", transparent=True, metadata=no_metadata)
    svg = text.getvalue()
    svg = re.sub(r'(<g) id="[^"]*"', r"\1", svg[svg.index("<svg") :])  # nothing refers to these, and a page has many charts
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(chart.title)}"', 1).replace(INK, "currentColor").strip()
