"""A cluster in memory around the operator. Controllers and kubelets act when a test calls them."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.stand_ins.api_server import CORE, FakeApiServer
from tests.stand_ins.live_objects import LiveObjects
from tests.unit.operator.builders import ALL, an_rljob, merge

from specrl_operator.api import (
    COMPONENT_LABEL,
    COORDINATOR,
    GENERATION,
    LEADER_LABEL,
    STORE,
    TRAINER,
    Object,
    find_condition,
    has_component,
)
from specrl_operator.kinds import (
    CLAIM_TEMPLATE,
    COMPUTE_DOMAIN,
    DEPLOYMENT,
    EVENT,
    JOB,
    JOB_SET,
    LEADER_WORKER_SET,
    POD,
    RLJOB,
    SECRET,
    STATEFUL_SET,
)
from specrl_operator.observed import has_pod_ended
from specrl_operator.plan.job_plan import Settings
from specrl_operator.reconcile import Reconciler

EVERYTHING = CORE | {kind.api_version for kind in ALL}
JOBSET_ONLY = CORE | {JOB_SET.api_version}


class World:
    """An API server with the RLJob `tiny` in namespace `rl`, a clock, and an operator without state."""

    def __init__(
        self, *changes: Object, served: frozenset[str] = JOBSET_ONLY, settings: Settings | None = None
    ) -> None:
        self.server = FakeApiServer(served)
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.settings = settings or Settings()
        self.server.put_object(an_rljob(*changes))

    def copy(self) -> World:
        """Copy the world into an independent one."""
        found = copy.copy(self)
        found.server = self.server.copy()
        return found

    def reconcile(self) -> float | None:
        """Reconcile once, with a new operator."""
        return self.start_operator().reconcile("rl", "tiny")

    def start_operator(self) -> Reconciler:
        """Start an operator without state, whose cache is never stale."""
        return Reconciler(self.server, LiveObjects(self.server), self.settings, lambda: self.now)

    def settle(self, looks: int = 12) -> float | None:
        """Reconcile, and run the controllers, until nothing is written any more."""
        for _ in range(looks):
            before = len(self.server.list_writes())
            after = self.reconcile()
            changed = self.run_controllers()
            if len(self.server.list_writes()) == before and not changed:
                return after
        raise AssertionError(f"still writing after {looks} reconciliations: {self.server.list_writes()[-5:]}")

    def advance_clock(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += timedelta(seconds=seconds)

    # -- changes by others -------------------------------------------------------------------------------------------

    def edit_spec(self, **spec: Any) -> None:
        """Change the job's spec, as a user does; None removes a field."""
        job = self.rljob
        self.server.put_object(merge(job, {"spec": spec}))

    def report_status(self, **status: Any) -> None:
        """Apply fields of the job's status, as the coordinator does."""
        body = {"apiVersion": RLJOB.api_version, "kind": RLJOB.name, "metadata": {"name": "tiny", "namespace": "rl"}}
        self.server.apply_status(RLJOB, {**body, "status": status}, "specrl-coordinator")
        self.server.calls.pop()

    def finish_run(self) -> None:
        """Report that all steps are trained, as the coordinator does."""
        finished = {"type": "RunFinished", "status": "True", "reason": "MaxStepsReached", "message": "2 steps"}
        self.report_status(conditions=[finished | {"lastTransitionTime": "2026-01-01T00:00:00Z"}])

    def run_controllers(self) -> bool:
        """Create and delete pods for the workloads; all are ready at once. Returns whether anything changed."""
        wanted: dict[str, tuple[str, Object]] = {}
        for kind, component in (
            (DEPLOYMENT, COORDINATOR),
            (STATEFUL_SET, GENERATION),
            (STATEFUL_SET, STORE),
            (JOB_SET, TRAINER),
            (JOB, TRAINER),
        ):
            for item in self.server.objects_by_name(kind).values():
                if item["metadata"]["labels"][COMPONENT_LABEL] == component:
                    count = item["spec"].get("replicas", 1)
                    if kind in (JOB_SET, JOB):
                        ended = {it["type"] for it in item.get("status", {}).get("conditions", [])}
                        count = 0 if ended else _pods_of(item)
                    for number in range(count):
                        wanted[f"{item['metadata']['name']}-{number}"] = component, item
        for item in self.server.objects_by_name(LEADER_WORKER_SET).values():
            size = item["spec"]["leaderWorkerTemplate"]["size"]
            for number in range(item["spec"]["replicas"]):
                name = f"{item['metadata']['name']}-{number}"
                wanted |= {name + (f"-{rank}" if rank else ""): (GENERATION, item) for rank in range(size)}
        # A ReplicaSet neither counts nor deletes pods that were evicted.
        there = {
            name: pod
            for name, pod in self.server.objects_by_name(POD).items()
            if not (has_component(pod, COORDINATOR) and has_pod_ended(pod))
        }
        for name in set(there) - set(wanted):
            self.server.delete(POD, there[name])
            self.server.calls.pop()
        for name in sorted(set(wanted) - set(there)):
            component, item = wanted[name]
            is_member = LEADER_WORKER_SET.is_kind_of(item) and name.count("-") > item["metadata"]["name"].count("-") + 1
            self.server.put_object(a_pod(name, component, item, is_leader=not is_member))
        made = False
        for domain in self.server.objects_by_name(COMPUTE_DOMAIN).values():
            template = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
            if template not in self.server.objects_by_name(CLAIM_TEMPLATE):
                meta = {"name": template, "namespace": "rl"}
                self.server.put_object(
                    {"apiVersion": CLAIM_TEMPLATE.api_version, "kind": CLAIM_TEMPLATE.name, "metadata": meta}
                )
                made = True
        return made or set(wanted) != set(there)

    def end_pod(self, name: str, code: int, message: str = "", restarts: int = 0, reason: str = "") -> None:
        """End a pod's container with an exit code. reason: the kubelet's. A trainer's pod ends with it."""
        pod = self.server.objects_by_name(POD)[name]
        ended = {"terminated": {"exitCode": code, "message": message, "reason": reason}}
        container = {"name": pod["metadata"]["labels"][COMPONENT_LABEL], "restartCount": restarts, "state": ended}
        # The kubelet restarts the containers of the other roles.
        phase = ("Failed" if code else "Succeeded") if has_component(pod, TRAINER) else "Running"
        pod["status"] = {"phase": phase, "containerStatuses": [container]}
        self.server.put_object(pod)

    def evict_coordinator(self, code: int = 137, restarts: int = 0) -> None:
        """Evict the coordinator's pod, as a kubelet does for lack of memory or disk. Its object stays."""
        pod = self.server.objects_by_name(POD)["tiny-coordinator-0"]
        self.server.delete(POD, pod)
        self.server.calls.pop()
        ended = {"terminated": {"exitCode": code, "reason": "Error"}}
        container = {"name": COORDINATOR, "restartCount": restarts, "state": ended}
        pod["status"] = {"phase": "Failed", "reason": "Evicted", "containerStatuses": [container]}
        pod["metadata"] = {**pod["metadata"], "name": "tiny-coordinator-evicted"}
        self.server.put_object(pod)

    def end_workload(self, kind: Any, name: str, condition: str, message: str = "") -> None:
        """Set the terminal condition of a workload, as its controller does."""
        item = self.server.objects_by_name(kind)[name]
        item["status"] = {"conditions": [{"type": condition, "status": "True", "message": message}]}
        self.server.put_object(item)

    # -- the present state -------------------------------------------------------------------------------------------

    @property
    def rljob(self) -> Object:
        return self.server.objects_by_name(RLJOB)["tiny"]

    @property
    def status(self) -> Object:
        return self.rljob.get("status") or {}

    def read_condition(self, condition: str) -> tuple[str | None, str | None]:
        """Status and reason of a condition."""
        found = find_condition(self.status, condition)
        return found.get("status"), found.get("reason")

    def list_objects(self) -> set[tuple[str, str]]:
        """Return kind and name of all objects except events."""
        return {(place[1], place[3]) for place in self.server.objects if place[1] != EVENT.name}

    def list_event_reasons(self) -> list[str]:
        """Return the reasons of all events, in the order of their creation."""
        found = [it for place, it in self.server.objects.items() if place[1] == EVENT.name]
        found.sort(key=lambda it: int(it["metadata"]["resourceVersion"]))
        return [it["reason"] for it in found]

    def take_snapshot(self) -> Object:
        """Return all objects except events, without fields that differ between two equal runs."""
        found = {}
        for place, item in sorted(self.server.objects.items()):
            if place[1] in (EVENT.name,):
                continue
            kept = {name: value for name, value in item.items() if place[1] != SECRET.name or name != "stringData"}
            meta = {
                name: value
                for name, value in item["metadata"].items()
                if name not in ("uid", "resourceVersion", "generation", "ownerReferences", "managedFields")
            }
            meta["owners"] = [it["kind"] for it in item["metadata"].get("ownerReferences", [])]
            found[f"{place[1]} {place[3]}"] = {**kept, "metadata": meta}
        return found


def _pods_of(item: Object) -> int:
    spec = item["spec"]
    return int(
        spec["parallelism"] if item["kind"] == "Job" else spec["replicatedJobs"][0]["template"]["spec"]["parallelism"]
    )


def a_pod(name: str, component: str, owner: Object, *, is_ready: bool = True, is_leader: bool = True) -> Object:
    """Build a pod as a kubelet reports it. is_leader: whether it leads its replica; ignored for other roles."""
    labels = {**owner["metadata"]["labels"], COMPONENT_LABEL: component}
    if component == GENERATION and is_leader:
        labels[LEADER_LABEL] = "true"
    reference = {"kind": owner["kind"], "uid": owner["metadata"]["uid"], "controller": True}
    said = "True" if is_ready else "False"
    return {
        "apiVersion": POD.api_version,
        "kind": POD.name,
        "metadata": {"name": name, "namespace": "rl", "labels": labels, "ownerReferences": [reference]},
        "spec": {},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": said}]},
    }


def creating_since(moment: str) -> Object:
    """Build the status of a pod that is on a node since a moment, and whose container is not created."""
    return {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": moment}],
        "containerStatuses": [{"name": "main", "state": {"waiting": {"reason": "ContainerCreating"}}}],
    }
