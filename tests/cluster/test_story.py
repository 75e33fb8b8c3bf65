"""One run as its user sees it: the local example, from the images, in real containers.

The fixture `story` installs the release, applies the example, and watches it until it is Complete. Meanwhile it
connects to the run's ports and scales the RLJob (story/run.py). Afterwards it reads the export, and applies the example
again. The tests judge what it saw.

By default the example has four of its 24 steps, and TLS with certificates in a Secret. With `make test-cluster FULL=1`
it is unchanged, and a pod of each role is deleted while it trains.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import Authority
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.kubectl import Kubectl
from tests.cluster.harness.node import REGISTRY
from tests.cluster.harness.pods import build_server, create_restricted_namespace
from tests.cluster.product import (
    EXAMPLE,
    create_example,
    install_release,
    prepare_engines,
    read_example,
)
from tests.cluster.story.log import FULL, StoryLog
from tests.cluster.story.run import (
    ELSEWHERE,
    NAMESPACE,
    PORTS,
    Story,
    apply_again,
    read_run_folder,
    watch_to_complete,
)
from tests.e2e.harness.api import RLJOBS, Object, find_condition

pytestmark = pytest.mark.timeout(5400)  # of the machine that is busiest; imports of vLLM and torch take most of it
only_full = pytest.mark.skipif(not FULL, reason="the full story: make test-cluster FULL=1")

SCHEDULE: Object = read_example()[1]["spec"]["schedule"]
STEPS = SCHEDULE["steps"] if FULL else 4


@pytest.fixture(scope="module")
def story(cluster: Cluster, jobset: None, kubectl: Kubectl, helm: Path, log: StoryLog) -> Iterator[Story]:
    """The run, from an installed release to a second RLJob of the same name."""
    digests = prepare_engines(cluster, log)
    seen = Story(log, digests)
    with install_release(cluster, helm, digests):
        log.add("installed the release")
        for name in (NAMESPACE, ELSEWHERE):
            create_restricted_namespace(cluster.admin, name)
            cluster.admin.create(build_server("stranger", name))
        job = _apply_example(cluster, kubectl)
        log.add(f"applied the example, with {STEPS} steps")
        watch_to_complete(seen, cluster.admin, kubectl, job)
        read_run_folder(seen, cluster.admin)
        cluster.add_volume(f"{NAMESPACE}-store-2")
        apply_again(seen, cluster.admin, kubectl, job)
        yield seen
        for name in (NAMESPACE, ELSEWHERE):
            cluster.admin.delete("v1/namespaces", name)


def _apply_example(cluster: Cluster, kubectl: Kubectl) -> Object:
    """Apply the example: the file as it is, or with four steps and TLS."""
    if not FULL:
        roles = ("coordinator", "generation", "trainer")
        content = Authority(cluster.folder / "authority").secret([f"{role}.local.{NAMESPACE}.specrl" for role in roles])
        data = {name: base64.b64encode(each).decode() for name, each in content.items()}
        metadata = {"name": "certificates", "namespace": NAMESPACE}
        cluster.admin.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
        tls = {"mode": "ExistingSecret", "secretName": "certificates"}
        return create_example(cluster, NAMESPACE, schedule=SCHEDULE | {"steps": STEPS}, tls=tls)
    for purpose in ("run", "store"):
        cluster.add_volume(f"{NAMESPACE}-{purpose}")
    kubectl.run("apply", "--namespace", NAMESPACE, "--filename", str(EXAMPLE))
    return cluster.admin.get(RLJOBS, "local", NAMESPACE)


def test_the_run_is_complete_with_all_steps_and_nothing_lost(story: Story) -> None:
    """Each step once, with all its prompts and rollouts, whatever was deleted meanwhile."""
    assert find_condition(story.finished, "Complete")["reason"] == "MaxStepsReached"
    assert story.finished["status"]["progress"]["step"] == STEPS
    assert [step["step"] for step in story.steps] == list(range(1, STEPS + 1))
    assert [step["groups"] for step in story.steps] == [SCHEDULE["promptsPerStep"]] * STEPS
    assert {step["rollouts"] for step in story.steps} == {SCHEDULE["promptsPerStep"] * SCHEDULE["groupSize"]}
    assert not any(step["failed"] for step in story.steps)


def test_no_container_restarts(story: Story) -> None:
    """Pods that were deleted have successors, whose containers do not restart."""
    assert set(story.restarts.values()) <= {0}, story.restarts
    assert story.finished["status"].get("restarts", 0) == sum(loss.role == "trainer" for loss in story.losses)


@only_full
def test_the_run_goes_on_after_the_pod_of_each_role_is_deleted(story: Story) -> None:
    assert [loss.role for loss in story.losses] == ["coordinator", "trainer", "store", "generation"]
    assert all(loss.step < STEPS and loss.trained_later > 0 for loss in story.losses), story.losses


def test_the_first_line_of_each_role_names_version_and_commit(story: Story) -> None:
    """The store is another project's program."""
    assert story.log.product is not None
    for role in ("coordinator", "trainer", "generation"):
        line = json.loads(story.first_lines[role])
        assert line["event"] == "process_started"
        assert story.log.product.commit in line["version"]


def test_every_role_ran_from_its_images_digest(story: Story) -> None:
    roles = {"coordinator": "control", "store": "store", "generation": "generation", "trainer": "trainer"}
    assert story.image_ids == {
        role: {f"{REGISTRY}/specrl-{image}@{story.digests[image]}"} for role, image in roles.items()
    }


def test_no_pod_is_the_first_to_be_evicted(story: Story) -> None:
    """Without requests they were BestEffort."""
    assert story.qos == dict.fromkeys(PORTS, "Burstable")


def test_the_status_has_exposed_generation_acceptance_length_and_lag(story: Story) -> None:
    """With lag 1 the tokens of a step are one policy version old at most."""
    progress = story.finished["status"]["progress"]
    assert 0 <= float(progress["exposedGenerationShare"]) <= 1
    assert float(progress["exposedGenerationSeconds"]) >= 0
    assert 0 <= progress["policyLag"] <= 1
    assert 1 < float(progress["acceptanceLength"]) <= 4  # 3 draft tokens and one more


def test_eagle3_saves_verifications(story: Story) -> None:
    """By the metrics of each step. Those that were generated before have none."""
    lengths = [step["acceptanceLength"] for step in story.steps]
    assert len(lengths) == STEPS
    assert all(1 < length <= 4 for length in lengths if length is not None), lengths
    assert any(length is not None for length in lengths), lengths


def test_strangers_reach_no_port_of_the_run(story: Story) -> None:
    """The same connections succeed from the coordinator, so the ports do listen."""
    assert {target.rpartition(":")[2] for target in story.peers} == {str(p) for ports in PORTS.values() for p in ports}
    assert len(story.strangers) == 2 * len(story.peers)
    assert all(story.strangers.values()), story.strangers


def test_scaling_creates_and_drains_replicas_during_the_run(story: Story) -> None:
    """2 -> 3 -> 1, before the RLJob is Complete. It does not need those that were added or drained."""
    assert [replicas for replicas, _ in story.scaled] == [3, 1]
    assert {state for _, state in story.scaled} <= {"Starting", "Running", "Degraded"}
    (added,) = story.replicas[3]
    assert added not in story.replicas[1]
    assert len(story.replicas[1]) <= 1  # none if the run has ended meanwhile


def test_the_export_is_readable_by_another_user(story: Story) -> None:
    """safetensors writes files with mode 0600."""
    assert story.exported["config.json"] > 0
    assert any(size > 0 for name, size in story.exported.items() if name.endswith(".safetensors"))


def test_an_rljob_is_not_judged_by_pods_of_a_deleted_one_of_its_name(story: Story) -> None:
    assert story.old_pods, "pods of the first RLJob were still there"
    for seen in story.second:
        assert find_condition(seen, "Failed").get("status") != "True"
        assert find_condition(seen, "Complete").get("status") != "True"
