"""Takes the pictures of the docs again, from one run of the demo: `make pictures`.

    python -m tests.pictures [--out docs/images] [--runs DIR]

It runs `specrl demo` with every process, and a Prometheus beside it, as docs/metrics.md says.

    live-page.png   the page of the run under way, in chromium
    report.png      the first page of `specrl report`, when the run has ended
    dashboard.png   panels of the dashboard Overview, drawn from that Prometheus (tests/pictures/dashboard.py)

Needs chromium (`make browser`), Prometheus (fetched) and a quarter of an hour on two cores. --runs keeps the policy and
the run there, and takes an earlier demo's policy.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2
from tests.integration.live.chromium import Browser, a_browser
from tests.integration.observability.prometheus import Prometheus
from tests.integration.runs import SPECRL, StartedRun, start
from tests.pictures.dashboard import draw_dashboard
from tools.dashboards.overview import OVERVIEW

ROOT = Path(__file__).parents[2]
START_S = 1800.0  # making the policy included
STEPS_S = 3600.0
SEEN_STEPS = 12  # trained when the live page is shown
PANELS = 6
RESOLUTION_S = 2


def take_pictures(folder: Path, out: Path) -> None:
    """Run the demo in `folder` and write the pictures to `out`."""
    run = start(folder, "demo", "--out", "runs", "--keep-policy", "--no-compare", "--plain", environment=os.environ)
    prometheus = None
    try:
        run.wait_until(lambda: any(run.runs.glob("*/endpoints.json")), START_S)
        page = read_page_address(run)
        prometheus = Prometheus(folder / "prometheus", scrape_config(page))
        run.wait_until(lambda: len(run.reports()) >= 1, START_S)  # before that, the panels are empty
        began = time.time()
        with a_browser(folder / "profile") as browser:
            browser.driver.get(page)
            run.wait_until(lambda: len(run.reports()) >= SEEN_STEPS, STEPS_S)
            browser.until(lambda: browser.painted("#gantt-canvas"))
            capture(browser, out / "live-page.png", 1280, 1240)
            run.finish(STEPS_S)
            ended = time.time()
            report = folder / "report.html"
            subprocess.run([SPECRL, "report", str(run.directory), "--out", str(report)], check=True, cwd=folder)
            browser.driver.get(report.as_uri())
            capture(browser, out / "report.png", 1000, 1080)
            dashboard = folder / "dashboard.html"
            dashboard.write_text(draw_run(prometheus, began, ended), encoding="utf-8")
            browser.driver.get(dashboard.as_uri())
            browser.resize(1200, 900)
            capture(browser, out / "dashboard.png", 1200, browser.evaluate("return document.body.scrollHeight"))
    finally:
        run.stop()
        if prometheus is not None:
            prometheus.close()


def read_page_address(run: StartedRun) -> str:
    """Return the address of the coordinator's page, once it answers."""
    (file,) = run.runs.glob("*/endpoints.json")
    page: str = json.loads(file.read_text(encoding="utf-8"))["http"]

    def is_up() -> bool:
        try:
            return httpx2.get(f"{page}/status", trust_env=False, timeout=30).is_success
        except httpx2.TransportError:
            return False

    run.wait_until(is_up, START_S)
    return page


def scrape_config(page: str) -> dict[str, object]:
    """Return the configuration of docs/metrics.md, which scrapes every process of a run on one machine."""
    found = [{"url": f"{page}/targets", "refresh_interval": "2s"}]
    job = {"job_name": "specrl", "honor_labels": True, "http_sd_configs": found}
    return {"global": {"scrape_interval": "2s", "scrape_timeout": "2s"}, "scrape_configs": [job]}


def draw_run(prometheus: Prometheus, began: float, ended: float) -> str:
    """Draw the dashboard Overview of a run between two Unix times."""

    def ask(expression: str) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        return [
            (labels, [(second - began, value) for second, value in points if math.isfinite(value)])
            for labels, points in prometheus.values(expression, began, ended, RESOLUTION_S)
        ]

    return draw_dashboard(OVERVIEW, ask, ended - began, PANELS)


def capture(browser: Browser, file: Path, width: int, height: int) -> None:
    """Write what the browser shows, as a PNG of this size in pixels."""
    browser.prefer("light")
    browser.resize(width, height)
    time.sleep(1)  # charts are drawn again after a change of size
    shot = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    file.write_bytes(base64.b64decode(shot["data"]))
    print(f"{file}: {file.stat().st_size / 1024:.0f} KiB")  # noqa: T201 - a command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--runs", type=Path, help="folder for the run; default: a temporary one")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="specrl-pictures-") as temporary:
        take_pictures((given.runs or Path(temporary)).absolute(), given.out.absolute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
