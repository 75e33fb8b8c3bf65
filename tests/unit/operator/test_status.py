"""A status is what is there: as a table, and as a property of any order in which it came to be there."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.operator.builders import ALL, PAPER, a_job, facts
from tests.unit.operator.world import a_pod

from specrl_operator.acceptance import Refusal
from specrl_operator.api import (
    COORDINATOR,
    GENERATION,
    JOB_SET,
    TRAINER,
    Job,
    Object,
    condition_of,
    write_time,
)
from specrl_operator.status import Observed, next_moment, summarize, want_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ROLES = (COORDINATOR, TRAINER, GENERATION)


def owner(component: str) -> Object:
    return {"kind": "X", "metadata": {"uid": component, "labels": {"specrl.dev/rljob": "tiny"}}}


def pods(**ready: Any) -> tuple[Object, ...]:
    """Pods by role: a list of whether each is ready."""
    return tuple(
        a_pod(f"tiny-{role}-{number}", role, owner(role), is_ready=is_ready)
        for role, states in ready.items()
        for number, is_ready in enumerate(states)
    )


def whole(**changes: Any) -> Observed:
    """Everything is there and ready."""
    trainer = {"apiVersion": JOB_SET.api_version, "kind": "JobSet", "metadata": {"name": "tiny-trainer"}}
    every = pods(coordinator=[True], trainer=[True], generation=[True])
    return replace(Observed(trainer=trainer, pods=every, has_claim_template=True), **changes)


def said(status: Object, kind: str) -> tuple[str | None, str | None]:
    found = condition_of(status, kind)
    return found.get("status"), found.get("reason")


@pytest.mark.parametrize(
    ("observed", "state", "ready"),
    [
        (whole(), "Running", ("True", "AllPartsReady")),
        (whole(pods=pods(coordinator=[True])), "Starting", ("False", "PodsPending")),
        (whole(refusal=Refusal("ChildConflict", "rename it")), "NotAccepted", ("False", "ChildConflict")),
        (
            whole(pods=pods(coordinator=[False], trainer=[True], generation=[True])),
            "Starting",
            ("False", "PodsNotReady"),
        ),
    ],
)
def test_the_state_follows_from_the_conditions(observed: Observed, state: str, ready: tuple[str, str]) -> None:
    status = summarize(a_job(), facts(), observed, NOW)
    assert status["state"] == state
    assert said(status, "Ready") == ready


def test_ready_counts_what_the_role_needs() -> None:
    job = a_job({"generation": {"replicas": 4}, "failurePolicy": {"minGenerationReplicas": 2}})
    for count, is_ready in ((1, "False"), (2, "True"), (4, "True")):
        states = [number < count for number in range(4)]
        observed = whole(pods=pods(coordinator=[True], trainer=[True], generation=states))
        assert said(summarize(job, facts(), observed, NOW), "GenerationReady")[0] == is_ready


def test_the_worst_explains_and_not_the_first() -> None:
    broken = pods(trainer=[False])[0]
    broken["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}],
    }
    observed = whole(pods=(*pods(coordinator=[False], generation=[False]), broken))
    status = summarize(a_job(), facts(), observed, NOW)
    assert said(status, "Ready") == ("False", "ImagePullFailed")
    assert "no such image" in condition_of(status, "Ready")["message"]


def test_quota_is_reserved_once_kueue_has_admitted_both() -> None:
    job = a_job({"scheduling": {"queueName": "team-a"}})
    suspended = {**(whole().trainer or {}), "spec": {"suspend": True}}
    waiting = whole(trainer=suspended, pods=())
    assert said(summarize(job, facts(ALL), waiting, NOW), "QuotaReserved") == ("False", "Pending")
    assert summarize(job, facts(ALL), waiting, NOW)["state"] == "Queued"
    gated = pods(generation=[False])
    gated[0]["spec"] = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    half = whole(pods=gated)
    assert said(summarize(job, facts(ALL), half, NOW), "QuotaReserved") == ("False", "Pending")
    assert said(summarize(job, facts(ALL), whole(), NOW), "QuotaReserved") == ("True", "Admitted")


def test_a_preflight_that_failed_is_why_nothing_moves() -> None:
    broken = {"type": "CollectiveReady", "status": "False", "reason": "PreflightFailed", "message": "see the network"}
    job = a_job(status={"progress": {"step": 0, "lastUpdateTime": write_time(NOW)}, "conditions": [broken]})
    assert said(summarize(job, facts(), whole(), NOW), "Progressing") == ("False", "PreflightFailed")


def test_a_run_that_says_nothing_new_for_an_hour_has_stalled() -> None:
    job = a_job(status={"progress": {"step": 3, "lastUpdateTime": write_time(NOW)}})
    soon, late = NOW + timedelta(minutes=59), NOW + timedelta(minutes=61)
    assert said(summarize(job, facts(), whole(), soon), "Progressing") == ("True", "StepsAreTrained")
    assert said(summarize(job, facts(), whole(), late), "Progressing") == ("False", "Stalled")
    held = a_job(status={"progress": {"step": 3, "paused": True, "lastUpdateTime": write_time(NOW)}})
    assert said(summarize(held, facts(), whole(), late), "Progressing") == ("False", "Paused")


def test_a_condition_keeps_its_time_until_it_turns() -> None:
    first = summarize(a_job(), facts(), whole(), NOW)
    later = NOW + timedelta(hours=1)
    again = summarize(a_job(status=first), facts(), whole(), later)
    assert again["conditions"] == first["conditions"]
    turned = summarize(a_job(status=first), facts(), whole(pods=()), later)
    assert condition_of(turned, "Ready")["lastTransitionTime"] == write_time(later)
    assert condition_of(turned, "Accepted")["lastTransitionTime"] == write_time(NOW)


def test_placement_says_whether_weights_go_over_nvlink() -> None:
    assert summarize(a_job(PAPER), facts(), whole(), NOW)["placement"] == {"multiNodeNVLink": "Active"}
    apart = a_job(PAPER, {"placement": {"layout": "SeparateDomains"}})
    assert summarize(apart, facts(), whole(), NOW)["placement"] == {"multiNodeNVLink": "Inactive"}
    assert "placement" not in summarize(a_job(), facts(), whole(), NOW)


def test_messages_are_no_longer_than_people_read() -> None:
    observed = whole(refusal=Refusal("ChildRejected", "x" * 5000))
    for condition in summarize(a_job(), facts(), observed, NOW)["conditions"]:
        assert len(condition["message"]) <= 1024


# -- any order -------------------------------------------------------------------------------------------------------


@st.composite
def observations(draw: Any) -> Observed:
    every = pods(**{role: draw(st.lists(st.booleans(), max_size=2)) for role in ROLES})
    for pod in every:
        trouble = draw(st.sampled_from([None, "ErrImagePull", "exit", "unschedulable"]))
        if condition_of(pod["status"], "Ready")["status"] == "True" or trouble is None:
            continue
        if trouble == "exit":
            ended = {"terminated": {"exitCode": 1, "message": "lost"}}
            pod["status"]["containerStatuses"] = [{"restartCount": 1, "state": ended}]
        elif trouble == "unschedulable":
            pod["status"]["conditions"].append({"type": "PodScheduled", "status": "False", "message": "0 of 3"})
        else:
            pod["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": trouble}}}]
    found = whole(pods=every, has_claim_template=draw(st.booleans()))
    refusal = draw(st.sampled_from([None, None, Refusal("ChildConflict", "rename")]))
    return replace(found, trainer=draw(st.sampled_from([None, found.trainer])), refusal=refusal)


def timeless(status: Object) -> Object:
    """A status without what says when, and without what remembers by intention."""
    conditions = [
        {name: value for name, value in it.items() if name != "lastTransitionTime"}
        for it in status["conditions"]
        if it["type"] not in ("Started", "Suspended")
    ]
    kept = {name: value for name, value in status.items() if name not in ("startTime", "state", "conditions")}
    return {**kept, "conditions": conditions}


def after(job: Job, history: list[Observed]) -> Object:
    """The status after these were seen, one after the other."""
    status: Object = {}
    for number, observed in enumerate(history):
        now = NOW + timedelta(seconds=number)
        status = summarize(replace(job, status=status), facts(), observed, now)
    return status


@settings(max_examples=60)
@given(st.lists(observations(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_any_order_of_events_ends_in_the_same_status(history: list[Observed], random: Any) -> None:
    job, last = a_job(PAPER), history[-1]
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
def test_a_second_look_at_the_same_changes_nothing(observed: Observed) -> None:
    job = a_job(PAPER)
    first = summarize(job, facts(), observed, NOW)
    assert summarize(replace(job, status=first), facts(), observed, NOW + timedelta(hours=2)) == first


@settings(max_examples=60)
@given(st.lists(observations(), max_size=4), st.sampled_from(["Complete", "Failed"]))
def test_a_last_word_stays_whatever_follows(history: list[Observed], word: str) -> None:
    spoken = {
        "type": word,
        "status": "True",
        "reason": "MaxStepsReached",
        "message": "",
        "lastTransitionTime": write_time(NOW),
    }
    status: Object = {"conditions": [spoken], "completionTime": write_time(NOW)}
    for observed in history:
        job = a_job(PAPER, status=status)
        status = summarize(job, facts(), observed, NOW + timedelta(hours=1))
        assert said(status, word) == ("True", "MaxStepsReached")
        assert status["completionTime"] == write_time(NOW)
        assert status["state"] == word
        assert len([it for it in status["conditions"] if it["type"] in ("Complete", "Failed")]) == 1


@settings(max_examples=60)
@given(observations(), st.booleans())
def test_what_is_wanted_follows_from_what_is_there(observed: Observed, suspend: bool) -> None:
    job = a_job(PAPER, {"suspend": suspend})
    want = want_of(job, facts(), observed, None)
    if suspend:
        assert want.name == ("SAVING" if observed.of(COORDINATOR) else "STOPPED")
    else:
        waits = observed.trainer is None and not observed.has_claim_template
        assert want.name == ("WAITING" if waits else "RUNNING")


def test_the_next_look_is_due_when_time_alone_changes_something() -> None:
    job = a_job({"activeDeadlineSeconds": 100, "startupDeadlineSeconds": 40})
    status = summarize(job, facts(), whole(pods=()), NOW)
    assert next_moment(job, status, NOW) == pytest.approx(41)
    started = summarize(job, facts(), whole(), NOW)
    assert next_moment(job, started, NOW) == pytest.approx(101)
    assert next_moment(a_job(), summarize(a_job(), facts(), whole(), NOW), NOW) is None
