"""Plots as SVG text: lines, steps, points, and stacked bars. They take their ink from the page, so they suit light and dark.

A chart grows with its legend, and with the number and the names of its bars, so that no text is cut off or covers another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

PLOT, HEIGHT = 500, 360  # width without margins; height with them, of a chart without bars at least
LEFT, TOP, BOTTOM = 70, 20, 50  # margins; the legend stands in a right one
LINE = 15  # height of a line of text
CHARACTER = 7.0
"""Width that a character of the page's 12 px type has at most, on average."""
NUM_TICKS = 5
COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a7f00", "#999999")
"""Told apart by colour-blind readers; Okabe and Ito 2008, the yellow darkened. Series beyond them are dashed and hollow."""

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

    def __post_init__(self) -> None:
        if self.style not in ("lines", "steps", "points"):
            raise ValueError(f"style={self.style!r} is not allowed: it must be 'lines', 'steps' or 'points'")
        if self.is_log_x and any(x <= 0 for each in self.series for x, _ in each.points):
            raise ValueError("is_log_x=True is not allowed with x of 0 or less")


@dataclass(frozen=True, slots=True)
class StackedBars:
    """One horizontal bar per name in ``bars``, the first on top; each part has a value of 0 or more per bar, the first at the left.

    Names may have two lines.
    """

    title: str
    value_label: str
    bars: Sequence[str]
    parts: Mapping[str, Sequence[float]]


def cumulative_points(values: Sequence[float]) -> list[Point]:
    """The empirical distribution of ``values``: (x, share of values that are at most x), for a chart of style "steps"."""
    ordered = sorted(values)
    return [(value, (i + 1) / len(ordered)) for i, value in enumerate(ordered)]


def render_chart(chart: LineChart | StackedBars) -> str:
    """Draw a chart as an ``<svg>`` element."""
    return _render_lines(chart) if isinstance(chart, LineChart) else _render_bars(chart)


def _render_lines(chart: LineChart) -> str:
    points = [point for each in chart.series for point in each.points]
    if not points:
        return _frame(chart.title, [f'<text x="{LEFT}" y="60">nothing was measured</text>'])
    transform: Callable[[float], float] = math.log2 if chart.is_log_x else float
    xs = sorted({x for x, _ in points})
    x_ticks = xs if chart.is_log_x or len(xs) <= NUM_TICKS else _round_values(xs[0], xs[-1])
    low, high = transform(x_ticks[0]), transform(x_ticks[-1])
    y_ticks = _round_values(0.0, max(y for each in chart.series for _, y in (*each.points, *each.ranges)))

    def place(x: float, y: float) -> Point:
        share = (transform(x) - low) / (high - low) if high > low else 0.5
        return LEFT + share * PLOT, _y(y, y_ticks[-1])

    parts = [
        *_y_axis(y_ticks, chart.y_label),
        *_x_axis([(place(x, 0)[0], _number(x)) for x in x_ticks], chart.x_label, LEFT, HEIGHT - BOTTOM),
    ]
    for i, each in enumerate(chart.series):
        color, dashes, fill = _ink(i)
        placed = [place(x, y) for x, y in each.points]
        if chart.style != "points" and placed:
            path = _step_path(placed) if chart.style == "steps" else " L".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
        for (x, _), (start, end) in zip(each.points, each.ranges, strict=False):
            (left, y1), (_, y2) = place(x, start), place(x, end)
            parts.append(f'<line x1="{left:.1f}" x2="{left:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="{color}" opacity="0.6"/>')
        if chart.style != "steps":
            for (x, y), (left, height) in zip(each.points, placed, strict=True):
                hint = f"<title>{escape(f'{each.name}: {_number(x)}, {_number(y)}')}</title>"
                parts.append(f'<circle cx="{left:.1f}" cy="{height:.1f}" r="4" fill="{fill}" stroke="{color}">{hint}</circle>')
    return _frame(chart.title, parts, [each.name for each in chart.series])


def _render_bars(chart: StackedBars) -> str:
    totals = [sum(values) for values in zip(*chart.parts.values(), strict=True)]
    if not totals:
        return _frame(chart.title, [f'<text x="{LEFT}" y="60">nothing was measured</text>'])
    ticks = _round_values(0.0, max(totals))
    names = [name.split("\n") for name in chart.bars]
    left = max(LEFT, 16 + _text_width([line for name in names for line in name]))
    pitch = 10 + LINE * max(map(len, names))
    base = TOP + pitch * len(names)

    def place(value: float) -> float:
        return left + value / ticks[-1] * PLOT

    parts = _x_axis([(place(tick), _number(tick)) for tick in ticks], chart.value_label, left, base)
    for i, name in enumerate(names):
        top = TOP + pitch * i
        for k, line in enumerate(name):
            y = top + pitch / 2 + 4 + LINE * (k - (len(name) - 1) / 2)
            parts.append(f'<text x="{left - 8:.1f}" y="{y:.1f}" text-anchor="end">{escape(line)}</text>')
        before = 0.0
        for k, (part, values) in enumerate(chart.parts.items()):
            start, end = place(before), place(before + values[i])
            before += values[i]
            hint = escape(f"{chart.bars[i]}, {part}: {_number(values[i])}")
            parts.append(
                f'<rect x="{start:.1f}" y="{top + 3}" width="{end - start:.1f}" height="{pitch - 6}" '
                f'fill="{COLORS[k % len(COLORS)]}"><title>{hint}</title></rect>'
            )
    return _frame(chart.title, parts, list(chart.parts), left, base + BOTTOM)


def _frame(title: str, parts: Sequence[str], names: Sequence[str] = (), left: float = LEFT, height: float = 0) -> str:
    """Put the parts and a legend of ``names`` into a chart that has room for both, ``left`` the margin of the plot."""
    edge = left + PLOT
    width = edge + 46 + _text_width(names)
    height = max(height or HEIGHT, TOP + 20 * len(names))
    body = "\n".join([*parts, *_legend(names, edge + 16)])
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width: {width:.0f}px" role="img" aria-label="{escape(title)}">\n'
        f"{body}\n</svg>"
    )


def _text_width(lines: Sequence[str]) -> float:
    """Estimated width of the longest line."""
    return CHARACTER * max(map(len, lines), default=0)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def _ink(i: int) -> tuple[str, str, str]:
    """Colour, dashes and fill of series ``i``."""
    color = COLORS[i % len(COLORS)]
    return (color, "", color) if i < len(COLORS) else (color, ' stroke-dasharray="6 3"', "none")


def _round_values(low: float, high: float) -> list[float]:
    """Round numbers at equal distances, from at most ``low`` to at least ``high``."""
    if high <= low:
        return [low, low + 1.0]
    raw = (high - low) / NUM_TICKS
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]


def _y_axis(ticks: Sequence[float], label: str) -> list[str]:
    parts = []
    for tick in ticks:
        y = _y(tick, ticks[-1])
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + PLOT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity="0.15"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return [*parts, f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(label)}</text>']


def _x_axis(ticks: Sequence[tuple[float, str]], label: str, left: float, base: float) -> list[str]:
    parts = [f'<line x1="{left}" x2="{left + PLOT}" y1="{base}" y2="{base}" stroke="currentColor" opacity="0.5"/>']
    parts += [f'<text x="{x:.1f}" y="{base + 18}" text-anchor="middle">{escape(text)}</text>' for x, text in ticks]
    return [*parts, f'<text x="{left + PLOT / 2}" y="{base + 40}" text-anchor="middle">{escape(label)}</text>']


def _legend(names: Sequence[str], x: float) -> list[str]:
    parts = []
    for i, name in enumerate(names):
        y = TOP + 10 + 20 * i
        color, _, fill = _ink(i)
        parts.append(f'<rect x="{x}" y="{y - 9}" width="11" height="11" fill="{fill}" stroke="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 2}">{escape(name)}</text>')
    return parts


def _step_path(placed: Sequence[Point]) -> str:
    """From the axis up, then each value holds until the next."""
    path = [f"{placed[0][0]:.1f},{HEIGHT - BOTTOM}"]
    for i, (x, y) in enumerate(placed):
        path.append(f"{x:.1f},{y:.1f}")
        if i + 1 < len(placed):
            path.append(f"{placed[i + 1][0]:.1f},{y:.1f}")
    return " L".join(path)


def _number(value: float) -> str:
    return f"{value:.4g}"
