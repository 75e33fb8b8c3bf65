"""The live page in a real Chromium, over a real run with stand-in engines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tests.integration.live.chromium import Browser, a_browser
from tests.integration.live.live_run import LiveRun
from tests.requirements import BROWSER

pytestmark = pytest.mark.needs(BROWSER)

AXE = Path(__file__).with_name("axe") / "axe.min.js"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with a_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(window: Browser, live: LiveRun) -> Iterator[Browser]:
    """Open the live page and wait until it shows a few steps. The console must stay empty in every test."""
    window.driver.get(live.url)
    window.until(lambda: window.text("#connection") == "live")
    window.until(lambda: window.all("#phases tbody tr") and "step" in window.text("#timeline-words"))
    window.until(lambda: window.painted("#gantt-canvas"))
    yield window
    assert window.complaints() == []


def test_the_page_shows_the_run(page: Browser, live: LiveRun) -> None:
    assert page.text("#run") == "small"
    assert float(page.text("#share")) >= 0
    assert "for too few sampled rollouts" in page.text("#share-words")
    assert "hidden, because the trainer does not wait" in page.text("#hidden-words")
    assert len(page.all("#phases tbody tr")) == 7
    assert page.text("#advice").endswith(".")
    page.until(lambda: page.texts("#replica-table tbody th") == ["gen-0", "gen-1"])
    page.until(lambda: page.painted("figure.wide canvas"))
    page.until(lambda: len(page.all("#event-list li")) > 0)
    page.evaluate("document.getElementById('spec').open = true")
    assert "maxPolicyLag: 1" in page.text("#spec pre")
    page.driver.get(f"{live.url}/#token={(live.folder / 'token').read_text()}")  # as the terminal prints it
    page.until(lambda: page.evaluate("return location.hash") == "")
    page.evaluate("document.getElementById('rollouts').open = true")
    page.until(lambda: page.all("#rollouts article"))
    page.evaluate("sessionStorage.clear()")
    verdicts = page.texts("#rollouts article .verdict")
    assert len(verdicts) == len(page.all("#rollouts article"))
    assert all(re.fullmatch(r"reward [01] for \d+ words: (odd|even)", verdict) for verdict in verdicts), verdicts


def test_the_page_updates_itself(page: Browser) -> None:
    def step() -> int:
        return int(page.evaluate("return document.getElementById('progress').value"))

    before = step()
    words = page.text("#timeline-words")
    page.until(lambda: step() > before + 1)
    page.until(lambda: page.text("#timeline-words") != words)


def test_no_request_leaves_the_coordinator(page: Browser, live: LiveRun) -> None:
    asked = [url for url in page.requests() if url.startswith(("http", "ws"))]  # the browser has pages of its own
    assert any(url.endswith("/stream") for url in asked)
    assert {url for url in asked if not url.startswith(f"{live.url}/")} == set()


def test_the_page_reconnects_after_a_restart_of_the_coordinator(window: Browser, live: LiveRun) -> None:
    window.driver.get(live.url)
    window.until(lambda: window.text("#connection") == "live")
    live.do(live.kill_coordinator())
    window.until(lambda: window.evaluate("return document.getElementById('connection').dataset.state") == "lost")
    assert "reconnecting. This page shows the run at" in window.text("#connection")
    assert window.text("#announcer") == "Connection lost; reconnecting."
    assert len(window.all("#replica-table tbody tr")) == 2, "the last known state stays visible"
    live.do(live.start_coordinator())
    window.until(lambda: window.text("#connection") == "live")
    step = int(window.evaluate("return document.getElementById('progress').value"))
    window.until(lambda: int(window.evaluate("return document.getElementById('progress').value")) > step)
    assert "ERR_CONNECTION_REFUSED" in " ".join(window.complaints())


def test_the_page_asks_for_a_token_if_reading_requires_one(window: Browser, live: LiveRun) -> None:
    def show(token: str) -> None:
        window.until(lambda: window.evaluate("return !document.getElementById('token-form').hidden"))
        field = window.driver.find_element(By.ID, "token")
        assert field == window.driver.switch_to.active_element
        field.send_keys(token, Keys.ENTER)

    live.do(live.admit(everybody=False))
    try:
        window.driver.get(live.url)
        show("another run's")
        assert window.text("#run") != "small"
        show((live.folder / "token").read_text())
        window.until(lambda: window.text("#connection") == "live")
        assert window.text("#run") == "small"
        window.until(lambda: window.all("#phases tbody tr") and window.painted("#gantt-canvas"))
        window.driver.refresh()
        window.until(lambda: window.text("#connection") == "live", "the token is the tab's")
        assert "401" in " ".join(window.complaints())
    finally:
        window.evaluate("sessionStorage.clear()")
        window.driver.get("about:blank")
        live.do(live.admit(everybody=True))


def test_the_page_asks_for_the_token_before_it_shows_rollouts(window: Browser, live: LiveRun) -> None:
    """Without it, every page that was rebound to this machine and every local user read the prompts."""
    window.driver.get("about:blank")
    window.driver.get(live.url)
    window.until(lambda: not window.evaluate("return document.getElementById('rollouts').hidden"))
    window.evaluate("document.getElementById('rollouts').open = true")
    window.until(lambda: not window.evaluate("return document.getElementById('token-form').hidden"))
    assert window.text("#connection") == "live", "the rest needs none"
    assert window.all("#rollouts article") == []
    window.driver.find_element(By.ID, "token").send_keys((live.folder / "token").read_text(), Keys.ENTER)
    window.until(lambda: window.all("#rollouts article"))
    window.evaluate("sessionStorage.clear()")
    assert window.complaints() == []


def test_everything_works_with_the_keyboard(page: Browser) -> None:
    body = page.driver.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    focused = lambda: page.driver.switch_to.active_element  # noqa: E731 - the element that has the focus now
    assert focused().text == "Skip to the timeline"
    reached = set()
    for _ in range(60):
        focused().send_keys(Keys.TAB)
        name = focused().get_attribute("id")
        reached.add(name or focused().tag_name)
    assert {
        "timeline-steps",
        "earlier",
        "follow",
        "gantt",
        "curves-range",
        "troubles",
        "event-list",
        "summary",
    } <= reached
    page.evaluate("document.getElementById('gantt').focus()")
    page.until(lambda: not page.evaluate("return document.getElementById('earlier').disabled"))
    focused().send_keys(Keys.ARROW_LEFT)
    page.until(
        lambda: page.evaluate("return document.getElementById('follow').getAttribute('aria-pressed')") == "false"
    )
    focused().send_keys("+")
    page.until(lambda: page.evaluate("return document.getElementById('timeline-steps').value") == "2")
    page.until(lambda: len(page.text("#timeline-words").split(" to ")) == 2)
    while not is_following(page):
        focused().send_keys(Keys.ARROW_RIGHT)


def is_following(page: Browser) -> bool:
    return bool(page.evaluate("return document.getElementById('follow').ariaPressed === 'true'"))


def test_charts_and_timeline_have_tables(page: Browser) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.until(lambda: page.all("#timeline-table tbody tr"))
    lanes = page.texts("#timeline-table tbody th")
    assert lanes[0] == "trainer"
    assert {"gen-0", "gen-1"} <= set(lanes)
    page.until(lambda: page.all("figure.wide tbody tr"))
    labels = page.evaluate(
        "return [...document.querySelectorAll('figure:not([hidden]) canvas')].map((c) => c.ariaLabel)"
    )
    assert all(":" in label for label in labels), "each label has the newest values"


@pytest.mark.parametrize(
    ("name", "width", "scheme"), [("light", 1280, "light"), ("dark", 1280, "dark"), ("phone", 390, "light")]
)
def test_page_is_accessible_and_fits(page: Browser, name: str, width: int, scheme: str) -> None:
    page.prefer(scheme)
    page.resize(width, 900)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.until(lambda: page.all("#timeline-table tbody tr"))
    assert page.evaluate("return document.documentElement.scrollWidth") <= width, "no horizontal overflow"
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.driver.execute_async_script(
        "const done = arguments[0]; axe.run().then((r) => done(r.violations.map((v) => "
        "`${v.id}: ${v.help}: ${v.nodes.slice(0, 3).map((n) => n.target + ' ' + n.failureSummary).join(' | ')}`)));"
    )
    assert found == []
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = false; })")
    assert page.screenshot(f"live-page-{name}").stat().st_size > 10_000
