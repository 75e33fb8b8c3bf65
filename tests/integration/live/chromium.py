"""A headless Chromium for tests of the live page: Debian's, or the one that `make browser` fetched."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from tests.e2e.binaries import find

PATIENCE_S = 240.0  # generous, because the machine may be busy
SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Browser:
    """One browser window. It records every request and every console message."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def resize(self, width: int, height: int) -> None:
        """The viewport, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def text(self, selector: str) -> str:
        """What the first such element says; nothing if there is none."""
        return next(iter(self.texts(selector)), "")

    def texts(self, selector: str) -> list[str]:
        """What all such elements say, at one moment: the page replaces them while it is looked at."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        found: list[str] = self.driver.execute_script(script, selector)
        return found

    def all(self, selector: str) -> list[WebElement]:
        """All such elements."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def evaluate(self, script: str) -> Any:
        """The value of a script's `return`."""
        return self.driver.execute_script(script)

    def until(self, is_so: Callable[[], object], what: str = "") -> None:
        """Wait until something is so on the page."""
        WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.1).until(lambda _: is_so(), what)

    def painted(self, selector: str) -> bool:
        """Whether a canvas has anything on it."""
        return bool(
            self.evaluate(
                # Reads a copy: the browser warns if the page's own canvas is read too often.
                f"const c = document.querySelector('{selector}'); if (!c.width) return false;"
                "const d = new OffscreenCanvas(c.width, c.height).getContext('2d', {willReadFrequently: true});"
                "d.drawImage(c, 0, 0); return d.getImageData(0, 0, c.width, c.height).data.some((x) => x > 0);"
            )
        )

    def screenshot(self, name: str) -> Path:
        """Keep the whole page as build/screenshots/NAME.png."""
        width, height = self.evaluate("return [innerWidth, document.documentElement.scrollHeight]")
        self.resize(width, height)
        self._settle()
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        (SCREENSHOTS / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))
        self.resize(width, 900)
        self._settle()
        return SCREENSHOTS / f"{name}.png"

    def _settle(self) -> None:
        """Another size is noticed, then laid out in one frame and drawn in the next."""
        self.driver.execute_async_script(
            "const done = arguments[0];setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 300);"
        )

    def complaints(self) -> list[str]:
        """Warnings and errors of the console since the last call."""
        found = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in found if entry["level"] in ("WARNING", "SEVERE")]

    def requests(self) -> list[str]:
        """URLs that were asked for since the last call."""
        lines = self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        messages = [json.loads(line["message"])["message"] for line in lines]
        sent = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
        return [message["params"]["request"]["url"] for message in sent]


@contextmanager
def a_browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with a fresh profile, in the size of a laptop's screen."""
    options = webdriver.ChromeOptions()
    chromium = find("chromium")
    options.binary_location = str(chromium)
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(chromium.with_name("chromedriver"))))
    try:
        browser = Browser(driver)
        browser.resize(1280, 900)
        yield browser
    finally:
        driver.quit()
