"""Plots as SVG by matplotlib: lines, steps, points, and stacked bars, in the ink of the page, be it light or dark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a7f00", "#999999")
"""Told apart by colour-blind readers; Okabe and Ito 2008, the yellow darkened. Series beyond them are dashed and hollow."""
LINE_STYLES: dict[str, dict[str, Any]] = {
    "lines": {"marker": "o"},
    "steps": {"drawstyle": "steps-post"},
    "points": {"marker": "o", "linestyle": ""},
}
INK = "#010203"
"""Stands for the page's own colour of text until the drawing is done."""
NO_METADATA: dict[str, None] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
FEW_TICKS = 5
WIDTH = 6.2

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


@dataclass(frozen=True, slots=True)
class StackedBars:
    """One horizontal bar per name in ``bars``, the first on top; each part has a value of 0 or more per bar."""

    title: str
    value_label: str
    bars: Sequence[str]
    parts: Mapping[str, Sequence[float]]


def cumulative_points(values: Sequence[float]) -> list[Point]:
    """The empirical distribution of ``values``: (x, share of values that are at most x), for a chart of style "steps"."""
    ordered = sorted(values)
    return [(value, (i + 1) / len(ordered)) for i, value in enumerate(ordered)]


def render_chart(chart: LineChart | StackedBars) -> str:
    """Draw a chart as an ``<svg>`` element, always the same text for the same chart."""
    from matplotlib import rc_context  # only a page with plots needs it
    from matplotlib.figure import Figure
    from matplotlib.rcsetup import cycler

    inks = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK)
    look: dict[str, Any] = {"axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False}
    look["axes.prop_cycle"] = cycler(linestyle=["-", "--"], fillstyle=["full", "none"]) * cycler(color=COLORS)
    with rc_context(inks | look | {"svg.fonttype": "none", "svg.hashsalt": "titan"}):
        figure = Figure()
        axes = figure.add_subplot()
        if isinstance(chart, LineChart):
            figure.set_size_inches(WIDTH, 3.8)
            _draw_lines(axes, chart)
        else:
            figure.set_size_inches(WIDTH, 0.7 + sum(0.15 + 0.2 * len(name.split("\n")) for name in chart.bars))
            _draw_bars(axes, chart)
        if not axes.get_legend_handles_labels()[1]:
            return "<p>nothing was measured</p>"
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
        text = StringIO()
        figure.savefig(text, format="svg", bbox_inches="tight", transparent=True, metadata=NO_METADATA)
    svg = text.getvalue()
    svg = re.sub(r'(<g) id="[^"]*"', r"\1", svg[svg.index("<svg") :])  # nothing refers to these, and a page has many charts
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(chart.title)}"', 1).replace(INK, "currentColor").strip()


def _draw_lines(axes: Axes, chart: LineChart) -> None:
    xs = sorted({x for each in chart.series for x, _ in each.points})
    if chart.is_log_x:
        axes.set_xscale("log", base=2)
    if chart.is_log_x or len(xs) <= FEW_TICKS:
        axes.set_xticks(xs, [f"{x:.4g}" for x in xs])
    for each in (each for each in chart.series if each.points):
        points = [(each.points[0][0], 0.0), *each.points] if chart.style == "steps" else each.points
        [line] = axes.plot(*zip(*points, strict=True), label=each.name, **LINE_STYLES[chart.style])
        if each.ranges:
            lows, highs = zip(*each.ranges, strict=True)
            axes.vlines([x for x, _ in each.points], lows, highs, colors=line.get_color(), alpha=0.6)
    axes.set_ylim(bottom=0)
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    axes.grid(axis="y", alpha=0.15)


def _draw_bars(axes: Axes, chart: StackedBars) -> None:
    places = range(len(chart.bars))
    starts = np.zeros(len(chart.bars))
    for part, values in chart.parts.items():
        axes.barh(places, values, left=starts, label=part)
        starts = starts + values
    axes.set_yticks(places, chart.bars)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set(xlabel=chart.value_label)
