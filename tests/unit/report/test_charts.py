"""Charts are well-formed SVG that stays within its frame, at any length and with any numbers."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from specrl.report import charts
from specrl.report.charts import Line, Stack

VALUES = st.lists(st.floats(0, 1e9, allow_subnormal=False), min_size=1, max_size=600)


def drawn(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)  # noqa: S314 - our own


def places(svg: str) -> list[tuple[float, float]]:
    """Every point of every curve and circle."""
    tree = drawn(svg)
    pairs = [pair.split(",") for line in tree.iter("polyline") for pair in line.attrib["points"].split()]
    circles = [(dot.attrib["cx"], dot.attrib["cy"]) for dot in tree.iter("circle")]
    return [(float(x), float(y)) for x, y in [*pairs, *circles]]


@given(VALUES)
def test_a_curve_lies_within_its_frame(values: list[float]) -> None:
    svg = charts.lines([Line("a", "train", [(float(i), value) for i, value in enumerate(values)])], "words")
    found = places(svg)
    assert 1 <= len(found) <= charts.MOST_POINTS
    assert all(charts.LEFT <= x <= charts.WIDTH - charts.RIGHT for x, _ in found)
    assert all(charts.TOP - 0.1 <= y <= charts.HEIGHT - charts.BOTTOM + 0.1 for _, y in found)


@given(VALUES)
def test_a_bar_is_as_high_as_its_parts(values: list[float]) -> None:
    stack = Stack(["a", "b"], ["train", "data"], [float(i) for i in range(len(values))], [values, values])
    rects = [rect.attrib for rect in drawn(charts.stacked(stack, "words")).iter("rect")]
    assert len(rects) == 2 * sum(value > 0 for value in values)
    assert all(float(rect["y"]) >= charts.TOP - 0.5 for rect in rects)


def test_a_chart_without_a_point_has_its_axes_alone() -> None:
    """The chart of rewards of a run without any raised a TypeError; so would any series that is never known."""
    for series in ([], [Line("a", "train", [])], [Line("a", "train", [], is_dotted=True), Line("b", "train", [])]):
        svg = charts.lines(series, "words")
        assert places(svg) == []
        assert "NaN" not in svg


def test_negative_rewards_are_drawn_too() -> None:
    found = places(charts.lines([Line("a", "train", [(1.0, -2.0), (2.0, 0.0), (3.0, 1.0)])], "words"))
    assert found[0][1] > found[1][1] > found[2][1]
    assert found[0][1] <= charts.HEIGHT - charts.BOTTOM + 0.1


def test_the_alternative_text_is_escaped_and_there_for_screen_readers() -> None:
    tree = drawn(charts.bars([("0", 40.0), ("<1>", 60.0)], 'a "b" & <c>', " %"))
    assert tree.attrib["role"] == "img"
    assert tree.attrib["aria-label"] == 'a "b" & <c>'
    assert tree.findtext("title") == 'a "b" & <c>'


def test_thinning_keeps_the_mean_and_the_order() -> None:
    assert charts.thinned([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert charts.thinned([1.0, 2.0], 5) == [1.0, 2.0]
