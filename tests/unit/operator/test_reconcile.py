"""The reconciler against an API server in memory: the right objects, no needless write, and the same end however it
was interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.stand_ins.api_server import CORE, Killed
from tests.unit.operator.builders import LARGE, PAPER, an_rljob
from tests.unit.operator.world import EVERYTHING, JOBSET_ONLY, World, a_pod

from specrl_operator.api import (
    COMPUTE_DOMAIN,
    CONFIG_MAP,
    COORDINATOR,
    DEPLOYMENT,
    GENERATION,
    JOB,
    JOB_SET,
    LEADER_WORKER_SET,
    POD,
    RLJOB,
    SECRET,
    STATEFUL_SET,
    STORE,
    TRAINER,
    Kind,
    Object,
    is_controlled_by,
)
from specrl_operator.cluster import ClusterError
from specrl_operator.facts import Settings
from specrl_operator.reconcile import Reconciler

SUSPENDED = {"suspend": True}
CLIQUE = "nvidia.com/gpu.clique"


def test_a_job_gets_its_children_and_becomes_ready() -> None:
    world = World()
    world.settle()
    assert {
        ("Deployment", "tiny-coordinator"),
        ("JobSet", "tiny-trainer"),
        ("StatefulSet", "tiny-generation"),
        ("StatefulSet", "tiny-store"),
        ("ConfigMap", "tiny-run"),
        ("Secret", "tiny-store"),
        ("Service", "tiny-coordinator"),
        ("Role", "tiny"),
        ("NetworkPolicy", "tiny-peers"),
    } <= world.names()
    assert world.said("Ready") == ("True", "AllPartsReady")
    assert world.status["state"] == "Running"
    assert world.status["generation"] == {
        "replicas": 1,
        "readyReplicas": 1,
        "selector": "specrl.dev/rljob=tiny,app.kubernetes.io/component=generation,specrl.dev/replica-leader=true",
    }


def test_an_idle_look_writes_nothing() -> None:
    world = World()
    world.settle()
    before = len(world.server.writes())
    world.later(3600)
    world.reconcile()
    assert world.server.writes()[before:] == []


def test_one_look_writes_the_status_at_most_once() -> None:
    world = World()
    for _ in range(6):
        before = len(world.server.calls)
        world.reconcile()
        world.run_controllers()
        assert world.server.calls[before:].count(("applyStatus", "RLJob")) <= 1


def test_every_child_is_owned_and_goes_with_the_job() -> None:
    world = World(PAPER, served=EVERYTHING)
    world.settle()
    job = world.rljob
    for place, item in world.server.objects.items():
        if place[1] not in (RLJOB.name, "Event", "Pod", "ResourceClaimTemplate"):
            assert [it["uid"] for it in item["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]], place
    world.server.delete(RLJOB, job)
    left = {kind for kind, _ in world.names()}
    assert left <= {"ResourceClaimTemplate"}  # the ComputeDomain's controller's own


def settled(start: World) -> World:
    """What becomes of a state if nobody is killed."""
    world = start.copy()
    world.settle()
    return world


def settled_after_kills(start: World) -> Iterator[tuple[int, World]]:
    """What becomes of a state if the operator is killed once, with the number of the call after which it is.

    Calls that changed nothing are left out. A kill after a read is no other case: the next operator remembers nothing,
    and finds what the last write left.
    """
    server = settled(start).server
    for number, call in enumerate(server.calls, 1):
        if number <= len(start.server.calls) or call not in server.writes():
            continue
        world = start.copy()
        world.server.kill_after = number
        with pytest.raises(Killed):
            world.settle()
        world.server.kill_after = None
        world.settle()
        yield number, world


@pytest.mark.parametrize("changes", [(), (PAPER,)], ids=["minimal", "gb200"])
def test_killed_after_any_call_the_next_operator_ends_in_the_same_state(changes: tuple[Object, ...]) -> None:
    start = World(*changes, served=EVERYTHING)
    whole = settled(start)
    kills = list(settled_after_kills(start))
    assert len(kills) >= 15
    for number, world in kills:
        assert world.state() == whole.state(), f"killed after call {number}: {world.server.calls[number - 1]}"


@pytest.mark.parametrize("verb", ["suspend", "resume", "scale", "complete", "fail", "expire"])
@pytest.mark.parametrize("changes", [(), (PAPER, LARGE)], ids=["minimal", "groups"])
def test_killed_on_the_way_to_another_state_it_ends_in_the_same(verb: str, changes: tuple[Object, ...]) -> None:
    def begun() -> World:
        ttl: Object = {"ttlSecondsAfterFinished": 0} if verb == "expire" else {}
        world = World(*changes, ttl, served=EVERYTHING)
        world.settle()
        if verb == "resume":
            world.edit(suspend=True)
            world.settle()
            world.edit(suspend=False)
        elif verb == "suspend":
            world.edit(suspend=True)
        elif verb == "scale":
            world.edit(generation={"replicas": 2})
        elif verb == "fail":
            world.end_pod("tiny-trainer-0", 2, "model.path must hold a model")
        else:
            world.finish()
        return world

    start = begun()
    whole = settled(start)
    kills = list(settled_after_kills(start))
    assert kills
    for number, world in kills:
        assert world.state() == whole.state(), number


def test_killed_while_the_job_is_deleted_it_leaves_nothing() -> None:
    """The user deletes the job after the operator's n-th call, its last."""
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
        assert world.names() == set(), number
    assert number > 40


def test_job_that_is_deleted_during_a_look_gets_no_more_than_garbage() -> None:
    world = World(served=EVERYTHING)
    uid = world.rljob["metadata"]["uid"]
    refused = world.server.refuse

    def delete_first(verb: str, body: Object) -> ClusterError | None:
        if verb == "apply" and "tiny" in world.server.of(RLJOB):
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
    world.edit(generation={"replicas": 4})
    world.settle()
    assert world.server.of(LEADER_WORKER_SET)["tiny-generation"]["spec"]["replicas"] == 4
    assert len([name for name in world.server.of(POD) if "generation" in name]) == 8
    assert world.status["generation"]["replicas"] == world.status["generation"]["readyReplicas"] == 4
    selected = dict(part.split("=") for part in world.status["generation"]["selector"].split(","))
    labels = [pod["metadata"]["labels"] for pod in world.server.of(POD).values()]
    assert sum(selected.items() <= its.items() for its in labels) == 4, "one pod of each"


def test_the_domain_of_the_trainer_s_nodes_is_shown_and_not_asked_for_at_every_look() -> None:
    world = World(PAPER, served=EVERYTHING)
    for node, labels in (("a", {CLIQUE: "rack.1"}), ("b", {CLIQUE: "rack.2"}), ("c", {})):
        world.server.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": labels}})
    world.settle()
    assert "domain" not in world.status["placement"], "nothing is bound yet"

    def bind(*nodes: str) -> str | None:
        for number, node in enumerate(nodes):
            pod = world.server.of(POD)[f"tiny-trainer-{number}"]
            world.server.put({**pod, "spec": {"nodeName": node}})
        operator.reconcile("rl", "tiny")
        return world.status["placement"].get("domain")  # type: ignore[no-any-return]

    operator = Reconciler(world.server, world.settings, lambda: world.now)
    assert bind("a", "a", "a", "a") == "rack.1"
    before = len(world.server.calls)
    operator.reconcile("rl", "tiny")
    assert ("get", "Node") not in world.server.calls[before:]
    assert bind("a", "b") == "rack.1, rack.2"
    assert bind("c", "c", "c", "c") is None
    world.server.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "c", "labels": {CLIQUE: "rack.3"}}})
    world.later(601)
    assert bind("c", "c", "c", "c") == "rack.3", "a label that came later"


def test_scaling_changes_the_replicas_alone() -> None:
    world = World()
    world.settle()
    before = world.state()
    world.edit(generation={"replicas": 4})
    world.settle()
    after = world.state()
    changed = {name for name in after if before.get(name) != after[name]}
    assert {name.split()[0] for name in changed} == {"RLJob", "StatefulSet", "Pod", "ConfigMap"}
    assert world.server.of(STATEFUL_SET)["tiny-generation"]["spec"]["replicas"] == 4
    assert world.status["generation"]["readyReplicas"] == 4
    world.edit(generation={"replicas": 1})
    world.settle()
    assert world.status["generation"]["replicas"] == 1
    assert world.said("Ready") == ("True", "AllPartsReady")


def test_the_operator_never_writes_the_spec_of_a_job() -> None:
    world = World()
    world.settle()
    world.edit(generation={"replicas": 3})
    spec = world.rljob["spec"]
    world.settle()
    assert world.rljob["spec"] == spec
    assert ("apply", "RLJob") not in world.server.calls
    assert ("replace", "RLJob") not in world.server.calls


def test_a_suspended_job_stops_its_coordinator_first_and_loses_nothing_that_must_stay() -> None:
    world = World()
    world.settle()
    world.edit(suspend=True)
    world.reconcile()
    assert world.server.of(DEPLOYMENT)["tiny-coordinator"]["spec"]["replicas"] == 0
    assert "tiny-trainer" in world.server.of(JOB_SET)  # it still answers while the run is saved
    assert world.said("Suspended") == ("False", "Suspending")
    world.settle()
    assert world.server.of(POD) == {}
    assert world.server.of(JOB_SET) == {}
    assert {name: it["spec"]["replicas"] for name, it in world.server.of(STATEFUL_SET).items()} == {
        "tiny-generation": 0,
        "tiny-store": 0,
    }
    assert "tiny-run" in world.server.of(CONFIG_MAP)
    assert world.said("Suspended") == ("True", "AllPodsGone")
    assert world.status["state"] == "Suspended"
    assert "startTime" not in world.status
    world.edit(suspend=False)
    world.settle()
    assert world.said("Ready") == ("True", "AllPartsReady")
    assert world.said("Suspended") == ("False", "Resumed")
    assert world.reasons().count("Resumed") == 1


def test_a_job_that_begins_suspended_starts_nothing() -> None:
    world = World(SUSPENDED)
    world.settle()
    assert world.server.of(POD) == {}
    assert world.server.of(JOB_SET) == {}
    assert world.said("Suspended") == ("True", "AllPodsGone")


def test_a_finished_run_is_complete_and_keeps_its_coordinator() -> None:
    world = World()
    world.settle()
    world.finish()
    world.settle()
    assert world.said("Complete") == ("True", "MaxStepsReached")
    assert world.server.of(DEPLOYMENT)["tiny-coordinator"]["spec"]["replicas"] == 1
    assert world.server.of(STATEFUL_SET)["tiny-generation"]["spec"]["replicas"] == 0
    assert "tiny-trainer" in world.server.of(JOB_SET)  # it is sent home by the coordinator, and its logs stay
    world.conclude(JOB_SET, "tiny-trainer", "Completed")
    world.later(3600)
    world.settle()
    assert "tiny-trainer" in world.server.of(JOB_SET)
    assert world.said("Failed") == (None, None)


def test_a_trainer_that_does_not_end_with_its_run_is_removed() -> None:
    world = World()
    world.settle()
    world.finish()
    after = world.settle()
    assert after is not None
    world.later(after)
    world.settle()
    assert world.server.of(JOB_SET) == {}


def test_a_last_word_is_never_taken_back() -> None:
    world = World()
    world.settle()
    world.finish()
    world.settle()
    completed = world.status["completionTime"]
    world.report(conditions=[])
    world.end_pod("tiny-coordinator-0", 2, "boom")
    world.later(99)
    world.settle()
    assert world.said("Complete") == ("True", "MaxStepsReached")
    assert world.said("Failed") == (None, None)
    assert world.status["completionTime"] == completed


def test_a_run_that_its_user_must_mend_has_failed_with_its_own_words() -> None:
    world = World()
    world.settle()
    world.end_pod("tiny-coordinator-0", 2, "starting\nmodel.path must hold a model, got /models/none; check the path")
    world.settle()
    assert world.said("Failed") == ("True", "RunRefused")
    message = next(it["message"] for it in world.status["conditions"] if it["type"] == "Failed")
    assert "model.path must hold a model, got /models/none; check the path" in message
    assert world.server.of(POD) == {}
    assert world.server.of(DEPLOYMENT)["tiny-coordinator"]["spec"]["replicas"] == 0


def test_a_coordinator_that_crashes_too_often_ends_the_job() -> None:
    world = World()
    world.settle()
    world.end_pod("tiny-coordinator-0", 1, "no store", restarts=3)
    world.settle()
    assert world.said("Failed") == (None, None)
    assert world.said("CoordinatorReady") == ("False", "CrashLooping")
    world.end_pod("tiny-coordinator-0", 1, "no store", restarts=4)
    world.settle()
    assert world.said("Failed") == ("True", "BackoffLimitExceeded")


def test_a_failed_jobset_is_a_failed_job_and_stays_to_be_read() -> None:
    world = World()
    world.settle()
    world.conclude(JOB_SET, "tiny-trainer", "Failed", "maxRestarts reached")
    world.settle()
    assert world.said("Failed") == ("True", "BackoffLimitExceeded")
    assert "tiny-trainer" in world.server.of(JOB_SET)


def test_what_is_not_its_own_is_not_adopted() -> None:
    world = World()
    strange = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tiny-run", "namespace": "rl"}, "data": {}}
    world.server.put(strange)
    after = world.settle()
    assert world.said("Accepted") == ("False", "ChildConflict")
    assert world.server.of(CONFIG_MAP)["tiny-run"]["data"] == {}
    assert world.server.of(JOB_SET) == {}
    assert after is not None
    world.server.delete(CONFIG_MAP, world.server.of(CONFIG_MAP)["tiny-run"])
    world.settle()
    assert world.said("Ready") == ("True", "AllPartsReady")


def test_what_another_job_of_the_same_name_owned_is_not_adopted() -> None:
    world = World()
    world.settle()
    other = an_rljob()
    other["metadata"]["uid"] = "99999999-2222-4333-8444-000000000000"
    children = {place: item for place, item in world.server.objects.items() if place[1] == "JobSet"}
    world.server.delete(RLJOB, world.rljob)
    world.server.objects.update(children)  # garbage collection has not come round yet
    world.server.put(other)
    world.reconcile()
    assert world.said("Accepted") == ("False", "ChildConflict")
    world.server.delete(JOB_SET, world.server.of(JOB_SET)["tiny-trainer"])
    world.settle()
    assert world.said("Ready") == ("True", "AllPartsReady")


def test_an_object_that_the_api_server_refuses_is_a_condition() -> None:
    world = World()

    def refuse(verb: str, body: Object) -> ClusterError | None:
        is_replicas = body["kind"] == "StatefulSet" and verb == "apply" and "generation" in body["metadata"]["name"]
        return ClusterError(422, "spec.template.spec.containers[0].image: Required value") if is_replicas else None

    world.server.refuse = refuse
    world.settle()
    assert world.said("Accepted") == ("False", "ChildRejected")
    assert world.said("Ready") == ("False", "ChildRejected")


def test_a_server_that_is_busy_is_no_fault_of_the_job() -> None:
    world = World()
    world.settle()
    world.server.refuse = lambda verb, body: ClusterError(503, "etcd leader changed") if verb == "apply" else None
    world.edit(generation={"replicas": 2})
    with pytest.raises(ClusterError, match="etcd"):
        world.reconcile()
    assert world.said("Accepted") == ("True", "Runnable")


def test_a_spec_that_cannot_be_read_says_so_and_leaves_what_runs() -> None:
    world = World()
    world.settle()
    before = {name: it for name, it in world.state().items() if not name.startswith("RLJob")}
    world.edit(schedule={"groupSize": 1})
    assert world.reconcile() is None
    assert world.said("Accepted") == ("False", "SpecInvalid")
    assert "schedule.groupSize" in next(it["message"] for it in world.status["conditions"] if it["type"] == "Accepted")
    assert {name: it for name, it in world.state().items() if not name.startswith("RLJob")} == before
    writes = len(world.server.writes())
    world.reconcile()
    assert len(world.server.writes()) == writes
    world.edit(schedule={"groupSize": 2})
    world.settle()
    assert world.said("Accepted") == ("True", "Runnable")


def test_a_job_that_cannot_be_run_here_gets_nothing_until_it_can() -> None:
    world = World(PAPER, served=CORE)
    after = world.settle()
    assert world.said("Accepted") == ("False", "DependencyMissing")
    assert world.status["state"] == "NotAccepted"
    assert world.names() == {("RLJob", "tiny")}
    assert after is not None
    world.server.group_versions = EVERYTHING
    world.settle()
    assert world.said("Ready") == ("True", "AllPartsReady")


def test_nothing_takes_nodes_before_the_claim_template_is_there() -> None:
    world = World(PAPER, served=EVERYTHING)
    world.reconcile()
    assert "tiny" in world.server.of(COMPUTE_DOMAIN)
    assert world.server.of(JOB_SET) == {}
    assert "tiny-generation" not in world.server.of(STATEFUL_SET)
    assert world.said("PlacementReady") == ("False", "WaitingForComputeDomain")
    world.run_controllers()
    world.settle()
    assert "tiny-trainer" in world.server.of(JOB_SET)
    assert world.said("PlacementReady") == ("True", "ClaimTemplateExists")
    assert world.status["placement"] == {"multiNodeNVLink": "Active"}


def test_a_jobset_that_runs_is_left_alone_whatever_others_write_into_it() -> None:
    world = World()
    world.settle()
    admitted = world.server.of(JOB_SET)["tiny-trainer"]
    template = admitted["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    template["spec"]["nodeSelector"] = {"cloud/flavor": "reserved"}
    admitted["metadata"]["annotations"]["specrl.dev/desired-hash"] = "of another version"
    world.server.put(admitted)
    before = len(world.server.writes())
    world.settings = Settings(trainer_image="specrl/trainer:9")
    world.settle()
    assert [call for call in world.server.writes()[before:] if call[1] == "JobSet"] == []
    assert world.server.of(JOB_SET)["tiny-trainer"]["spec"] == admitted["spec"]


def test_a_newer_operator_restarts_no_pod_and_can_scale_them_all_the_same() -> None:
    world = World()
    world.settle()
    templates = {name: it["spec"]["template"] for name, it in world.server.of(STATEFUL_SET).items()}
    world.settings = Settings(generation_image="specrl/generation:9", control_image="c:9", store_image="s:9")
    before = len(world.server.writes())
    world.settle()
    assert world.server.writes()[before:] == []
    world.edit(generation={"replicas": 3})
    world.settle()
    assert world.server.of(STATEFUL_SET)["tiny-generation"]["spec"]["replicas"] == 3
    assert {name: it["spec"]["template"] for name, it in world.server.of(STATEFUL_SET).items()} == templates
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.settle()
    found = world.server.of(STATEFUL_SET)["tiny-generation"]["spec"]
    assert found["template"]["spec"]["containers"][0]["image"] == "specrl/generation:9"
    assert found["replicas"] == 3


def test_without_jobset_the_operator_itself_starts_the_trainer_again_and_counts() -> None:
    world = World({"failurePolicy": {"maxRestarts": 2}}, served=CORE)
    world.settle()
    assert "JobSet is not installed" in next(
        it["message"] for it in world.status["conditions"] if it["type"] == "Accepted"
    )
    for restarts in (1, 2):
        first = world.server.of(JOB)["tiny-trainer"]["metadata"]["uid"]
        world.conclude(JOB, "tiny-trainer", "Failed", "a pod failed")
        world.settle()
        assert world.server.of(JOB)["tiny-trainer"]["metadata"]["uid"] != first
        assert world.status["restarts"] == restarts
        assert world.said("Failed") == (None, None)
    world.conclude(JOB, "tiny-trainer", "Failed", "a pod failed")
    world.settle()
    assert world.said("Failed") == ("True", "BackoffLimitExceeded")
    assert world.status["restarts"] == 2


def test_killed_while_it_restarts_a_trainer_every_restart_is_counted_once() -> None:
    start = World(served=CORE)
    start.settle()
    start.conclude(JOB, "tiny-trainer", "Failed")
    kills = list(settled_after_kills(start))
    assert kills
    for number, world in kills:
        assert world.status["restarts"] == 1, number
        assert world.server.of(JOB)["tiny-trainer"]["metadata"]["annotations"]["specrl.dev/attempt"] == "1"


def test_a_trainer_that_runs_as_a_job_stays_one_when_jobset_is_installed() -> None:
    world = World(served=CORE)
    world.settle()
    world.server.group_versions = EVERYTHING
    world.settle()
    assert world.server.of(JOB_SET) == {}
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.settle()
    assert world.server.of(JOB) == {}
    assert "tiny-trainer" in world.server.of(JOB_SET)


def test_deadlines_are_kept_without_any_event() -> None:
    world = World({"startupDeadlineSeconds": 60, "activeDeadlineSeconds": 500})
    world.reconcile()
    assert world.reconcile() == pytest.approx(61)
    world.later(61)
    world.reconcile()
    assert world.said("Failed") == ("True", "StartupDeadlineExceeded")
    started = World({"startupDeadlineSeconds": 60, "activeDeadlineSeconds": 500})
    started.settle()
    started.later(100)
    started.settle()
    assert started.said("Failed") == (None, None)
    started.later(401)
    started.settle()
    assert started.said("Failed") == ("True", "DeadlineExceeded")
    assert started.server.of(POD) == {}


def test_clocks_of_deadlines_start_again_with_a_resumption() -> None:
    world = World({"activeDeadlineSeconds": 500})
    world.settle()
    world.later(400)
    world.edit(suspend=True)
    world.settle()
    world.later(4000)
    world.edit(suspend=False)
    world.settle()
    world.later(400)
    world.settle()
    assert world.said("Failed") == (None, None)


def test_a_finished_job_is_deleted_when_its_time_is_over() -> None:
    world = World({"ttlSecondsAfterFinished": 100})
    world.settle()
    world.finish()
    after = world.settle()
    assert after == pytest.approx(101)
    world.later(99)
    world.settle()
    assert "tiny" in world.server.of(RLJOB)
    world.later(1)
    world.settle()
    assert world.names() == set()


def test_a_job_of_another_controller_is_not_touched() -> None:
    world = World({"managedBy": "kueue.x-k8s.io/multikueue"})
    world.settle()
    assert world.server.writes() == []


def test_a_job_that_is_gone_or_going_is_let_go() -> None:
    world = World()
    world.server.delete(RLJOB, world.rljob)
    assert world.reconcile() is None
    world.server.put(an_rljob(deletionTimestamp="2026-01-01T00:00:00Z"))
    before = len(world.server.writes())
    assert world.reconcile() is None
    assert len(world.server.writes()) == before


def test_what_the_coordinator_writes_is_not_overwritten() -> None:
    world = World()
    world.settle()
    world.report(progress={"step": 7, "lastUpdateTime": "2026-01-01T00:00:00Z"})
    world.edit(generation={"replicas": 2})
    world.settle()
    assert world.status["progress"]["step"] == 7
    world.report(progress={"step": 8, "lastUpdateTime": "2026-01-01T00:00:10Z"})
    world.settle()
    assert world.status["progress"]["step"] == 8
    assert world.said("Progressing") == ("True", "StepsAreTrained")


def test_every_turn_is_told_once() -> None:
    world = World()
    world.settle()
    for _ in range(3):
        world.reconcile()
    reasons = world.reasons()
    assert reasons.count("Ready") == reasons.count("Accepted") == reasons.count("Created") == 1


def test_the_store_s_password_is_made_once() -> None:
    world = World()
    world.settle()
    before = world.server.of(SECRET)["tiny-store"]["stringData"]["password"]
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.settle()
    assert world.server.of(SECRET)["tiny-store"]["stringData"]["password"] == before
    assert len(before) >= 32
    assert ("list", "Secret") not in world.server.calls


def test_secrets_for_cert_manager_are_there_before_it_and_keep_what_it_writes() -> None:
    world = World({"tls": {"mode": "CertManager", "issuer": {"name": "ca"}}}, served=EVERYTHING)
    world.settle()
    secrets = {name: it for name, it in world.server.of(SECRET).items() if name.endswith("-tls")}
    assert set(secrets) == {f"tiny-{role}-tls" for role in (COORDINATOR, GENERATION, TRAINER)}
    for secret in secrets.values():
        assert [owner["name"] for owner in secret["metadata"]["ownerReferences"]] == ["tiny"]
        assert "data" not in secret
        assert "immutable" not in secret
    wrote = [(verb, kind) for verb, kind in world.server.calls if kind in ("Secret", "Certificate") and verb != "get"]
    assert wrote.index(("create", "Secret")) < wrote.index(("apply", "Certificate"))
    writes = len(world.server.writes())
    world.reconcile()
    assert len(world.server.writes()) == writes


def test_a_secret_of_the_users_that_is_not_there_is_waited_for() -> None:
    world = World({"tls": {"mode": "ExistingSecret", "secretName": "mine"}})
    after = world.settle()
    assert world.said("Accepted") == ("False", "SecretMissing")
    assert after is not None
    assert not world.server.of(JOB_SET)
    metadata = {"name": "mine", "namespace": "rl"}
    world.server.put(SECRET.object(metadata, data={"tls.crt": "eA==", "tls.key": "eA=="}))
    world.settle()
    assert "got mine: one without ca.crt" in next(
        it["message"] for it in world.status["conditions"] if it["type"] == "Accepted"
    )
    world.server.put(SECRET.object(metadata, data=dict.fromkeys(("tls.crt", "tls.key", "ca.crt"), "eA==")))
    world.settle()
    assert world.said("Accepted") == ("True", "Runnable")
    assert world.server.of(JOB_SET)


def test_pods_that_wait_say_what_for() -> None:
    world = World()
    world.reconcile()
    owner = world.server.of(JOB_SET)["tiny-trainer"]
    pod = a_pod("tiny-trainer-0", TRAINER, owner, is_ready=False)
    pod["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/36 nodes are available"}],
    }
    world.server.put(pod)
    coordinator = a_pod(
        "tiny-coordinator-0", COORDINATOR, world.server.of(DEPLOYMENT)["tiny-coordinator"], is_ready=False
    )
    waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "mine" not found'}}
    coordinator["status"] = {"phase": "Pending", "containerStatuses": [{"name": COORDINATOR, "state": waiting}]}
    world.server.put(coordinator)
    world.reconcile()
    assert world.said("TrainerReady") == ("False", "InsufficientCapacity")
    assert world.said("CoordinatorReady") == ("False", "ConfigurationMissing")
    ready = next(it for it in world.status["conditions"] if it["type"] == "Ready")
    assert ready["reason"] == "ConfigurationMissing"
    assert 'secret "mine" not found' in ready["message"]


def test_a_job_s_own_store_is_left_out_where_it_names_one() -> None:
    world = World({"store": {"redis": {"addresses": ["redis.infra:6380"]}}})
    world.settle()
    assert f"tiny-{STORE}" not in world.server.of(STATEFUL_SET)
    assert ("Secret", "tiny-store") not in world.names()


def test_pods_that_run_without_a_channel_are_not_said_to_have_one() -> None:
    preferred = {"placement": {"nvlink": "Preferred"}}
    world = World(PAPER, preferred, served=JOBSET_ONLY)
    world.settle()
    assert world.status["placement"] == {"multiNodeNVLink": "Inactive"}
    world.server.group_versions = EVERYTHING
    world.settle()
    assert world.status["placement"] == {"multiNodeNVLink": "Inactive"}
    assert world.server.of(COMPUTE_DOMAIN) == {}
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.settle()
    assert world.status["placement"] == {"multiNodeNVLink": "Active"}
    assert world.said("Ready") == ("True", "AllPartsReady")


class Behind:
    """A cache that has not seen any child yet."""

    def __init__(self, served: frozenset[str]) -> None:
        self.served = served

    def find(self, kind: Kind, namespace: str, job: str) -> list[Object]:
        return []


def test_a_cache_that_is_behind_does_no_harm_to_what_runs() -> None:
    world = World()
    world.settle()
    admitted = world.server.of(JOB_SET)["tiny-trainer"]
    admitted["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["nodeSelector"] = {"flavor": "a"}
    world.server.put(admitted)
    before = {name: it for name, it in world.state().items() if not name.startswith("RLJob")}
    behind = Behind(world.server.group_versions)
    Reconciler(world.server, world.settings, lambda: world.now, behind).reconcile("rl", "tiny")
    assert {name: it for name, it in world.state().items() if not name.startswith("RLJob")} == before
    world.settle()
    assert world.said("Ready") == ("True", "AllPartsReady")


def test_a_status_is_not_written_over_what_was_said_meanwhile() -> None:
    world = World()
    world.settle()
    world.edit(generation={"replicas": 2})

    def meanwhile(verb: str, body: Object) -> ClusterError | None:
        if verb == "apply" and body["kind"] == "RLJob" and "state" in body["status"]:
            world.server.refuse = lambda verb, body: None
            world.report(progress={"step": 1, "lastUpdateTime": "2026-01-01T00:00:00Z"})
        return None

    world.server.refuse = meanwhile
    with pytest.raises(ClusterError) as caught:
        world.reconcile()
    assert caught.value.status == 409
    world.settle()
    assert world.status["progress"]["step"] == 1
    assert world.status["generation"]["replicas"] == 2
