"""The picture of a dashboard is drawn from the dashboard's own panels and queries."""

from __future__ import annotations

import re

from tests.pictures.dashboard import draw_dashboard
from tools.dashboards.model import Dashboard, Panel, PanelKind

LINES = Panel("Lag", "", "short", (('lag{namespace=~"$namespace"}', "{{rljob}} mean"),))
STACK = Panel("Share", "", "percentunit", (("share[$__rate_interval]", "{{cause}}"),), stacked=True, maximum=1)
EMPTY = Panel("Nothing", "", "short", (("absent", "x"),))
HEATMAP = Panel("Heat", "", "short", (("heat", "{{le}}"),), kind=PanelKind.HEATMAP)
BOARD = Dashboard("uid", "specrl / Test", "", (), (EMPTY, HEATMAP, LINES, STACK))
ANSWERS = {
    'lag{namespace=~".*"}': [({"rljob": "<demo>"}, [(0.0, 1.0), (10.0, 3.0)])],
    "share[20s]": [({"cause": "a"}, [(0.0, 0.25), (10.0, 0.25)]), ({"cause": "b"}, [(0.0, 0.5), (10.0, 0.75)])],
}


def ask(expression: str) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
    assert expression != "heat", "only panels of lines are drawn"
    return ANSWERS.get(expression, [])


def test_panels_with_data_are_drawn_with_their_legends() -> None:
    page = draw_dashboard(BOARD, ask, seconds=120, most=5)
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["Lag", "Share"]
    assert "&lt;demo&gt; mean" in page
    assert page.count("<polyline") == 3
    assert page.count("<polygon") == 4, "each layer of the stack, and what it covers"
    assert "100%" in page
    assert ">1:40<" in page, "minutes and seconds"


def test_layers_of_a_stack_lie_on_those_before() -> None:
    page = draw_dashboard(BOARD, ask, seconds=10, most=5)
    upper, lower = re.findall(r'<polyline points="([^"]+)"', page)[1:]
    heights = [float(line.split(",")[-1]) for line in (upper, lower)]
    assert heights[0] < heights[1]
    assert heights[0] == 8.0, "0.25 and 0.75 fill the panel"


def test_no_more_panels_are_drawn_than_asked_for() -> None:
    assert draw_dashboard(BOARD, ask, seconds=10, most=1).count("<h2>") == 1
