"""With 10,000 steps and 64 replicas all answers stay small, and so does the page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select
from tests.integration.coordinator.small_run import LengthGrader, TableStream, a_spec
from tests.integration.live.chromium import a_browser
from tests.integration.live.served import Served
from tests.requirements import BROWSER
from tests.unit.coordinator.test_report_files import a_report

from specrl.coordinator.ledger import REPORTS_KEPT, SqliteStore
from specrl.coordinator.ledger.store_link import StoreLink
from specrl.coordinator.members.registry import Registry
from specrl.coordinator.observe.observer import RunObserver
from specrl.coordinator.observe.timeline import Timeline
from specrl.coordinator.observe.web.app import make_app
from specrl.coordinator.wiring import wire_coordinator
from specrl.formats.reports import Phase, PhaseSeconds
from specrl.records import Peer, Role
from specrl.spec import digest_spec
from specrl.telemetry.spans import COORDINATOR, TRAINER, VERIFIERS, Recorder, Span, SpanContext, SpanName

STEPS = 10_000
REPLICAS = 64
ROLLOUTS = 24
STEP_S = 30.0
SEEN = 60
"""Steps whose spans are in the timeline: more than the page can show at once."""
BEGAN_S = 1_760_000_000.0


class LargeRun(Served):
    """The observer, registry and timeline of such a run. Nothing trains."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    async def begin(self) -> None:
        """Fill them."""
        spec = a_spec(self._folder, steps=STEPS, maxPolicyLag=2)
        store = SqliteStore(self._folder / "store.db")
        reports = [
            a_report(step).model_copy(
                update={
                    "phases": PhaseSeconds(
                        generation=3 + math.sin(step / 40), logprob=4, train=18, prepare=2, data=0.5
                    ),
                    "reward": 1 - math.exp(-step / 4000),
                    "policy_lag_max": 2,
                    "policy_lag_mean": 1.3,
                    "acceptance_length": 2.4,
                    "draft_length": 3.0,
                    "accepted_per_position": [0.8, 0.6, 0.4],
                }
            )
            for step in range(1, STEPS + 1)
        ]
        lines = "".join(report.model_dump_json(by_alias=True) + "\n" for report in reports)
        (self._folder / "metrics.jsonl").write_text(lines)
        for report in reports[-REPORTS_KEPT:]:
            store.finish_step(report.step, report.model_dump(by_alias=True))
        link = StoreLink(spec.name, store)
        registry = Registry(digest_spec(spec), 1e6, lambda: 0.0)
        for number in range(REPLICAS):
            registry.register_peer(Peer(f"gen-{number}", Role.GENERATION, "127.0.0.1:1", digest_spec(spec)))
        self._link = link
        timeline = a_timeline()
        loop = wire_coordinator(
            spec,
            self._folder,
            link,
            registry,
            TableStream(),
            LengthGrader(),
        )
        observer = RunObserver(loop.context, loop, timeline=timeline)
        loop.context.phase.update(Phase.TRAINING, "training")
        for number in range(2000):
            observer.events.add_event(
                "warning", "replica_state_changed", {"replica": f"gen-{number % 64}", "reason": "x" * 2000}
            )
        self.serve(make_app(loop.context, observer))

    async def end(self) -> None:
        """Close the store."""
        await self.unserve()
        await self._link.close()


def a_timeline() -> Timeline:
    """Add the spans of the last SEEN steps: all replicas are busy, each with a last rollout longer than a step."""
    timeline = Timeline()
    timeline.set_recorder(Recorder(timeline, clock=lambda: BEGAN_S + (STEPS + 1) * STEP_S))

    def take(name: SpanName, lane: str, step: int, began: float, ended: float) -> None:
        at_s = BEGAN_S + step * STEP_S
        timeline(Span(name, lane, at_s + began, at_s + ended, {}, SpanContext(1, 1, step)))

    for step in range(STEPS - SEEN + 1, STEPS + 1):
        for number in range(REPLICAS):
            lane = f"gen-{number}"
            for sample in range(ROLLOUTS):
                take(SpanName.ROLLOUT, lane, step, 0.1 * (sample % 5), 8 + (sample * (number + 3)) % 26)
            take(SpanName.RECEIVE, lane, step, 25.5, 26.5)
            take(SpanName.COMMIT, lane, step, 26.5, 27.0)
        for sample in range(50):
            take(SpanName.REWARD, VERIFIERS, step, sample / 2, sample / 2 + 0.4)
        take(SpanName.COLLECT, COORDINATOR, step, 0, 3)
        take(SpanName.LOGPROB, TRAINER, step, 3, 7)
        take(SpanName.TRAIN, TRAINER, step, 7, 25)
        take(SpanName.SYNC, COORDINATOR, step, 25, 27)
        take(SpanName.STEP, COORDINATOR, step, 0, 27.5)
    return timeline


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LargeRun]:
    with LargeRun(tmp_path_factory.mktemp("large")) as run:
        yield run


@pytest.mark.parametrize(
    ("path", "most_bytes"),
    [
        ("/status", 40_000),
        ("/exposure", 2_000),
        ("/steps", 160_000),
        (f"/steps?after={STEPS - 50}", 80_000),
        ("/curves?points=240", 100_000),
        ("/timeline?steps=4&points=240", 160_000),
        ("/timeline?steps=50&points=1000", 800_000),
        ("/replicas", 40_000),
        ("/events", 250_000),
    ],
)
def test_answers_are_bounded(large: LargeRun, path: str, most_bytes: int) -> None:
    answer = large.client.get(path)
    assert answer.status_code == 200
    assert 100 < len(answer.content) < most_bytes


def test_every_step_can_be_read_page_by_page(large: LargeRun) -> None:
    after = 0
    pages = 0
    while page := large.client.get(f"/steps?after={after}&limit=1000").json():
        assert [report["step"] for report in page] == list(range(after + 1, after + 1 + len(page)))
        after = page[-1]["step"]
        pages = pages + 1
    assert (after, pages) == (STEPS, 10)


def test_curves_of_fewer_steps_are_finer(large: LargeRun) -> None:
    whole, part = (large.client.get(f"/curves?points=200&first={first}").json() for first in (1, STEPS - 99))
    assert (whole["stride"], len(whole["steps"]), part["stride"], len(part["steps"])) == (50, 200, 1, 100)
    assert part["numbers"]["accepted_2"][0] == 0.6


@pytest.mark.needs(BROWSER)
def test_page_stays_small(large: LargeRun, tmp_path: Path) -> None:
    with a_browser(tmp_path) as page:
        page.driver.get(large.url)
        page.until(lambda: len(page.all("#replica-table tbody tr")) == REPLICAS)
        page.until(lambda: page.painted("#gantt-canvas") and page.painted("figure.wide canvas"))
        page.until(lambda: "10000 steps" in page.text("#curves-words"))
        page.screenshot("live-page-large")
        canvas, most = page.evaluate("return [document.getElementById('gantt-canvas').height, 0.63 * innerHeight]")
        assert canvas <= most, "only visible lanes are drawn"
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        page.until(lambda: len(page.all("#timeline-table tbody tr")) >= REPLICAS + 3)
        for select, value in (("timeline-steps", "32"), ("curves-range", "1000")):
            Select(page.driver.find_element(By.ID, select)).select_by_value(value)
        page.until(lambda: page.text("#curves-words") == "1000 steps, each point the mean of 5")
        page.until(lambda: "steps 9969 to 10000" in page.text("#timeline-words"))
        assert page.evaluate("return document.querySelectorAll('*').length") < 6000
        received = "return performance.getEntriesByType('resource').reduce((sum, one) => sum + one.decodedBodySize, 0)"
        assert page.evaluate(received) < 3_000_000
        assert page.complaints() == []
