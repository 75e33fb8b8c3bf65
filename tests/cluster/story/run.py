"""What is done to the local example while it runs on the cluster, and what is seen of it. test_story.py judges it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.cluster.harness.kubectl import Kubectl
from tests.cluster.harness.node import REGISTRY
from tests.cluster.harness.pods import build_pod, build_server, connect, run_to_end, wait_until_ready
from tests.cluster.story.log import FULL, StoryLog
from tests.e2e.harness.api import RLJOBS, Api, Object, find_condition, is_condition_true
from tests.e2e.jobs import COMPONENT, pods_of

NAMESPACE = "story"
ELSEWHERE = "strangers"
PORTS = {"store": (6379,), "coordinator": (7000, 8080), "generation": (7001, 8081), "trainer": (7002, 8082)}
"""Ports that each role serves (operators/specrl_operator/children/pods.py)."""
START_S = 2400.0
TRAIN_S = 2400.0
SHORT_S = 600.0
LAST_SCALED_STEP = 18
"""The full story scales down at this step at the latest, so that a replica is lost before the last step."""
STEPS_BETWEEN = 2
"""Steps that are trained after each loss of a pod."""
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
AWAIT_PORTS = """
import socket, sys, time
for address in sys.argv[1:]:
    host, port = address.split(":")
    while True:
        try:
            socket.create_connection((host, int(port)), 5).close()
            break
        except OSError:
            time.sleep(0.5)
"""
"""Ends when all ports listen. A pod is ready by one of its ports; that of the metrics opens a moment later."""


@dataclass(frozen=True)
class Loss:
    """A pod that was deleted while the run trained."""

    role: str
    step: int
    """Last trained step at that moment."""
    trained_later: int
    """Steps that were trained when another pod had taken its place."""


@dataclass
class Story:
    """What was seen of the run."""

    log: StoryLog
    digests: dict[str, str]
    qos: dict[str, str] = field(default_factory=dict)
    """Quality of service of each role's pods, as kubelet puts them into cgroups."""
    image_ids: dict[str, set[str]] = field(default_factory=dict)
    """Image of each role's pods, as the runtime pulled it."""
    first_lines: dict[str, str] = field(default_factory=dict)
    """The first line of each role's log."""
    peers: list[str] = field(default_factory=list)
    """Pods and ports to which the coordinator's pod could connect."""
    strangers: dict[str, str] = field(default_factory=dict)
    """Why a stranger could not connect, by its namespace, pod and port; empty if it could."""
    replicas: dict[int, list[str]] = field(default_factory=dict)
    """Names of the replicas' pods after scaling to a number."""
    scaled: list[tuple[int, str]] = field(default_factory=list)
    """Each number of replicas that was asked for, and the RLJob's state then."""
    losses: list[Loss] = field(default_factory=list)
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


def watch_to_complete(seen: Story, admin: Api, kubectl: Kubectl, job: Object) -> None:
    """Try its ports, scale it, in the full story delete a pod of each role, and wait until it is Complete."""
    log = seen.log

    def read() -> Object:
        found = admin.get(RLJOBS, job["metadata"]["name"], NAMESPACE)
        failed = find_condition(found, "Failed")
        assert failed.get("status") != "True", failed
        return found

    def step() -> int:
        return int(read().get("status", {}).get("progress", {}).get("step") or 0)

    def state() -> str:
        return describe(admin, job)

    def is_up() -> bool:
        found = read()
        return all(is_condition_true(found, kind) for kind in ("GenerationReady", "TrainerReady"))

    log.wait_until(is_up, "replicas and trainer are ready", START_S, state)
    pods = pods_of(admin, job)
    for pod in pods:
        role = pod["metadata"]["labels"][COMPONENT]
        seen.qos[role] = pod["status"]["qosClass"]
        seen.image_ids.setdefault(role, set()).add(pod["status"]["containerStatuses"][0]["imageID"])
        seen.first_lines[role] = admin.logs(pod["metadata"]["name"], NAMESPACE, role).partition("\n")[0]
    targets = _await_ports(seen, admin, kubectl, pods)
    if FULL:
        log.wait_until(lambda: step() >= 1, "the first step is trained", TRAIN_S, state)
    before = _started(admin, job)
    seen.scaled.append((3, str(read()["status"]["state"])))
    _scale(kubectl, 3)
    log.add(f"scaled to 3 replicas at step {step()}")
    _try_ports(seen, kubectl, targets)  # meanwhile the third replica's container starts
    # It need not import vLLM before the short story's run ends.
    log.wait_until(lambda: len(_started(admin, job)) == 3, "the third replica's container runs", SHORT_S, state)
    seen.replicas[3] = sorted(_started(admin, job) - before)
    if FULL:
        # Meanwhile the third replica imports vLLM, which takes longer than all steps.
        for role in ("coordinator", "trainer", "store"):
            _lose_pod(seen, admin, kubectl, job, role)
        (third,) = seen.replicas[3]
        claim = lambda: _is_ready(admin, third) or step() >= LAST_SCALED_STEP  # noqa: E731 - beside its event
        log.wait_until(claim, f"the third replica is ready, or step {LAST_SCALED_STEP} is trained", START_S, state)
        log.add(f"the third replica is {'ready' if _is_ready(admin, third) else 'still starting'}")
    seen.scaled.append((1, str(read()["status"]["state"])))
    _scale(kubectl, 1)
    log.add(f"scaled to 1 replica at step {step()}")
    log.wait_until(lambda: len(_list_replicas(admin)) <= 1, "the other replicas are gone", SHORT_S, state)
    seen.replicas[1] = _list_replicas(admin)
    if FULL:
        _lose_pod(seen, admin, kubectl, job, "generation")

    log.wait_until(lambda: is_condition_true(read(), "Complete"), "the RLJob is Complete", TRAIN_S, state)
    seen.finished = read()
    log.add(f"progress: {json.dumps(seen.finished['status']['progress'])}")
    log.add(f"restarts of the trainer: {seen.finished['status'].get('restarts', 0)}")
    for pod in pods_of(admin, job):
        seen.restarts[pod["metadata"]["name"]] = sum(
            each["restartCount"] for each in pod["status"].get("containerStatuses", [])
        )


def _lose_pod(seen: Story, admin: Api, kubectl: Kubectl, job: Object, role: str) -> None:
    """Delete the only pod of a role, without which no step is trained, until STEPS_BETWEEN more are trained.

    The trainer's pod has both ranks.
    """

    def state() -> str:
        return describe(admin, job)

    def step() -> int:
        found = admin.get(RLJOBS, job["metadata"]["name"], NAMESPACE)
        return int(found["status"].get("progress", {}).get("step") or 0)

    (pod,) = pods_of(admin, job, role)
    at = step()
    wanted = min(at + STEPS_BETWEEN, int(job["spec"]["schedule"]["steps"]))

    def has_successor() -> bool:
        others = [it for it in pods_of(admin, job, role) if it["metadata"]["uid"] != pod["metadata"]["uid"]]
        return any(is_condition_true(it, "Ready") for it in others)

    kubectl.run("delete", "pod", pod["metadata"]["name"], "--namespace", NAMESPACE, "--wait=false")
    seen.log.add(f"deleted {pod['metadata']['name']} at step {at}")
    seen.log.wait_until(has_successor, f"another pod of the {role} is ready", START_S, state)
    seen.log.wait_until(lambda: step() >= wanted, f"step {wanted} is trained", TRAIN_S, state)
    seen.losses.append(Loss(role, at, step() - at))


def _await_ports(seen: Story, admin: Api, kubectl: Kubectl, pods: list[Object]) -> dict[str, str]:
    """Wait until the coordinator's pod can connect to all ports of the run. Returns their addresses by pod and port."""
    targets = {
        f"{pod['metadata']['name']}:{port}": f"{pod['status']['podIP']}:{port}"
        for pod in pods
        for port in PORTS[pod["metadata"]["labels"][COMPONENT]]
    }
    (coordinator,) = (pod["metadata"]["name"] for pod in pods if pod["metadata"]["labels"][COMPONENT] == "coordinator")
    program = ("--", "python", "-c", AWAIT_PORTS, *targets.values())
    kubectl.run("exec", "--namespace", NAMESPACE, coordinator, *program, timeout_s=START_S)
    seen.peers += targets
    seen.log.add(f"the coordinator reached {len(targets)} ports")
    for name in (NAMESPACE, ELSEWHERE):
        wait_until_ready(admin, build_server("stranger", name))
    return targets


def _try_ports(seen: Story, kubectl: Kubectl, targets: dict[str, str]) -> None:
    """Connect to the ports from pods that do not belong to the run: at once, since four steps take a minute."""
    tries = [(name, target) for target in targets for name in (NAMESPACE, ELSEWHERE)]
    with ThreadPoolExecutor(len(tries)) as pool:
        said = pool.map(lambda each: connect(kubectl, each[0], "stranger", targets[each[1]]), tries)
        seen.strangers |= {f"{name} -> {target}": why for (name, target), why in zip(tries, said, strict=True)}
    refused = sum(map(bool, seen.strangers.values()))
    seen.log.add(f"{refused} of {len(tries)} tries of strangers failed")


def read_run_folder(seen: Story, admin: Api) -> None:
    """Read the export, and the metrics of each step, in a pod of another user."""
    seen.exported, seen.steps = read_claim(admin, NAMESPACE, seen.digests["control"])
    seen.log.add(f"another user has read {len(seen.exported)} exported files, {sum(seen.exported.values())} bytes")
    seen.log.add(f"acceptance length of each step: {[step.get('acceptanceLength') for step in seen.steps]}")


def read_claim(admin: Api, namespace: str, control: str) -> tuple[dict[str, int], list[Object]]:
    """Read the claim of the only run in a namespace, as another user. control: digest of the control image.

    Returns the size of each exported file, and the metrics of each step.
    """
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "local-run", "readOnly": True}}
    mounts = [{"name": "data", "mountPath": "/data"}]
    image = f"{REGISTRY}/specrl-control@{control}"
    command = ("python", "-c", READ_RUN)
    pod = build_pod("reader", namespace, *command, image=image, volumes=[volume], volumeMounts=mounts)
    pod["spec"]["securityContext"] |= READER
    del pod["spec"]["securityContext"]["fsGroup"]
    ended = run_to_end(admin, pod)
    said = admin.logs("reader", namespace, "main")
    assert ended["exitCode"] == 0, said
    exported, steps = json.loads(said.splitlines()[-1])
    return exported, steps


def apply_again(seen: Story, admin: Api, kubectl: Kubectl, job: Object) -> None:
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

    log.wait_until(has_started, "the second RLJob's coordinator runs", SHORT_S, lambda: describe(admin, second))
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


def _is_ready(admin: Api, name: str) -> bool:
    return is_condition_true(admin.find("v1/pods", name, NAMESPACE) or {}, "Ready")


def _state(pod: Object) -> Object:
    statuses: list[Object] = pod["status"].get("containerStatuses") or [{}]
    state: Object = statuses[0].get("state", {})
    return state


def describe(admin: Api, job: Object) -> str:
    """Describe the RLJob's state, and its pods'."""
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
