"""The work of a cluster's administrator: claims and volumes, certificates, a node that is drained, one that is lost.

The tests of claims and volumes need the control image alone. The others judge one run (story/operated.py), and need the
engines and cert-manager: `make controllers`, then `make test-cluster FULL=1`.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.images import write_data_image
from tests.cluster.harness.kubectl import Kubectl
from tests.cluster.harness.node import NODE, REGISTRY, Node
from tests.cluster.harness.pods import create_restricted_namespace
from tests.cluster.product import EXAMPLE, build_example, install_release, prepare_engines, push_images
from tests.cluster.story.jobs import CONDITION_S, IDLE_RUN, Jobs
from tests.cluster.story.log import FULL, StoryLog
from tests.cluster.story.operated import (
    CERTIFICATE,
    MODEL,
    PLACE,
    SCHEDULE,
    OperatedRun,
    PolicyHub,
    find_gateway,
    serve_policy,
)
from tests.e2e.controllers.cert_manager import CertManager
from tests.e2e.harness.api import RLJOBS, Object, find_condition, wait_until
from tests.e2e.harness.release import Release
from tests.e2e.jobs import describe_job, pods_of
from tests.stand_ins.hub import Fault
from tests.stand_ins.s3 import ENDPOINT, serve_s3

pytestmark = pytest.mark.timeout(5400)  # as in test_story.py
only_full = pytest.mark.skipif(not FULL, reason="a run with engines: make test-cluster FULL=1")

S3_PORT = 9000
USER_ID = 65532  # of all pods of a run
PROBLEMS = EXAMPLE.parent / "04-code" / "problems.jsonl"
READ_PROBLEMS = {
    "source": {"jsonl": {"path": f"/problems/{PROBLEMS.name}"}},
    "format": "Chat",
    "maxTokens": 128,
    "template": "{question}",
}
"""Section `prompts` of an RLJob that mounts the problems."""
TRY_FOLDERS = """
import pathlib, sys
for folder in map(pathlib.Path, sys.argv[1:]):
    print(*sorted(path.name for path in folder.iterdir()))
    try:
        (folder / "new").touch()
    except OSError as error:
        print(error.strerror)
"""
"""Lists folders, and tries to write to each."""


@pytest.fixture(scope="module")
def release(cluster: Cluster, jobset: None, helm: Path, log: StoryLog) -> Iterator[Release]:
    """An installed release with two operators, one of which leads."""
    digests = prepare_engines(cluster, log) if FULL else push_images(cluster, "control", "store")
    egress = {"extraEgress": [{"ports": [{"port": S3_PORT}]}]}
    with install_release(cluster, helm, digests, operator={"replicas": 2}, jobs=egress) as installed:
        yield installed


@pytest.fixture
def jobs(cluster: Cluster, release: Release, namespace: str, log: StoryLog) -> Iterator[Jobs]:
    """RLJobs, which are deleted at the end."""
    yield Jobs(cluster, namespace, log)
    cluster.admin.delete(RLJOBS, "local", namespace)


@pytest.fixture(scope="module")
def bucket(cluster: Cluster) -> Iterator[dict[str, str]]:
    """The bucket `problems` of a server that speaks S3. Returns the variables for its clients."""
    with serve_s3(find_gateway(cluster), S3_PORT) as variables:
        files = fsspec.filesystem("s3", endpoint_url=variables[ENDPOINT], key="a", secret="b")
        files.makedirs("problems/code")
        files.pipe_file(f"problems/code/{PROBLEMS.name}", PROBLEMS.read_bytes())
        yield variables


@pytest.fixture(scope="module")
def hub(cluster: Cluster) -> Iterator[PolicyHub]:
    """A stand-in for the hub that pods can reach."""
    with serve_policy(cluster) as served:
        yield served


def delete_job(jobs: Jobs) -> None:
    """Delete the RLJob, and add a volume for the store of the next one."""
    jobs.cluster.admin.delete(RLJOBS, "local", jobs.namespace)
    wait_until(lambda: jobs.cluster.admin.find(RLJOBS, "local", jobs.namespace) is None, "the RLJob is gone")
    jobs.cluster.add_volume(f"{jobs.namespace}-store-2")


def try_folders(jobs: Jobs, kubectl: Kubectl, job: Object, *folders: str) -> list[str]:
    """Run TRY_FOLDERS in the job's coordinator, which has never failed. Returns its lines."""
    admin = jobs.cluster.admin

    def find_started() -> Object | None:
        pods = pods_of(admin, job, "coordinator")
        return next((it for it in pods if it["status"].get("containerStatuses", [{}])[0].get("started")), None)

    explain = lambda: describe_job(admin, job)  # noqa: E731 - one expression
    pod = jobs.log.wait_until(find_started, "the coordinator has read its volumes", CONDITION_S, explain)
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    program = ("--", "python", "-c", TRY_FOLDERS, *folders)
    return kubectl.run("exec", "--namespace", jobs.namespace, pod["metadata"]["name"], *program).stdout.splitlines()


# -- claims and volumes ----------------------------------------------------------------------------------------------


@dataclass
class FolderOfRoot:
    """A claim on a folder of root to which fsGroup does not apply, as to most shared file systems, and an RLJob."""

    jobs: Jobs
    node: Node
    path: Path
    job: Object

    @classmethod
    def create(cls, jobs: Jobs, node: Node) -> FolderOfRoot:
        """Create the claim. The RLJob, which needs no engines, is not applied."""
        name = f"{jobs.namespace}-run"
        path = jobs.cluster.add_volume(name, has_group=False)
        path.chmod(0o755)
        jobs.cluster.add_volume(f"{jobs.namespace}-store")
        claim, job = build_example(jobs.namespace, **IDLE_RUN)
        claim["spec"]["volumeName"] = name
        jobs.cluster.admin.create(claim)
        return cls(jobs, node, path, job)

    def apply_job(self, what: str) -> None:
        """Create the RLJob. what: for the record."""
        self.jobs.cluster.admin.create(self.job)
        self.jobs.log.add(f"applied a job {what}")

    def open_to_group(self) -> None:
        """Run the commands of docs/deploy.md."""
        self.node.run("chgrp", str(USER_ID), self.path)
        self.node.run("chmod", "2770", self.path)
        self.jobs.log.add(f"ran chgrp {USER_ID} and chmod 2770 for the claim's root folder")

    def wait_until_written(self) -> None:
        """Wait until the coordinator has written to the run's folder."""

        def find_written() -> list[Path]:
            return [file for file in self.path.glob("local-*/store-id") if file.stat().st_uid == USER_ID]

        explain = lambda: describe_job(self.jobs.cluster.admin, self.jobs.read())  # noqa: E731 - one expression
        self.jobs.log.wait_until(find_written, "the coordinator has written to the claim", CONDITION_S, explain)


def test_a_claim_that_pods_cannot_write_to_fails_the_job_with_the_remedy_that_helps(jobs: Jobs, node: Node) -> None:
    """H8: uid and folder are named, and no container is started again and again."""
    folder = FolderOfRoot.create(jobs, node)
    folder.apply_job("whose claim belongs to root")
    message = jobs.wait_for("Failed", ("True", "RunRefused"))
    assert f"must be writable by uid {USER_ID} and gid {USER_ID}, got Permission denied" in message
    assert "give the claim's root folder that group and mode 2770" in message
    explain = lambda: describe_job(jobs.cluster.admin, jobs.read())  # noqa: E731 - one expression
    is_stopped = lambda: not pods_of(jobs.cluster.admin, folder.job)  # noqa: E731 - beside its event
    jobs.log.wait_until(is_stopped, "its pods are gone", CONDITION_S, explain)
    folder.open_to_group()
    delete_job(jobs)
    folder.apply_job("with the same claim")
    folder.wait_until_written()


def test_a_claim_to_which_root_may_not_write_is_a_condition_until_it_may(jobs: Jobs, node: Node) -> None:
    """The kubelet, as root, makes the run's folder. Here the file system is read-only; elsewhere it is root_squash."""
    folder = FolderOfRoot.create(jobs, node)
    node.run("mount", "--bind", folder.path, folder.path)
    node.run("mount", "-o", "remount,bind,ro", folder.path)
    folder.apply_job("whose claim is read-only for root")
    message = jobs.wait_for("CoordinatorReady", ("False", "ConfigurationMissing"), "subPath")
    assert 'failed to create subPath directory for volumeMount "run" of container "coordinator"; ' in message
    assert "mount the claim writable, and let root write to it (NFS: no_root_squash)" in message
    node.run("mount", "-o", "remount,bind,rw", folder.path)
    folder.open_to_group()
    folder.wait_until_written()


def test_a_pod_reads_a_policy_that_it_has_fetched_and_data_of_an_image(
    jobs: Jobs, hub: PolicyHub, kubectl: Kubectl, tmp_path: Path
) -> None:
    """H9: the hub's files are damaged first, and what the init container says is the job's message."""
    admin = jobs.cluster.admin
    registry = jobs.cluster.registry
    assert registry is not None
    digest = write_data_image(tmp_path / "image.tar", "problems", {PROBLEMS.name: PROBLEMS.read_bytes()})
    with tarfile.open(tmp_path / "image.tar") as archive:
        archive.extractall(tmp_path / "layout", filter="data")
    registry.push_layout(tmp_path / "layout", digest, "problems", "1")
    hub.create_secret(admin, jobs.namespace)
    changes = IDLE_RUN | {
        "model": MODEL,
        "volumes": [hub.volume, {"mountPath": "/problems", "image": f"{REGISTRY}/problems:1"}],
        "prompts": READ_PROBLEMS,
        "rewards": {"code": {}},
    }
    hub.server.faults.append(Fault("/api/resolve-cache/", times=1000, damages=True))
    jobs.create("whose policy is damaged on the hub", **changes)
    message = jobs.wait_for("Failed", ("True", "RunRefused"))
    assert f"uri must come as it is on {hub.server.url}, got " in message
    assert "with the checksum" in message
    hub.server.faults.clear()
    delete_job(jobs)
    job = admin.create(build_example(jobs.namespace, **changes)[1])
    jobs.log.add("applied it again, with the policy as it should be")
    policy, policy_error, problems, problems_error = try_folders(jobs, kubectl, job, MODEL["path"], "/problems")
    jobs.log.add(f"its pod has {policy}, and of the image {problems}")
    assert {"config.json", "tokenizer.json"} <= set(policy.split())
    assert "model.safetensors" not in policy, "a coordinator needs no weights"
    assert PROBLEMS.name in problems.split()
    assert {policy_error, problems_error} == {"Read-only file system"}


def test_a_pod_reads_data_that_it_has_fetched_from_s3(jobs: Jobs, bucket: dict[str, str], kubectl: Kubectl) -> None:
    """By the library in the image, at a port that `jobs.extraEgress` opens."""
    secret = {"apiVersion": "v1", "kind": "Secret", "stringData": bucket}
    jobs.cluster.admin.create(secret | {"metadata": {"name": "bucket", "namespace": jobs.namespace}})
    volume = {"mountPath": "/problems", "uri": "s3://problems/code", "secretName": "bucket"}
    changes = IDLE_RUN | {"volumes": [volume], "prompts": READ_PROBLEMS, "rewards": {"code": {}}}
    job = jobs.create("whose data is in a bucket", **changes)
    problems, problems_error = try_folders(jobs, kubectl, job, "/problems")
    jobs.log.add(f"its pod has {problems} of the bucket")
    assert PROBLEMS.name in problems.split()
    assert problems_error == "Read-only file system"


# -- a run with TLS, on a node that is drained and lost ---------------------------------------------------------------


@pytest.fixture(scope="module")
def operated(
    cluster: Cluster, release: Release, kubectl: Kubectl, hub: PolicyHub, log: StoryLog
) -> Iterator[OperatedRun]:
    """The run, until it is complete."""
    assert cluster.plane is not None
    cert_manager = CertManager(cluster.plane)
    cert_manager.install()
    create_restricted_namespace(cluster.admin, PLACE)
    cert_manager.add_authority("team-ca", PLACE)
    hub.create_secret(cluster.admin, PLACE)
    run = OperatedRun(Jobs(cluster, PLACE, log), kubectl)
    try:
        run.apply(hub)
        run.try_tls()
        cert_manager.renew(CERTIFICATE, PLACE)
        log.add("asked cert-manager for another certificate of the coordinator")
        run.drain()
        run.lose_node()
    finally:
        kubectl.run("uncordon", NODE)
    run.complete()
    yield run
    cluster.admin.delete("v1/namespaces", PLACE)
    wait_until(lambda: cluster.admin.find("v1/namespaces", PLACE) is None, f"{PLACE} is gone", CONDITION_S)
    cert_manager.uninstall()


@only_full
def test_a_run_with_tls_trains_each_step_once_whatever_became_of_its_node(operated: OperatedRun) -> None:
    """It was drained, and then lost for longer than its lease."""
    assert find_condition(operated.finished, "Complete")["reason"] == "MaxStepsReached"
    (metrics,) = operated.folder.rglob("metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [each["step"] for each in steps] == list(range(1, SCHEDULE["steps"] + 1))
    assert {each["groups"] for each in steps} == {SCHEDULE["promptsPerStep"]}
    assert {each["rollouts"] for each in steps} == {SCHEDULE["promptsPerStep"] * SCHEDULE["groupSize"]}


@only_full
def test_trainer_and_replica_admit_nobody_without_a_certificate(operated: OperatedRun) -> None:
    """Their own certificates, from cert-manager, have the names of their roles."""
    assert operated.secured == {role: ["answered", "refused"] for role in ("trainer", "generation")}


@only_full
def test_a_renewed_certificate_reaches_a_pod_that_runs(operated: OperatedRun) -> None:
    before, after = operated.certificates
    assert before != after


@only_full
def test_a_drain_leaves_what_a_run_cannot_lose_and_one_operator(operated: OperatedRun) -> None:
    """M7: budgets refuse the evictions. A replica has none, and of two operators one is evicted."""
    assert operated.refused == {"coordinator", "trainer", "store", "operator"}
    assert operated.evicted == {"generation", "operator"}
    assert operated.kept == {"coordinator", "trainer", "store"}


@only_full
def test_a_node_that_does_not_answer_is_named_with_what_to_do(operated: OperatedRun) -> None:
    """H2. Here it comes back, and the trainer's pod is replaced."""
    assert all(f"its node {NODE} does not answer" in message for message in operated.lost)
    taint = f"kubectl taint nodes {NODE} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    assert [taint in message for message in operated.lost] == [False, True]
