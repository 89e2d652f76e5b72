"""Plots: what is drawn, read back from the SVG."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from titan.bench.charts import COLORS, LineChart, Series, cumulative_points, figure_chart, render_chart
from titan.bench.samples import Row, Spread


def test_a_chart_has_a_series_per_value_of_a_label() -> None:
    speeds = {("a", 1): Spread(2.0, 1.0, 3.0, 3), ("b", 1): Spread(5.0, 5.0, 5.0, 1), ("a", 4): Spread(3.0, 2.0, 4.0, 3)}
    rows = [Row({"mode": mode, "at once": at_once}, {"x": speed}) for (mode, at_once), speed in speeds.items()]
    chart = figure_chart("t", [*rows, Row({"mode": "c", "at once": 1}, {})], "at once", "x", "mode")
    lines = [Series("a", [(1, 2.0), (4, 3.0)], [(1.0, 3.0), (2.0, 4.0)]), Series("b", [(1, 5.0)], [(5.0, 5.0)])]
    assert chart == LineChart("t", "at once", "x", lines)


def test_names_are_text_and_all_ink_is_that_of_the_page() -> None:
    series = Series("a<b $x$", [(1, 1), (2, 3), (8, 2)], [(0, 2), (2, 4), (1, 3)])
    chart = LineChart("t", "depth", "share", [series], is_log_x=True)
    svg = render_chart(chart)
    assert {"1", "2", "8", "depth", "share", "a<b $x$"} <= {
        "".join(each.itertext()) for each in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    }
    colors = set(re.findall(r"(?:fill|stroke): (\S+?)[;\"]", svg))
    assert "currentColor" in colors and colors <= {"currentColor", "none", *COLORS}
    assert svg == render_chart(chart)


def test_more_series_than_colours_can_still_be_told_apart() -> None:
    many = LineChart("t", "x", "y", [Series(str(i), [(0, i), (1, i)], [(i, i + 1)] * 2) for i in range(len(COLORS) + 1)])
    assert render_chart(many).count("stroke-dasharray") == 2  # the last line, here and in the legend


def test_a_distribution_rises_to_one_in_steps() -> None:
    assert cumulative_points([3.0, 1.0, 1.0, 2.0]) == [(1.0, 0.25), (1.0, 0.5), (2.0, 0.75), (3.0, 1.0)]
