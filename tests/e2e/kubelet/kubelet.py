"""The kubelet of all nodes with the label `specrl.dev/kubelet`, in one process.

It watches nodes, pods and services, renews the nodes' leases, and runs every pod that is bound to one of its nodes:
`pod.Pod` as processes on this machine, `statuses.StatusOnlyPod` by writing a status only. It also provisions folders
for PersistentVolumeClaims, creates the claim templates of ComputeDomains, and serves logs to `kubectl logs`.

Modelled: environment with the downward API; ConfigMap, Secret, emptyDir, hostPath, claim, projected and token volumes
with subPath; a writable layer over the machine's file system; a network namespace and address per pod; names of
services and of pods behind headless ones; init containers; all four kinds of probes; restart policies with back-off;
preStop, SIGTERM and grace periods; exit codes, termination messages, container statuses, logs.

Not modelled: images (the machine is the image), users and capabilities (everything runs as root), CPU and memory
limits, devices, network policies, hostNetwork, Services whose port differs from the targetPort, sidecars, ephemeral
containers, updates of ConfigMaps and tokens in running pods, activeDeadlineSeconds of pods, postStart, sysctls,
eviction.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from tests.e2e.harness import compute_domain
from tests.e2e.harness.api import Object, Refused, path_of
from tests.e2e.harness.network import PodNetwork
from tests.e2e.harness.nodes import OURS
from tests.e2e.kubelet.client import RETRY_S, Cache, Client
from tests.e2e.kubelet.names import hosts_file
from tests.e2e.kubelet.pod import Pod
from tests.e2e.kubelet.statuses import StatusOnlyPod

RENEW_S = 10  # seconds, as in Kubernetes' kubelet; the lease lasts four times as long
STORAGE_CLASS = "folder"


@dataclass(frozen=True)
class ImageMap:
    """How this machine replaces images. `entrypoints`: part of an image's name to a command; `kept`: see Machine."""

    entrypoints: dict[str, list[str]]
    kept: tuple[Path, ...]


class Kubelet:
    """The kubelet of all our nodes."""

    def __init__(self, client: Client, folder: Path, network: PodNetwork, images: ImageMap, log_port: int) -> None:
        self.client = client
        self.folder = folder
        self.network = network
        self.kept = images.kept
        self._entrypoints = images.entrypoints
        self._log_port = log_port
        self._nodes = Cache("v1/nodes", self._node_changed)
        self._pods = Cache("v1/pods", self._pod_changed)
        self._slices = Cache("discovery.k8s.io/v1/endpointslices", lambda _: self._names_changed())
        self._claims = Cache("v1/persistentvolumeclaims", self._claim_changed)
        self._domains = Cache(compute_domain.KIND, self._domain_changed)
        self._lives: dict[str, Pod | StatusOnlyPod] = {}
        self._renewed: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set. Then stop everything that was started."""
        for cache in (self._nodes, self._slices, self._claims, self._domains, self._pods):
            self._run_task(self.client.watch(cache))
        self._run_task(self._renew_for_ever())
        await stop.wait()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(life.abandon() for life in self._lives.values() if isinstance(life, Pod)))

    def image_command(self, image: str) -> list[str]:
        """Return the ENTRYPOINT of an image."""
        return next((command for part, command in self._entrypoints.items() if part in image), [])

    def base_environment(self) -> dict[str, str]:
        """Return the variables of images, and those that the kubelet adds about the API server."""
        host, port = self.client.server.removeprefix("https://").split(":")
        api = {"KUBERNETES_SERVICE_HOST": host}
        api |= dict.fromkeys(("KUBERNETES_SERVICE_PORT", "KUBERNETES_SERVICE_PORT_HTTPS"), port)
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
        return {"HOME": "/tmp"} | kept | api  # noqa: S108 - the container's

    def log_file(self, namespace: str, pod: str, container: str) -> Path | None:
        """Return the log of a container's latest run."""
        files = list((self.folder / "logs" / namespace / pod).glob(f"{container}.*.log"))
        return max(files, key=lambda file: int(file.name.split(".")[-2]), default=None)

    def _mode_of(self, node: str) -> str | None:
        """Return how pods on a node are run; None if the node is not ours."""
        names = {each["metadata"]["name"]: each["metadata"].get("labels", {}) for each in self._nodes.objects.values()}
        mode: str | None = names.get(node, {}).get(OURS)
        return mode

    def _pod_changed(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        life = self._lives.get(uid)
        if uid not in self._pods.objects:
            if life is not None:
                self._run_task(self._forget(uid, life))
            return
        if life is None:
            life = self._begin(pod)
            if life is None:
                return
        life.observed = pod
        if isinstance(life, StatusOnlyPod):
            self._run_task(life.follow())
        elif "deletionTimestamp" in pod["metadata"]:
            self._run_task(life.end())

    def _begin(self, pod: Object) -> Pod | StatusOnlyPod | None:
        mode = self._mode_of(pod["spec"].get("nodeName", ""))
        if mode is None:
            return None
        address = self.network.next_address()
        if mode == "processes":
            life = Pod(self, pod, address)
            self._lives[pod["metadata"]["uid"]] = life
            self._names_changed()
            life.start()
            return life
        played = StatusOnlyPod(self.client, pod, address, self.network.gateway)
        self._lives[pod["metadata"]["uid"]] = played
        return played

    async def _forget(self, uid: str, life: Pod | StatusOnlyPod) -> None:
        """The pod is no longer in the API: it was deleted by force, or by this kubelet."""
        if isinstance(life, Pod):
            await life.abandon()
        self._lives.pop(uid, None)

    def _names_changed(self) -> None:
        """Rewrite /etc/hosts of every running pod, in place, since it is mounted."""
        for life in self._lives.values():
            if isinstance(life, Pod):
                content = hosts_file(life.observed, life.address, self._slices.objects.values())
                if life.hosts.read_text() != content:
                    life.hosts.write_text(content)

    def _node_changed(self, node: Object) -> None:
        name = node["metadata"]["name"]
        if node["metadata"]["uid"] not in self._nodes.objects:
            self._renewed.discard(name)
        elif OURS in node["metadata"].get("labels", {}) and name not in self._renewed:
            self._renewed.add(name)
            self._run_task(self._join(name))

    async def _join(self, name: str) -> None:
        """Renew the lease, then report Ready: the node controller distrusts a node without a lease."""
        await self._renew(name)
        kinds = {"MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False", "Ready": "True"}
        stamp = _micro_time()[:19] + "Z"
        conditions = [
            {
                "type": kind,
                "status": status,
                "reason": "Kubelet",
                "lastHeartbeatTime": stamp,
                "lastTransitionTime": stamp,
            }
            for kind, status in kinds.items()
        ]
        addresses = [{"type": "InternalIP", "address": self.network.gateway}]  # the API server would prefer a host name
        endpoint = {"kubeletEndpoint": {"Port": self._log_port}}
        status = {"conditions": conditions, "addresses": addresses, "daemonEndpoints": endpoint}
        with contextlib.suppress(Refused):
            await self.client.call("PATCH", path_of("v1/nodes", name=name, subresource="status"), {"status": status})
        # Pods may have been bound to the node before this kubelet knew it.
        for pod in list(self._pods.objects.values()):
            if pod["spec"].get("nodeName") == name and pod["metadata"]["uid"] not in self._lives:
                self._pod_changed(pod)

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            for name in list(self._renewed):
                await self._renew(name)

    async def _renew(self, name: str) -> None:
        kind = "coordination.k8s.io/v1/leases"
        namespace = "kube-node-lease"
        spec = {"holderIdentity": name, "leaseDurationSeconds": 4 * RENEW_S, "renewTime": _micro_time()}
        metadata = {"name": name, "namespace": namespace}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        with contextlib.suppress(httpx2.HTTPError):
            try:
                await self.client.call("PATCH", path_of(kind, namespace, name), {"spec": spec})
            except Refused:
                with contextlib.suppress(Refused):  # the namespace is created a moment after the API server starts
                    await self.client.call("POST", path_of(kind, namespace), lease)

    def _claim_changed(self, claim: Object) -> None:
        if claim.get("status", {}).get("phase") == "Pending" and claim["spec"].get("storageClassName") == STORAGE_CLASS:
            folder = self.folder / "claims" / claim["metadata"]["uid"]
            folder.mkdir(parents=True, exist_ok=True)
            self._run_task(self._provision_volume(claim, folder))

    async def _provision_volume(self, claim: Object, folder: Path) -> None:
        """Create a folder and a volume for a claim of our storage class. Kubernetes binds the two."""
        metadata = claim["metadata"]
        reference = {key: metadata[key] for key in ("name", "namespace", "uid")}
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"pvc-{metadata['uid']}"},
            "spec": {
                "capacity": {"storage": claim["spec"]["resources"]["requests"]["storage"]},
                "accessModes": claim["spec"]["accessModes"],
                "storageClassName": STORAGE_CLASS,
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(folder)},
                "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim"} | reference,
            },
        }
        with contextlib.suppress(Refused):  # it was created at an earlier event
            await self.client.call("POST", path_of("v1/persistentvolumes"), volume)

    def _domain_changed(self, domain: Object) -> None:
        if domain["metadata"]["uid"] in self._domains.objects:
            self._run_task(self._create_claim_template(compute_domain.build_claim_template(domain)))

    async def _create_claim_template(self, template: Object) -> None:
        kind = "resource.k8s.io/v1/resourceclaimtemplates"
        with contextlib.suppress(Refused):  # it was created at an earlier event
            await self.client.call("POST", path_of(kind, template["metadata"]["namespace"]), template)

    def _run_task(self, work: Any) -> None:
        """Run a task concurrently. A failure is a bug of this kubelet; the harness shows it, from stderr."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            sys.stderr.write(f"kubelet: {type(error).__name__}: {error}\n")
            sys.stderr.flush()


async def until_ready(client: Client) -> None:
    """Wait for the API server. The harness bounds the wait."""
    while True:
        try:
            await client.call("GET", path_of("v1/namespaces", name="kube-system"))
            return
        except (Refused, httpx2.HTTPError):
            await asyncio.sleep(RETRY_S)


def _micro_time() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
