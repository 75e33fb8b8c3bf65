"""Charts are well-formed SVG that stays within its frame, at any length and with any numbers."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from specrl.report import charts
from specrl.report.charts import BarStack, ChartLine
from specrl.report.document import ReportChart

VALUES = st.lists(st.floats(0, 1e9, allow_subnormal=False), min_size=1, max_size=600)


def drawn(chart: ReportChart) -> ElementTree.Element:
    return ElementTree.fromstring(chart.svg)  # noqa: S314 - our own


def places(chart: ReportChart) -> list[tuple[float, float]]:
    """Return the coordinates of all points of curves and of all circles."""
    tree = drawn(chart)
    pairs = [pair.split(",") for line in tree.iter("polyline") for pair in line.attrib["points"].split()]
    circles = [(dot.attrib["cx"], dot.attrib["cy"]) for dot in tree.iter("circle")]
    return [(float(x), float(y)) for x, y in [*pairs, *circles]]


@given(VALUES)
def test_a_curve_stays_within_its_frame(values: list[float]) -> None:
    points = [(float(i), value) for i, value in enumerate(values)]
    found = places(charts.draw_lines("a", [ChartLine("a", "train", points)], "words"))
    assert 1 <= len(found) <= charts.MAX_POINTS
    assert all(charts.LEFT <= x <= charts.WIDTH - charts.RIGHT for x, _ in found)
    assert all(charts.TOP - 0.1 <= y <= charts.HEIGHT - charts.BOTTOM + 0.1 for _, y in found)


@given(VALUES)
def test_a_bar_is_as_high_as_its_parts(values: list[float]) -> None:
    stack = BarStack(["train", "data"], [float(i) for i in range(len(values))], [values, values])
    rects = [rect.attrib for rect in drawn(charts.draw_stacked_bars("a", stack, "words")).iter("rect")]
    assert len(rects) == 2 * sum(value > 0 for value in values)
    assert all(float(rect["y"]) >= charts.TOP - 0.5 for rect in rects)


def test_a_chart_without_points_has_axes_only() -> None:
    """The reward chart of a run without rewards once raised a TypeError, as would any series without values."""
    for series in (
        [],
        [ChartLine("a", "train", [])],
        [ChartLine("a", "train", [], is_dotted=True), ChartLine("b", "train", [])],
    ):
        chart = charts.draw_lines("a", series, "words")
        assert places(chart) == []
        assert "NaN" not in chart.svg


def test_a_legend_names_each_style_once_and_a_single_line_has_none() -> None:
    lines = [ChartLine(name, style, [(1.0, 1.0)]) for name, style in (("a", "train"), ("b", "data"), ("c", "data"))]
    assert charts.draw_lines("all", lines, "words").key == [("train", "a"), ("data", "b")]
    assert charts.draw_lines("one", lines[:1], "words").key == []


def test_negative_rewards_are_drawn_too() -> None:
    falling = ChartLine("a", "train", [(1.0, -2.0), (2.0, 0.0), (3.0, 1.0)])
    found = places(charts.draw_lines("a", [falling], "words"))
    assert found[0][1] > found[1][1] > found[2][1]
    assert found[0][1] <= charts.HEIGHT - charts.BOTTOM + 0.1


def test_screen_readers_get_the_escaped_alternative_text() -> None:
    tree = drawn(charts.draw_bars("a", [("0", 40.0), ("<1>", 60.0)], 'a "b" & <c>', " %"))
    assert tree.attrib["role"] == "img"
    assert tree.attrib["aria-label"] == 'a "b" & <c>'
    assert tree.findtext("title") == 'a "b" & <c>'


def test_averaging_neighbours_keeps_the_mean_and_the_order() -> None:
    assert charts.average_neighbours([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert charts.average_neighbours([1.0, 2.0], 5) == [1.0, 2.0]
