"""The CRD in a real API server: it is accepted, and decides as the unit tests' model of an API server does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.harness.api import RLJOBS, Api, Object, Refused, find_condition, is_condition_true, path_of, wait_until
from tests.e2e.harness.control_plane import ControlPlane
from tests.e2e.jobs import kubectl
from tests.rljob_cases import AT_ANY_TIME, CASES, NEVER, WHILE_SUSPENDED, Case, a_job, changes_of

from specrl.spec.rljob.crd import build_definition

DEFINITIONS = "apiextensions.k8s.io/v1/customresourcedefinitions"
CRD = "rljobs.specrl.dev"
COLUMNS = "NAME STATE STEP STEPS REPLICAS READY EXPOSED RESTARTS AGE"
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("rljob-*.yaml"))
IDS = [f"{case.path}-{case.must}-{number}" for number, case in enumerate(CASES)]


@pytest.fixture(scope="module")
def crd(admin: Api) -> Iterator[Object]:
    """The served CRD: the chart's if it is installed, or one that is applied for this module."""
    was_there = admin.find(DEFINITIONS, CRD) is not None
    if not was_there:
        admin.apply(build_definition())
    yield wait_until(lambda: _established(admin), "the CRD is served")
    if not was_there:  # otherwise helm would refuse a CRD that it does not own
        admin.delete(DEFINITIONS, CRD)
        wait_until(lambda: admin.find(DEFINITIONS, CRD) is None, "the CRD is gone")


@pytest.fixture
def place(crd: Object, namespace: str) -> str:
    """A namespace in which RLJobs can be created."""
    return namespace


def test_definition_is_accepted_as_it_is(crd: Object) -> None:
    assert not is_condition_true(crd, "NonStructuralSchema"), find_condition(crd, "NonStructuralSchema")
    assert is_condition_true(crd, "NamesAccepted")
    assert len(str(crd)) < 256 * 1024, "client-side apply keeps it in an annotation, which may not be larger"


def test_operators_requests_do_what_they_do_in_memory(control_plane: ControlPlane, crd: Object) -> None:
    environment = os.environ | {"KUBECONFIG": str(control_plane.kubeconfig), "SPECRL_CLUSTER_CONTEXT": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "real", "tests/contract/test_cluster_contract.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rule_refuses_and_accepts(admin: Api, place: str, case: Case) -> None:
    with pytest.raises(Refused) as refused:
        _create(admin, place, a_job(case.refused), dryRun="All")
    assert refused.value.status == 422
    ((field, message),) = refused.value.causes
    # The API server writes the number of an item in brackets.
    assert re.sub(r"\[(\d+)\]", r".\1", field).startswith(f"spec.{case.path}")
    assert case.must in message
    _create(admin, place, a_job(case.accepted), dryRun="All")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_rljobs_of_examples_are_admitted(admin: Api, place: str, file: Path) -> None:
    (job,) = (it for it in yaml.safe_load_all(file.read_text(encoding="utf-8")) if it["kind"] == "RLJob")
    job["metadata"]["namespace"] = place
    _create(admin, place, job, dryRun="All")


@pytest.mark.parametrize("path", NEVER)
def test_field_never_changes(admin: Api, place: str, path: str) -> None:
    for _, before, after in changes_of({path: NEVER[path]}):
        for is_suspended in (False, True):
            job = _create(admin, place, _suspended(before, is_suspended))
            assert _change(admin, job, _suspended(after, is_suspended)), (before, after)


@pytest.mark.parametrize("path", WHILE_SUSPENDED)
def test_field_changes_while_the_job_is_suspended(admin: Api, place: str, path: str) -> None:
    for _, before, after in changes_of({path: WHILE_SUSPENDED[path]}):
        job = _create(admin, place, before)
        assert _change(admin, job, after), (before, after)
        job = _create(admin, place, _suspended(before, True))
        assert not _change(admin, job, _suspended(after, True)), (before, after)


@pytest.mark.parametrize("path", AT_ANY_TIME)
def test_field_changes_at_any_time(admin: Api, place: str, path: str) -> None:
    for _, before, after in changes_of({path: AT_ANY_TIME[path]}):
        job = _create(admin, place, before)
        assert not _change(admin, job, after), (before, after)


def test_unknown_field_is_refused_by_kubectl_and_named(admin: Api, place: str) -> None:
    job = a_job({"generation.replica": 3})
    with pytest.raises(Refused, match=r"generation\.replica"):
        _create(admin, place, job, fieldValidation="Strict")


def test_wrong_type_is_refused_with_its_path(admin: Api, place: str) -> None:
    with pytest.raises(Refused, match=r"spec\.schedule\.steps"):
        _create(admin, place, a_job({"schedule.steps": "many"}))


@pytest.mark.parametrize("name", ["a" * 64, "1st", "my.job"])
def test_name_that_children_could_not_have_is_refused(admin: Api, place: str, name: str) -> None:
    with pytest.raises(Refused):
        _create(admin, place, a_job(name=name))


def test_scale_writes_replicas_alone(admin: Api, place: str) -> None:
    job = _create(admin, place, a_job())
    admin.scale(RLJOBS, "job", place, 5)
    stored = admin.get(RLJOBS, "job", place)
    assert stored["spec"]["generation"]["replicas"] == 5
    job["spec"]["generation"]["replicas"] = 5
    assert stored["spec"] == job["spec"]
    admin.patch(
        RLJOBS, "job", {"status": {"generation": {"replicas": 4, "selector": "a=b"}}}, place, subresource="status"
    )
    scale = admin.get(RLJOBS, "job", place, "scale")
    assert scale["spec"]["replicas"] == 5
    assert scale["status"] == {"replicas": 4, "selector": "a=b"}


def test_status_is_written_apart_from_the_spec(admin: Api, place: str) -> None:
    _create(admin, place, a_job())
    change = {"spec": {"generation": {"replicas": 9}}, "status": {"restarts": 2}}
    stored = admin.patch(RLJOBS, "job", change, place, subresource="status")
    assert stored["status"]["restarts"] == 2
    assert stored["spec"]["generation"]["replicas"] == 1
    stored = admin.patch(RLJOBS, "job", {"status": {"restarts": 7}}, place)
    assert stored["status"]["restarts"] == 2


def test_kubectl_shows_the_columns(admin: Api, place: str, tmp_path: Path) -> None:
    _create(admin, place, a_job())
    said = kubectl(admin, tmp_path, "get", "rlj", "--namespace", place)
    assert said.splitlines()[0].split() == COLUMNS.split()
    explained = kubectl(admin, tmp_path, "explain", "rljob.spec.placement.layout")
    assert "SameDomain" in explained


def _create(api: Api, namespace: str, job: Object, **params: Any) -> Object:
    """Create the job in the namespace; replace an existing one."""
    name = job["metadata"]["name"]
    if "dryRun" not in params and api.find(RLJOBS, name, namespace) is not None:
        api.delete(RLJOBS, name, namespace)
        wait_until(lambda: api.find(RLJOBS, name, namespace) is None, "the job is gone")
    job["metadata"]["namespace"] = namespace
    return api.send_request("POST", path_of(RLJOBS, namespace), job, **params)


def _suspended(job: Object, is_suspended: bool) -> Object:
    return job | {"spec": job["spec"] | {"suspend": is_suspended}}


def _change(api: Api, stored: Object, wanted: Object) -> list[tuple[str, str]]:
    """Replace the stored spec in a dry run. Returns the reasons of a refusal; empty if it is accepted.

    Another writer, such as an operator, may change the job at any moment. Then it is read again.
    """
    metadata = stored["metadata"]
    new = stored | {"spec": wanted["spec"]}
    try:
        api.send_request("PUT", path_of(RLJOBS, metadata["namespace"], metadata["name"]), new, dryRun="All")
    except Refused as refused:
        if refused.status == HTTPStatus.CONFLICT:
            return _change(api, api.get(RLJOBS, metadata["name"], metadata["namespace"]), wanted)
        if refused.status != HTTPStatus.UNPROCESSABLE_ENTITY:
            raise
        return refused.causes
    return []


def _established(api: Api) -> Object | None:
    found = api.get(DEFINITIONS, CRD)
    return found if is_condition_true(found, "Established") else None
