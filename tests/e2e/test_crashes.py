"""The operator is killed after every API call while a job is created, suspended, resumed and deleted. The final state
is always the same.

The reconciler runs in this process with the token of the chart's ServiceAccount, so that it can be stopped after
exactly the n-th request to the real API server. The installed operator is scaled to zero meanwhile.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Iterator
from typing import Any

import kubernetes
import pytest
from tests.e2e.harness.api import RLJOBS, Api, Object, is_condition_true, wait_until
from tests.e2e.harness.release import Release
from tests.e2e.harness.workloads import Workloads
from tests.e2e.jobs import KINDS, build_claim, cpu_job, describe_job, list_remaining_objects
from tests.stand_ins.live_objects import LiveObjects

from specrl_operator.cluster.interface import ClusterError
from specrl_operator.cluster.kube import KubeCluster
from specrl_operator.plan.job_plan import Settings
from specrl_operator.reconcile import Reconciler

JOB_SETS = "jobset.x-k8s.io/v1alpha2/jobsets"
VOLATILE = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "clusterIP", "clusterIPs")
HASHES = ("specrl.dev/desired-hash", "specrl.dev/template-hash")
"""Placeholder of the job's uid in objects."""
DRIVEN = ("v1/pods", "resource.k8s.io/v1/resourceclaims", "v1/persistentvolumeclaims", "batch/v1/jobs")
"""Kinds that Kubernetes' controllers create for the operator's objects, later or with random names."""


WRITES = ("apply", "apply_status", "create", "merge", "replace", "delete")


class Crash(BaseException):
    """The operator's process has died."""


class CrashingCluster:
    """A Cluster whose process dies after the answer to its n-th request, or to its n-th write."""

    def __init__(self, cluster: KubeCluster, requests: int, *, only_writes: bool = False) -> None:
        self._cluster = cluster
        self._left = requests
        self._only_writes = only_writes

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cluster, name)

        def call(*arguments: Any, **named: Any) -> Any:
            answer = method(*arguments, **named)
            self._left -= name in WRITES or not self._only_writes
            if self._left == 0:
                raise Crash
            return answer

        return call


@pytest.fixture
def operators_cluster(admin: Api, release: Release) -> Iterator[KubeCluster]:
    """A client with the operator's account. The operator's own pod is scaled to zero."""
    deployment = f"{release.name}-operator"
    admin.scale("apps/v1/deployments", deployment, release.namespace, 0)
    labels = "app.kubernetes.io/component=operator"
    wait_until(lambda: not admin.list("v1/pods", release.namespace, labels), "the operator is away")
    configuration = kubernetes.client.Configuration()
    configuration.host = admin.server
    configuration.ssl_ca_cert = str(admin.ca)
    configuration.api_key = {"authorization": f"Bearer {admin.token_of(release.account, release.namespace)}"}
    yield KubeCluster(kubernetes.client.ApiClient(configuration))
    admin.scale("apps/v1/deployments", deployment, release.namespace, 1)


@pytest.mark.timeout(3000)
def test_the_final_state_is_the_same_after_a_crash_at_any_request(
    admin: Api, operators_cluster: KubeCluster, jobset: Workloads, namespace: str
) -> None:
    """Each request gets a job in its own namespace. The last process makes too few requests to be killed."""
    places: list[str] = []
    try:
        while not places or _dies(admin, operators_cluster, places[-1], len(places)):
            places.append(f"{namespace}-{len(places) + 1}")
        assert len(places) > 30, "the work on a job is that many requests at least"
        again = _reconciler(operators_cluster)
        waiting = set(places)

        def are_ready() -> bool:
            waiting.difference_update([place for place in waiting if _is_ready(admin, again, place)])
            return not waiting

        wait_until(
            are_ready, "the jobs are ready", 1200, explain=lambda: describe_job(admin, _job(admin, min(waiting)))
        )
        *crashed, whole = [_snapshot(admin, place) for place in places]
        for number, found in enumerate(crashed, start=1):
            assert found == whole, f"after a crash at request {number}"
    finally:
        for place in places:
            admin.delete("v1/namespaces", place)


@pytest.mark.timeout(1800)
def test_suspension_and_resumption_survive_a_crash_at_any_write(
    admin: Api, operators_cluster: KubeCluster, jobset: Workloads, namespace: str
) -> None:
    """One job is suspended and resumed repeatedly; each time, the operator dies one write later. Reads leave nothing
    behind, so only writes count. tests/unit/operator does the same with every request."""
    admin.create(build_claim("runs", namespace))
    job = admin.create(cpu_job("job", namespace))
    again = _reconciler(operators_cluster)
    wait_until(
        lambda: _is_ready(admin, again, namespace), "the job is ready", 300, explain=lambda: describe_job(admin, job)
    )
    whole: dict[bool, str] = {}
    writes = 0
    did_die = True
    while did_die:
        did_die = False
        for suspend in (True, False):
            admin.patch(RLJOBS, "job", {"spec": {"suspend": suspend}}, namespace)
            if writes:
                did_die |= _settles(
                    admin, _reconciler(CrashingCluster(operators_cluster, writes, only_writes=True)), namespace
                )
            wait_until(
                lambda: _has_become(admin, again, namespace, "Suspended" if suspend else "Ready"),  # noqa: B023
                "the other state",
                300,
                explain=lambda: describe_job(admin, job),
            )
            found = _snapshot(admin, namespace)
            assert found == whole.setdefault(suspend, found), f"after a crash at write {writes}"
        writes += 1
        did_die |= writes == 1
    assert writes > 4, "a suspension is that many writes at least"
    admin.delete(RLJOBS, "job", namespace)
    wait_until(
        lambda: not list_remaining_objects(admin, job, JOB_SETS),
        "nothing is left",
        explain=lambda: list_remaining_objects(admin, job, JOB_SETS),
    )


@pytest.mark.timeout(1800)
def test_a_job_that_is_deleted_while_it_is_created_leaves_no_children(
    admin: Api, operators_cluster: KubeCluster, jobset: Workloads, namespace: str
) -> None:
    """After each of the operator's writes the job is deleted, and the operator either dies or continues."""
    admin.create(build_claim("runs", namespace))
    jobs: list[Object] = []
    did_die = True
    while did_die:
        jobs.append(admin.create(cpu_job(f"job-{len(jobs)}", namespace)))
        name = jobs[-1]["metadata"]["name"]
        try:
            _reconciler(CrashingCluster(operators_cluster, len(jobs), only_writes=True)).reconcile(namespace, name)
            did_die = False
        except Crash:
            admin.delete(RLJOBS, name, namespace)
            _reconciler(operators_cluster).reconcile(namespace, name)
    assert len(jobs) > 12, "the work on a job is that many writes at least"
    admin.delete(RLJOBS, jobs[-1]["metadata"]["name"], namespace)

    def left() -> list[str]:
        return [item for job in jobs for item in list_remaining_objects(admin, job, JOB_SETS)]

    wait_until(lambda: not left(), "nothing is left", 300, explain=left)


def _settles(api: Api, reconciler: Reconciler, namespace: str) -> bool:
    """Reconcile until the job has the desired state or the process dies. Returns whether it died."""
    try:
        wait_until(lambda: _has_become(api, reconciler, namespace, ""), "the end of its process", 300)
    except Crash:
        return True
    return False


def _has_become(api: Api, reconciler: Reconciler, namespace: str, kind: str) -> bool:
    """Reconcile once. Returns whether a condition then holds, by default the one that the spec asks for."""
    with contextlib.suppress(ClusterError):  # the operator would retry
        reconciler.reconcile(namespace, "job")
    found = _job(api, namespace)
    return is_condition_true(found, kind or ("Suspended" if found["spec"]["suspend"] else "Ready"))


def _dies(api: Api, cluster: KubeCluster, namespace: str, requests: int) -> bool:
    """Reconcile a job in a new namespace with a client that dies after some requests. Returns whether it died."""
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    wait_until(lambda: api.find("v1/serviceaccounts", "default", namespace), "default service account")
    api.create(build_claim("runs", namespace))
    api.create(cpu_job("job", namespace))
    try:
        _reconciler(CrashingCluster(cluster, requests)).reconcile(namespace, "job")
    except Crash:
        return True
    return False


def _is_ready(api: Api, reconciler: Reconciler, namespace: str) -> bool:
    """Reconcile once. Returns whether the job is then ready."""
    return _has_become(api, reconciler, namespace, "Ready")


def _job(api: Api, namespace: str) -> Object:
    return api.get(RLJOBS, "job", namespace)


def _reconciler(cluster: Any) -> Reconciler:
    return Reconciler(cluster, LiveObjects(cluster), Settings(), lambda: datetime.datetime.now(datetime.UTC))


def _snapshot(api: Api, namespace: str) -> str:
    """Return all of the operator's objects and the job's status, without what differs between two equal runs."""
    kinds = [kind for kind in (*KINDS, JOB_SETS) if kind not in DRIVEN]
    found: dict[str, Any] = {}
    for kind in kinds:
        for item in api.list(kind, namespace):
            if any(owner["kind"] == "RLJob" for owner in item["metadata"].get("ownerReferences", [])):
                item.pop("status", None)
                found[f"{kind} {item['metadata']['name']}"] = _stable(item)
    job = _job(api, namespace)
    status = _stable(job["status"])
    uid = job["metadata"]["uid"]
    for each in status["conditions"]:
        each.pop("lastTransitionTime")
    status.pop("startTime", None)
    text = json.dumps({"children": found, "status": status}, sort_keys=True, indent=1)
    text = re.sub(r'"(observedG|g)eneration": \d+', "", text)  # generations count changes of the spec
    return text.replace(namespace, "PLACE").replace(uid, "UID").replace(uid[:8], "UID")


def _stable(item: Object) -> Object:
    """Remove uids and times at any depth."""
    if isinstance(item, dict):
        return {key: _stable(value) for key, value in item.items() if key not in (*VOLATILE, *HASHES)}
    if isinstance(item, list):
        return [_stable(value) for value in item]  # type: ignore[return-value]
    return item
