"""One suite for every Cluster: in memory, over HTTP to the in-memory server, and over HTTP to a real API server.

The last one needs a cluster with the CRD of RLJob. `SPECRL_CLUSTER_CONTEXT` names its kubeconfig context, '' the
current one. Without it that part is skipped, and nothing proves that the in-memory server answers as a real one.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator

import kubernetes
import pytest
from tests.requirements import CLUSTER
from tests.stand_ins.api_server import FakeApiServer
from tests.stand_ins.api_server_http import TOKEN, HttpApiServer
from tests.unit.operator.builders import an_rljob

from specrl_operator.api import Object, trim_object
from specrl_operator.cluster.interface import Cluster, ClusterError, WatchExpired
from specrl_operator.cluster.kube import KubeCluster, connect_cluster
from specrl_operator.kinds import CONFIG_MAP, DEPLOYMENT, JOB_SET, LEASE, RLJOB

REAL = os.environ.get("SPECRL_CLUSTER_CONTEXT")


def over_http(server: HttpApiServer, token: str = TOKEN) -> KubeCluster:
    configuration = kubernetes.client.Configuration()
    configuration.host = server.url
    configuration.api_key = {"BearerToken": f"Bearer {token}"}
    return KubeCluster(kubernetes.client.ApiClient(configuration))


@pytest.fixture(params=["memory", "http", "real"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == "memory":
        yield FakeApiServer()
    elif request.param == "http":
        server = HttpApiServer(FakeApiServer())
        yield over_http(server)
        server.close()
    else:
        CLUSTER.require()
        yield connect_cluster(REAL)


@pytest.fixture
def name(cluster: Cluster) -> Iterator[str]:
    """Names of objects in namespace `default` that are deleted after the test."""
    found = f"contract-{uuid.uuid4().hex[:8]}"
    yield found
    for kind in (RLJOB, CONFIG_MAP, LEASE, DEPLOYMENT):
        item = cluster.get(kind, "default", found)
        if item is not None:
            cluster.delete(kind, item)


def a_map(name: str, data: dict[str, str], **meta: object) -> Object:
    metadata = {"name": name, "namespace": "default", "labels": {"contract": name}, **meta}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def test_what_is_served_is_known_by_group_and_version(cluster: Cluster) -> None:
    assert {"apps/v1", "batch/v1", "specrl.dev/v1alpha1"} <= cluster.list_served_versions()


def test_an_object_that_is_not_there_is_none(cluster: Cluster, name: str) -> None:
    assert cluster.get(CONFIG_MAP, "default", name) is None


def test_a_kind_that_is_not_served_is_none_to_get_and_an_error_to_write(cluster: Cluster, name: str) -> None:
    if JOB_SET.api_version in cluster.list_served_versions():
        pytest.skip("this cluster serves JobSet")
    with pytest.raises(ClusterError) as caught:
        cluster.list(JOB_SET, "default")
    assert caught.value.status == 404


def test_apply_makes_changes_and_takes_away_what_its_manager_no_longer_says(cluster: Cluster, name: str) -> None:
    made = cluster.apply(CONFIG_MAP, a_map(name, {"a": "1", "b": "1"}), "one")
    assert made["data"] == {"a": "1", "b": "1"}
    changed = cluster.apply(CONFIG_MAP, a_map(name, {"a": "2"}), "one")
    assert changed["data"] == {"a": "2"}
    assert changed["metadata"]["uid"] == made["metadata"]["uid"]
    cluster.apply(CONFIG_MAP, a_map(name, {"c": "3"}), "two")
    assert cluster.apply(CONFIG_MAP, a_map(name, {"a": "4"}), "one")["data"] == {"a": "4", "c": "3"}


def test_apply_by_force_takes_fields_over(cluster: Cluster, name: str) -> None:
    cluster.apply(CONFIG_MAP, a_map(name, {"a": "1"}), "one")
    assert cluster.apply(CONFIG_MAP, a_map(name, {"a": "2"}), "two")["data"] == {"a": "2"}


def test_apply_of_the_same_changes_nothing(cluster: Cluster, name: str) -> None:
    first = cluster.apply(CONFIG_MAP, a_map(name, {"a": "1"}), "one")
    second = cluster.apply(CONFIG_MAP, a_map(name, {"a": "1"}), "one")
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


def test_replicas_alone_can_be_taken_over(cluster: Cluster, name: str) -> None:
    pod = {"metadata": {"labels": {"contract": name}}, "spec": {"containers": [{"name": "main", "image": "none"}]}}
    spec = {"replicas": 0, "selector": {"matchLabels": {"contract": name}}, "template": pod}
    head = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": "default"}}
    cluster.apply(DEPLOYMENT, {**head, "spec": spec}, "one")
    scaled = cluster.apply(DEPLOYMENT, {**head, "spec": {"replicas": 2}}, "one-scale")
    assert scaled["spec"]["replicas"] == 2
    assert scaled["spec"]["template"]["spec"]["containers"][0]["image"] == "none"
    assert cluster.apply(DEPLOYMENT, {**head, "spec": {**spec, "replicas": 0}}, "one")["spec"]["replicas"] == 0


def adopt(cluster: Cluster, name: str, manager: str) -> Object:
    """Turn the record of what the manager's creation has set into that of an apply."""
    found = cluster.get(CONFIG_MAP, "default", name)
    assert found is not None
    entries = [{**entry, "operation": "Apply"} for entry in found["metadata"]["managedFields"]]
    assert [entry["manager"] for entry in entries] == [manager]
    metadata = {name: found["metadata"][name] for name in ("name", "namespace", "resourceVersion")}
    return cluster.merge(CONFIG_MAP, CONFIG_MAP.build_object({**metadata, "managedFields": entries}))


def test_apply_removes_created_fields_only_if_their_record_is_that_of_an_apply(cluster: Cluster, name: str) -> None:
    created = cluster.create(CONFIG_MAP, a_map(name, {"a": "1", "b": "1"}), "one")
    assert cluster.apply(CONFIG_MAP, a_map(name, {"a": "2"}), "one")["data"] == {"a": "2", "b": "1"}
    cluster.delete(CONFIG_MAP, created)
    cluster.create(CONFIG_MAP, a_map(name, {"a": "1", "b": "1"}), "one")
    adopt(cluster, name, "one")
    assert cluster.apply(CONFIG_MAP, a_map(name, {"a": "2"}), "one")["data"] == {"a": "2"}
    assert cluster.apply(CONFIG_MAP, a_map(name, {"c": "3"}), "one")["data"] == {"c": "3"}


def test_merging_changes_fields_and_removes_those_that_are_none(cluster: Cluster, name: str) -> None:
    first = cluster.apply(CONFIG_MAP, a_map(name, {"a": "1", "b": "1"}), "one")
    change = a_map(name, {"b": "2", "c": "3"})
    change["data"]["a"] = None  # type: ignore[assignment]
    change["metadata"]["resourceVersion"] = first["metadata"]["resourceVersion"]
    assert cluster.merge(CONFIG_MAP, change)["data"] == {"b": "2", "c": "3"}
    with pytest.raises(ClusterError) as caught:
        cluster.merge(CONFIG_MAP, change)
    assert caught.value.status == 409


def a_status(name: str, version: str | None, **status: object) -> Object:
    metadata = {"name": name, "namespace": "default"} | ({"resourceVersion": version} if version else {})
    return {"apiVersion": RLJOB.api_version, "kind": RLJOB.name, "metadata": metadata, "status": status}


def a_condition(kind: str, status: str = "True") -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": "Because",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def an_empty_job(cluster: Cluster, name: str) -> Object:
    job = an_rljob(name=name)
    job["metadata"] = {"name": name, "namespace": "default"}
    job["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"  # no operator of this cluster touches it
    return cluster.create(RLJOB, job, "user")


def test_two_managers_share_a_status(cluster: Cluster, name: str) -> None:
    an_empty_job(cluster, name)
    cluster.apply_status(RLJOB, a_status(name, None, state="Running", conditions=[a_condition("Ready")]), "operator")
    mine = a_status(name, None, progress={"step": 3}, conditions=[a_condition("RunFinished")])
    cluster.apply_status(RLJOB, mine, "coordinator")
    found = cluster.apply_status(RLJOB, a_status(name, None, state="Failed", conditions=[]), "operator")["status"]
    assert found["state"] == "Failed"
    assert found["progress"]["step"] == 3
    assert [it["type"] for it in found["conditions"]] == ["RunFinished"]


def test_a_status_write_changes_neither_spec_nor_generation(cluster: Cluster, name: str) -> None:
    before = an_empty_job(cluster, name)
    after = cluster.apply_status(RLJOB, a_status(name, None, state="Running"), "operator")
    assert after["spec"] == before["spec"]
    assert after["metadata"]["generation"] == before["metadata"]["generation"] == 1


def test_a_status_is_written_to_what_was_read_and_to_nothing_newer(cluster: Cluster, name: str) -> None:
    read = an_empty_job(cluster, name)["metadata"]["resourceVersion"]
    cluster.apply_status(RLJOB, a_status(name, read, state="Starting"), "operator")
    with pytest.raises(ClusterError) as caught:
        cluster.apply_status(RLJOB, a_status(name, read, state="Running"), "operator")
    assert caught.value.status == 409
    assert not caught.value.is_refused
    found = cluster.get(RLJOB, "default", name)
    assert found is not None
    assert found["status"]["state"] == "Starting"


def test_lists_are_by_label_whole_and_say_what_they_hold(cluster: Cluster, name: str) -> None:
    names = [f"{name}-{number}" for number in range(5)]
    for each in names:
        item = a_map(each, {})
        item["metadata"]["labels"] = {"contract": name, "number": each[-1]}
        cluster.apply(CONFIG_MAP, item, "one")
    try:
        found = cluster.list(CONFIG_MAP, "default", f"contract={name}").items
        assert [it["metadata"]["name"] for it in found] == names
        assert all(CONFIG_MAP.is_kind_of(it) for it in found)
        assert all(it == trim_object(it) for it in found), "what nobody looks at takes no memory"
        assert len(cluster.list(CONFIG_MAP, None, f"contract={name},number=3").items) == 1
        assert cluster.list(CONFIG_MAP, "kube-system", f"contract={name}").items == []
    finally:
        for item in cluster.list(CONFIG_MAP, "default", f"contract={name}").items:
            cluster.delete(CONFIG_MAP, item)


def test_a_watch_tells_what_changed_since_a_listing(cluster: Cluster, name: str) -> None:
    cluster.apply(CONFIG_MAP, a_map(name, {"a": "1"}), "one")
    version = cluster.list(CONFIG_MAP, "default", f"contract={name}").resource_version
    cluster.apply(CONFIG_MAP, a_map(name, {"a": "2" * 500}), "one")
    item = cluster.get(CONFIG_MAP, "default", name)
    assert item is not None
    cluster.delete(CONFIG_MAP, item)
    found = []
    for change in cluster.watch(CONFIG_MAP, "default", f"contract={name}", version):
        found.append((change.type, change.item["metadata"]["uid"]))
        if change.type == "DELETED":
            break
    uid = item["metadata"]["uid"]
    assert found == [("MODIFIED", uid), ("DELETED", uid)]


def test_create_and_replace_are_refused_where_somebody_was_faster(cluster: Cluster, name: str) -> None:
    lease = {
        "apiVersion": LEASE.api_version,
        "kind": LEASE.name,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"holderIdentity": "a"},
    }
    mine = cluster.create(LEASE, lease, "one")
    with pytest.raises(ClusterError) as caught:
        cluster.create(LEASE, lease, "one")
    assert caught.value.status == 409
    cluster.replace(LEASE, {**mine, "spec": {"holderIdentity": "b"}})
    with pytest.raises(ClusterError) as caught:
        cluster.replace(LEASE, {**mine, "spec": {"holderIdentity": "c"}})
    assert caught.value.status == 409


def test_a_deletion_is_of_that_very_object_and_may_be_repeated(cluster: Cluster, name: str) -> None:
    old = cluster.apply(CONFIG_MAP, a_map(name, {}), "one")
    cluster.delete(CONFIG_MAP, old)
    cluster.delete(CONFIG_MAP, old)
    cluster.apply(CONFIG_MAP, a_map(name, {"new": "1"}), "one")
    cluster.delete(CONFIG_MAP, old)
    found = cluster.get(CONFIG_MAP, "default", name)
    assert found is not None
    assert found["data"] == {"new": "1"}


# -- promises that only some implementations can show ------------------------------------------------------------------


@pytest.fixture
def http() -> Iterator[HttpApiServer]:
    server = HttpApiServer(FakeApiServer())
    yield server
    server.close()


def test_a_watch_from_too_far_back_is_gone(http: HttpApiServer) -> None:
    cluster = over_http(http)
    cluster.apply(CONFIG_MAP, a_map("x", {}), "one")
    version = cluster.list(CONFIG_MAP, "default").resource_version
    cluster.apply(CONFIG_MAP, a_map("x", {"a": "1"}), "one")
    http.fake.compact_history()
    for client in (cluster, http.fake):
        with pytest.raises(WatchExpired):
            list(client.watch(CONFIG_MAP, "default", "", version))


def test_a_token_that_is_not_known_is_an_error_with_the_servers_words(http: HttpApiServer) -> None:
    with pytest.raises(ClusterError, match="Unauthorized") as caught:
        over_http(http, token="old").list_served_versions()
    assert caught.value.status == 401


@pytest.mark.parametrize(
    "ask",
    [
        lambda it: it.list_served_versions(),
        lambda it: it.get(CONFIG_MAP, "default", "x"),
        lambda it: it.list(CONFIG_MAP, "default"),
        lambda it: list(it.watch(CONFIG_MAP, "default", "", "1")),
        lambda it: it.apply(CONFIG_MAP, a_map("x", {}), "one"),
        lambda it: it.delete(CONFIG_MAP, a_map("x", {}, uid="u")),
    ],
)
def test_a_server_that_is_gone_is_an_error_of_ours(http: HttpApiServer, ask: Callable[[Cluster], object]) -> None:
    cluster = over_http(http)
    http.close()
    with pytest.raises(ClusterError) as caught:
        ask(cluster)
    assert caught.value.status == 0
