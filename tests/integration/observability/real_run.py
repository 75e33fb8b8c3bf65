"""One run of the real services, scraped by a real Prometheus from its first version to its end, beside an operator.

They are the coordinator, vLLM with an EAGLE-3 head, and Megatron, on a policy of a few thousand parameters.
The operator reconciles two jobs of an in-memory API server and rejects one of them.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import yaml
from tests.fork_server import ForkServer
from tests.integration.forked_run import ForkedRun
from tests.integration.observability.prometheus import Prometheus
from tests.integration.observability.scraping import config, rules_each_second
from tests.integration.operator.operator_process import Process
from tests.requirements import PROMETHEUS
from tests.stand_ins.api_server import CORE, FakeApiServer
from tests.stand_ins.api_server_http import HttpApiServer
from tests.tiny_models import Shape, make_bigram_drafter, make_policy
from tests.unit.operator.builders import an_rljob
from tests.unit.operator.world import a_pod

from specrl_operator.api import COORDINATOR, GENERATION, TRAINER
from specrl_operator.kinds import DEPLOYMENT, JOB_SET, RLJOB, STATEFUL_SET

NAME = "observed"
STEPS = 24
VALIDATED = 10
TERMS = [
    {"name": "answer", "verifier": {"exact": {}}},
    {"name": "form", "weight": "0.5", "verifier": {"pattern": {"expression": "####"}}},
]
QUESTIONS = [f"box {letter}" for letter in "abcdefghijklmnop"]
LOOK_S = 1.0
"""Interval between looks at what is exported: as often as Prometheus scrapes."""
NOTE_S = 0.05
"""Interval between looks for new reports, a five-hundredth of the time that is compared with their arrivals."""


@dataclass
class Observed:
    """The results of the finished run. Spans have unix seconds; `arrivals` are of a monotonic clock."""

    prometheus: Prometheus
    targets: list[dict[str, Any]]
    scraped: list[dict[str, Any]] = field(default_factory=list)
    """The targets of Prometheus when all of them answered, or at first."""
    began: float = 0.0
    ended: float = 0.0
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    arrivals: dict[int, float] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=dict)
    """The last scraped metrics of each component."""


def a_run(folder: Path) -> dict[str, Any]:
    """Make an asynchronous run with one replica, steps of about a second and a useful drafter."""
    policy = make_policy(folder / "policy", shape=Shape(layers=8), sharpness=30, bigram=20)
    make_bigram_drafter(folder / "drafter", policy)
    rows = [{"question": question, "answer": "#### 3"} for question in QUESTIONS]
    for name, part in (("boxes.jsonl", rows[:-2]), ("held-out.jsonl", rows[-2:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    return {
        "name": NAME,
        "model": {"path": str(policy), "dtype": "float32", "maxLength": 64},
        "prompts": {"source": {"jsonl": {"path": str(folder / "boxes.jsonl")}}, "maxTokens": 16},
        "rewards": {"sum": {"terms": TERMS}},
        "generation": {
            "replicas": 1,
            "sampling": {"temperature": "0.5", "maxTokens": 32},
            "speculation": {"eagle3": {"numDraftTokens": 3, "path": str(folder / "drafter")}},
            "maxLiveRollouts": 16,
        },
        "trainer": {"optimizer": {"learningRate": "1e-5"}},
        "schedule": {"steps": STEPS, "promptsPerStep": 4, "groupSize": 8, "maxPolicyLag": 1},
        "validation": {"source": {"jsonl": {"path": str(folder / "held-out.jsonl")}}, "everySteps": VALIDATED},
        "checkpoint": {"everySteps": 8},
    }


def observe(folder: Path, ranks: ForkServer) -> Observed:
    """Run to the end. The returned Prometheus keeps running; the caller closes it.

    Skips before anything starts where there is no Prometheus.
    """
    PROMETHEUS.require()
    api = HttpApiServer(FakeApiServer(CORE | {JOB_SET.api_version}))
    api.watch_s = 0.5
    operator = Process(api, folder / "operator")
    try:
        _two_jobs(api.fake, operator)
        run = ForkedRun(folder, a_run(folder), ranks)
        try:
            found = _scraped(folder, run, operator, api.fake)
        finally:
            run.stop()
    finally:
        operator.close()
        api.close()
    return found


def _scraped(folder: Path, run: ForkedRun, operator: Process, fake: FakeApiServer) -> Observed:
    """Whether Prometheus has the final samples of the run and of the operator."""
    page, targets = _when_all_are_there(run)
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules_each_second()))
    found = Observed(
        Prometheus(folder / "prometheus", config(page, operator.address(), str(folder / "rules.yaml"), targets)),
        targets,
        began=time.time(),
    )
    try:
        _watch(run, page, fake, found)
    except BaseException:
        found.prometheus.close()
        raise
    return found


def _two_jobs(fake: FakeApiServer, operator: Process) -> None:
    """Two jobs: one whose pods are all ready, and one that cannot be parsed."""
    fake.put_object(an_rljob({"schedule": {"groupSize": 0}}, name="broken"))
    fake.put_object(an_rljob(name="sound"))
    parts = {DEPLOYMENT: COORDINATOR, STATEFUL_SET: GENERATION, JOB_SET: TRAINER}
    operator.until(lambda: all(f"sound-{component}" in fake.objects_by_name(kind) for kind, component in parts.items()))
    for kind, component in parts.items():
        name = f"sound-{component}"
        fake.put_object(a_pod(f"{name}-0", component, fake.objects_by_name(kind)[name]))


def _when_all_are_there(run: ForkedRun) -> tuple[str, list[dict[str, Any]]]:
    """Wait for replica and trainer to register. Returns the coordinator's address and its targets."""
    run.wait_until(run.directory.endpoints_file.exists)
    page = json.loads(run.directory.endpoints_file.read_text())["http"]
    targets: list[dict[str, Any]] = []

    def are_there() -> bool:
        targets[:] = json.loads(_get(f"{page}/targets") or "[]")
        return len(targets) == 3

    run.wait_until(are_there)
    return page, targets


def _watch(run: ForkedRun, page: str, fake: FakeApiServer, found: Observed) -> None:
    """Record the exported metrics until the run has ended, and scale the operator's job meanwhile.

    Reports are noted as they appear by a thread of their own, which does nothing else.
    """
    addresses = {group["labels"]["component"]: group["targets"][0] for group in found.targets}
    turns = itertools.count()
    next_look_s = 0.0
    noting = Thread(target=_note_reports, args=(page, found))
    noting.start()

    def has_ended() -> bool:
        nonlocal next_look_s
        if time.monotonic() < next_look_s and len(found.arrivals) < STEPS:
            return False
        next_look_s = time.monotonic() + LOOK_S
        pages = {component: _get(f"http://{address}/metrics") for component, address in addresses.items()}
        found.pages |= {component: text for component, text in pages.items() if text}
        scraped = found.prometheus.targets()
        # A scrape is late at times if the machine is busy, and its target counts as down until the next one.
        if not found.scraped or all(target["health"] == "up" for target in scraped):
            found.scraped = scraped
        job = fake.objects_by_name(RLJOB)["sound"]
        job["spec"]["generation"]["replicas"] = 1 + next(turns) % 2
        fake.put_object(job)
        return len(found.arrivals) == STEPS

    try:
        run.wait_until(has_ended)
        found.ended = time.time()
        run.finish()
    finally:
        run.stop()  # after which it no longer answers
        noting.join()


def _note_reports(page: str, found: Observed) -> None:
    """Poll for new reports until the last one has appeared or the coordinator no longer answers."""
    with httpx2.Client(verify=False, timeout=30, trust_env=False) as http:  # no TLS here
        while len(found.arrivals) < STEPS:
            try:
                reports = http.get(f"{page}/steps?after={max(found.arrivals, default=0)}").json()
            except httpx2.TransportError:
                return
            for report in reports:
                found.reports[report["step"]] = report
                found.arrivals[report["step"]] = time.monotonic()
            time.sleep(NOTE_S)


def _get(url: str) -> str:
    """Fetch a page's text; empty if it does not answer."""
    try:
        answer = httpx2.get(url, verify=False, timeout=30, trust_env=False)  # no TLS here
    except httpx2.TransportError:
        return ""
    return answer.text if answer.status_code == httpx2.codes.OK else ""
