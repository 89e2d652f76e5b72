"""Plots: what is drawn where, read back from the SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations

import pytest

from titan.bench.charts import BOTTOM, HEIGHT, TOP, LineChart, Series, StackedBars, cumulative_points, render_chart


def parse(chart: LineChart | StackedBars) -> ET.Element:
    return ET.fromstring(render_chart(chart))


def circles(chart: LineChart) -> list[tuple[float, float]]:
    return [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in parse(chart).iter("circle")]


def test_points_are_placed_to_scale() -> None:
    chart = LineChart("t", "x", "y", [Series("s", [(0, 0), (1, 5), (4, 10)])])
    (x0, y0), (x1, y1), (x2, y2) = circles(chart)
    assert (x1 - x0) / (x2 - x0) == pytest.approx(1 / 4, abs=1e-3)
    assert y0 == HEIGHT - BOTTOM and y2 == pytest.approx(TOP) and (y0 - y1) / (y0 - y2) == pytest.approx(0.5)


def test_doublings_are_equally_far_apart_on_a_log_axis() -> None:
    xs = [x for x, _ in circles(LineChart("t", "x", "y", [Series("s", [(1, 1), (2, 1), (4, 1)])], is_log_x=True))]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1])


def test_a_range_is_drawn_from_its_low_to_its_high_end() -> None:
    svg = parse(LineChart("t", "x", "y", [Series("s", [(1, 5)], [(4, 10)])]))
    [bar] = [each for each in svg.iter("line") if each.attrib["x1"] == each.attrib["x2"]]
    assert float(bar.attrib["y2"]) == pytest.approx(TOP)
    assert float(bar.attrib["y1"]) == pytest.approx(HEIGHT - BOTTOM - 0.4 * (HEIGHT - TOP - BOTTOM), abs=0.1)


def test_parts_of_a_bar_stand_on_each_other() -> None:
    svg = parse(StackedBars("t", "ms", ["one", "two"], {"low": [3, 1], "high": [1, 0]}))
    low, low_two, high, high_two = sorted(
        (each for each in svg.iter("rect") if each.find("title") is not None),
        key=lambda each: each.find("title").text.split(", ")[1].startswith("high"),  # type: ignore[union-attr]
    )
    assert float(low.attrib["width"]) == pytest.approx(3 * float(low_two.attrib["width"]), abs=0.2)
    assert float(low.attrib["x"]) + float(low.attrib["width"]) == pytest.approx(float(high.attrib["x"]), abs=0.1)
    assert float(high_two.attrib["width"]) == 0
    assert low.attrib["y"] == high.attrib["y"] and float(low_two.attrib["y"]) > float(low.attrib["y"])


def boxes(svg: ET.Element) -> list[tuple[float, float, float, float]]:
    """Left, right, top and bottom of each text that is not turned: 6.5 wide per character, 12 high."""
    found = []
    for each in svg.iter("text"):
        if each.text and "transform" not in each.attrib:
            width, x, y = 6.5 * len(each.text), float(each.attrib["x"]), float(each.attrib["y"])
            left = x - {"end": width, "middle": width / 2}.get(each.attrib.get("text-anchor", ""), 0)
            found.append((left, left + width, y - 10, y + 2))
    return found


DRAFTS = ["no draft", "demo", "demo,tree=dynamic,tokens=8", "truncated:1", "organization/a-draft-of-a-long-name,tokens=2", "ngram"]
WORKLOADS = ["code", "prose", "chat at temperature 0.8", "json"]


@pytest.mark.parametrize(
    "chart",
    [
        StackedBars(
            "t", "ms", [f"{draft}, {each}" for each in WORKLOADS for draft in DRAFTS], {"target": [1] * 24, "x" * 60: [2] * 24}
        ),
        StackedBars("t", "ms", ["titan-draft\nfloat32, 8", "titan\nfloat32, 16"], {"attention": [0.1, 0.2]}),
        LineChart("t", "depth", "y", [Series(f"{draft}, {i}", [(1, i), (4, i)]) for draft in DRAFTS for i in range(5)]),
    ],
)
def test_no_text_is_cut_off_or_covers_another(chart: LineChart | StackedBars) -> None:
    svg = parse(chart)
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    found = boxes(svg)
    assert all(left >= 0 and right <= width and top >= 0 and bottom <= height for left, right, top, bottom in found)
    for a, b in combinations(found, 2):
        assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2], (a, b)


def test_a_distribution_rises_to_one() -> None:
    assert cumulative_points([3.0, 1.0, 1.0, 2.0]) == [(1.0, 0.25), (1.0, 0.5), (2.0, 0.75), (3.0, 1.0)]


def test_steps_hold_until_the_next_value() -> None:
    [path] = parse(LineChart("t", "x", "y", [Series("s", [(0, 1), (2, 2)])], style="steps")).iter("path")
    corners = [tuple(map(float, corner.strip("ML ").split(","))) for corner in path.attrib["d"].split(" ")]
    assert [corner[0] for corner in corners] == [corners[0][0], corners[0][0], corners[-1][0], corners[-1][0]]
    assert corners[1][1] == corners[2][1] > corners[3][1]


def test_ticks_are_round_and_span_the_data() -> None:
    svg = parse(LineChart("t", "x", "y", [Series("s", [(0.7 + i, 83.0) for i in range(9)])]))
    ticks = [float(each.text) for each in svg.iter("text") if each.text and each.text.replace(".", "").isdigit()]
    assert ticks == [0, 20, 40, 60, 80, 100, 0, 2, 4, 6, 8, 10]


def test_more_series_than_colours_can_still_be_told_apart() -> None:
    svg = parse(LineChart("t", "x", "y", [Series(str(i), [(1, i), (2, i)]) for i in range(10)]))
    looks = [(each.attrib["stroke"], each.attrib.get("stroke-dasharray")) for each in svg.iter("path")]
    assert len(set(looks)) == 10


def test_a_name_may_have_two_lines() -> None:
    texts = [each for each in parse(StackedBars("t", "y", ["up\ndown"], {"a": [1]})).iter("text") if each.text in ("up", "down")]
    assert [each.text for each in texts] == ["up", "down"]
    assert texts[0].attrib["x"] == texts[1].attrib["x"] and float(texts[0].attrib["y"]) < float(texts[1].attrib["y"])


def test_names_are_escaped_and_stand_in_the_legend() -> None:
    texts = [each.text for each in parse(LineChart("t", "x", "y", [Series("a<b", [(1, 1)])])).iter("text")]
    assert "a<b" in texts


@pytest.mark.parametrize(
    "chart", [LineChart("t", "x", "y", []), StackedBars("t", "y", [], {}), StackedBars("t", "y", [], {"a": []})]
)
def test_nothing_is_said_to_be_nothing(chart: LineChart | StackedBars) -> None:
    assert "nothing was measured" in render_chart(chart)


def test_bad_charts_are_refused() -> None:
    with pytest.raises(ValueError, match="style='bars' is not allowed"):
        LineChart("t", "x", "y", [], style="bars")
    with pytest.raises(ValueError, match="x of 0 or less"):
        LineChart("t", "x", "y", [Series("s", [(0, 1)])], is_log_x=True)
