"""The operator as a process, against an API server in memory behind HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from tests.integration.operator.operator_process import PATIENCE_S, Process
from tests.stand_ins.api_server import CORE, FakeApiServer
from tests.stand_ins.api_server_http import HttpApiServer
from tests.unit.operator.builders import PAPER, an_rljob

from specrl_operator.api import find_condition
from specrl_operator.kinds import CLAIM_TEMPLATE, COMPUTE_DOMAIN, CONFIG_MAP, JOB_SET, LEASE, RLJOB, STATEFUL_SET


@pytest.fixture
def server() -> Iterator[HttpApiServer]:
    served = HttpApiServer(FakeApiServer(CORE | {JOB_SET.api_version}))
    served.watch_s = 0.5
    yield served
    served.close()


@pytest.fixture
def start(server: HttpApiServer, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*arguments: str) -> Process:
        started.append(Process(server, tmp_path / f"operator-{len(started)}", *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def ask(process: Process, path: str) -> httpx2.Response:
    return httpx2.get(process.address() + path, verify=False, timeout=PATIENCE_S, trust_env=False)  # no TLS here


def test_jobs_are_reconciled_when_they_are_created_changed_and_deleted(
    server: HttpApiServer, start: Callable[..., Process]
) -> None:
    fake = server.fake
    fake.put_object(an_rljob(name="first"))
    operator = start()
    operator.until(lambda: "first-trainer" in fake.objects_by_name(JOB_SET))
    assert ask(operator, "/healthz").status_code == ask(operator, "/readyz").status_code == 200
    fake.put_object(an_rljob(name="second"))
    operator.until(lambda: "second-generation" in fake.objects_by_name(STATEFUL_SET))
    run_file = next(name for name in fake.objects_by_name(CONFIG_MAP) if name.startswith("second-run-"))
    fake.delete(CONFIG_MAP, fake.objects_by_name(CONFIG_MAP)[run_file])
    operator.until(lambda: run_file in fake.objects_by_name(CONFIG_MAP))
    job = fake.objects_by_name(RLJOB)["second"]
    job["spec"]["generation"]["replicas"] = 3
    fake.put_object(job)
    operator.until(lambda: fake.objects_by_name(STATEFUL_SET)["second-generation"]["spec"]["replicas"] == 3)
    operator.until(lambda: 'type="Accepted"' in ask(operator, "/metrics").text)
    assert (
        'specrl_rljob_condition{name="second",namespace="rl",status="True",type="Accepted"} 1.0'
        in ask(operator, "/metrics").text
    )
    fake.delete(RLJOB, fake.objects_by_name(RLJOB)["second"])
    operator.until(lambda: 'name="second"' not in ask(operator, "/metrics").text)
    assert operator.stop() == 0
    assert fake.objects_by_name(LEASE)["specrl-operator"]["spec"]["holderIdentity"] == ""


def test_a_job_starts_when_the_claim_template_of_its_compute_domain_is_created(
    server: HttpApiServer, start: Callable[..., Process]
) -> None:
    """The operator did not watch claim templates, so the job started minutes later, at the next relist."""
    fake = server.fake
    fake.group_versions |= {COMPUTE_DOMAIN.api_version, CLAIM_TEMPLATE.api_version}
    fake.put_object(an_rljob(PAPER))
    operator = start()
    operator.until(lambda: "tiny" in fake.objects_by_name(COMPUTE_DOMAIN))
    operator.until(lambda: "WaitingForComputeDomain" in str(fake.objects_by_name(RLJOB)["tiny"].get("status")))
    assert "tiny-trainer" not in fake.objects_by_name(JOB_SET)
    fake.put_object(CLAIM_TEMPLATE.build_object({"name": "tiny-imex", "namespace": "rl"}))
    operator.until(lambda: "tiny-trainer" in fake.objects_by_name(JOB_SET))


def test_of_two_operators_one_leads_and_the_other_takes_over(
    server: HttpApiServer, start: Callable[..., Process]
) -> None:
    fake = server.fake
    first = start()
    first.until(lambda: '"leadership_won"' in first.log)
    second = start()
    second.until(lambda: '"operator_started"' in second.log)
    fake.put_object(an_rljob(name="one"))
    first.until(lambda: "one-trainer" in fake.objects_by_name(JOB_SET))
    assert "child_created" not in second.log
    assert first.stop() == 0
    fake.put_object(an_rljob(name="two"))
    second.until(lambda: "two-trainer" in fake.objects_by_name(JOB_SET))


def test_the_process_exits_when_its_lease_is_lost(server: HttpApiServer, start: Callable[..., Process]) -> None:
    operator = start()
    operator.until(lambda: '"leadership_won"' in operator.log)
    lease = server.fake.objects_by_name(LEASE)["specrl-operator"]
    lease["spec"]["holderIdentity"] = "stranger"
    server.fake.put_object(lease)
    assert operator.process.wait(PATIENCE_S) == 1
    assert '"leadership_lost"' in operator.log


def test_only_the_given_namespace_is_watched(server: HttpApiServer, start: Callable[..., Process]) -> None:
    fake = server.fake
    elsewhere = an_rljob(name="theirs")
    elsewhere["metadata"]["namespace"] = "elsewhere"
    fake.put_object(elsewhere)
    fake.put_object(an_rljob(name="mine"))
    operator = start("--namespace", "rl")
    operator.until(lambda: "mine-trainer" in fake.objects_by_name(JOB_SET))
    assert "status" not in fake.objects_by_name(RLJOB)["theirs"]
    assert not [name for name in fake.objects_by_name(CONFIG_MAP) if name.startswith("theirs")]


def test_an_invalid_job_does_not_affect_others(server: HttpApiServer, start: Callable[..., Process]) -> None:
    fake = server.fake
    fake.put_object(an_rljob({"schedule": {"groupSize": 0}}, name="broken"))
    fake.put_object(an_rljob(name="sound"))
    operator = start()
    operator.until(lambda: "sound-trainer" in fake.objects_by_name(JOB_SET))
    operator.until(lambda: find_condition(fake.objects_by_name(RLJOB)["broken"].get("status", {}), "Accepted") != {})
    assert find_condition(fake.objects_by_name(RLJOB)["broken"]["status"], "Accepted")["reason"] == "SpecInvalid"
    assert operator.process.poll() is None


def test_without_a_cluster_the_operator_explains_and_exits(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "specrl_operator.main"],
        env=os.environ | {"KUBECONFIG": str(tmp_path / "none"), "KUBERNETES_SERVICE_HOST": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert found.returncode == 2
    assert "set KUBECONFIG" in found.stderr
