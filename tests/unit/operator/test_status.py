"""The status: tables of cases, and properties over any order of events."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.operator.builders import ALL, PAPER, ClusterFacts, a_job, plan_job
from tests.unit.operator.world import a_pod, creating_since

from specrl_operator.api import (
    COMPONENT_LABEL,
    COORDINATOR,
    GENERATION,
    STORE,
    TRAINER,
    Job,
    Object,
    find_condition,
    format_time,
    trim_object,
)
from specrl_operator.kinds import JOB_SET
from specrl_operator.observed import ObservedState
from specrl_operator.plan.acceptance import Refusal
from specrl_operator.plan.decision import make_decision
from specrl_operator.status.deadlines import find_next_deadline_s
from specrl_operator.status.job_status import build_status
from specrl_operator.status.readiness import ROLE_CONDITIONS

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ROLES = (STORE, COORDINATOR, TRAINER, GENERATION)


@dataclass(frozen=True)
class Seen(ObservedState):
    """An observed state, and whether the API server rejected a child."""

    refusal: Refusal | None = None


def status_of(job: Job, given_facts: ClusterFacts, seen: Seen, now: datetime) -> Object:
    """Build the status of a job with this observed state."""
    plan = plan_job(job, given_facts)
    decision = make_decision(plan, seen, now)
    return build_status(plan, decision, seen, seen.refusal or decision.refusal, now)


def owner(component: str) -> Object:
    return {"kind": "X", "metadata": {"uid": component, "labels": {"specrl.dev/rljob": "tiny"}}}


def pods(**ready: Any) -> tuple[Object, ...]:
    """Build pods by role, from a list of whether each is ready."""
    return tuple(
        a_pod(f"tiny-{role}-{number}", role, owner(role), is_ready=is_ready)
        for role, states in ready.items()
        for number, is_ready in enumerate(states)
    )


def role_of(pod: Object) -> str:
    return str(pod["metadata"]["labels"][COMPONENT_LABEL])


def whole(**changes: Any) -> Seen:
    """Build an observed state in which everything exists and is ready."""
    trainer = {"apiVersion": JOB_SET.api_version, "kind": "JobSet", "metadata": {"name": "tiny-trainer"}}
    every = pods(store=[True], coordinator=[True], trainer=[True], generation=[True])
    return replace(Seen(trainer=trainer, pods=every, has_claim_template=True), **changes)


def said(status: Object, kind: str) -> tuple[str | None, str | None]:
    found = find_condition(status, kind)
    return found.get("status"), found.get("reason")


@pytest.mark.parametrize(
    ("observed", "state", "ready"),
    [
        (whole(), "Running", ("True", "AllPartsReady")),
        (whole(pods=pods(coordinator=[True])), "Starting", ("False", "PodsPending")),
        (whole(refusal=Refusal("ChildConflict", "rename it")), "NotAccepted", ("False", "ChildConflict")),
        (
            whole(pods=pods(store=[True], coordinator=[False], trainer=[True], generation=[True])),
            "Starting",
            ("False", "PodsNotReady"),
        ),
    ],
)
def test_the_state_follows_from_the_conditions(observed: Seen, state: str, ready: tuple[str, str]) -> None:
    status = status_of(a_job(), ClusterFacts(), observed, NOW)
    assert status["state"] == state
    assert said(status, "Ready") == ready


def test_a_role_is_ready_with_as_many_pods_as_it_needs() -> None:
    job = a_job({"generation": {"replicas": 4}, "failurePolicy": {"minGenerationReplicas": 2}})
    for count, is_ready in ((1, "False"), (2, "True"), (4, "True")):
        states = [number < count for number in range(4)]
        observed = whole(pods=pods(coordinator=[True], trainer=[True], generation=states))
        assert said(status_of(job, ClusterFacts(), observed, NOW), "GenerationReady")[0] == is_ready


def test_the_most_specific_problem_is_the_reason() -> None:
    broken = pods(trainer=[False])[0]
    broken["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}],
    }
    observed = whole(pods=(*pods(coordinator=[False], generation=[False]), broken))
    status = status_of(a_job(), ClusterFacts(), observed, NOW)
    assert said(status, "Ready") == ("False", "ImagePullFailed")
    assert "no such image" in find_condition(status, "Ready")["message"]


UNBOUND = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found"


@pytest.mark.parametrize(
    ("status", "reason", "remedy"),
    [
        ({"conditions": [{"type": "PodScheduled", "status": "False", "message": UNBOUND}]}, "VolumeUnavailable", "pvc"),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "x" * 2000}}}]},
            "ImagePullFailed",
            "images.pullSecrets",
        ),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3: Insufficient cpu"}]},
            "Unschedulable",
            "nodes that fit",
        ),
    ],
)
def test_a_store_that_cannot_start_is_named_with_its_cause_and_remedy(status: Object, reason: str, remedy: str) -> None:
    """The store had no condition: its coordinator was not ready, and nothing said why."""
    (store,) = pods(store=[False])
    store["status"] = {"phase": "Pending", **status}
    observed = whole(pods=(store, *pods(coordinator=[False])))
    shown = status_of(a_job(), ClusterFacts(), observed, NOW)
    assert said(shown, "StoreReady") == ("False", reason)
    assert said(shown, "Ready") == ("False", reason)
    message = find_condition(shown, "Ready")["message"]
    assert message.startswith("StoreReady: 0 of at least 1 ready: tiny-store-0: ")
    assert remedy in message
    assert shown["store"] == {"replicas": 1, "readyReplicas": 0}


@pytest.mark.parametrize(
    ("reason", "words", "remedy"),
    [
        (
            "CreateContainerConfigError",
            'failed to create subPath directory for volumeMount "run" of container "coordinator"',
            "no_root_squash",
        ),
        (
            "CreateContainerError",
            f'failed to generate container "{"0" * 64}" spec: failed to apply OCI options: failed to mkdir "": mkdir : '
            "no such file or directory",
            "containerd 2.1",
        ),
    ],
)
def test_a_container_that_cannot_be_created_is_explained_where_the_kubelet_gives_no_cause(
    reason: str, words: str, remedy: str
) -> None:
    """A claim to which root of the node may not write, and a runtime that mounts no images."""
    (pod,) = pods(coordinator=[False])
    waiting = {"waiting": {"reason": reason, "message": words}}
    pod["status"] = {"phase": "Pending", "containerStatuses": [{"state": waiting}]}
    shown = status_of(a_job(), ClusterFacts(), whole(pods=(pod, *pods(store=[True]))), NOW)
    assert said(shown, "CoordinatorReady") == ("False", "ConfigurationMissing")
    message = find_condition(shown, "CoordinatorReady")["message"]
    assert f"{words}; " in message
    assert remedy in message


def test_a_job_with_a_store_of_its_users_has_no_condition_of_one() -> None:
    shown = status_of(a_job({"store": {"sqlite": {}}}), ClusterFacts(), whole(), NOW)
    assert find_condition(shown, "StoreReady") == {}
    assert "store" not in shown


def test_a_node_that_does_not_answer_is_named_with_what_to_do() -> None:
    """H2: nothing is replaced while the pod's object stays, and the condition said that pods were not ready."""
    (lost,) = pods(trainer=[False])
    lost["spec"] = {"nodeName": "rack-1"}
    lost["metadata"]["deletionTimestamp"] = format_time(NOW)
    observed = whole(pods=(*pods(store=[True], coordinator=[False], generation=[True]), lost))

    def look(after_s: int) -> Object:
        moment = NOW + timedelta(seconds=after_s)
        return status_of(a_job(), ClusterFacts(), replace(observed, moment=moment), moment)

    assert said(look(59), "Ready") == ("False", "PodsNotReady")
    assert said(look(60), "Ready") == ("False", "NodeLost")
    message = find_condition(look(60), "Ready")["message"]
    assert "kubectl taint nodes rack-1 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute" in message
    lost["status"]["phase"] = "Succeeded"
    assert said(look(60), "Ready") == ("False", "PodsNotReady"), "a finalizer keeps it, not its kubelet"


def test_a_node_that_stops_answering_is_named_before_kubernetes_gives_its_pods_up() -> None:
    """The condition said for seven minutes that pods were not ready. The node controller changes Ready alone."""
    (silent,) = pods(trainer=[False])
    silent["spec"] = {"nodeName": "rack-1"}
    observed = whole(pods=(*pods(store=[True], coordinator=[False], generation=[True]), silent))
    by_kubelet = {"type": "ContainersReady", "status": "False"}
    silent["status"]["conditions"].append(by_kubelet)
    assert said(status_of(a_job(), ClusterFacts(), observed, NOW), "TrainerReady") == ("False", "PodsNotReady")
    by_kubelet["status"] = "True"
    shown = status_of(a_job(), ClusterFacts(), observed, NOW)
    assert said(shown, "Ready") == ("False", "NodeLost")
    assert "its node rack-1 does not answer" in find_condition(shown, "TrainerReady")["message"]
    # As the cache keeps a pod. It kept no gates, so each such pod was on a lost node.
    gated = trim_object({**silent, "spec": {"readinessGates": [{"conditionType": "example.com/gate"}]}})
    observed = replace(observed, pods=(*observed.pods[:-1], gated))
    assert said(status_of(a_job(), ClusterFacts(), observed, NOW), "TrainerReady") == ("False", "PodsNotReady")


def test_quota_is_reserved_once_kueue_has_admitted_both() -> None:
    job = a_job({"scheduling": {"queueName": "team-a"}})
    suspended = {**(whole().trainer or {}), "spec": {"suspend": True}}
    waiting = whole(trainer=suspended, pods=())
    assert said(status_of(job, ClusterFacts(ALL), waiting, NOW), "QuotaReserved") == ("False", "Pending")
    assert status_of(job, ClusterFacts(ALL), waiting, NOW)["state"] == "Queued"
    gated = pods(generation=[False])
    gated[0]["spec"] = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    half = whole(pods=gated)
    assert said(status_of(job, ClusterFacts(ALL), half, NOW), "QuotaReserved") == ("False", "Pending")
    assert said(status_of(job, ClusterFacts(ALL), whole(), NOW), "QuotaReserved") == ("True", "Admitted")


def test_a_failed_collective_is_the_reason_for_no_progress() -> None:
    broken = {"type": "CollectiveReady", "status": "False", "reason": "PreflightFailed", "message": "see the network"}
    job = a_job(status={"progress": {"step": 0, "lastUpdateTime": format_time(NOW)}, "conditions": [broken]})
    assert said(status_of(job, ClusterFacts(), whole(), NOW), "Progressing") == ("False", "PreflightFailed")


def test_a_run_without_progress_for_an_hour_is_stalled() -> None:
    job = a_job(status={"progress": {"step": 3, "lastUpdateTime": format_time(NOW)}})
    soon = NOW + timedelta(minutes=59)
    late = NOW + timedelta(minutes=61)
    assert said(status_of(job, ClusterFacts(), whole(), soon), "Progressing") == ("True", "StepsTrained")
    assert said(status_of(job, ClusterFacts(), whole(), late), "Progressing") == ("False", "Stalled")
    held = a_job(status={"progress": {"step": 3, "paused": True, "lastUpdateTime": format_time(NOW)}})
    assert said(status_of(held, ClusterFacts(), whole(), late), "Progressing") == ("False", "Paused")


def test_a_condition_keeps_its_transition_time_until_its_status_changes() -> None:
    first = status_of(a_job(), ClusterFacts(), whole(), NOW)
    later = NOW + timedelta(hours=1)
    again = status_of(a_job(status=first), ClusterFacts(), whole(), later)
    assert again["conditions"] == first["conditions"]
    turned = status_of(a_job(status=first), ClusterFacts(), whole(pods=()), later)
    assert find_condition(turned, "Ready")["lastTransitionTime"] == format_time(later)
    assert find_condition(turned, "Accepted")["lastTransitionTime"] == format_time(NOW)


def test_placement_shows_whether_weights_are_sent_over_nvlink() -> None:
    def shown(transport: str | None, *changes: Object) -> Object:
        status = {} if transport is None else {"progress": {"ncclTransport": transport}}
        found: Object = status_of(a_job(PAPER, *changes, status=status), ClusterFacts(), whole(), NOW)["placement"]
        return found

    assert shown(None) == {"multiNodeNVLink": "Unknown"}
    assert shown("P2P/MNNVL") == {"multiNodeNVLink": "Active"}
    assert shown("NET/IB, P2P/MNNVL") == {"multiNodeNVLink": "Active"}
    assert shown("NET/Socket") == {"multiNodeNVLink": "Inactive"}
    alone = {"trainer": {"numNodes": 1, "parallelism": {"tensor": 4, "data": 1}}}
    assert shown(None, alone, {"placement": {"nvlink": "Preferred", "layout": "Any"}}) == {
        "multiNodeNVLink": "Inactive"
    }
    assert "placement" not in status_of(a_job(), ClusterFacts(), whole(), NOW)


def test_messages_are_cut_to_their_maximum_length() -> None:
    observed = whole(refusal=Refusal("ChildRejected", "x" * 5000))
    for condition in status_of(a_job(), ClusterFacts(), observed, NOW)["conditions"]:
        assert len(condition["message"]) <= 1024


# -- any order -------------------------------------------------------------------------------------------------------


@st.composite
def observations(draw: Any) -> Seen:
    every = pods(**{role: draw(st.lists(st.booleans(), max_size=2)) for role in ROLES})
    for pod in every:
        trouble = draw(st.sampled_from([None, "ErrImagePull", "exit", "unschedulable"]))
        if find_condition(pod["status"], "Ready")["status"] == "True" or trouble is None:
            continue
        if trouble == "exit":
            ended = {"terminated": {"exitCode": 1, "message": "lost"}}
            pod["status"]["containerStatuses"] = [{"name": role_of(pod), "restartCount": 1, "state": ended}]
        elif trouble == "unschedulable":
            pod["status"]["conditions"].append({"type": "PodScheduled", "status": "False", "message": "0 of 3"})
        else:
            pod["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": trouble}}}]
    found = whole(pods=every, has_claim_template=draw(st.booleans()))
    refusal = draw(st.sampled_from([None, None, Refusal("ChildConflict", "rename")]))
    return replace(found, trainer=draw(st.sampled_from([None, found.trainer])), refusal=refusal)


def timeless(status: Object) -> Object:
    """Return a status without times, and without the fields that intentionally remember earlier states."""
    conditions = [
        {name: value for name, value in it.items() if name != "lastTransitionTime"}
        for it in status["conditions"]
        if it["type"] not in ("Started", "Suspended")
    ]
    kept = {name: value for name, value in status.items() if name not in ("startTime", "state", "conditions")}
    return {**kept, "conditions": conditions}


def after(job: Job, history: list[Seen]) -> Object:
    """Build the status after observing these states one after the other."""
    status: Object = {}
    for number, observed in enumerate(history):
        now = NOW + timedelta(seconds=number)
        status = status_of(replace(job, status=status), ClusterFacts(), observed, now)
    return status


@settings(max_examples=60)
@given(st.lists(observations(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_any_order_of_events_ends_in_the_same_status(history: list[Seen], random: Any) -> None:
    job = a_job(PAPER)
    last = history[-1]
    other = history[:-1]
    random.shuffle(other)
    direct = after(job, [last])
    assert timeless(after(job, history)) == timeless(direct)
    assert timeless(after(job, [*other, last])) == timeless(direct)
    shuffled = list(last.pods)
    random.shuffle(shuffled)
    assert timeless(after(job, [replace(last, pods=tuple(shuffled))])) == timeless(direct)


@settings(max_examples=60)
@given(observations())
def test_building_a_status_again_changes_nothing(observed: Seen) -> None:
    job = a_job(PAPER)
    first = status_of(job, ClusterFacts(), observed, NOW)
    assert status_of(replace(job, status=first), ClusterFacts(), observed, NOW + timedelta(hours=2)) == first


@settings(max_examples=60)
@given(st.lists(observations(), max_size=4), st.sampled_from(["Complete", "Failed"]))
def test_a_terminal_condition_stays_whatever_follows(history: list[Seen], word: str) -> None:
    spoken = {
        "type": word,
        "status": "True",
        "reason": "MaxStepsReached",
        "message": "",
        "lastTransitionTime": format_time(NOW),
    }
    status: Object = {"conditions": [spoken], "completionTime": format_time(NOW)}
    for observed in history:
        job = a_job(PAPER, status=status)
        status = status_of(job, ClusterFacts(), observed, NOW + timedelta(hours=1))
        assert said(status, word) == ("True", "MaxStepsReached")
        assert status["completionTime"] == format_time(NOW)
        assert status["state"] == word
        assert len([it for it in status["conditions"] if it["type"] in ("Complete", "Failed")]) == 1


@settings(max_examples=60)
@given(observations(), st.booleans())
def test_the_desired_state_follows_from_the_observed_one(observed: Seen, suspend: bool) -> None:
    job = a_job(PAPER, {"suspend": suspend})
    state = make_decision(plan_job(job, ClusterFacts()), observed, NOW).state
    if suspend:
        assert state.name == ("SAVING" if observed.pods_of(COORDINATOR) else "STOPPED")
    else:
        waits = observed.trainer is None and not observed.has_claim_template
        assert state.name == ("WAITING" if waits else "RUNNING")


def test_the_next_reconciliation_is_due_at_the_next_deadline() -> None:
    job = a_job({"activeDeadlineSeconds": 100, "startupDeadlineSeconds": 40})
    status = status_of(job, ClusterFacts(), whole(pods=()), NOW)
    assert find_next_deadline_s(job, status, NOW, None) == pytest.approx(41)
    started = status_of(job, ClusterFacts(), whole(), NOW)
    assert find_next_deadline_s(job, started, NOW, None) == pytest.approx(101)
    assert find_next_deadline_s(a_job(), status_of(a_job(), ClusterFacts(), whole(), NOW), NOW, None) is None


MOUNT_FAILED: Object = {"reason": "FailedMount", "message": 'MountVolume.SetUp failed: secret "s3" not found'}
PULLING: Object = {"reason": "Pulling", "message": 'Pulling image "registry/trainer"'}


@pytest.mark.parametrize(
    ("seconds", "event", "reason", "words"),
    [
        (39, {}, "PodsPending", "tiny-trainer-0"),
        (40, {}, "ConfigurationMissing", "have not been created for 40 s: a volume cannot be mounted; check that"),
        (40, None, "PodsPending", "tiny-trainer-0"),  # another pod of the role was asked about
        (20, MOUNT_FAILED, "ConfigurationMissing", 'secret "s3" not found; check that claims, Secrets and ConfigMaps'),
        (4000, PULLING, "PodsPending", 'tiny-trainer-0: Pulling image "registry/trainer"'),
    ],
)
def test_a_pod_without_containers_says_why_within_a_minute(
    seconds: int, event: Object | None, reason: str, words: str
) -> None:
    """A claim that is mounted on another node showed as PodsPending without a word, later after two minutes."""
    pod = a_pod("tiny-trainer-0", "trainer", owner("trainer"), is_ready=False)
    pod["status"] = creating_since("2026-01-01T00:00:00Z")
    now = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    told = {} if event is None else {"tiny-trainer-0": event}
    everything = (*pods(coordinator=[True], generation=[True]), pod)
    found = status_of(a_job(), ClusterFacts(), whole(pods=everything, creation_events=told, moment=now), now)
    condition = find_condition(found, "TrainerReady")
    assert condition["reason"] == reason
    assert words in condition["message"]


def ended(code: int, message: str) -> Object:
    return {"terminated": {"exitCode": code, "message": message}}


@pytest.mark.parametrize(
    ("init", "main", "failed", "trainer"),
    [
        ({"running": {}}, {}, None, "PodsPending"),
        (ended(2, "specrl fetch: uri must name a model"), {}, "uri must name a model", "Stopped"),
        (ended(0, ""), ended(2, "specrl-trainer: no such folder"), "no such folder", "Stopped"),
        (ended(0, ""), {"running": {}}, None, "PodsNotReady"),
    ],
)
def test_what_an_init_container_does_and_refuses_is_in_the_conditions(
    init: Object, main: Object, failed: str | None, trainer: str
) -> None:
    """An init container that had ended with 0 hid every later exit code of its pod, such as 2, which a restart cannot
    help. One that ran for 40 s was said to be a volume that cannot be mounted."""
    pod = a_pod("tiny-trainer-0", "trainer", owner("trainer"), is_ready=False)
    pod["status"] = creating_since("2026-01-01T00:00:00Z") | {"phase": "Running" if main else "Pending"}
    pod["status"]["initContainerStatuses"] = [{"name": "fetch-0", "state": init}]
    if main:
        pod["status"]["containerStatuses"] = [{"name": "trainer", "state": main}]
    now = NOW + timedelta(hours=1)
    everything = (*pods(coordinator=[True], generation=[True]), pod)
    seen = whole(pods=everything, creation_events={"tiny-trainer-0": {}}, moment=now)
    status = status_of(a_job(), ClusterFacts(), seen, now)
    condition = find_condition(status, "TrainerReady")
    assert condition["reason"] == trainer
    assert ("`kubectl logs -c fetch-0` has its progress" in condition["message"]) == (trainer == "PodsPending")
    found = find_condition(status, "Failed")
    assert found.get("reason") == (failed and "RunRefused")
    assert (failed or "") in found.get("message", "")


SIDECAR_STOPPED = {"name": "proxy", "restartCount": 9, "state": ended(143, "")}
PANIC = {"name": "proxy", "restartCount": 9, "lastState": ended(2, "goroutine 1 [running]")}
REFUSED = {"name": "trainer", "restartCount": 0, "state": ended(2, "specrl-trainer: no such folder")}


@pytest.mark.parametrize(
    ("role", "init", "main", "failed", "reason"),
    [
        ("trainer", [], [PANIC], None, "CrashLooping"),
        ("coordinator", [], [PANIC], None, "CrashLooping"),
        ("coordinator", [PANIC], [], None, "CrashLooping"),
        ("trainer", [SIDECAR_STOPPED], [REFUSED], "no such folder", "Stopped"),
    ],
)
def test_a_sidecar_neither_ends_a_run_nor_hides_why_it_ends(
    role: str, init: list[Object], main: list[Object], failed: str | None, reason: str
) -> None:
    """A proxy that a webhook adds exits with 2 when it panics, and with 143 after a trainer that has ended with 2."""
    pod = a_pod(f"tiny-{role}-0", role, owner(role), is_ready=False)
    pod["status"] |= {"initContainerStatuses": init, "containerStatuses": main}
    others = (it for it in whole().pods if role_of(it) != role)
    status = status_of(a_job(), ClusterFacts(), whole(pods=(*others, pod), moment=NOW), NOW)
    assert find_condition(status, "Failed").get("reason") == (failed and "RunRefused")
    assert (failed or "") in find_condition(status, "Failed").get("message", "")
    assert said(status, ROLE_CONDITIONS[role]) == ("False", reason)
