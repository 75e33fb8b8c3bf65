"""A release is upgraded and rolled back under running jobs, on a real kubelet.

The newer version is this tree with one more field, which has a default (story/newer.py). The job `kept` leaves it out,
and the job `added` sets it (story/upgrade.py):

    kept:   trains - upgrade - two operators - suspended - resumed - rollback - suspended - resumed - ends
    added:                                                 trains  - rollback ------------------------ ends

Both jobs have no queue. The tests judge what was seen. All of it takes `make test-cluster FULL=1`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.pods import create_restricted_namespace
from tests.cluster.product import NAMESPACE, RELEASE, build_values, install_release, prepare_engines, push_digests
from tests.cluster.story.log import FULL, StoryLog
from tests.cluster.story.newer import DEFAULT, FIELD, SECTION, TAG, VERSION, build_newer
from tests.cluster.story.run import read_claim
from tests.cluster.story.upgrade import (
    SCHEDULE,
    STEPS,
    Run,
    Seen,
    roll_back_while_both_train,
    suspend,
    train_both,
    upgrade_while_it_trains,
)
from tests.e2e.harness.api import find_condition, is_condition_true
from tests.e2e.harness.release import Release

pytestmark = [
    pytest.mark.timeout(5400),  # as in test_story.py
    pytest.mark.skipif(not FULL, reason="upgrades of running jobs: make test-cluster FULL=1"),
]

ROLES = {"coordinator": "control", "store": "store", "generation": "generation", "trainer": "trainer"}
"""Image of each role."""


@pytest.fixture(scope="module")
def seen(
    cluster: Cluster, jobset: None, helm: Path, log: StoryLog, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seen]:
    """An upgrade and a rollback under both jobs."""
    old = prepare_engines(cluster, log)
    newer = build_newer(tmp_path_factory.mktemp("newer"))
    log.add(f"built {VERSION}")
    push_digests(cluster, newer.digests, TAG)
    log.add(f"pushed its images, control by {newer.digests['control']}")
    found = Seen(old, old | newer.digests)
    with install_release(cluster, helm, old) as release:
        values = build_values(found.new)
        upgraded = Release(helm, cluster.kubeconfig, RELEASE, NAMESPACE, values, chart=newer.chart)
        runs = {name: Run(cluster, name, log) for name in STEPS}
        for name in runs:
            create_restricted_namespace(cluster.admin, name)
        upgrade_while_it_trains(found, runs["kept"], upgraded)
        suspend(found, runs["kept"])
        train_both(found, **runs)
        roll_back_while_both_train(found, release, **runs)
        for name, run in runs.items():
            found.finished[name] = run.await_true("Complete")
            _, found.steps[name] = read_claim(cluster.admin, name, old["control"])
            events = cluster.admin.list("v1/events", name)
            found.reasons |= {event["reason"] for event in events if event["involvedObject"]["kind"] == "RLJob"}
        yield found
        for name in runs:
            cluster.admin.delete("v1/namespaces", name)


def _images_of(digests: dict[str, str]) -> dict[str, str]:
    return {role: digests[image] for role, image in ROLES.items()}


def _by_role(pods: dict[str, str]) -> dict[str, str]:
    return {name.partition(" ")[0]: image for name, image in pods.items()}


def test_a_running_job_keeps_its_pods_and_their_images_through_an_upgrade(seen: Seen) -> None:
    """And through a change of the operator's version in both directions."""
    assert _by_role(seen.pods["before"]) == _images_of(seen.old)
    assert seen.pods["before"] == seen.pods["upgraded"] == seen.pods["older"] == seen.pods["newer"]


def test_a_running_job_is_never_judged_wrong_while_versions_differ(seen: Seen) -> None:
    """The API server fills in the new field's default. The older operator called every running job SpecInvalid."""
    assert {condition["status"] for condition in seen.accepted.values()} == {"True"}
    assert len({condition["lastTransitionTime"] for condition in seen.accepted.values()}) == 1
    assert f"ignores {SECTION}.{FIELD}" in seen.accepted["older"]["message"]
    assert FIELD not in seen.accepted["newer"]["message"]
    assert "SpecInvalid" not in seen.reasons


def test_operators_of_two_versions_do_not_write_against_each_other(seen: Seen) -> None:
    """One leads at a time. Whichever does, it writes no child of a running job."""
    assert seen.leaders == [seen.new["control"], seen.old["control"], seen.new["control"]]
    assert seen.writes["before"] == seen.writes["upgraded"] == seen.writes["older"] == seen.writes["newer"]


def test_a_suspended_job_holds_no_pod_and_says_so(seen: Seen) -> None:
    assert seen.left == []
    assert [job["status"]["state"] for job in seen.suspended] == ["Suspended", "Suspended"]
    assert all(find_condition(job, "Suspended")["reason"] == "PodsDeleted" for job in seen.suspended)


def test_a_resumed_job_gets_the_images_of_the_release(seen: Seen) -> None:
    """The new ones after the upgrade, the old ones after the rollback."""
    assert _by_role(seen.pods["resumed"]) == _images_of(seen.new)
    assert seen.pods["rolled back"] == seen.pods["resumed"]
    assert _by_role(seen.pods["resumed again"]) == _images_of(seen.old)


def test_a_new_job_uses_the_new_field_and_the_new_images(seen: Seen) -> None:
    assert f"{FIELD}: {DEFAULT + 7}" in seen.run_file
    assert _by_role(seen.pods["added"]) == _images_of(seen.new)
    for role in ("coordinator", "trainer", "generation"):
        assert json.loads(seen.first_lines[role])["version"].startswith(VERSION)


def test_a_job_with_the_new_field_completes_after_a_rollback(seen: Seen) -> None:
    """Its pods keep the run file that they were started with, while the older definition drops the field."""
    assert FIELD not in seen.rolled_back["spec"][SECTION]
    assert seen.pods["added, rolled back"] == seen.pods["added"]
    assert is_condition_true(seen.finished["added"], "Complete")


def test_no_step_is_lost_or_trained_twice(seen: Seen) -> None:
    """Through two suspensions, an upgrade and a rollback."""
    for name, steps in STEPS.items():
        assert seen.finished[name]["status"]["progress"]["step"] == steps
        assert [step["step"] for step in seen.steps[name]] == list(range(1, steps + 1))
        assert {step["groups"] for step in seen.steps[name]} == {SCHEDULE["promptsPerStep"]}
        assert not any(step["failed"] for step in seen.steps[name])
        assert not seen.finished[name]["status"].get("restarts")
