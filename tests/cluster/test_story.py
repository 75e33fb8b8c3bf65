"""One run as its user sees it: the local example, from the images, in real containers, with four of its 24 steps.

The fixture `story` installs the release, applies the example, and watches it until it is Complete. Meanwhile it
connects to the run's ports and scales the RLJob. Afterwards it reads the export, and applies the example again. The
tests judge what it saw. With SPECRL_CLUSTER_LOG=FILE the record is written there, if all of them pass.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.kubectl import Kubectl
from tests.cluster.harness.node import REGISTRY
from tests.cluster.pods import (
    build_pod,
    build_server,
    connect,
    create_restricted_namespace,
    run_to_end,
    wait_until_ready,
)
from tests.cluster.product import (
    IMAGES,
    create_example,
    find_commit_of_engines,
    install_release,
    push_images,
    read_example,
)
from tests.cluster.story_log import StoryLog
from tests.e2e.go_programs import cache_folder
from tests.e2e.harness.api import RLJOBS, Api, Object, find_condition, is_condition_true, wait_until
from tests.e2e.jobs import COMPONENT, pods_of
from tests.requirements import PRODUCT_IMAGES

pytestmark = pytest.mark.timeout(5400)  # of the machine that is busiest; imports of vLLM and torch take most of it

NEEDED_GB = 16
"""Free disk space: the registry's and containerd's copies of the engines."""
STEPS = 4
NAMESPACE = "story"
ELSEWHERE = "strangers"
PORTS = {"store": (6379,), "coordinator": (7000, 8080), "generation": (7001, 8081), "trainer": (7002, 8082)}
"""Ports that each role serves (operators/specrl_operator/children/pods.py)."""
START_S = 2400.0
TRAIN_S = 2400.0
SHORT_S = 600.0
READER = {"runAsNonRoot": True, "runAsUser": 1234, "runAsGroup": 1234, "supplementalGroups": [65532]}
"""Another user of the group. Without fsGroup, by which kubelet would first make every file readable."""
READ_RUN = """
import json, pathlib
folders = list(pathlib.Path("/data").rglob("export"))
files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
(metrics,) = pathlib.Path("/data").rglob("metrics.jsonl")
lines = metrics.read_text().splitlines()
print(json.dumps([{file.name: len(file.read_bytes()) for file in files}, [json.loads(line) for line in lines]]))
"""
LISTENS = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()"


@dataclass
class Story:
    """What was seen of the run."""

    log: StoryLog
    digests: dict[str, str]
    qos: dict[str, str] = field(default_factory=dict)
    """Quality of service of each role's pods, as kubelet puts them into cgroups."""
    image_ids: dict[str, set[str]] = field(default_factory=dict)
    """Image of each role's pods, as the runtime pulled it."""
    peers: list[str] = field(default_factory=list)
    """Pods and ports to which the coordinator's pod could connect."""
    strangers: dict[str, str] = field(default_factory=dict)
    """Why a stranger could not connect, by its namespace, pod and port; empty if it could."""
    replicas: dict[int, list[str]] = field(default_factory=dict)
    """Names of the replicas' pods after scaling to a number."""
    scaled: list[tuple[int, str]] = field(default_factory=list)
    """Each number of replicas that was asked for, and the RLJob's state then."""
    finished: Object = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    """Restarts of the containers that were left at the end."""
    exported: dict[str, int] = field(default_factory=dict)
    """Size of each exported file, as another user has read it."""
    steps: list[Object] = field(default_factory=list)
    """The metrics of each step."""
    old_pods: set[str] = field(default_factory=set)
    """Pods of the first RLJob that were still there when the second one was applied."""
    second: list[Object] = field(default_factory=list)
    """The second RLJob, each time it was looked at."""


@pytest.fixture(scope="module")
def story(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    kubectl: Kubectl,
    helm: Path,
    say: Callable[[str], None],
) -> Iterator[Story]:
    """The run, from an installed release to a second RLJob of the same name."""
    free = shutil.disk_usage(cache_folder()).free / 1e9
    if free < NEEDED_GB:
        PRODUCT_IMAGES.skip(f"they need {NEEDED_GB} GB of free disk space, got {free:.0f} GB")
    commit = find_commit_of_engines()
    log = StoryLog(say)
    digests = push_images(cluster, *IMAGES)
    log.add("pushed the images to the registry")
    cluster.install("jobset")
    seen = Story(log, digests)
    with install_release(cluster, helm, digests):
        log.add("installed the release")
        for name in (NAMESPACE, ELSEWHERE):
            create_restricted_namespace(cluster.admin, name)
            cluster.admin.create(build_server("stranger", name))
        _, example = read_example()
        job = create_example(cluster, NAMESPACE, schedule=example["spec"]["schedule"] | {"steps": STEPS})
        log.add("applied the example")
        _watch_to_complete(seen, cluster.admin, kubectl, job)
        _read_run_folder(seen, cluster.admin)
        cluster.add_volume(f"{NAMESPACE}-store-2")
        _apply_again(seen, cluster.admin, kubectl, job)
        yield seen
        for name in (NAMESPACE, ELSEWHERE):
            cluster.admin.delete("v1/namespaces", name)
    if (file := os.environ.get("SPECRL_CLUSTER_LOG")) and not request.session.testsfailed:
        own = [item.name for item in request.session.items if item.path == request.path]
        log.write(Path(file), commit, digests, own)


def _watch_to_complete(seen: Story, admin: Api, kubectl: Kubectl, job: Object) -> None:
    log = seen.log

    def read() -> Object:
        found = admin.get(RLJOBS, job["metadata"]["name"], NAMESPACE)
        failed = find_condition(found, "Failed")
        assert failed.get("status") != "True", failed
        return found

    def step() -> int:
        return int(read().get("status", {}).get("progress", {}).get("step") or 0)

    def state() -> str:
        return _describe(admin, job)

    def is_up() -> bool:
        found = read()
        return all(is_condition_true(found, kind) for kind in ("GenerationReady", "TrainerReady"))

    log.wait_until(is_up, "replicas and trainer are ready", START_S, state)
    for pod in pods_of(admin, job):
        role = pod["metadata"]["labels"][COMPONENT]
        seen.qos[role] = pod["status"]["qosClass"]
        seen.image_ids.setdefault(role, set()).add(pod["status"]["containerStatuses"][0]["imageID"])
    _try_ports(seen, admin, kubectl, job)
    before = _started(admin, job)
    seen.scaled.append((3, str(read()["status"]["state"])))
    _scale(kubectl, 3)
    log.add(f"scaled to 3 replicas at step {step()}")
    # It need not import vLLM before the run ends.
    log.wait_until(lambda: len(_started(admin, job)) == 3, "the third replica's container runs", SHORT_S, state)
    seen.replicas[3] = sorted(_started(admin, job) - before)
    seen.scaled.append((1, str(read()["status"]["state"])))
    _scale(kubectl, 1)
    log.add(f"scaled to 1 replica at step {step()}")
    log.wait_until(lambda: len(_list_replicas(admin)) <= 1, "the other replicas are gone", SHORT_S, state)
    seen.replicas[1] = _list_replicas(admin)

    log.wait_until(lambda: is_condition_true(read(), "Complete"), "the RLJob is Complete", TRAIN_S, state)
    seen.finished = read()
    log.add(f"progress: {json.dumps(seen.finished['status']['progress'])}")
    for pod in pods_of(admin, job):
        seen.restarts[pod["metadata"]["name"]] = sum(
            each["restartCount"] for each in pod["status"].get("containerStatuses", [])
        )


def _try_ports(seen: Story, admin: Api, kubectl: Kubectl, job: Object) -> None:
    """Connect to each port of the run, from the coordinator and from pods that do not belong to the run."""
    (coordinator,) = pods_of(admin, job, "coordinator")
    for name in (NAMESPACE, ELSEWHERE):
        wait_until_ready(admin, build_server("stranger", name))
    for pod in pods_of(admin, job):
        role = pod["metadata"]["labels"][COMPONENT]
        for port in PORTS[role]:
            address = pod["status"]["podIP"]
            target = f"{pod['metadata']['name']}:{port}"
            inside = ("exec", "--namespace", NAMESPACE, coordinator["metadata"]["name"], "--")
            try_port = (*inside, "python", "-c", LISTENS, address, str(port))
            wait_until(lambda words=try_port: kubectl.run(*words, check=False).returncode == 0, f"{target} listens")  # type: ignore[misc]
            seen.peers.append(target)
            for name in (NAMESPACE, ELSEWHERE):
                seen.strangers[f"{name} -> {target}"] = connect(kubectl, name, "stranger", f"{address}:{port}")
    refused = sum(map(bool, seen.strangers.values()))
    seen.log.add(
        f"the coordinator reached {len(seen.peers)} ports; {refused} of {len(seen.strangers)} tries of strangers failed"
    )


def _read_run_folder(seen: Story, admin: Api) -> None:
    """Read the export, and the metrics of each step, in a pod of another user."""
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "local-run", "readOnly": True}}
    mounts = [{"name": "data", "mountPath": "/data"}]
    image = f"{REGISTRY}/specrl-control@{seen.digests['control']}"
    command = ("python", "-c", READ_RUN)
    pod = build_pod("reader", NAMESPACE, *command, image=image, volumes=[volume], volumeMounts=mounts)
    pod["spec"]["securityContext"] |= READER
    del pod["spec"]["securityContext"]["fsGroup"]
    ended = run_to_end(admin, pod)
    said = admin.logs("reader", NAMESPACE, "main")
    assert ended["exitCode"] == 0, said
    seen.exported, seen.steps = json.loads(said.splitlines()[-1])
    seen.log.add(f"another user has read {len(seen.exported)} exported files, {sum(seen.exported.values())} bytes")
    seen.log.add(f"acceptance length of each step: {[step.get('acceptanceLength') for step in seen.steps]}")


def _apply_again(seen: Story, admin: Api, kubectl: Kubectl, job: Object) -> None:
    """Delete the RLJob, apply it again at once, and watch it until its own coordinator runs. Then delete it, too."""
    name = job["metadata"]["name"]
    log = seen.log
    kubectl.run("delete", "rljob", name, "--namespace", NAMESPACE, "--wait")
    log.add("deleted the RLJob")
    manifest = {key: job[key] for key in ("apiVersion", "kind", "spec")}
    second = admin.create(manifest | {"metadata": {"name": name, "namespace": NAMESPACE}})
    seen.old_pods = {pod["metadata"]["uid"] for pod in _list_pods(admin)}
    log.add(f"applied it again; {len(seen.old_pods)} pods of the first are left")

    def has_started() -> bool:
        seen.second.append(admin.get(RLJOBS, name, NAMESPACE))
        pods = [pod for pod in pods_of(admin, second, "coordinator") if pod["metadata"]["uid"] not in seen.old_pods]
        return any("running" in _state(pod) for pod in pods)

    log.wait_until(has_started, "the second RLJob's coordinator runs", SHORT_S, lambda: _describe(admin, second))
    seen.second.append(admin.get(RLJOBS, name, NAMESPACE))
    kubectl.run("delete", "rljob", name, "--namespace", NAMESPACE, "--wait")
    log.add("deleted it while it starts")
    log.wait_until(lambda: not _list_pods(admin), "its pods are gone", SHORT_S, lambda: _describe_pods(admin))


def _scale(kubectl: Kubectl, replicas: int) -> None:
    kubectl.run("scale", "rljob", "local", f"--replicas={replicas}", "--namespace", NAMESPACE)


def _list_pods(admin: Api) -> list[Object]:
    """The pods of RLJobs, also those that are ending."""
    return admin.list("v1/pods", NAMESPACE, "specrl.dev/rljob=local")


def _list_replicas(admin: Api) -> list[str]:
    """Names of the replicas' pods, also of those that are ending."""
    found = admin.list("v1/pods", NAMESPACE, f"specrl.dev/rljob=local,{COMPONENT}=generation")
    return sorted(pod["metadata"]["name"] for pod in found)


def _started(admin: Api, job: Object) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods_of(admin, job, "generation") if "running" in _state(pod)}


def _state(pod: Object) -> Object:
    statuses: list[Object] = pod["status"].get("containerStatuses") or [{}]
    state: Object = statuses[0].get("state", {})
    return state


def _describe(admin: Api, job: Object) -> str:
    found = admin.find(RLJOBS, job["metadata"]["name"], NAMESPACE) or {}
    status = found.get("status", {})
    step = status.get("progress", {}).get("step", "-")
    return f"{status.get('state')}, step {step}; {_describe_pods(admin)}"


def _describe_pods(admin: Api) -> str:
    pods = []
    for pod in _list_pods(admin):
        ready = "ready" if is_condition_true(pod, "Ready") else next(iter(_state(pod)), pod["status"]["phase"])
        pods.append(f"{pod['metadata']['name']} {'ending' if 'deletionTimestamp' in pod['metadata'] else ready}")
    return ", ".join(sorted(pods))


def test_the_run_is_complete_with_all_steps_and_no_restart(story: Story) -> None:
    assert find_condition(story.finished, "Complete")["reason"] == "MaxStepsReached"
    assert story.finished["status"]["progress"]["step"] == STEPS
    assert not story.finished["status"].get("restarts")
    assert set(story.restarts.values()) <= {0}, story.restarts


def test_every_role_ran_from_its_images_digest(story: Story) -> None:
    roles = {"coordinator": "control", "store": "store", "generation": "generation", "trainer": "trainer"}
    assert story.image_ids == {
        role: {f"{REGISTRY}/specrl-{image}@{story.digests[image]}"} for role, image in roles.items()
    }


def test_no_pod_is_the_first_to_be_evicted(story: Story) -> None:
    """Without requests they were BestEffort."""
    assert story.qos == dict.fromkeys(PORTS, "Burstable")


def test_the_status_has_exposed_generation_and_lag(story: Story) -> None:
    """With lag 1 the tokens of a step are one policy version old at most."""
    progress = story.finished["status"]["progress"]
    assert 0 <= float(progress["exposedGenerationShare"]) <= 1
    assert float(progress["exposedGenerationSeconds"]) >= 0
    assert 0 <= progress["policyLag"] <= 1


def test_eagle3_saves_verifications(story: Story) -> None:
    """By the metrics of the steps. The status has the acceptance length of the last step alone, and that has none."""
    lengths = [step["acceptanceLength"] for step in story.steps]
    assert len(lengths) == STEPS
    assert all(1 < length <= 4 for length in lengths if length is not None), lengths  # 3 draft tokens and one more
    assert any(length is not None for length in lengths), lengths


def test_strangers_reach_no_port_of_the_run(story: Story) -> None:
    """The same connections succeed from the coordinator, so the ports do listen."""
    assert {target.rpartition(":")[2] for target in story.peers} == {str(p) for ports in PORTS.values() for p in ports}
    assert len(story.strangers) == 2 * len(story.peers)
    assert all(story.strangers.values()), story.strangers


def test_scaling_creates_and_drains_replicas_during_the_run(story: Story) -> None:
    """2 -> 3 -> 1, before the RLJob is Complete. It does not need those that were added or drained."""
    assert [replicas for replicas, _ in story.scaled] == [3, 1]
    assert {state for _, state in story.scaled} <= {"Starting", "Running"}
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
