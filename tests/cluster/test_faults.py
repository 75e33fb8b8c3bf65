"""RLJobs of the release that meet faults which only a real kubelet has. The RLJob's conditions say what to do.

Those that need the engines run with `make test-cluster FULL=1` alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.kubectl import Kubectl
from tests.cluster.harness.node import Node
from tests.cluster.product import EXAMPLE, build_example, install_release, prepare_engines, push_images
from tests.cluster.story.jobs import IDLE_RUN, SHORT_RUN, Jobs
from tests.cluster.story.log import FULL, StoryLog
from tests.e2e.harness.api import RLJOBS, Object, is_condition_true
from tests.e2e.harness.release import Release
from tests.e2e.jobs import pods_of

pytestmark = pytest.mark.timeout(5400)  # as in test_story.py
only_full = pytest.mark.skipif(not FULL, reason="a fault of an engine: make test-cluster FULL=1")

RUN_S = 2400.0
VOLUME_MIB = 200
PROBLEMS = EXAMPLE.parent / "04-code" / "problems.jsonl"
GRADE = r"""
import json, subprocess, sys
token = "/var/run/secrets/kubernetes.io/serviceaccount/token"
assert open(token).read()
answers = ["def double(x): return 2 * x", f"def double(x): return 2 * x if open({token!r}).read() else 0"]
lines = [{"reference": "assert double(2) == 4", "completion": f"```python\n{answer}\n```"} for answer in answers]
command = ["specrl", "rewards", "grade", "-f", "/etc/specrl/run.yaml", "--completions", "-", "--jsonl"]
done = subprocess.run(command, input="\n".join(map(json.dumps, lines)), capture_output=True, text=True)
sys.stderr.write(done.stderr)
print(json.dumps([json.loads(line)["reward"] for line in done.stdout.splitlines()]))
"""
"""Grades two answers with the verifier of the run file: a right one, and one that reads the pod's token."""
CALL = r"""
import asyncio, json
from pathlib import Path
from specrl.agent_tools import ToolPool, tool_for
from specrl.records import Prompt
from specrl.spec import load_process_spec

async def main():
    tools = load_process_spec(Path("/etc/specrl/run.yaml")).tools
    pool = ToolPool(tool_for(tools), tools.pool)
    await pool.start()
    calls = ["12 + 30", "open('/var/run/secrets/kubernetes.io/serviceaccount/token').read()"]
    outputs = [await pool.answer_call(Prompt("000001-00000", 0, (1,), "", "42"), "", call) for call in calls]
    await pool.close()
    print(json.dumps([output.text for output in outputs]))

asyncio.run(main())
"""
"""Answers two calls with the tool of the run file: a sum, and one that reads the pod's token."""


@pytest.fixture(scope="module")
def release(cluster: Cluster, jobset: None, helm: Path, log: StoryLog) -> Iterator[Release]:
    """An installed release. Only the full story has images with engines."""
    digests = prepare_engines(cluster, log) if FULL else push_images(cluster, "control", "store")
    with install_release(cluster, helm, digests) as installed:
        yield installed


@pytest.fixture
def jobs(cluster: Cluster, release: Release, namespace: str, log: StoryLog) -> Iterator[Jobs]:
    """RLJobs, which are deleted at the end."""
    yield Jobs(cluster, namespace, log)
    cluster.admin.delete(RLJOBS, "local", namespace)


def test_a_secret_that_is_missing_is_named_before_any_image_is_pulled(jobs: Jobs) -> None:
    """The pod is in ContainerCreating. Its status said nothing for two minutes, and then guessed."""
    volume = {"name": "keys", "secret": {"secretName": "no-such-secret"}}
    container = {"name": "trainer", "volumeMounts": [{"name": "keys", "mountPath": "/keys"}]}
    template = {"spec": {"volumes": [volume], "containers": [container]}}
    trainer = SHORT_RUN["trainer"] | {"podTemplate": template}
    jobs.create("whose trainer mounts a Secret that does not exist", **IDLE_RUN | {"trainer": trainer})
    message = jobs.wait_for("TrainerReady", ("False", "ConfigurationMissing"))
    assert 'secret "no-such-secret" not found; check that claims, Secrets and ConfigMaps exist' in message


def test_a_coordinator_that_needs_more_memory_than_its_limit_says_so(jobs: Jobs) -> None:
    """The kernel kills it while it imports its packages."""
    coordinator = {"podTemplate": limit_memory("coordinator", "64Mi")}
    jobs.create("whose coordinator may use 64Mi", **IDLE_RUN, coordinator=coordinator)
    message = jobs.wait_for("CoordinatorReady", ("False", "CrashLooping"), "OOMKilled")
    assert "it used more memory than its limit; raise limits.memory in the role's podTemplate" in message


def test_programs_of_the_policy_are_isolated_in_the_pod(jobs: Jobs, kubectl: Kubectl) -> None:
    """Verifier and tool, in the coordinator's own pod: as its user, with its seccomp profile and read-only root."""
    problems = {"apiVersion": "v1", "kind": "ConfigMap", "data": {PROBLEMS.name: PROBLEMS.read_text()}}
    jobs.cluster.admin.create(problems | {"metadata": {"name": "problems", "namespace": jobs.namespace}})
    mount = {"name": "coordinator", "volumeMounts": [{"name": "problems", "mountPath": "/problems"}]}
    volume = {"name": "problems", "configMap": {"name": "problems"}}
    prompts = {"source": {"jsonl": {"path": f"/problems/{PROBLEMS.name}"}}, "format": "Chat", "maxTokens": 128}
    job = jobs.create(
        "with the verifier and the tool that run programs",
        **IDLE_RUN,
        prompts=prompts | {"template": "{question}"},
        rewards={"code": {}},
        tools={"answeredBy": {"code": {}}, "maxOutputTokens": 16},
        coordinator={"podTemplate": {"spec": {"volumes": [volume], "containers": [mount]}}},
    )
    message = jobs.wait_for("SandboxReady", ("True", "IsolationChosen"))
    assert "rewards.code: " in message
    assert "tools.answeredBy.code: " in message
    (coordinator,) = pods_of(jobs.cluster.admin, job, "coordinator")
    inside = ("exec", "--namespace", jobs.namespace, coordinator["metadata"]["name"], "--", "python", "-c")
    graded = kubectl.run(*inside, GRADE).stdout.splitlines()[-1]
    jobs.log.add(f"rewards of a right answer and of one that reads the pod's token: {graded}")
    assert graded == "[1.0, 0.0]"
    outputs = json.loads(kubectl.run(*inside, CALL).stdout.splitlines()[-1])
    jobs.log.add(f"outputs of a sum and of a call that reads the pod's token: {outputs}")
    assert outputs[0] == "42"
    assert "Error" in outputs[1]


@only_full
def test_a_trainer_that_needs_more_memory_than_its_limit_says_so(jobs: Jobs) -> None:
    """Its imports alone need more. The kernel kills it, and its restarts do not help."""
    trainer = SHORT_RUN["trainer"] | {"podTemplate": limit_memory("trainer", "256Mi")}
    jobs.create("whose trainer may use 256Mi", **IDLE_RUN | {"trainer": trainer})
    message = jobs.wait_for("Failed", ("True", "BackoffLimitExceeded"), timeout_s=RUN_S)
    assert "it used more memory than its limit; raise limits.memory in the role's podTemplate" in message


@only_full
def test_a_volume_that_fills_is_a_condition_and_a_larger_one_lets_the_run_complete(jobs: Jobs, node: Node) -> None:
    """The run keeps every checkpoint, on a volume of 200 MiB. Then its owner expands the volume."""
    jobs.cluster.add_volume(f"{jobs.namespace}-store")
    name = f"{jobs.namespace}-run"
    folder = jobs.cluster.add_volume(name, f"{VOLUME_MIB}Mi")
    node.run("mount", "-t", "tmpfs", "-o", f"size={VOLUME_MIB}m", "tmpfs", folder)
    schedule = {"steps": 20, "promptsPerStep": 4, "groupSize": 4, "maxPolicyLag": 1}
    checkpoint = {"everySteps": 1, "keep": 100, "claimName": "local-run"}
    claim, job = build_example(jobs.namespace, **SHORT_RUN, schedule=schedule, checkpoint=checkpoint)
    claim["spec"] |= {"resources": {"requests": {"storage": f"{VOLUME_MIB}Mi"}}, "volumeName": name}
    jobs.cluster.admin.create(claim)
    jobs.cluster.admin.create(job)
    jobs.log.add(f"applied a job that keeps every checkpoint, on a volume of {VOLUME_MIB} MiB")
    message = jobs.wait_for("CheckpointsWritten", ("False", "CheckpointFailed"), timeout_s=RUN_S)
    assert "free space on its disk" in message
    node.run("mount", "-o", "remount,size=2g", folder)
    jobs.log.add("expanded the volume")
    jobs.wait_for("Complete", ("True", "MaxStepsReached"), timeout_s=RUN_S)
    assert jobs.read()["status"]["progress"]["step"] == schedule["steps"]
    assert is_condition_true(jobs.read(), "CheckpointsWritten")


def limit_memory(container: str, size: str) -> Object:
    """Build a pod template whose container may use this much memory."""
    resources = {"requests": {"memory": size}, "limits": {"memory": size}}
    return {"spec": {"containers": [{"name": container, "resources": resources}]}}
