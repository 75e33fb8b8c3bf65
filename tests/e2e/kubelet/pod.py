"""A pod that runs as processes: volumes, init containers, containers, probes, restarts, termination.

    PENDING --volumes exist--> INITIALISING --each init container ends with 0--> RUNNING
    RUNNING --all ended, and none is to be restarted--> Succeeded | Failed
    any --deletionTimestamp--> TERMINATING --all ended, or the grace period is over--> deleted from the API

The status is written only when it has changed, and writes are serialized: a delayed older write must not report an
ended container as running.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx2
from tests.e2e.harness.api import Object, Refused, path_of
from tests.e2e.harness.network import Namespace, PodNetwork
from tests.e2e.kubelet import probes
from tests.e2e.kubelet.client import RETRY_S, Client
from tests.e2e.kubelet.container import Plan, Running
from tests.e2e.kubelet.environment import ObjectMissing, expand, variables_of
from tests.e2e.kubelet.names import hostname_of
from tests.e2e.kubelet.volumes import VolumeBind, binds_of, create_volumes

FIRST_BACKOFF_S = 1.0  # seconds; Kubernetes has 10 and 300
LAST_BACKOFF_S = 10.0
TERMINATION_LOG = "/dev/termination-log"
STEADY_S = 600.0  # seconds; a container that ran for longer restarts with the first back-off, as in Kubernetes


class PodHost(Protocol):
    """The interface of the kubelet to its pods."""

    client: Client
    folder: Path
    network: PodNetwork
    kept: tuple[Path, ...]
    """Folders of this machine that every image has. They stay visible when a volume is mounted over them."""

    def image_command(self, image: str) -> list[str]:
        """Return the ENTRYPOINT of an image."""

    def base_environment(self) -> dict[str, str]:
        """Return the variables that images set."""


@dataclass
class ContainerSlot:
    """One container of the pod: its spec and its status."""

    spec: Object
    is_init: bool
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "PodInitializing"}})
    last_state: Object = field(default_factory=dict)
    running: Running | None = None
    started: bool = False
    ready: bool = False
    restarts: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while nothing runs. Waiters for the container's end wait for it; `state` then has the result."""

    @property
    def exit_code(self) -> int | None:
        """Exit code; None unless the container has ended and is not being restarted."""
        code: int | None = self.state.get("terminated", {}).get("exitCode")
        return code

    def status(self) -> Object:
        image = self.spec.get("image", "")
        return {
            "name": self.spec["name"],
            "image": image,
            "imageID": f"machine://{image}",
            "state": self.state,
            "lastState": self.last_state,
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
        }


class Pod:
    """The life cycle of one pod. The kubelet keeps `observed` up to date."""

    def __init__(self, machine: PodHost, observed: Object, address: str) -> None:
        self._machine = machine
        self.observed = observed
        self.address = address
        metadata = observed["metadata"]
        spec = observed["spec"]
        self._path = path_of("v1/pods", metadata["namespace"], metadata["name"])
        self._folder = machine.folder / "pods" / metadata["uid"]
        self._folder.mkdir(parents=True, exist_ok=True)
        self.hosts = self._folder / "hosts"
        self.hosts.touch()
        self._init = [ContainerSlot(each, is_init=True) for each in spec.get("initContainers", [])]
        self._main = [ContainerSlot(each, is_init=False) for each in spec["containers"]]
        self._restart = spec.get("restartPolicy", "Always")
        self._volumes: dict[str, Path] = {}
        self._initialised = False
        self._stopping = False
        self._written: Object = {}
        self._writing = asyncio.Lock()
        self._conditions: dict[str, Object] = {}
        self._began = now()
        self._task: asyncio.Task[None] | None = None
        self._network: Namespace = machine.network.open(address)

    def start(self) -> None:
        """Start the pod's life cycle."""
        self._task = asyncio.create_task(self._run_lifecycle())

    @property
    def log_folder(self) -> Path:
        metadata = self.observed["metadata"]
        return self._machine.folder / "logs" / str(metadata["namespace"]) / str(metadata["name"])

    def log_of(self, container: str, restarts: int | None = None) -> Path:
        """Return the log file of a container's current run, or of run `restarts`."""
        slot = next(each for each in (*self._init, *self._main) if each.spec["name"] == container)
        number = slot.restarts if restarts is None else restarts
        return self.log_folder / f"{container}.{number}.log"

    async def end(self) -> None:
        """Stop the containers within the grace period, and delete the pod from the API."""
        if self._stopping:
            return
        self._stopping = True
        for slot in self._main:
            slot.ready = False
        await self._report()
        grace_s = self.observed["metadata"].get("deletionGracePeriodSeconds", 30)
        await asyncio.gather(*(self._stop(slot, grace_s) for slot in (*self._init, *self._main) if slot.running))
        await self.abandon()
        for slot in (*self._init, *self._main):
            if slot.exit_code is None:  # it never ran, or was between two runs
                slot.state = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
        await self._report()
        await delete_pod(self._machine.client, self.observed)

    async def abandon(self) -> None:
        """Kill the containers without reporting it."""
        self._stopping = True
        for slot in (*self._init, *self._main):
            if slot.running:
                slot.running.kill()
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._network.close()
        for slot in (*self._init, *self._main):
            slot.idle.set()

    async def _run_lifecycle(self) -> None:
        await self._report()
        await self._make_volumes()
        for slot in self._init:
            await self._run(slot)
            if slot.exit_code != 0:
                await self._report()
                return
        self._initialised = True
        await asyncio.gather(*(self._run(slot) for slot in self._main))
        await self._report()

    async def _make_volumes(self) -> None:
        while True:
            try:
                self._volumes = await create_volumes(
                    self._machine.client, self.observed, self._folder / "volumes", self._facts()
                )
                return
            except (ObjectMissing, Refused) as reason:
                await self._wait_because("ContainerCreating", str(reason), self._init + self._main)
                await asyncio.sleep(RETRY_S)

    async def _run(self, slot: ContainerSlot) -> None:
        """Run a container, and restart it by its restart policy. Returns when it is not restarted any more."""
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping:
            began = time.monotonic()
            code = await self._run_once(slot)
            again = self._restart == "Always" or (self._restart == "OnFailure" and code != 0)
            if slot.is_init:
                again = code != 0 and self._restart != "Never"
            if self._stopping or not again:
                return
            if time.monotonic() - began > STEADY_S:
                backoff_s = FIRST_BACKOFF_S
            slot.last_state = slot.state
            await self._wait_because(
                "CrashLoopBackOff", f"back-off {backoff_s:.0f} s restarting failed container", [slot]
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
            slot.restarts += 1

    async def _run_once(self, slot: ContainerSlot) -> int:
        """Run a container once. Returns its exit code."""
        plan = await self._plan(slot)
        log = self.log_of(slot.spec["name"])
        slot.idle.clear()
        slot.running = await Running.start(plan, log)
        began = now()
        slot.state = {"running": {"startedAt": began}}
        slot.started = "startupProbe" not in slot.spec
        slot.ready = slot.started and "readinessProbe" not in slot.spec
        watching = asyncio.create_task(self._probe(slot, slot.running))
        await self._report()
        try:
            code = await slot.running.wait()
        finally:
            watching.cancel()
            slot.running = None
            slot.ready = False
            slot.started = False
        reason = "Completed" if code == 0 else "Error"
        ended = {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": now()}
        ended["message"] = self._last_words(slot, code, log)
        slot.state = {"terminated": {key: value for key, value in ended.items() if value != ""}}
        slot.idle.set()
        await self._report()
        return code

    def _last_words(self, slot: ContainerSlot, code: int, log: Path) -> str:
        """Return the container's termination message; by its policy, the end of its output if that is empty."""
        words = (self._folder / f"{slot.spec['name']}.last-words").read_text()[:4096]
        if not words and code != 0 and slot.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            return log.read_text(encoding="utf-8", errors="replace")[-2048:]
        return words

    async def _plan(self, slot: ContainerSlot) -> Plan:
        spec = slot.spec
        context = slot.spec.get("securityContext", {})
        while True:
            try:
                own = await variables_of(self._machine.client, self.observed, spec, self._facts())
                break
            except ObjectMissing as reason:
                await self._wait_because("CreateContainerConfigError", str(reason), [slot])
                await asyncio.sleep(RETRY_S)
        variables = self._machine.base_environment() | {"HOSTNAME": hostname_of(self.observed)} | own
        command = spec.get("command") or self._machine.image_command(spec.get("image", ""))
        binds = binds_of(spec, self._volumes, own)
        words_at = spec.get("terminationMessagePath", TERMINATION_LOG)
        last_words = self._folder / f"{spec['name']}.last-words"
        last_words.write_text("")
        return Plan(
            command=[expand(word, own) for word in (*command, *spec.get("args", []))],
            environment=variables,
            working_directory=spec.get("workingDir", "/"),
            hostname=hostname_of(self.observed),
            binds=[
                *binds,
                *(
                    VolumeBind(str(path), str(path), read_only=True)
                    for path in self._machine.kept
                    if _is_hidden(path, binds)
                ),
                VolumeBind(str(self.hosts), "/etc/hosts", read_only=False),
                VolumeBind(str(last_words), words_at, False),
            ],
            read_only_root=context.get("readOnlyRootFilesystem", False),
            network=self._network.path,
            scratch=str(self._folder / f"{spec['name']}.{slot.restarts}"),
        )

    async def _probe(self, slot: ContainerSlot, running: Running) -> None:
        """Run the startup probe, then liveness and readiness probes concurrently."""

        async def check(probe: Object) -> bool:
            return await probes.passes(probe, slot.spec, running, self.address)

        async def alive(is_alive: bool) -> None:
            if not is_alive:
                await self._stop(slot, self.observed["spec"].get("terminationGracePeriodSeconds", 30))

        async def ready(is_ready: bool) -> None:
            slot.ready = is_ready and not self._stopping
            await self._report()

        up = asyncio.Event()

        async def started(is_started: bool) -> None:
            if not is_started:
                await alive(False)
            elif not up.is_set():
                up.set()
                slot.started = True
                slot.ready = "readinessProbe" not in slot.spec
                await self._report()

        async with asyncio.TaskGroup() as group:
            if (startup := slot.spec.get("startupProbe")) is not None:
                starting = group.create_task(probes.watch(startup, lambda: check(startup), started))
                await up.wait()
                starting.cancel()
            for name, decided in (("livenessProbe", alive), ("readinessProbe", ready)):
                if (probe := slot.spec.get(name)) is not None:
                    group.create_task(probes.watch(probe, lambda probe=probe: check(probe), decided))  # type: ignore[misc]

    async def _stop(self, slot: ContainerSlot, grace_s: float) -> None:
        """Run preStop, send SIGTERM, and SIGKILL after the grace period, which covers both."""
        running = slot.running
        if running is None:
            return
        deadline = time.monotonic() + grace_s
        hook = slot.spec.get("lifecycle", {}).get("preStop", {})
        if "exec" in hook:
            await running.execute(hook["exec"]["command"], grace_s)
        elif "httpGet" in hook:
            await probes.passes({**hook, "timeoutSeconds": grace_s}, slot.spec, running, self.address)
        elif "sleep" in hook:
            await asyncio.sleep(min(grace_s, hook["sleep"]["seconds"]))
        running.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await slot.idle.wait()
        if not slot.idle.is_set():
            running.kill()
            await slot.idle.wait()

    def _facts(self) -> dict[str, str]:
        """Return the fields of the downward API that this kubelet decides."""
        return {
            "status.podIP": self.address,
            "status.podIPs": self.address,
            "status.hostIP": self._machine.network.gateway,
        }

    async def _wait_because(self, reason: str, message: str, slots: list[ContainerSlot]) -> None:
        for slot in slots:
            slot.state = {"waiting": {"reason": reason, "message": message}}
        await self._report()

    async def _report(self) -> None:
        """Write the current status. Shielded: cancelling a probe must not cancel the write."""
        await asyncio.shield(self._write())

    async def _write(self) -> None:
        async with self._writing:
            status = self._status()
            if status == self._written:
                return
            self._written = status
            await write_status(self._machine.client, self._path, status)

    def _status(self) -> Object:
        codes = [slot.exit_code for slot in self._main]
        init_failed = any(slot.exit_code not in (0, None) for slot in self._init)
        ended = init_failed or (
            all(code is not None for code in codes) and (self._restart != "Always" or self._stopping)
        )
        if ended and not (self._restart == "OnFailure" and any(codes) and not self._stopping):
            phase = "Failed" if init_failed or any(codes) else "Succeeded"
        else:
            phase = "Running" if self._initialised else "Pending"
        ready = phase == "Running" and all(slot.ready for slot in self._main)
        claims = {"PodReadyToStartContainers": True, "Initialized": self._initialised}
        claims |= {"ContainersReady": ready, "Ready": ready}
        for kind, holds in claims.items():
            word = "True" if holds else "False"
            if self._conditions.get(kind, {}).get("status") != word:
                self._conditions[kind] = {"type": kind, "status": word, "lastTransitionTime": now()}
        scheduled = [c for c in self.observed["status"].get("conditions", []) if c["type"] == "PodScheduled"]
        return {
            "phase": phase,
            "conditions": [*scheduled, *self._conditions.values()],
            "hostIP": self._machine.network.gateway,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self._began,
            "initContainerStatuses": [slot.status() for slot in self._init],
            "containerStatuses": [dict(slot.status()) for slot in self._main],
        }


def _is_hidden(path: Path, binds: list[VolumeBind]) -> bool:
    return any(path.is_relative_to(bind.target) for bind in binds)


async def write_status(client: Client, path: str, status: Object) -> None:
    """Patch the status of a pod. Does nothing if the pod no longer exists."""
    await _retry_request(client, "PATCH", f"{path}/status", {"status": status})


async def delete_pod(client: Client, pod: Object) -> None:
    """Delete the pod from the API, after all its processes have ended."""
    metadata = pod["metadata"]
    path = path_of("v1/pods", metadata["namespace"], metadata["name"])
    options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
    await _retry_request(client, "DELETE", path, {"apiVersion": "v1", "kind": "DeleteOptions"} | options)


async def _retry_request(client: Client, method: str, path: str, body: Object) -> None:
    """Repeat a request until an API server answers. That the pod was deleted or replaced is an answer."""
    while True:
        try:
            await client.call(method, path, body)
            return
        except Refused as refused:
            if refused.status in (404, 409):
                return
            raise
        except httpx2.HTTPError:
            await asyncio.sleep(RETRY_S)


def now() -> str:
    """Return the time in Kubernetes' format."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
