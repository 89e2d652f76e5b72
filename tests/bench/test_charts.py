"""Plots: what is drawn, read back from the SVG."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from titan.bench.charts import COLORS, LineChart, Series, StackedBars, cumulative_points, render_chart

LINES = LineChart("t", "depth", "share", [Series("a<b $x$", [(1, 1), (2, 3), (8, 2)], [(0, 2), (2, 4), (1, 3)])], is_log_x=True)
BARS = StackedBars("t", "ms", ["up\ndown", "two"], {"low": [3, 1], "high": [1, 0]})


@pytest.mark.parametrize(("chart", "names"), [(LINES, ["1", "2", "8", "depth", "share", "a<b $x$"]), (BARS, ["ms", "low", "high"])])
def test_names_are_text_and_all_ink_is_that_of_the_page(chart: LineChart | StackedBars, names: list[str]) -> None:
    svg = render_chart(chart)
    assert set(names) <= {"".join(each.itertext()) for each in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}
    colors = set(re.findall(r"(?:fill|stroke): (\S+?)[;\"]", svg))
    assert "currentColor" in colors and colors <= {"currentColor", "none", *COLORS}
    assert svg == render_chart(chart)


def test_more_series_than_colours_can_still_be_told_apart() -> None:
    many = LineChart("t", "x", "y", [Series(str(i), [(0, i), (1, i)], [(i, i + 1)] * 2) for i in range(len(COLORS) + 1)])
    assert render_chart(many).count("stroke-dasharray") == 2  # the last line, here and in the legend


def test_a_distribution_rises_to_one_in_steps() -> None:
    points = cumulative_points([3.0, 1.0, 1.0, 2.0])
    assert points == [(1.0, 0.25), (1.0, 0.5), (2.0, 0.75), (3.0, 1.0)]
    svg = render_chart(LineChart("t", "x", "y", [Series("s", points)], style="steps"))
    path = max(re.findall(r'<path d="([^"]*)" clip-path', svg), key=len)  # grid lines are short
    corners = [corner.split() for corner in path.replace("M ", "").split("L ")]
    assert all(x == next_x or y == next_y for (x, y), (next_x, next_y) in pairwise(corners))


def test_nothing_is_said_to_be_nothing() -> None:
    assert "nothing was measured" in render_chart(LineChart("t", "x", "y", [Series("s", [])]))
