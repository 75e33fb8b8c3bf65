"""One run of the real services, scraped by a real Prometheus from its first version to its end, beside an operator.

The coordinator, vLLM with an EAGLE-3 head and Megatron, on a policy of a few thousand parameters; `specrl run` starts
them. The operator looks after two jobs of an API server in memory, one of which it does not accept.
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
from tests.integration.observability.prometheus import Prometheus
from tests.integration.observability.scraping import config, rules_each_second
from tests.integration.operator.operator_process import Process
from tests.integration.runs import StartedRun, start
from tests.requirements import PROMETHEUS
from tests.stand_ins.api_server import CORE, FakeApiServer
from tests.stand_ins.api_server_http import HttpApiServer
from tests.tiny_models import Shape, make_bigram_drafter, make_policy
from tests.unit.operator.builders import an_rljob
from tests.unit.operator.world import a_pod

from specrl_operator.api import COORDINATOR, DEPLOYMENT, GENERATION, JOB_SET, RLJOB, STATEFUL_SET, TRAINER

NAME = "observed"
STEPS, VALIDATED = 40, 10
QUESTIONS = [f"box {letter}" for letter in "abcdefghijklmnop"]
START_S, RUN_S = 400.0, 400.0


@dataclass
class Observed:
    """What is left when the run has ended. Times of a span are Unix seconds, `arrivals` those of a monotonic clock."""

    prometheus: Prometheus
    targets: list[dict[str, Any]]
    scraped: list[dict[str, Any]] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    arrivals: dict[int, float] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=dict)
    """The last metrics of each component."""


def a_run_file(folder: Path) -> Path:
    """An asynchronous run of one replica, with steps of about a second and a drafter that pays from the beginning."""
    policy = make_policy(folder / "policy", shape=Shape(layers=8), sharpness=30, bigram=20)
    make_bigram_drafter(folder / "drafter", policy)
    rows = [{"question": question, "answer": "#### 3"} for question in QUESTIONS]
    for name, part in (("boxes.jsonl", rows[:-2]), ("held-out.jsonl", rows[-2:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    run = {
        "name": NAME,
        "model": {"path": str(policy), "dtype": "float32", "maxLength": 64},
        "prompts": {"source": {"jsonl": {"path": "boxes.jsonl"}}, "maxTokens": 16},
        "rewards": {"exact": {}},
        "generation": {
            "replicas": 1,
            "sampling": {"temperature": "0.5", "maxTokens": 32},
            "speculation": {"eagle3": {"numDraftTokens": 3, "path": "drafter"}},
            "maxLiveRollouts": 16,
        },
        "trainer": {"optimizer": {"learningRate": "1e-5"}},
        "schedule": {"steps": STEPS, "promptsPerStep": 4, "groupSize": 8, "maxPolicyLag": 1},
        "validation": {"source": {"jsonl": {"path": "held-out.jsonl"}}, "everySteps": VALIDATED},
        "checkpoint": {"everySteps": 8},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    return file


def observe(folder: Path) -> Observed:
    """Run to the end. The Prometheus of what is returned goes on; whoever called closes it.

    Skips before anything starts where there is no Prometheus.
    """
    PROMETHEUS.require()
    a_run_file(folder)
    api = HttpApiServer(FakeApiServer(CORE | {JOB_SET.api_version}))
    api.watch_s = 0.5
    operator = Process(api, folder / "operator")
    try:
        _two_jobs(api.fake, operator)
        run = start(folder, "run", "-f", "run.yaml", "--plain")
        try:
            found = _scraped(folder, run, operator, api.fake)
        finally:
            run.stop()
    finally:
        operator.close()
        api.close()
    return found


def _scraped(folder: Path, run: StartedRun, operator: Process, fake: FakeApiServer) -> Observed:
    """What a Prometheus has of the run, and of the operator, when the run has ended."""
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
    """One whose pods are all ready, and one that cannot be read."""
    fake.put(an_rljob({"schedule": {"groupSize": 0}}, name="broken"))
    fake.put(an_rljob(name="sound"))
    parts = {DEPLOYMENT: COORDINATOR, STATEFUL_SET: GENERATION, JOB_SET: TRAINER}
    operator.until(lambda: all(f"sound-{component}" in fake.of(kind) for kind, component in parts.items()))
    for kind, component in parts.items():
        name = f"sound-{component}"
        fake.put(a_pod(f"{name}-0", component, fake.of(kind)[name]))


def _when_all_are_there(run: StartedRun) -> tuple[str, list[dict[str, Any]]]:
    """The coordinator's address, and its targets once replica and trainer have registered."""
    run.until(lambda: any(run.runs.glob("*/endpoints.json")), START_S)
    (file,) = run.runs.glob("*/endpoints.json")
    page = json.loads(file.read_text())["http"]
    targets: list[dict[str, Any]] = []

    def are_there() -> bool:
        targets[:] = json.loads(_get(f"{page}/targets") or "[]")
        return len(targets) == 3

    run.until(are_there, START_S)
    return page, targets


def _watch(run: StartedRun, page: str, fake: FakeApiServer, found: Observed) -> None:
    """Keep what is exported until the run has ended; meanwhile a user scales the operator's job.

    Reports are noted as they appear by a thread of their own, which does nothing else.
    """
    addresses = {group["labels"]["component"]: group["targets"][0] for group in found.targets}
    turns = itertools.count()
    noting = Thread(target=_note_reports, args=(page, found))
    noting.start()

    def has_ended() -> bool:
        pages = {component: _get(f"http://{address}/metrics") for component, address in addresses.items()}
        found.pages |= {component: text for component, text in pages.items() if text}
        found.scraped = found.prometheus.targets() if all(pages.values()) else found.scraped
        job = fake.of(RLJOB)["sound"]
        job["spec"]["generation"]["replicas"] = 1 + next(turns) % 2
        fake.put(job)
        return len(found.arrivals) == STEPS

    try:
        run.until(has_ended, RUN_S)
        found.ended = time.time()
        run.finish(RUN_S)
    finally:
        run.stop()  # then nobody answers
        noting.join()


def _note_reports(page: str, found: Observed) -> None:
    """Look for new reports all the time, until the last one is there, or nobody answers any more."""
    with httpx2.Client(verify=False, timeout=30, trust_env=False) as http:  # no TLS here
        while len(found.arrivals) < STEPS:
            try:
                reports = http.get(f"{page}/steps?after={max(found.arrivals, default=0)}").json()
            except httpx2.TransportError:
                return
            for report in reports:
                found.reports[report["step"]] = report
                found.arrivals[report["step"]] = time.monotonic()
            time.sleep(0.01)


def _get(url: str) -> str:
    """A page's text; nothing when it does not answer."""
    try:
        answer = httpx2.get(url, verify=False, timeout=30, trust_env=False)  # no TLS here
    except httpx2.TransportError:
        return ""
    return answer.text if answer.status_code == httpx2.codes.OK else ""
