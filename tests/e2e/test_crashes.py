"""The operator dies after every single API call of its work on a job, and the cluster ends the same each time; it is
made, suspended, resumed and deleted.

The reconciler is run in this process, with the token of the chart's ServiceAccount, so that it can be cut off after
exactly the n-th request to the real API server; the installed operator is scaled to zero meanwhile.
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
from tests.e2e.harness.api import RLJOBS, Api, Object, holds, until
from tests.e2e.harness.release import Release
from tests.e2e.harness.workloads import Workloads
from tests.e2e.jobs import KINDS, claim, cpu_job, explain, left_of

from specrl_operator.cluster import ClusterError
from specrl_operator.facts import Settings
from specrl_operator.kube import KubeCluster
from specrl_operator.reconcile import Reconciler

JOB_SETS = "jobset.x-k8s.io/v1alpha2/jobsets"
VOLATILE = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "clusterIP", "clusterIPs")
HASHES = ("specrl.dev/desired-hash", "specrl.dev/template-hash")
"""Of objects that name the job's uid."""
DRIVEN = ("v1/pods", "resource.k8s.io/v1/resourceclaims", "v1/persistentvolumeclaims", "batch/v1/jobs")
"""Made by Kubernetes' controllers out of the operator's objects, under names of their own or later."""


WRITES = ("apply", "apply_status", "create", "replace", "delete")


class Crash(BaseException):
    """The process is gone; nothing that it would have done afterwards happens."""


class CutOff:
    """A cluster whose client dies right after its n-th request was answered; of its writes, if only those count."""

    def __init__(self, cluster: KubeCluster, requests: int, *, only_writes: bool = False) -> None:
        self._cluster, self._left, self._only_writes = cluster, requests, only_writes

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
    """The API server, as the operator's account sees it; its own pod is away."""
    deployment = f"{release.name}-operator"
    admin.scale("apps/v1/deployments", deployment, release.namespace, 0)
    labels = "app.kubernetes.io/component=operator"
    until(lambda: not admin.list("v1/pods", release.namespace, labels), "the operator is away")
    configuration = kubernetes.client.Configuration()
    configuration.host, configuration.ssl_ca_cert = admin.server, str(admin.ca)
    configuration.api_key = {"authorization": f"Bearer {admin.token_of(release.account, release.namespace)}"}
    yield KubeCluster(kubernetes.client.ApiClient(configuration))
    admin.scale("apps/v1/deployments", deployment, release.namespace, 1)


@pytest.mark.timeout(3000)
def test_end_is_the_same_whichever_request_is_the_last(
    admin: Api, operators_cluster: KubeCluster, jobset: Workloads, namespace: str
) -> None:
    """A job in a namespace of its own for each request; the last one's process had no request left to die at."""
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

        until(are_ready, "the jobs are ready", 1200, explain=lambda: explain(admin, _job(admin, min(waiting))))
        *crashed, whole = [_snapshot(admin, place) for place in places]
        for number, found in enumerate(crashed, start=1):
            assert found == whole, f"after a crash at request {number}"
    finally:
        for place in places:
            admin.delete("v1/namespaces", place)


@pytest.mark.timeout(1800)
def test_suspension_and_resumption_end_the_same_whichever_write_is_the_last(
    admin: Api, operators_cluster: KubeCluster, jobset: Workloads, namespace: str
) -> None:
    """One job goes down and up again and again; each time its operators die one write later. What an operator reads
    leaves nothing behind, so writes alone are counted; tests/unit/operator does the same with every request."""
    admin.create(claim("runs", namespace))
    job = admin.create(cpu_job("job", namespace))
    again = _reconciler(operators_cluster)
    until(lambda: _is_ready(admin, again, namespace), "the job is ready", 300, explain=lambda: explain(admin, job))
    whole: dict[bool, str] = {}
    writes, did_die = 0, True
    while did_die:
        did_die = False
        for suspend in (True, False):
            admin.patch(RLJOBS, "job", {"spec": {"suspend": suspend}}, namespace)
            if writes:
                did_die |= _settles(admin, _reconciler(CutOff(operators_cluster, writes, only_writes=True)), namespace)
            until(
                lambda: _has_become(admin, again, namespace, "Suspended" if suspend else "Ready"),  # noqa: B023
                "the other state",
                300,
                explain=lambda: explain(admin, job),
            )
            found = _snapshot(admin, namespace)
            assert found == whole.setdefault(suspend, found), f"after a crash at write {writes}"
        writes += 1
        did_die |= writes == 1
    assert writes > 4, "a suspension is that many writes at least"
    admin.delete(RLJOBS, "job", namespace)
    until(lambda: not left_of(admin, job, JOB_SETS), "nothing is left", explain=lambda: left_of(admin, job, JOB_SETS))


@pytest.mark.timeout(1800)
def test_job_that_is_deleted_while_it_is_made_leaves_nothing(
    admin: Api, operators_cluster: KubeCluster, jobset: Workloads, namespace: str
) -> None:
    """After each write of an operator the job is deleted under it, and the operator dies or goes on regardless."""
    admin.create(claim("runs", namespace))
    jobs: list[Object] = []
    did_die = True
    while did_die:
        jobs.append(admin.create(cpu_job(f"job-{len(jobs)}", namespace)))
        name = jobs[-1]["metadata"]["name"]
        try:
            _reconciler(CutOff(operators_cluster, len(jobs), only_writes=True)).reconcile(namespace, name)
            did_die = False
        except Crash:
            admin.delete(RLJOBS, name, namespace)
            _reconciler(operators_cluster).reconcile(namespace, name)
    assert len(jobs) > 12, "the work on a job is that many writes at least"
    admin.delete(RLJOBS, jobs[-1]["metadata"]["name"], namespace)

    def left() -> list[str]:
        return [item for job in jobs for item in left_of(admin, job, JOB_SETS)]

    until(lambda: not left(), "nothing is left", 300, explain=left)


def _settles(api: Api, reconciler: Reconciler, namespace: str) -> bool:
    """Look at the job until it is as it is to be, or the process dies. Did it?"""
    try:
        until(lambda: _has_become(api, reconciler, namespace, ""), "the end of its process", 300)
    except Crash:
        return True
    return False


def _has_become(api: Api, reconciler: Reconciler, namespace: str, kind: str) -> bool:
    """Look at the job once more; whether that condition holds then, by default the one of its spec."""
    with contextlib.suppress(ClusterError):  # its process would look again
        reconciler.reconcile(namespace, "job")
    found = _job(api, namespace)
    return holds(found, kind or ("Suspended" if found["spec"]["suspend"] else "Ready"))


def _dies(api: Api, cluster: KubeCluster, namespace: str, requests: int) -> bool:
    """Make a namespace with a job, and look at it with a client that dies after so many requests. Did it?"""
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    until(lambda: api.find("v1/serviceaccounts", "default", namespace), "default service account")
    api.create(claim("runs", namespace))
    api.create(cpu_job("job", namespace))
    try:
        _reconciler(CutOff(cluster, requests)).reconcile(namespace, "job")
    except Crash:
        return True
    return False


def _is_ready(api: Api, reconciler: Reconciler, namespace: str) -> bool:
    """Look at the job once more; whether it is ready then."""
    return _has_become(api, reconciler, namespace, "Ready")


def _job(api: Api, namespace: str) -> Object:
    return api.get(RLJOBS, "job", namespace)


def _reconciler(cluster: Any) -> Reconciler:
    return Reconciler(cluster, Settings(), lambda: datetime.datetime.now(datetime.UTC))


def _snapshot(api: Api, namespace: str) -> str:
    """Everything that the operator made, and the job's status, without what differs from life to life."""
    kinds = [kind for kind in (*KINDS, JOB_SETS) if kind not in DRIVEN]
    found: dict[str, Any] = {}
    for kind in kinds:
        for item in api.list(kind, namespace):
            if any(owner["kind"] == "RLJob" for owner in item["metadata"].get("ownerReferences", [])):
                item.pop("status", None)
                found[f"{kind} {item['metadata']['name']}"] = _stable(item)
    job = _job(api, namespace)
    status, uid = _stable(job["status"]), job["metadata"]["uid"]
    for each in status["conditions"]:
        each.pop("lastTransitionTime")
    status.pop("startTime", None)
    text = json.dumps({"children": found, "status": status}, sort_keys=True, indent=1)
    text = re.sub(r'"(observedG|g)eneration": \d+', "", text)  # how often a spec was changed
    return text.replace(namespace, "PLACE").replace(uid, "UID").replace(uid[:8], "UID")


def _stable(item: Object) -> Object:
    """Without identities and times, wherever they are."""
    if isinstance(item, dict):
        return {key: _stable(value) for key, value in item.items() if key not in (*VOLATILE, *HASHES)}
    if isinstance(item, list):
        return [_stable(value) for value in item]  # type: ignore[return-value]
    return item
