"""The reconciler with an in-memory API server: the right objects, no needless writes, and the same final state after an
interruption at any point."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from prometheus_client import REGISTRY
from tests.stand_ins.api_server import CORE, FakeApiServer, Killed
from tests.unit.operator.builders import LARGE, PAPER, an_rljob
from tests.unit.operator.world import EVERYTHING, JOBSET_ONLY, World, a_pod, creating_since

from specrl.spec.rljob.status import PlacementStatus
from specrl_operator.api import (
    COORDINATOR,
    GENERATION,
    MAX_MESSAGE_LENGTH,
    STORE,
    TRAINER,
    Object,
    find_condition,
    is_controlled_by,
)
from specrl_operator.children import desired
from specrl_operator.children.schedulers import list_pod_templates
from specrl_operator.cluster.cache import WatchedObjects
from specrl_operator.cluster.interface import ClusterError
from specrl_operator.cluster.topology import NodeTopology
from specrl_operator.kinds import (
    COMPUTE_DOMAIN,
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    JOB,
    JOB_SET,
    LEADER_WORKER_SET,
    NETWORK_POLICY,
    POD,
    RLJOB,
    ROLE,
    ROLE_BINDING,
    SECRET,
    SERVICE,
    STATEFUL_SET,
    Kind,
)
from specrl_operator.plan.job_plan import Settings
from specrl_operator.reconcile import Reconciler

SUSPENDED = {"suspend": True}
QUEUED = {"scheduling": {"queueName": "team-a"}}
CLIQUE = "nvidia.com/gpu.clique"


def a_certificate() -> Object:
    """Build a Secret with the keys of a certificate."""
    keys = dict.fromkeys(("tls.crt", "tls.key", "ca.crt"), "eA==")
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mine", "namespace": "rl"}, "data": keys}


def the_run_file(world: World) -> str:
    """Return the name of the only ConfigMap."""
    (name,) = world.server.objects_by_name(CONFIG_MAP)
    return name


def test_a_job_gets_its_children_and_becomes_ready() -> None:
    world = World()
    world.settle()
    assert {
        ("Deployment", "tiny-coordinator"),
        ("JobSet", "tiny-trainer"),
        ("StatefulSet", "tiny-generation"),
        ("StatefulSet", "tiny-store"),
        ("ConfigMap", the_run_file(world)),
        ("Secret", "tiny-store"),
        ("Service", "tiny-coordinator"),
        ("Role", "tiny"),
        ("NetworkPolicy", "tiny-peers"),
    } <= world.list_objects()
    assert world.read_condition("Ready") == ("True", "AllPartsReady")
    assert world.status["state"] == "Running"
    assert world.status["generation"] == {
        "replicas": 1,
        "readyReplicas": 1,
        "selector": f"specrl.dev/rljob=tiny,specrl.dev/rljob-uid={world.rljob['metadata']['uid']},"
        "app.kubernetes.io/component=generation,specrl.dev/replica-leader=true",
    }


def test_reconciling_an_unchanged_job_writes_nothing() -> None:
    world = World()
    world.settle()
    before = len(world.server.list_writes())
    world.advance_clock(3600)
    world.reconcile()
    assert world.server.list_writes()[before:] == []


@pytest.mark.parametrize("kind", ["CollectiveReady", "DrafterReady"])
def test_a_condition_that_the_coordinator_reports_causes_no_write(kind: str) -> None:
    """Once a drafter was reported, the operator used to write the status at every reconciliation."""
    world = World()
    world.settle()
    reported = {"type": kind, "status": "True", "reason": "Serving", "message": "as reported"}
    world.report_status(conditions=[reported | {"lastTransitionTime": "2026-01-01T00:00:00Z"}])
    before = len(world.server.list_writes())
    world.reconcile()
    assert world.server.list_writes()[before:] == []


def test_one_reconciliation_writes_the_status_at_most_once() -> None:
    world = World()
    for _ in range(6):
        before = len(world.server.calls)
        world.reconcile()
        world.run_controllers()
        assert world.server.calls[before:].count(("applyStatus", "RLJob")) <= 1


def test_every_child_is_owned_and_deleted_with_the_job() -> None:
    world = World(PAPER, served=EVERYTHING)
    world.settle()
    job = world.rljob
    for place, item in world.server.objects.items():
        if place[1] not in (RLJOB.name, "Event", "Pod", "ResourceClaimTemplate"):
            assert [it["uid"] for it in item["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]], place
    world.server.delete(RLJOB, job)
    left = {kind for kind, _ in world.list_objects()}
    assert left <= {"ResourceClaimTemplate"}  # created by the ComputeDomain's controller


def settled(start: World) -> World:
    """Return the state that an operator reaches if it is not killed."""
    world = start.copy()
    world.settle()
    return world


def settled_after_kills(start: World) -> Iterator[tuple[int, World]]:
    """Yield the final states if the operator is killed once, with the number of the call after which it was killed.

    Only kills after writes are tried. A kill after a read is the same case as one after the write before it, since the
    next operator has no memory.
    """
    server = settled(start).server
    for number, call in enumerate(server.calls, 1):
        if number <= len(start.server.calls) or call not in server.list_writes():
            continue
        world = start.copy()
        world.server.kill_after = number
        with pytest.raises(Killed):
            world.settle()
        world.server.kill_after = None
        world.settle()
        yield number, world


@pytest.mark.parametrize("changes", [(), (PAPER,)], ids=["minimal", "gb200"])
def test_an_operator_killed_after_any_call_is_continued_to_the_same_state(changes: tuple[Object, ...]) -> None:
    start = World(*changes, served=EVERYTHING)
    whole = settled(start)
    kills = list(settled_after_kills(start))
    assert len(kills) >= 15
    for number, world in kills:
        assert world.take_snapshot() == whole.take_snapshot(), (
            f"killed after call {number}: {world.server.calls[number - 1]}"
        )


@pytest.mark.parametrize("verb", ["suspend", "resume", "scale", "complete", "fail", "expire"])
@pytest.mark.parametrize("changes", [(), (PAPER, LARGE)], ids=["minimal", "groups"])
def test_an_operator_killed_during_a_transition_is_continued_to_the_same_state(
    verb: str, changes: tuple[Object, ...]
) -> None:
    def begun() -> World:
        ttl: Object = {"ttlSecondsAfterFinished": 0} if verb == "expire" else {}
        world = World(*changes, ttl, served=EVERYTHING)
        world.settle()
        if verb == "resume":
            world.edit_spec(suspend=True)
            world.settle()
            world.edit_spec(suspend=False)
        elif verb == "suspend":
            world.edit_spec(suspend=True)
        elif verb == "scale":
            world.edit_spec(generation={"replicas": 2})
        elif verb == "fail":
            world.end_pod("tiny-trainer-0", 2, "model.path must hold a model")
        else:
            world.finish_run()
        return world

    start = begun()
    whole = settled(start)
    kills = list(settled_after_kills(start))
    assert kills
    for number, world in kills:
        assert world.take_snapshot() == whole.take_snapshot(), number


def test_an_operator_killed_while_the_job_is_deleted_leaves_no_children() -> None:
    """The user deletes the job after the operator's n-th call, which is its last."""
    number = 0
    while True:
        number += 1
        world = World(served=EVERYTHING)
        world.server.kill_after = number
        try:
            world.reconcile()
            break
        except Killed:
            world.server.kill_after = None
        world.server.delete(RLJOB, world.rljob)
        assert world.settle() is None
        assert world.list_objects() == set(), number
    assert number > 40


def test_children_created_while_their_job_is_deleted_are_garbage_collected() -> None:
    world = World(served=EVERYTHING)
    uid = world.rljob["metadata"]["uid"]
    refused = world.server.refuse

    def delete_first(verb: str, body: Object) -> ClusterError | None:
        if verb == "create" and "tiny" in world.server.objects_by_name(RLJOB):
            world.server.delete(RLJOB, world.rljob)
        return refused(verb, body)

    world.server.refuse = delete_first
    with suppress(ClusterError):
        world.reconcile()
    left = [item for place, item in world.server.objects.items() if place[1] != "Event"]
    assert left, "it was deleted before there was anything"
    assert all(is_controlled_by(item, uid) for item in left), "Kubernetes removes what an absent owner owned"


def test_replicas_of_several_nodes_are_scaled_and_counted_by_their_leaders() -> None:
    world = World(PAPER, LARGE, served=EVERYTHING)
    world.settle()
    world.edit_spec(generation={"replicas": 4})
    world.settle()
    assert world.server.objects_by_name(LEADER_WORKER_SET)["tiny-generation"]["spec"]["replicas"] == 4
    assert len([name for name in world.server.objects_by_name(POD) if "generation" in name]) == 8
    assert world.status["generation"]["replicas"] == world.status["generation"]["readyReplicas"] == 4
    selected = dict(part.split("=") for part in world.status["generation"]["selector"].split(","))
    labels = [pod["metadata"]["labels"] for pod in world.server.objects_by_name(POD).values()]
    assert sum(selected.items() <= its.items() for its in labels) == 4, "one pod of each"


def test_the_domain_of_the_trainers_nodes_is_shown_and_cached() -> None:
    world = World(PAPER, served=EVERYTHING)
    for node, labels in (("a", {CLIQUE: "rack.1"}), ("b", {CLIQUE: "rack.2"}), ("c", {})):
        world.server.put_object({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": labels}})
    world.settle()
    assert "domain" not in world.status["placement"], "nothing is bound yet"

    def bind(*nodes: str) -> str | None:
        for number, node in enumerate(nodes):
            pod = world.server.objects_by_name(POD)[f"tiny-trainer-{number}"]
            world.server.put_object({**pod, "spec": {"nodeName": node}})
        operator.reconcile("rl", "tiny")
        return world.status["placement"].get("domain")  # type: ignore[no-any-return]

    operator = world.start_operator()
    assert bind("a", "a", "a", "a") == "rack.1"
    before = len(world.server.calls)
    operator.reconcile("rl", "tiny")
    assert ("get", "Node") not in world.server.calls[before:]
    assert bind("a", "b") == "rack.1, rack.2"
    assert bind("c", "c", "c", "c") is None
    world.server.put_object(
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "c", "labels": {CLIQUE: "rack.3"}}}
    )
    world.advance_clock(601)
    assert bind("c", "c", "c", "c") == "rack.3", "a label that came later"


def test_the_domains_of_a_large_trainer_fit_their_field() -> None:
    """The API server refused every status of a trainer in six domains. The longest value has 63 characters."""
    cluster = FakeApiServer()
    for number in range(9):
        meta = {"name": f"node-{number}", "labels": {CLIQUE: f"{number}".ljust(63, "x")}}
        cluster.put_object({"apiVersion": "v1", "kind": "Node", "metadata": meta})
    topology = NodeTopology(cluster, lambda: datetime(2026, 1, 1, tzinfo=UTC))
    found = topology.find_domains((f"node-{number}" for number in range(9)), CLIQUE)
    assert found is not None
    assert found.endswith(" and 6 more")
    assert PlacementStatus(domain=found).domain == found


def test_scaling_changes_only_the_number_of_replicas() -> None:
    world = World()
    world.settle()
    before = world.take_snapshot()
    world.edit_spec(generation={"replicas": 4})
    world.settle()
    after = world.take_snapshot()
    changed = {name for name in after if before.get(name) != after[name]}
    assert {name.split()[0] for name in changed} == {"RLJob", "StatefulSet", "Pod"}
    assert world.server.objects_by_name(STATEFUL_SET)["tiny-generation"]["spec"]["replicas"] == 4
    assert world.status["generation"]["readyReplicas"] == 4
    world.edit_spec(generation={"replicas": 1})
    world.settle()
    assert world.status["generation"]["replicas"] == 1
    assert world.read_condition("Ready") == ("True", "AllPartsReady")


def test_the_operator_never_writes_the_spec_of_a_job() -> None:
    world = World()
    world.settle()
    world.edit_spec(generation={"replicas": 3})
    spec = world.rljob["spec"]
    world.settle()
    assert world.rljob["spec"] == spec
    assert ("apply", "RLJob") not in world.server.calls
    assert ("replace", "RLJob") not in world.server.calls


def test_a_suspended_job_stops_its_coordinator_first_and_keeps_its_durable_objects() -> None:
    world = World()
    world.settle()
    world.edit_spec(suspend=True)
    world.reconcile()
    assert world.server.objects_by_name(DEPLOYMENT)["tiny-coordinator"]["spec"]["replicas"] == 0
    assert "tiny-trainer" in world.server.objects_by_name(JOB_SET)  # it must answer while the coordinator saves the run
    assert world.read_condition("Suspended") == ("False", "Suspending")
    world.settle()
    assert world.server.objects_by_name(POD) == {}
    assert world.server.objects_by_name(JOB_SET) == {}
    assert {name: it["spec"]["replicas"] for name, it in world.server.objects_by_name(STATEFUL_SET).items()} == {
        "tiny-generation": 0,
        "tiny-store": 0,
    }
    assert the_run_file(world)
    assert world.read_condition("Suspended") == ("True", "PodsDeleted")
    assert world.status["state"] == "Suspended"
    assert "startTime" not in world.status
    world.edit_spec(suspend=False)
    world.settle()
    assert world.read_condition("Ready") == ("True", "AllPartsReady")
    assert world.read_condition("Suspended") == ("False", "Resumed")
    assert world.list_event_reasons().count("Resumed") == 1


def test_an_evicted_coordinator_keeps_no_job_from_being_suspended() -> None:
    """Its pod's object stays for ever. It counted as a coordinator that saves the run, so the GPUs were never freed."""
    world = World()
    world.settle()
    world.evict_coordinator()
    world.settle()
    assert world.read_condition("Ready") == ("True", "AllPartsReady")
    world.edit_spec(suspend=True)
    world.settle()
    assert set(world.server.objects_by_name(POD)) == {"tiny-coordinator-evicted"}
    assert world.server.objects_by_name(JOB_SET) == {}
    assert world.read_condition("Suspended") == ("True", "PodsDeleted")


@pytest.mark.parametrize("code", [1, 2])
def test_how_an_evicted_coordinator_ended_does_not_fail_the_next_one(code: int) -> None:
    world = World()
    world.settle()
    world.evict_coordinator(code, restarts=9)
    world.reconcile()
    assert world.read_condition("Failed") == (None, None)
    world.settle()
    assert world.read_condition("Ready") == ("True", "AllPartsReady")


def test_a_job_that_is_created_suspended_starts_no_pods() -> None:
    world = World(SUSPENDED)
    world.settle()
    assert world.server.objects_by_name(POD) == {}
    assert world.server.objects_by_name(JOB_SET) == {}
    assert world.read_condition("Suspended") == ("True", "PodsDeleted")


def test_a_finished_run_is_complete_and_keeps_its_coordinator() -> None:
    world = World()
    world.settle()
    world.finish_run()
    world.settle()
    assert world.read_condition("Complete") == ("True", "MaxStepsReached")
    assert world.server.objects_by_name(DEPLOYMENT)["tiny-coordinator"]["spec"]["replicas"] == 1
    assert world.server.objects_by_name(STATEFUL_SET)["tiny-generation"]["spec"]["replicas"] == 0
    assert "tiny-trainer" in world.server.objects_by_name(
        JOB_SET
    )  # the coordinator dismisses it, and its logs stay readable
    world.end_workload(JOB_SET, "tiny-trainer", "Completed")
    world.advance_clock(3600)
    world.settle()
    assert "tiny-trainer" in world.server.objects_by_name(JOB_SET)
    assert world.read_condition("Failed") == (None, None)


def test_a_trainer_that_does_not_exit_after_its_run_is_deleted() -> None:
    world = World()
    world.settle()
    world.finish_run()
    after = world.settle()
    assert after is not None
    world.advance_clock(after)
    world.settle()
    assert world.server.objects_by_name(JOB_SET) == {}


def test_a_terminal_condition_is_never_taken_back() -> None:
    world = World()
    world.settle()
    world.finish_run()
    world.settle()
    completed = world.status["completionTime"]
    world.report_status(conditions=[])
    world.end_pod("tiny-coordinator-0", 2, "boom")
    world.advance_clock(99)
    world.settle()
    assert world.read_condition("Complete") == ("True", "MaxStepsReached")
    assert world.read_condition("Failed") == (None, None)
    assert world.status["completionTime"] == completed


def test_a_process_that_needs_its_user_fails_the_job_with_its_message() -> None:
    world = World()
    world.settle()
    world.end_pod("tiny-coordinator-0", 2, "starting\nmodel.path must hold a model, got /models/none; check the path")
    world.settle()
    assert world.read_condition("Failed") == ("True", "RunRefused")
    message = next(it["message"] for it in world.status["conditions"] if it["type"] == "Failed")
    assert "model.path must hold a model, got /models/none; check the path" in message
    assert world.server.objects_by_name(POD) == {}
    assert world.server.objects_by_name(DEPLOYMENT)["tiny-coordinator"]["spec"]["replicas"] == 0


def test_a_coordinator_that_crashes_too_often_fails_the_job() -> None:
    world = World()
    world.settle()
    world.end_pod("tiny-coordinator-0", 1, "no store", restarts=3)
    world.settle()
    assert world.read_condition("Failed") == (None, None)
    assert world.read_condition("CoordinatorReady") == ("False", "CrashLooping")
    world.end_pod("tiny-coordinator-0", 1, "no store", restarts=4)
    world.settle()
    assert world.read_condition("Failed") == ("True", "BackoffLimitExceeded")


def test_a_process_that_the_kernel_killed_for_its_memory_says_what_to_raise() -> None:
    """Not the end of its log, which says nothing of it."""
    world = World()
    world.settle()
    world.end_pod("tiny-coordinator-0", 137, "model_loaded seconds=3", reason="OOMKilled")
    world.settle()
    message = next(it["message"] for it in world.status["conditions"] if it["type"] == "CoordinatorReady")
    assert "raise limits.memory in the role's podTemplate" in message
    assert "model_loaded" not in message


def test_an_image_of_another_architecture_is_named_with_what_to_do() -> None:
    world = World()
    world.settle()
    said = 'failed to create task: exec: "/opt/specrl/.venv/bin/specrl-coordinator": exec format error: unknown'
    world.end_pod("tiny-coordinator-0", 128, said, reason="StartError")
    world.settle()
    message = next(it["message"] for it in world.status["conditions"] if it["type"] == "CoordinatorReady")
    assert "the image is of another architecture than the node; choose nodes of its architecture" in message


def test_a_failed_jobset_fails_the_job_and_is_kept_for_its_logs() -> None:
    world = World()
    world.settle()
    world.end_workload(JOB_SET, "tiny-trainer", "Failed", "maxRestarts reached")
    world.settle()
    assert world.read_condition("Failed") == ("True", "BackoffLimitExceeded")
    assert "tiny-trainer" in world.server.objects_by_name(JOB_SET)


def test_a_failed_run_releases_its_gpus_and_says_how_a_new_job_continues_it() -> None:
    """C7: replicas and trainer of a job that has failed kept their GPUs only while its coordinator saved the run."""
    world = World()
    world.settle()
    world.report_status(progress={"step": 1, "lastUpdateTime": "2026-01-01T00:00:00Z"})
    world.end_pod("tiny-generation-0", 1)
    world.end_workload(JOB_SET, "tiny-trainer", "Failed", "maxRestarts reached" + "!" * 2000)
    world.settle()
    assert world.server.objects_by_name(POD) == {}
    assert {it["spec"]["replicas"] for it in world.server.objects_by_name(STATEFUL_SET).values()} == {0}
    message = find_condition(world.status, "Failed")["message"]
    assert len(message) == MAX_MESSAGE_LENGTH
    folder = f"tiny-{world.rljob['metadata']['uid'][:8]}"
    assert message.endswith(
        f"!; continue it in a new RLJob with checkpoint.from: {{claimName: runs, folder: {folder}}}"
    )


def test_a_run_that_failed_before_its_first_step_has_nothing_to_continue() -> None:
    world = World()
    world.settle()
    world.end_workload(JOB_SET, "tiny-trainer", "Failed", "maxRestarts reached")
    world.settle()
    assert "checkpoint.from" not in find_condition(world.status, "Failed")["message"]


def test_objects_of_others_are_not_adopted() -> None:
    world = World()
    settled_world = World()
    settled_world.settle()
    name = the_run_file(settled_world)
    strange = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "rl"}, "data": {}}
    world.server.put_object(strange)
    after = world.settle()
    assert world.read_condition("Accepted") == ("False", "ChildConflict")
    assert world.server.objects_by_name(CONFIG_MAP)[name]["data"] == {}
    assert world.server.objects_by_name(JOB_SET) == {}
    assert after is not None
    world.server.delete(CONFIG_MAP, world.server.objects_by_name(CONFIG_MAP)[name])
    world.settle()
    assert world.read_condition("Ready") == ("True", "AllPartsReady")


def test_objects_of_an_earlier_job_of_the_same_name_are_not_adopted() -> None:
    world = World()
    world.settle()
    other = an_rljob()
    other["metadata"]["uid"] = "99999999-2222-4333-8444-000000000000"
    children = {place: item for place, item in world.server.objects.items() if place[1] == "JobSet"}
    world.server.delete(RLJOB, world.rljob)
    world.server.objects.update(children)  # the garbage collector has not deleted them yet
    world.server.put_object(other)
    world.reconcile()
    assert world.read_condition("Accepted") == ("False", "ChildConflict")
    world.server.delete(JOB_SET, world.server.objects_by_name(JOB_SET)["tiny-trainer"])
    world.settle()
    assert world.read_condition("Ready") == ("True", "AllPartsReady")


def test_a_new_job_is_not_judged_by_pods_of_a_deleted_job_of_its_name() -> None:
    """A job that was deleted and applied again failed within seconds, with the exit code and the message of the old
    job's pod, which was still within its grace period."""
    world = World()
    world.settle()
    world.end_pod("tiny-coordinator-0", 2, "model.path must hold a model")
    old = world.server.objects_by_name(POD)["tiny-coordinator-0"]
    world.server.delete(RLJOB, world.rljob)
    again = an_rljob()
    again["metadata"]["uid"] = "99999999-2222-4333-8444-000000000000"
    world.server.put_object(again)
    old["metadata"] |= {"deletionTimestamp": "2026-01-01T00:01:30Z"}
    world.server.put_object(old)
    world.reconcile()
    assert world.read_condition("Failed") == (None, None)
    assert "no pods exist yet" in next(
        it["message"] for it in world.status["conditions"] if it["type"] == "CoordinatorReady"
    )


@pytest.mark.parametrize("name", ["tiny-coordinator", "tiny-generation", "tiny-store"])
def test_services_policies_and_affinities_select_pods_of_one_job_by_uid(name: str) -> None:
    """Selectors by name alone let a new trainer register with the ending coordinator of a deleted job."""
    world = World(PAPER, served=EVERYTHING)
    world.settle()
    uid = world.rljob["metadata"]["uid"]
    assert world.server.objects_by_name(SERVICE)[name]["spec"]["selector"]["specrl.dev/rljob-uid"] == uid
    policies = world.server.objects_by_name(NETWORK_POLICY)
    peers = policies["tiny-peers"]["spec"]
    selectors = [
        *(policy["spec"]["podSelector"]["matchLabels"] for policy in policies.values()),
        peers["ingress"][0]["from"][0]["podSelector"]["matchLabels"],
        peers["egress"][0]["to"][0]["podSelector"]["matchLabels"],
    ]
    assert {it["specrl.dev/rljob-uid"] for it in selectors} == {uid}


def test_an_object_that_the_api_server_rejects_is_reported_in_a_condition() -> None:
    world = World()

    def refuse(verb: str, body: Object) -> ClusterError | None:
        is_replicas = body["kind"] == "StatefulSet" and verb == "create" and "generation" in body["metadata"]["name"]
        return ClusterError(422, "spec.template.spec.containers[0].image: Required value") if is_replicas else None

    world.server.refuse = refuse
    world.settle()
    assert world.read_condition("Accepted") == ("False", "ChildRejected")
    assert world.read_condition("Ready") == ("False", "ChildRejected")


def refuse_replicas(verb: str, body: Object) -> ClusterError | None:
    """Refuse every change of the replicas' StatefulSet, as Kueue's webhook refused to scale one with its label."""
    is_replicas = body["kind"] == "StatefulSet" and body["metadata"]["name"] == "tiny-generation"
    return ClusterError(422, "spec.replicas: field is immutable") if is_replicas and verb == "apply" else None


@pytest.mark.parametrize("is_upgraded", [False, True])
def test_a_refused_scaling_is_reported_and_keeps_nothing_from_being_stopped(is_upgraded: bool) -> None:
    """C6: the first refusal ended the loop before the coordinator, so the job was Suspending with all its pods. After
    an upgrade of the operator no status was written at all."""
    world = World()
    world.settle()
    if is_upgraded:
        world.settings = Settings(control_image="new", generation_image="new")
    world.server.refuse = refuse_replicas
    world.edit_spec(generation={"replicas": 2})
    world.settle()
    assert world.read_condition("Accepted") == ("False", "ChildRejected")
    assert "field is immutable" in find_condition(world.status, "Accepted")["message"]
    assert world.read_condition("CoordinatorReady") == ("True", "PodsReady")
    world.edit_spec(suspend=True)
    world.settle()
    assert set(world.server.objects_by_name(POD)) == {"tiny-generation-0"}, "all but those that may not be scaled"
    world.server.refuse = lambda verb, body: None
    world.settle()
    assert world.read_condition("Suspended")[0] == "True"


def test_a_failed_job_whose_replicas_may_not_be_scaled_stops_the_rest() -> None:
    world = World()
    world.settle()
    world.server.refuse = refuse_replicas
    world.end_pod("tiny-coordinator-0", 2, "no such model")
    world.settle()
    assert world.read_condition("Failed") == ("True", "RunRefused")
    assert world.server.objects_by_name(JOB_SET) == {}
    assert world.server.objects_by_name(DEPLOYMENT)["tiny-coordinator"]["spec"]["replicas"] == 0


def test_a_job_whose_secret_is_gone_can_be_suspended() -> None:
    world = World({"tls": {"mode": "ExistingSecret", "secretName": "mine"}})
    world.server.put_object(a_certificate())
    world.settle()
    world.server.delete(SECRET, world.server.objects_by_name(SECRET)["mine"])
    world.edit_spec(suspend=True)
    world.settle()
    assert world.read_condition("Suspended")[0] == "True"


def test_a_coordinator_on_a_node_that_does_not_answer_is_not_waited_for_without_end() -> None:
    """Its pod stays until the Node object goes, and the job would hold its GPUs until then."""
    world = World()
    world.settle()
    pod = world.server.objects_by_name(POD)["tiny-coordinator-0"]
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:30Z"  # the end of its grace period
    world.server.put_object(pod)
    world.edit_spec(suspend=True)
    assert world.reconcile() == pytest.approx(15), "no watch event would wake the operator"
    assert world.server.objects_by_name(JOB_SET)
    world.advance_clock(90 + 59)
    world.reconcile()
    assert world.server.objects_by_name(JOB_SET)
    world.advance_clock(1)
    world.reconcile()
    assert world.server.objects_by_name(JOB_SET) == {}


def test_a_busy_api_server_is_not_reported_as_a_problem_of_the_job() -> None:
    world = World()
    world.settle()
    world.server.refuse = lambda verb, body: ClusterError(503, "etcd leader changed") if verb == "apply" else None
    world.edit_spec(generation={"replicas": 2})
    with pytest.raises(ClusterError, match="etcd"):
        world.reconcile()
    assert world.read_condition("Accepted") == ("True", "Accepted")


def is_exported_as_refused() -> bool:
    labels = {"namespace": "rl", "name": "tiny", "type": "Accepted", "status": "False"}
    return REGISTRY.get_sample_value("specrl_rljob_condition", labels) == 1


def test_an_invalid_spec_is_reported_and_changes_no_children() -> None:
    world = World()
    world.settle()
    before = {name: it for name, it in world.take_snapshot().items() if not name.startswith("RLJob")}
    world.edit_spec(schedule={"groupSize": 1})
    assert world.reconcile() is None
    assert world.read_condition("Accepted") == ("False", "SpecInvalid")
    assert is_exported_as_refused(), "SpecrlJobNotAccepted watches the metric"
    assert "schedule.groupSize" in next(it["message"] for it in world.status["conditions"] if it["type"] == "Accepted")
    assert {name: it for name, it in world.take_snapshot().items() if not name.startswith("RLJob")} == before
    writes = len(world.server.list_writes())
    world.reconcile()
    assert len(world.server.list_writes()) == writes
    world.edit_spec(schedule={"groupSize": 2})
    world.settle()
    assert world.read_condition("Accepted") == ("True", "Accepted")
    assert not is_exported_as_refused()


def test_an_older_operator_looks_after_a_job_with_fields_of_a_newer_crd() -> None:
    """A newer CRD fills in the default of a new field. Until the newer operator led, the older one called every running
    job SpecInvalid, and did not scale or suspend it."""
    world = World()
    world.settle()
    world.edit_spec(schedule={"newField": 1}, newSection={"mode": "Off"})
    world.settle()
    assert world.read_condition("Accepted") == ("True", "Accepted")
    message = find_condition(world.status, "Accepted")["message"]
    assert "ignores schedule.newField, newSection; upgrade the operator" in message
    writes = len(world.server.list_writes())
    world.reconcile()
    assert len(world.server.list_writes()) == writes
    world.edit_spec(generation={"replicas": 3})
    world.settle()
    assert world.server.objects_by_name(STATEFUL_SET)["tiny-generation"]["spec"]["replicas"] == 3
    world.edit_spec(suspend=True)
    world.settle()
    assert world.read_condition("Suspended") == ("True", "PodsDeleted")


def test_an_older_operator_starts_no_job_with_fields_of_a_newer_crd() -> None:
    """It would run without what its user asks for. The newer operator, which is about to lead, starts it."""
    world = World({"schedule": {"newField": 1}})
    world.settle()
    assert world.read_condition("Accepted") == ("False", "SpecInvalid")
    assert "schedule.newField" in find_condition(world.status, "Accepted")["message"]
    assert world.list_objects() == {("RLJob", "tiny")}


def test_a_job_that_is_not_accepted_gets_no_children_until_it_is() -> None:
    world = World(PAPER, served=CORE)
    after = world.settle()
    assert world.read_condition("Accepted") == ("False", "DependencyMissing")
    assert world.status["state"] == "NotAccepted"
    assert world.list_objects() == {("RLJob", "tiny")}
    assert after is not None
    world.server.group_versions = EVERYTHING
    world.settle()
    assert world.read_condition("Ready") == ("True", "AllPartsReady")


def test_no_gpu_pods_are_created_before_the_claim_template_exists() -> None:
    world = World(PAPER, served=EVERYTHING)
    world.reconcile()
    assert "tiny" in world.server.objects_by_name(COMPUTE_DOMAIN)
    assert world.server.objects_by_name(JOB_SET) == {}
    assert "tiny-generation" not in world.server.objects_by_name(STATEFUL_SET)
    assert world.read_condition("PlacementReady") == ("False", "WaitingForComputeDomain")
    world.run_controllers()
    world.settle()
    assert "tiny-trainer" in world.server.objects_by_name(JOB_SET)
    assert world.read_condition("PlacementReady") == ("True", "ClaimTemplateExists")
    assert world.status["placement"] == {"multiNodeNVLink": "Unknown"}


CODE = {"rewards": {"exact": None, "code": {}}}
ISOLATED = {
    "type": "SandboxReady",
    "status": "True",
    "reason": "IsolationChosen",
    "message": "rewards.code: Landlock",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


@pytest.mark.parametrize(
    "programs",
    [CODE, {"tools": {"answeredBy": {"code": {}}, "maxOutputTokens": 4}}],
    ids=["verifier", "tool"],
)
def test_the_sandbox_is_tried_before_anything_that_may_take_gpus_is_asked_for(programs: Object) -> None:
    """The coordinator refused the default isolation when trainer and replicas had been started."""
    world = World(programs)
    world.settle()
    assert set(world.server.objects_by_name(STATEFUL_SET)) == {"tiny-store"}
    assert world.server.objects_by_name(JOB_SET) == {}
    assert set(world.server.objects_by_name(POD)) == {"tiny-coordinator-0", "tiny-store-0"}
    assert world.read_condition("PlacementReady") == ("False", "WaitingForSandbox")
    assert world.read_condition("Ready") == ("False", "WaitingForSandbox")
    world.report_status(conditions=[ISOLATED])
    world.settle()
    assert world.read_condition("Ready") == ("True", "AllPartsReady")
    world.report_status(conditions=[])
    world.settle()
    assert world.read_condition("Ready") == ("True", "AllPartsReady"), "what runs is kept"


def test_a_job_that_is_created_suspended_tries_its_sandbox_when_it_is_resumed() -> None:
    world = World(CODE, SUSPENDED)
    world.settle()
    world.edit_spec(suspend=False)
    world.settle()
    assert world.server.objects_by_name(JOB_SET) == {}
    assert world.read_condition("PlacementReady") == ("False", "WaitingForSandbox")
    world.report_status(conditions=[ISOLATED])
    world.settle()
    world.edit_spec(suspend=True)
    world.settle()
    world.edit_spec(suspend=False)
    world.settle()
    assert world.read_condition("Ready") == ("True", "AllPartsReady"), "it is not tried again"


def test_a_refused_sandbox_fails_a_job_that_has_asked_for_no_gpu() -> None:
    world = World(CODE)
    world.settle()
    world.end_pod("tiny-coordinator-0", 2, "rewards.code.isolation must be possible on this machine")
    world.reconcile()
    assert world.read_condition("Failed") == ("True", "RunRefused")
    assert world.server.objects_by_name(STATEFUL_SET)["tiny-generation"]["spec"]["replicas"] == 0
    world.settle()
    assert world.server.objects_by_name(JOB_SET) == {}
    assert world.server.objects_by_name(POD) == {}


@pytest.mark.parametrize(
    ("changes", "served"), [((CODE,), JOBSET_ONLY), ((PAPER,), EVERYTHING)], ids=["sandbox", "claim template"]
)
def test_a_job_that_is_suspended_before_it_asked_for_gpus_asks_for_none(
    changes: tuple[Object, ...], served: frozenset[str]
) -> None:
    """Its replicas were created while the coordinator stopped, all of them."""
    world = World(*changes, served=served)
    world.reconcile()
    coordinator = a_pod("tiny-coordinator-0", COORDINATOR, world.server.objects_by_name(DEPLOYMENT)["tiny-coordinator"])
    world.server.put_object(coordinator)
    world.edit_spec(suspend=True)
    world.reconcile()
    assert world.server.objects_by_name(DEPLOYMENT)["tiny-coordinator"]["spec"]["replicas"] == 0
    assert world.server.objects_by_name(STATEFUL_SET)["tiny-generation"]["spec"]["replicas"] == 0
    world.settle()
    assert world.read_condition("Suspended") == ("True", "PodsDeleted")


def test_a_job_keeps_the_replicas_that_it_has_while_its_coordinator_stops() -> None:
    """One edit may suspend a job and change its replicas. New ones would start only to be stopped."""
    world = World()
    world.settle()
    world.edit_spec(suspend=True, generation={"replicas": 5})
    world.reconcile()
    assert world.server.objects_by_name(STATEFUL_SET)["tiny-generation"]["spec"]["replicas"] == 1


def test_a_job_that_waits_for_its_sandbox_is_not_queued_yet() -> None:
    world = World(CODE, {"scheduling": {"queueName": "team"}}, served=EVERYTHING)
    world.settle()
    assert world.read_condition("QuotaReserved") == ("False", "NotRequested")
    assert world.status["state"] == "Starting"
    assert world.read_condition("Ready") == ("False", "WaitingForSandbox")


def test_a_running_jobset_is_not_patched_whatever_others_write_into_it() -> None:
    world = World()
    world.settle()
    admitted = world.server.objects_by_name(JOB_SET)["tiny-trainer"]
    template = admitted["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    template["spec"]["nodeSelector"] = {"cloud/flavor": "reserved"}
    admitted["metadata"]["annotations"]["specrl.dev/desired-hash"] = "of another version"
    world.server.put_object(admitted)
    before = len(world.server.list_writes())
    world.settings = Settings(trainer_image="specrl/trainer:9")
    world.settle()
    assert [call for call in world.server.list_writes()[before:] if call[1] == "JobSet"] == []
    assert world.server.objects_by_name(JOB_SET)["tiny-trainer"]["spec"] == admitted["spec"]


def test_a_newer_operator_restarts_no_pod_and_can_still_scale() -> None:
    world = World()
    world.settle()
    templates = {name: it["spec"]["template"] for name, it in world.server.objects_by_name(STATEFUL_SET).items()}
    world.settings = Settings(generation_image="specrl/generation:9", control_image="c:9", store_image="s:9")
    before = len(world.server.list_writes())
    world.settle()
    assert world.server.list_writes()[before:] == []
    world.edit_spec(generation={"replicas": 3})
    world.settle()
    assert world.server.objects_by_name(STATEFUL_SET)["tiny-generation"]["spec"]["replicas"] == 3
    assert {
        name: it["spec"]["template"] for name, it in world.server.objects_by_name(STATEFUL_SET).items()
    } == templates
    world.edit_spec(suspend=True)
    world.settle()
    world.edit_spec(suspend=False)
    world.settle()
    found = world.server.objects_by_name(STATEFUL_SET)["tiny-generation"]["spec"]
    assert found["template"]["spec"]["containers"][0]["image"] == "specrl/generation:9"
    assert found["replicas"] == 3


@pytest.mark.parametrize("served", [CORE, JOBSET_ONLY, EVERYTHING], ids=["job", "jobset", "groups"])
def test_pods_that_are_created_again_read_the_run_file_that_their_image_understands(
    served: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer operator with one more defaulted field rewrote the run file at once. Every pod that restarted, with its
    old image, then refused the unknown field, and the job was RunRefused for good."""
    world = World(*([PAPER, LARGE] if served is EVERYTHING else []), served=served)
    world.settle()
    old = the_run_file(world)
    content = world.server.objects_by_name(CONFIG_MAP)[old]
    assert content["immutable"] is True
    dump = desired.dump_spec
    monkeypatch.setattr(desired, "dump_spec", lambda spec: dump(spec) + "newField: 1\n")
    for name in world.server.objects_by_name(POD):
        pod = world.server.objects_by_name(POD).get(name)
        if pod is not None:
            world.server.delete(POD, pod)
        world.settle()
        assert world.server.objects_by_name(CONFIG_MAP)[old] == content
        assert list_mounted_run_files(world) == {old}
    world.edit_spec(generation={"replicas": 2})
    world.settle()
    assert the_run_file(world) == old
    world.edit_spec(suspend=True)
    world.settle()
    world.edit_spec(suspend=False)
    world.settle()
    assert the_run_file(world) != old
    assert list_mounted_run_files(world) == {the_run_file(world)}
    assert "newField" in world.server.objects_by_name(CONFIG_MAP)[the_run_file(world)]["data"]["run.yaml"]


def test_what_others_change_in_children_is_repaired() -> None:
    """A StatefulSet that was scaled behind the RLJob's back, and a policy that was opened, stayed so: the operator
    compared only its own annotations."""
    world = World({"generation": {"replicas": 3}})
    world.settle()
    before = world.take_snapshot()
    opened = [
        (NETWORK_POLICY, "tiny-peers", lambda it: it["spec"]["ingress"][0]["from"][0].update(namespaceSelector={})),
        (NETWORK_POLICY, "tiny-peers", lambda it: it["spec"].update(egress=[{}])),
        (NETWORK_POLICY, "tiny-peers", lambda it: it["spec"]["podSelector"]["matchLabels"].update(no="pod")),
        (SERVICE, "tiny-coordinator", lambda it: it["spec"]["selector"].update({"specrl.dev/rljob": "other"})),
        (ROLE, "tiny", lambda it: it["rules"][0].update(verbs=["*"])),
        (ROLE_BINDING, "tiny", lambda it: it["subjects"].append({"kind": "Group", "name": "system:authenticated"})),
        (STATEFUL_SET, "tiny-generation", lambda it: it["spec"].update(replicas=1)),
        (DEPLOYMENT, "tiny-coordinator", lambda it: it["spec"].update(replicas=0)),
    ]
    for kind, name, change in opened:
        item = world.server.objects_by_name(kind)[name]
        change(item)
        world.server.put_object(item)
        assert world.take_snapshot() != before
        world.settle()
        assert world.take_snapshot() == before, name


def test_what_the_api_server_fills_in_is_no_change() -> None:
    world = World()
    world.settle()
    service = world.server.objects_by_name(SERVICE)["tiny-coordinator"]
    service["spec"] |= {"clusterIP": "10.0.0.1", "ipFamilies": ["IPv4"]}
    service["spec"]["ports"][0] |= {"protocol": "TCP"}
    world.server.put_object(service)
    before = len(world.server.list_writes())
    world.reconcile()
    assert world.server.list_writes()[before:] == []


@pytest.mark.parametrize(
    ("name", "owner", "condition"),
    [
        ("tiny-trainer-node-0", JOB_SET, "TrainerReady"),
        ("tiny-generation", STATEFUL_SET, "GenerationReady"),
    ],
)
def test_why_admission_refuses_pods_is_in_the_condition(name: str, owner: Kind, condition: str) -> None:
    """Quotas, Pod Security and webhooks refuse pods after their owner was accepted. The status said "no pods yet"."""
    world = World()
    world.reconcile()
    event = {"reason": "FailedCreate", "lastTimestamp": "2026-01-01T00:00:30Z"}
    event["message"] = 'pods "x" is forbidden: exceeded quota: team'
    world.server.events[name] = [event]
    assert world.reconcile() == pytest.approx(15), "no watch event would say that the quota was raised"
    assert world.read_condition(condition) == ("False", "FailedCreate")
    message = next(it["message"] for it in world.status["conditions"] if it["type"] == "Ready")
    assert "exceeded quota: team; change what refuses it" in message
    world.settle()
    assert world.read_condition(condition) == ("True", "PodsReady")


def test_pods_that_a_deployment_cannot_create_are_in_the_condition() -> None:
    world = World()
    world.reconcile()
    deployment = world.server.objects_by_name(DEPLOYMENT)["tiny-coordinator"]
    failure = {"type": "ReplicaFailure", "status": "True", "message": "violates PodSecurity"}
    world.server.put_object(deployment | {"status": {"conditions": [failure]}})
    world.reconcile()
    assert world.read_condition("CoordinatorReady") == ("False", "FailedCreate")


def test_refused_pods_of_a_deleted_job_of_the_same_name_are_not_shown() -> None:
    world = World()
    world.reconcile()
    event = {"reason": "FailedCreate", "lastTimestamp": "2025-12-31T23:59:59Z", "message": "exceeded quota"}
    world.server.events["tiny-generation"] = [event]
    world.reconcile()
    assert world.read_condition("GenerationReady") == ("False", "PodsPending")


def test_what_the_kubelet_says_of_a_pod_without_containers_is_in_the_condition() -> None:
    """The condition guessed after two minutes. Events of a deleted pod of the same name say nothing of this one."""
    world = World({"generation": {"replicas": 2}})
    world.settle()
    for name in ("tiny-generation-0", "tiny-generation-1"):
        pod = world.server.objects_by_name(POD)[name]
        world.server.put_object(pod | {"status": creating_since("2026-01-01T00:00:00Z")})
        mounts = {"reason": "FailedMount", "message": f'{name}: secret "old" not found'}
        pulls = {"reason": "Pulling", "message": f"{name}: Pulling image"}
        world.server.events[name] = [
            mounts | {"involvedObject": {"uid": "of a deleted pod"}, "lastTimestamp": "2026-01-01T00:00:19Z"},
            pulls | {"involvedObject": {"uid": pod["metadata"]["uid"]}, "lastTimestamp": "2026-01-01T00:00:18Z"},
        ]
    before = len(world.server.calls)
    world.advance_clock(20)
    assert world.reconcile() == pytest.approx(15), "no watch event would say that it still does not start"
    assert world.read_condition("GenerationReady") == ("False", "PodsPending")
    assert "tiny-generation-0: Pulling image" in find_condition(world.status, "GenerationReady")["message"]
    asked = [call for call in world.server.calls[before:] if call == ("list", "Event")]
    assert len(asked) == 1, "of one pod of each role"


def test_a_part_that_does_not_start_is_looked_at_again_whatever_another_part_lacks() -> None:
    """Replicas that no node fits hid that a trainer's Secret was missing: only the reason of Ready was looked at."""
    world = World()
    world.settle()
    replica = world.server.objects_by_name(POD)["tiny-generation-0"]
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
    world.server.put_object(replica | {"status": {"phase": "Pending", "conditions": [unscheduled]}})
    trainer = next(it for name, it in world.server.objects_by_name(POD).items() if "trainer" in name)
    world.server.put_object(trainer | {"status": creating_since("2026-01-01T00:00:00Z")})
    assert world.reconcile() == pytest.approx(15)
    assert world.read_condition("Ready") == ("False", "Unschedulable")


def test_a_failure_of_the_operator_itself_is_in_the_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A podTemplate that the operator could not merge raised at every reconciliation, and the status stayed empty."""
    world = World()

    def fail(*_: object) -> None:
        raise AttributeError("'str' object has no attribute 'get'")

    with monkeypatch.context() as patch:
        patch.setattr("specrl_operator.reconcile.build_children", fail)
        for _ in range(2):
            with pytest.raises(AttributeError):
                world.reconcile()
    assert world.read_condition("Accepted") == ("False", "OperatorFailed")
    world.settle()
    assert world.read_condition("Accepted") == ("True", "Accepted")


def test_a_coordinator_that_was_superseded_does_not_end_the_run() -> None:
    """After a partition, the old coordinator finds that a newer one has taken the run over, and exits with 2."""
    world = World()
    world.settle()
    world.end_pod("tiny-coordinator-0", 2, "a newer coordinator has taken the run over")
    old = world.server.objects_by_name(POD)["tiny-coordinator-0"]
    old["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:30Z"
    world.server.put_object(old)
    world.reconcile()
    assert world.read_condition("Failed") == (None, None)


def list_mounted_run_files(world: World) -> set[str]:
    """Return the ConfigMaps that the pod templates of coordinator, trainer and replicas mount."""
    found = set()
    for kind in (DEPLOYMENT, JOB, JOB_SET, STATEFUL_SET, LEADER_WORKER_SET):
        for workload in world.server.objects_by_name(kind).values():
            for template in list_pod_templates(workload):
                volumes = template["spec"].get("volumes", [])
                found |= {it["configMap"]["name"] for it in volumes if "configMap" in it}
    return found


def test_without_jobset_the_operator_restarts_the_trainer_and_counts() -> None:
    world = World({"failurePolicy": {"maxRestarts": 2}}, served=CORE)
    world.settle()
    assert "JobSet is not installed" in next(
        it["message"] for it in world.status["conditions"] if it["type"] == "Accepted"
    )
    for restarts in (1, 2):
        first = world.server.objects_by_name(JOB)["tiny-trainer"]["metadata"]["uid"]
        world.end_workload(JOB, "tiny-trainer", "Failed", "a pod failed")
        world.settle()
        assert world.server.objects_by_name(JOB)["tiny-trainer"]["metadata"]["uid"] != first
        assert world.status["restarts"] == restarts
        assert world.read_condition("Failed") == (None, None)
    world.end_workload(JOB, "tiny-trainer", "Failed", "a pod failed")
    world.settle()
    assert world.read_condition("Failed") == ("True", "BackoffLimitExceeded")
    assert world.status["restarts"] == 2


def test_every_trainer_restart_is_counted_once_even_if_the_operator_is_killed() -> None:
    start = World(served=CORE)
    start.settle()
    start.end_workload(JOB, "tiny-trainer", "Failed")
    kills = list(settled_after_kills(start))
    assert kills
    for number, world in kills:
        assert world.status["restarts"] == 1, number
        assert world.server.objects_by_name(JOB)["tiny-trainer"]["metadata"]["annotations"]["specrl.dev/attempt"] == "1"


def test_a_trainer_that_runs_as_a_job_stays_a_job_when_jobset_is_installed() -> None:
    world = World(served=CORE)
    world.settle()
    world.server.group_versions = EVERYTHING
    world.settle()
    assert world.server.objects_by_name(JOB_SET) == {}
    world.edit_spec(suspend=True)
    world.settle()
    world.edit_spec(suspend=False)
    world.settle()
    assert world.server.objects_by_name(JOB) == {}
    assert "tiny-trainer" in world.server.objects_by_name(JOB_SET)


def test_deadlines_are_enforced_without_any_watch_event() -> None:
    world = World({"startupDeadlineSeconds": 60, "activeDeadlineSeconds": 500})
    world.reconcile()
    assert world.reconcile() == pytest.approx(15), "sooner than the deadline: no pods exist yet"
    world.advance_clock(50)
    assert world.reconcile() == pytest.approx(11)
    world.advance_clock(11)
    world.reconcile()
    assert world.read_condition("Failed") == ("True", "StartupDeadlineExceeded")
    started = World({"startupDeadlineSeconds": 60, "activeDeadlineSeconds": 500})
    started.settle()
    started.advance_clock(100)
    started.settle()
    assert started.read_condition("Failed") == (None, None)
    started.advance_clock(401)
    started.settle()
    assert started.read_condition("Failed") == ("True", "DeadlineExceeded")
    assert started.server.objects_by_name(POD) == {}


def test_deadlines_count_from_the_resumption() -> None:
    world = World({"activeDeadlineSeconds": 500})
    world.settle()
    world.advance_clock(400)
    world.edit_spec(suspend=True)
    world.settle()
    world.advance_clock(4000)
    world.edit_spec(suspend=False)
    world.settle()
    world.advance_clock(400)
    world.settle()
    assert world.read_condition("Failed") == (None, None)


def set_trainer_suspended(world: World, is_suspended: bool) -> None:
    """Suspend or admit the trainer's JobSet, as Kueue does."""
    trainer = world.server.objects_by_name(JOB_SET)["tiny-trainer"]
    world.server.put_object({**trainer, "spec": {**trainer["spec"], "suspend": is_suspended}})


def test_deadlines_count_from_the_admission_by_the_queue() -> None:
    """H7: a job that waited for its quota longer than a deadline failed without having run."""
    world = World(QUEUED, {"startupDeadlineSeconds": 60, "activeDeadlineSeconds": 500}, served=EVERYTHING)
    world.reconcile()
    set_trainer_suspended(world, True)
    world.advance_clock(7200)
    world.reconcile()
    assert world.status["state"] == "Queued"
    assert "startTime" not in world.status
    set_trainer_suspended(world, False)
    world.reconcile()
    assert world.status["startTime"] == "2026-01-01T02:00:00Z"
    world.advance_clock(59)
    set_trainer_suspended(world, True)
    world.reconcile()
    assert "startTime" not in world.status, "it was evicted, and waits again"
    set_trainer_suspended(world, False)
    world.reconcile()
    world.advance_clock(61)
    world.reconcile()
    assert world.read_condition("Failed") == ("True", "StartupDeadlineExceeded")


def test_a_part_that_holds_gpus_lets_the_deadlines_count_while_another_is_queued() -> None:
    """Two jobs that were admitted by halves would otherwise wait for each other without end."""
    world = World(QUEUED, {"startupDeadlineSeconds": 60}, served=EVERYTHING)
    world.reconcile()
    world.run_controllers()
    set_trainer_suspended(world, True)
    world.reconcile()
    assert world.status["state"] == "Queued"
    world.advance_clock(61)
    world.reconcile()
    assert world.read_condition("Failed") == ("True", "StartupDeadlineExceeded")


def test_a_refusal_of_a_running_job_does_not_restart_its_deadlines() -> None:
    """H7: one look with Accepted=False removed startTime, and the deadlines began anew after it."""
    world = World({"tls": {"mode": "ExistingSecret", "secretName": "mine"}})
    world.server.put_object(a_certificate())
    world.settle()
    started = world.status["startTime"]
    world.server.delete(SECRET, world.server.objects_by_name(SECRET)["mine"])
    world.advance_clock(100)
    world.reconcile()
    assert world.read_condition("Accepted") == ("False", "SecretMissing")
    assert world.status["startTime"] == started


def test_a_finished_job_is_deleted_after_its_ttl() -> None:
    world = World({"ttlSecondsAfterFinished": 100})
    world.settle()
    world.finish_run()
    after = world.settle()
    assert after == pytest.approx(101)
    world.advance_clock(99)
    world.settle()
    assert "tiny" in world.server.objects_by_name(RLJOB)
    world.advance_clock(1)
    world.settle()
    assert world.list_objects() == set()


def test_a_failed_job_is_not_deleted_before_its_coordinator_has_saved_the_run() -> None:
    """With a time to live of 0 it was deleted as soon as it had failed: trainer and coordinator at once."""
    world = World({"ttlSecondsAfterFinished": 0})
    world.settle()
    world.end_workload(JOB_SET, "tiny-trainer", "Failed", "maxRestarts reached")
    for _ in range(3):
        world.reconcile()
    assert world.read_condition("Failed") == ("True", "BackoffLimitExceeded")
    assert world.server.objects_by_name(DEPLOYMENT)["tiny-coordinator"]["spec"]["replicas"] == 0
    world.run_controllers()
    world.reconcile()
    assert world.list_objects() == set()


def test_the_trainer_stays_as_long_as_the_coordinator_saves_the_run() -> None:
    """It was deleted five minutes after the deadline, in the middle of a long step, with the checkpoint to come."""
    world = World({"activeDeadlineSeconds": 3600})
    world.settle()
    world.advance_clock(3601)
    world.reconcile()
    assert world.read_condition("Failed") == ("True", "DeadlineExceeded")
    world.advance_clock(600)
    world.reconcile()
    assert "tiny-trainer" in world.server.objects_by_name(JOB_SET)
    world.settle()  # the coordinator's pod is gone
    assert world.server.objects_by_name(JOB_SET) == {}


@pytest.mark.parametrize(("own", "is_kept"), [({}, False), ({"ttlSecondsAfterFinished": 1000}, True)])
def test_the_administrators_time_to_live_counts_for_jobs_that_name_none(own: Object, is_kept: bool) -> None:
    """M11: without one, a finished job kept its coordinator, store and volume for ever."""
    world = World(own, settings=Settings(finished_job_ttl_s=500))
    world.settle()
    world.finish_run()
    world.settle()
    world.advance_clock(499)
    assert world.reconcile() == pytest.approx(502 if is_kept else 2)
    world.advance_clock(2)
    world.reconcile()
    assert is_kept is ("tiny" in world.server.objects_by_name(RLJOB))


def test_a_job_of_another_controller_is_not_touched() -> None:
    world = World({"managedBy": "kueue.x-k8s.io/multikueue"})
    world.settle()
    assert world.server.list_writes() == []


def test_a_job_that_is_deleted_or_being_deleted_is_ignored() -> None:
    world = World()
    world.server.delete(RLJOB, world.rljob)
    assert world.reconcile() is None
    world.server.put_object(an_rljob(deletionTimestamp="2026-01-01T00:00:00Z"))
    before = len(world.server.list_writes())
    assert world.reconcile() is None
    assert len(world.server.list_writes()) == before


def test_what_the_coordinator_writes_is_not_overwritten() -> None:
    world = World()
    world.settle()
    world.report_status(progress={"step": 7, "lastUpdateTime": "2026-01-01T00:00:00Z"})
    world.edit_spec(generation={"replicas": 2})
    world.settle()
    assert world.status["progress"]["step"] == 7
    world.report_status(progress={"step": 8, "lastUpdateTime": "2026-01-01T00:00:10Z"})
    world.settle()
    assert world.status["progress"]["step"] == 8
    assert world.read_condition("Progressing") == ("True", "StepsTrained")


def test_every_condition_change_creates_one_event() -> None:
    world = World()
    world.settle()
    for _ in range(3):
        world.reconcile()
    reasons = world.list_event_reasons()
    assert reasons.count("Ready") == reasons.count("Accepted") == reasons.count("Created") == 1


def test_restarts_of_the_trainer_and_changes_of_the_replicas_create_an_event_each() -> None:
    """M16: there were events for six conditions only."""
    world = World(served=CORE)
    world.settle()
    world.end_workload(JOB, "tiny-trainer", "Failed", "a pod failed")
    world.settle()
    world.edit_spec(generation={"replicas": 3})
    world.settle()
    reasons = world.list_event_reasons()
    assert (reasons.count("TrainerRestarted"), reasons.count("Scaled")) == (1, 1)
    notes = {it["reason"]: it["note"] for it in world.server.objects_by_name(EVENT).values()}
    assert notes["TrainerRestarted"].endswith("restart 1")
    assert notes["Scaled"] == "scaling from 1 to 3 replicas"


def test_the_stores_password_is_created_once() -> None:
    world = World()
    world.settle()
    before = world.server.objects_by_name(SECRET)["tiny-store"]["stringData"]["password"]
    world.edit_spec(suspend=True)
    world.settle()
    world.edit_spec(suspend=False)
    world.settle()
    assert world.server.objects_by_name(SECRET)["tiny-store"]["stringData"]["password"] == before
    assert len(before) >= 32
    assert ("list", "Secret") not in world.server.calls


def test_secrets_for_cert_manager_are_created_empty_and_never_overwritten() -> None:
    world = World({"tls": {"mode": "CertManager", "issuer": {"name": "ca"}}}, served=EVERYTHING)
    world.settle()
    secrets = {name: it for name, it in world.server.objects_by_name(SECRET).items() if name.endswith("-tls")}
    assert set(secrets) == {f"tiny-{role}-tls" for role in (COORDINATOR, GENERATION, TRAINER)}
    for secret in secrets.values():
        assert [owner["name"] for owner in secret["metadata"]["ownerReferences"]] == ["tiny"]
        assert "data" not in secret
        assert "immutable" not in secret
    wrote = [(verb, kind) for verb, kind in world.server.calls if kind in ("Secret", "Certificate") and verb != "get"]
    assert wrote.index(("create", "Secret")) < wrote.index(("create", "Certificate"))
    writes = len(world.server.list_writes())
    world.reconcile()
    assert len(world.server.list_writes()) == writes


def test_a_job_waits_for_the_missing_secret_of_its_user() -> None:
    world = World({"tls": {"mode": "ExistingSecret", "secretName": "mine"}})
    after = world.settle()
    assert world.read_condition("Accepted") == ("False", "SecretMissing")
    assert after is not None
    assert not world.server.objects_by_name(JOB_SET)
    metadata = {"name": "mine", "namespace": "rl"}
    world.server.put_object(SECRET.build_object(metadata, data={"tls.crt": "eA==", "tls.key": "eA=="}))
    world.settle()
    assert "got mine, which lacks ca.crt" in next(
        it["message"] for it in world.status["conditions"] if it["type"] == "Accepted"
    )
    world.server.put_object(SECRET.build_object(metadata, data=dict.fromkeys(("tls.crt", "tls.key", "ca.crt"), "eA==")))
    world.settle()
    assert world.read_condition("Accepted") == ("True", "Accepted")
    assert world.server.objects_by_name(JOB_SET)


def test_waiting_pods_explain_what_they_wait_for() -> None:
    world = World()
    world.reconcile()
    owner = world.server.objects_by_name(JOB_SET)["tiny-trainer"]
    pod = a_pod("tiny-trainer-0", TRAINER, owner, is_ready=False)
    pod["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/36 nodes are available"}],
    }
    world.server.put_object(pod)
    coordinator = a_pod(
        "tiny-coordinator-0", COORDINATOR, world.server.objects_by_name(DEPLOYMENT)["tiny-coordinator"], is_ready=False
    )
    waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "mine" not found'}}
    coordinator["status"] = {"phase": "Pending", "containerStatuses": [{"name": COORDINATOR, "state": waiting}]}
    world.server.put_object(coordinator)
    world.reconcile()
    assert world.read_condition("TrainerReady") == ("False", "Unschedulable")
    assert world.read_condition("CoordinatorReady") == ("False", "ConfigurationMissing")
    ready = next(it for it in world.status["conditions"] if it["type"] == "Ready")
    assert ready["reason"] == "ConfigurationMissing"
    assert 'secret "mine" not found' in ready["message"]


def test_a_job_that_names_a_store_gets_none_of_its_own() -> None:
    world = World({"store": {"redis": {"addresses": ["redis.infra:6380"]}}})
    world.settle()
    assert f"tiny-{STORE}" not in world.server.objects_by_name(STATEFUL_SET)
    assert ("Secret", "tiny-store") not in world.list_objects()


def test_pods_that_run_without_a_channel_are_not_reported_to_have_one() -> None:
    preferred = {"placement": {"nvlink": "Preferred"}}
    world = World(PAPER, preferred, served=JOBSET_ONLY)
    world.settle()
    assert world.status["placement"] == {"multiNodeNVLink": "Inactive"}
    world.server.group_versions = EVERYTHING
    world.settle()
    assert world.status["placement"] == {"multiNodeNVLink": "Inactive"}
    assert world.server.objects_by_name(COMPUTE_DOMAIN) == {}
    world.edit_spec(suspend=True)
    world.settle()
    world.edit_spec(suspend=False)
    world.settle()
    assert world.status["placement"] == {"multiNodeNVLink": "Unknown"}
    assert world.read_condition("Ready") == ("True", "AllPartsReady")


def test_a_stale_cache_does_not_harm_running_pods() -> None:
    world = World()
    world.settle()
    admitted = world.server.objects_by_name(JOB_SET)["tiny-trainer"]
    admitted["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["nodeSelector"] = {"flavor": "a"}
    world.server.put_object(admitted)
    before = {name: it for name, it in world.take_snapshot().items() if not name.startswith("RLJob")}
    behind = WatchedObjects()
    behind.served = world.server.group_versions
    Reconciler(world.server, behind, world.settings, lambda: world.now).reconcile("rl", "tiny")
    assert {name: it for name, it in world.take_snapshot().items() if not name.startswith("RLJob")} == before
    world.settle()
    assert world.read_condition("Ready") == ("True", "AllPartsReady")


def test_a_status_does_not_overwrite_a_newer_one() -> None:
    world = World()
    world.settle()
    world.edit_spec(generation={"replicas": 2})

    def meanwhile(verb: str, body: Object) -> ClusterError | None:
        if verb == "apply" and body["kind"] == "RLJob" and "state" in body["status"]:
            world.server.refuse = lambda verb, body: None
            world.report_status(progress={"step": 1, "lastUpdateTime": "2026-01-01T00:00:00Z"})
        return None

    world.server.refuse = meanwhile
    with pytest.raises(ClusterError) as caught:
        world.reconcile()
    assert caught.value.status == 409
    world.settle()
    assert world.status["progress"]["step"] == 1
    assert world.status["generation"]["replicas"] == 2
