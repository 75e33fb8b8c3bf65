"""An administrator's work on a run and on its node, and what is seen of it. test_operations.py judges it.

The run's services use TLS, with certificates from cert-manager, and its pods fetch the policy from a stand-in for the
hub. While it trains, its node is drained. Meanwhile kubelet is killed for so long that Kubernetes gives the trainer's
pod up. Then kubelet is started again, and the node uncordoned.
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.kubectl import Kubectl
from tests.cluster.harness.node import NODE, Node
from tests.cluster.product import LAYOUT, NAMESPACE
from tests.cluster.story.jobs import SHORT_RUN, Jobs
from tests.e2e.harness.api import Api, Object, is_condition_true
from tests.e2e.harness.nodes import cpu_node
from tests.e2e.jobs import COMPONENT, describe_job, pods_of
from tests.stand_ins.hub import StandInHub, serve_hub
from tools.images.release import make_demo_policy

PLACE = "operated"
START_S = 2400.0
TRAIN_S = 2400.0
PART_S = 600.0
DRAIN_S = 90
MODEL: Object = {"path": "/models/demo", "dtype": "float32", "maxLength": 192}
SCHEDULE: Object = {"steps": 40, "promptsPerStep": 4, "groupSize": 4, "maxPolicyLag": 1}
UNREACHABLE: Object = {
    "key": "node.kubernetes.io/unreachable",
    "operator": "Exists",
    "effect": "NoExecute",
    "tolerationSeconds": 10,
}
"""Toleration of the trainer's pod. By default Kubernetes waits for five minutes before it gives a pod up."""
NEIGHBOUR = "neighbour"
CERTIFICATE = "local-coordinator-tls"
TRY_TLS = """
import socket, ssl, sys
address, name = sys.argv[1:]
host, port = address.split(":")
for has_certificate in (True, False):
    context = ssl.create_default_context(cafile="/etc/specrl-tls/ca.crt")
    context.set_alpn_protocols(["h2"])
    if has_certificate:
        context.load_cert_chain("/etc/specrl-tls/tls.crt", "/etc/specrl-tls/tls.key")
    try:
        with socket.create_connection((host, int(port)), 60) as plain:
            with context.wrap_socket(plain, server_hostname=name) as secured:
                print("answered" if secured.recv(1) else "refused")
    except (ConnectionResetError, ssl.SSLEOFError):
        print("refused")
    except ssl.SSLError as error:
        print("refused" if "CERTIFICATE_REQUIRED" in str(error) else error)
"""
"""Connects with the coordinator's certificate and without one. The name must be in the server's certificate."""


@dataclass
class PolicyHub:
    """A stand-in for the hub that has the demo's policy. volume: of an RLJob whose pods fetch it."""

    server: StandInHub
    volume: Object

    def create_secret(self, admin: Api, namespace: str) -> None:
        """Create the Secret of the volume, with the hub's address for the init containers."""
        secret = {"apiVersion": "v1", "kind": "Secret", "stringData": {"HF_ENDPOINT": self.server.url}}
        admin.create(secret | {"metadata": {"name": self.volume["secretName"], "namespace": namespace}})


def find_gateway(cluster: Cluster) -> str:
    """Return the machine's address in the cluster."""
    assert cluster.plane is not None
    assert cluster.plane.network is not None
    return cluster.plane.network.gateway


@contextmanager
def serve_policy(cluster: Cluster) -> Iterator[PolicyHub]:
    """Serve the hub to pods. Pods that fetch may reach port 443 of any address."""
    folder = make_demo_policy(LAYOUT.parent) / "demo-policy"
    with serve_hub(find_gateway(cluster), 443) as server:
        server.lfs_bytes = 1 << 30  # nothing is on the CDN, since pods know no second name of this machine
        commit = server.add_model("team/demo", {path.name: path.read_bytes() for path in folder.iterdir()})
        yield PolicyHub(server, {"mountPath": MODEL["path"], "uri": f"hf://team/demo@{commit}", "secretName": "hub"})


@dataclass
class OperatedRun:
    """The run, and what was seen of it. Its methods are called in their order here."""

    jobs: Jobs
    kubectl: Kubectl
    job: Object = field(default_factory=dict)
    secured: dict[str, list[str]] = field(default_factory=dict)
    """Answers of trainer and replica with the coordinator's certificate, and without one."""
    refused: set[str] = field(default_factory=set)
    """Roles of the pods that the drain could not evict."""
    evicted: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    """Roles all of whose pods were the same, and ready, after the drain."""
    lost: list[str] = field(default_factory=list)
    """Messages of TrainerReady: when the node had stopped answering, and when the pod should have ended."""
    finished: Object = field(default_factory=dict)
    certificates: list[str] = field(default_factory=list)
    """Digest of the certificate in the coordinator's pod: before it was renewed, and at the end."""

    @property
    def admin(self) -> Api:
        return self.jobs.cluster.admin

    @property
    def node(self) -> Node:
        assert self.jobs.cluster.node is not None
        return self.jobs.cluster.node

    @property
    def folder(self) -> Path:
        """The run's claim, on this machine."""
        claim = self.admin.get("v1/persistentvolumeclaims", "local-run", PLACE)
        return self.node.folder / "volumes" / str(claim["spec"]["volumeName"])

    def read_step(self) -> int:
        """Read the last step of the RLJob's status."""
        return int(self.jobs.read().get("status", {}).get("progress", {}).get("step") or 0)

    def wait_until(self, claim: Callable[[], Any], event: str, timeout_s: float = PART_S) -> None:
        """Wait until `claim` returns something true, and record the event."""
        self.jobs.log.wait_until(claim, event, timeout_s, lambda: describe_job(self.admin, self.job))

    def apply(self, hub: PolicyHub) -> None:
        """Apply the RLJob, and wait until it trains."""
        trainer = SHORT_RUN["trainer"] | {"podTemplate": {"spec": {"tolerations": [UNREACHABLE]}}}
        self.job = self.jobs.create(
            "with TLS, whose pods fetch the policy",
            **SHORT_RUN | {"trainer": trainer},
            model=MODEL,
            volumes=[hub.volume],
            schedule=SCHEDULE,
            checkpoint={"everySteps": 4, "claimName": "local-run"},
            tls={"mode": "CertManager", "issuer": {"name": "team-ca"}},
        )
        self.jobs.wait_for("Ready", ("True", "AllPartsReady"), timeout_s=START_S)
        self.wait_until(lambda: self.read_step() >= 2, "two steps are trained", TRAIN_S)
        self.certificates.append(self.read_certificate())

    def try_tls(self) -> None:
        """Connect from the coordinator's pod to trainer and replica, with its certificate and without."""
        for role, port in (("trainer", 7002), ("generation", 7001)):
            (pod,) = pods_of(self.admin, self.job, role)
            program = ("python", "-c", TRY_TLS, f"{pod['status']['podIP']}:{port}", f"{role}.local.{PLACE}.specrl")
            self.secured[role] = self.run_in_coordinator(*program).splitlines()
        self.jobs.log.add(f"connections with the coordinator's certificate, and without: {self.secured}")

    def run_in_coordinator(self, *command: str) -> str:
        """Run a program in the coordinator's pod. Returns its output."""
        (pod,) = pods_of(self.admin, self.job, "coordinator")
        return self.kubectl.run("exec", "--namespace", PLACE, pod["metadata"]["name"], "--", *command).stdout

    def read_certificate(self) -> str:
        """Return the digest of the certificate in the coordinator's pod."""
        return self.run_in_coordinator("sha256sum", "/etc/specrl-tls/tls.crt").split()[0]

    def drain(self) -> None:
        """Drain the node, except for DNS, of which the cluster has one pod. It cannot succeed while the run goes on."""
        roles = {pod["metadata"]["name"]: pod["metadata"]["labels"][COMPONENT] for pod in self._list_pods()}
        before = self._list_ready()
        step = self.read_step()
        options = ("--delete-emptydir-data", "--force", "--pod-selector=k8s-app!=kube-dns", f"--timeout={DRAIN_S}s")
        done = self.kubectl.run("drain", NODE, *options, check=False, timeout_s=DRAIN_S + 300)
        assert done.returncode != 0, done.stdout
        refused = re.findall(r'error when evicting pods/"([^"]+)"', done.stderr)
        evicted = re.findall(r"^pod/(\S+) evicted", done.stdout, re.MULTILINE)
        self.refused = {role for name, role in roles.items() if name in refused}
        self.evicted = {role for name, role in roles.items() if name in evicted}
        after = self._list_ready()
        self.kept = {role for role, pods in before.items() if pods <= after.get(role, set())}
        self.jobs.log.add(f"drained the node for {DRAIN_S} s, from step {step}")
        self.jobs.log.add(f"  evicted {sorted(self.evicted)}; could not evict {sorted(self.refused)}")

    def lose_node(self) -> None:
        """Kill kubelet until the trainer's pod is given up. Then start it again, and wait until that pod is gone."""
        (trainer,) = pods_of(self.admin, self.job, "trainer")
        answers = partial(self._has_ready, "v1/nodes", NODE)
        with keep_neighbour(self.admin):
            self.node.kill("kubelet")
            self.jobs.log.add("killed kubelet")
            self.wait_until(lambda: not answers(), "the node is not Ready")
            self.lost += [
                self.jobs.wait_for("TrainerReady", ("False", "NodeLost"), words) for words in ("tolerations", "taint")
            ]
            self.node.start_again("kubelet")
            self.jobs.log.add("started kubelet again")
            self.wait_until(answers, "the node is Ready")
            uid = trainer["metadata"]["uid"]
            self.wait_until(
                lambda: all(pod["metadata"]["uid"] != uid for pod in self.admin.list("v1/pods", PLACE)),
                "the trainer's lost pod is gone",
            )

    def complete(self) -> None:
        """Uncordon the node, and wait until the RLJob is Complete, and its pod has the renewed certificate."""
        self.kubectl.run("uncordon", NODE)
        self.jobs.log.add(f"uncordoned the node at step {self.read_step()}")
        self.wait_until(lambda: is_condition_true(self.jobs.read(), "Complete"), "the RLJob is Complete", TRAIN_S)
        self.finished = self.jobs.read()
        self.jobs.log.add(f"restarts of the trainer: {self.finished['status'].get('restarts', 0)}")
        renewed = self.admin.get("v1/secrets", CERTIFICATE, PLACE)["data"]["tls.crt"]
        digest = hashlib.sha256(base64.b64decode(renewed)).hexdigest()
        self.wait_until(lambda: self.read_certificate() == digest, "the coordinator's pod has the new certificate")
        self.certificates.append(digest)

    def _list_pods(self) -> list[Object]:
        """List the pods of the run and of the operator that are not being deleted."""
        operators = self.admin.list("v1/pods", NAMESPACE, f"{COMPONENT}=operator")
        return pods_of(self.admin, self.job) + [pod for pod in operators if "deletionTimestamp" not in pod["metadata"]]

    def _list_ready(self) -> dict[str, set[str]]:
        """List the uids of the pods that are ready, by role."""
        found: dict[str, set[str]] = {}
        for pod in self._list_pods():
            if is_condition_true(pod, "Ready"):
                found.setdefault(pod["metadata"]["labels"][COMPONENT], set()).add(pod["metadata"]["uid"])
        return found

    def _has_ready(self, kind: str, name: str) -> bool:
        return is_condition_true(self.admin.get(kind, name), "Ready")


@contextmanager
def keep_neighbour(admin: Api) -> Iterator[None]:
    """Keep another node Ready, which takes no pods. Kubernetes evicts nothing where no node answers."""
    api = admin.with_token(admin.token)
    node = cpu_node(NEIGHBOUR, "statuses")
    times = dict.fromkeys(("lastHeartbeatTime", "lastTransitionTime"), _format_now("%Y-%m-%dT%H:%M:%SZ"))
    node["status"]["conditions"] = [{"type": "Ready", "status": "True", "reason": "Kept", "message": ""} | times]
    ended = threading.Event()

    def renew_lease() -> None:
        metadata = {"name": NEIGHBOUR, "namespace": "kube-node-lease"}
        spec = {"holderIdentity": NEIGHBOUR, "leaseDurationSeconds": 40}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
        while True:
            api.apply(lease | {"spec": spec | {"renewTime": _format_now("%Y-%m-%dT%H:%M:%S.%fZ")}})
            if ended.wait(5):
                return

    api.create(node)
    thread = threading.Thread(target=renew_lease)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        api.delete("v1/nodes", NEIGHBOUR)
        api.delete("coordination.k8s.io/v1/leases", NEIGHBOUR, "kube-node-lease")


def _format_now(form: str) -> str:
    return datetime.now(UTC).strftime(form)
