"""A cluster in memory around the operator: what controllers and kubelets would do, as far as a test lets them."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.stand_ins.api_server import CORE, FakeApiServer
from tests.unit.operator.builders import an_rljob, merge

from specrl_operator.api import (
    CLAIM_TEMPLATE,
    COMPONENT_LABEL,
    COMPUTE_DOMAIN,
    COORDINATOR,
    DEPLOYMENT,
    EVENT,
    GENERATION,
    JOB,
    JOB_SET,
    LEADER_LABEL,
    LEADER_WORKER_SET,
    OPTIONAL,
    POD,
    RLJOB,
    SECRET,
    STATEFUL_SET,
    TRAINER,
    Object,
    condition_of,
)
from specrl_operator.facts import Settings
from specrl_operator.reconcile import Reconciler

EVERYTHING = CORE | {kind.api_version for kind in OPTIONAL}
JOBSET_ONLY = CORE | {JOB_SET.api_version}


class World:
    """One API server with one RLJob `tiny` in namespace `rl`, a clock, and an operator that can be replaced."""

    def __init__(
        self, *changes: Object, served: frozenset[str] = JOBSET_ONLY, settings: Settings | None = None
    ) -> None:
        self.server = FakeApiServer(served)
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.settings = settings or Settings()
        self.server.put(an_rljob(*changes))

    def copy(self) -> World:
        """A world of the same state, which goes its own way from here."""
        found = copy.copy(self)
        found.server = self.server.copy()
        return found

    def reconcile(self) -> float | None:
        """One look by an operator that remembers nothing."""
        return Reconciler(self.server, self.settings, lambda: self.now).reconcile("rl", "tiny")

    def settle(self, looks: int = 12) -> float | None:
        """Look until nothing is written any more, with controllers at work in between."""
        for _ in range(looks):
            before = len(self.server.writes())
            after = self.reconcile()
            changed = self.run_controllers()
            if len(self.server.writes()) == before and not changed:
                return after
        raise AssertionError(f"still writing after {looks} looks: {self.server.writes()[-5:]}")

    def later(self, seconds: float) -> None:
        """Let time pass."""
        self.now += timedelta(seconds=seconds)

    # -- what others do ---------------------------------------------------------------------------------------------

    def edit(self, **spec: Any) -> None:
        """A user changes the job's spec; None removes."""
        job = self.rljob
        self.server.put(merge(job, {"spec": spec}))

    def report(self, **status: Any) -> None:
        """The coordinator says something in the job's status."""
        body = {"apiVersion": RLJOB.api_version, "kind": RLJOB.name, "metadata": {"name": "tiny", "namespace": "rl"}}
        self.server.apply_status(RLJOB, {**body, "status": status}, "specrl-coordinator")
        self.server.calls.pop()

    def finish(self) -> None:
        """The coordinator says that all steps are trained."""
        finished = {"type": "RunFinished", "status": "True", "reason": "MaxStepsReached", "message": "2 steps"}
        self.report(conditions=[finished | {"lastTransitionTime": "2026-01-01T00:00:00Z"}])

    def run_controllers(self) -> bool:
        """Make and remove pods as the workloads say, all of them ready at once. Returns whether there was anything."""
        wanted: dict[str, tuple[str, Object]] = {}
        for kind, component in (
            (DEPLOYMENT, COORDINATOR),
            (STATEFUL_SET, GENERATION),
            (JOB_SET, TRAINER),
            (JOB, TRAINER),
        ):
            for item in self.server.of(kind).values():
                if item["metadata"]["labels"][COMPONENT_LABEL] == component:
                    count = item["spec"].get("replicas", 1)
                    if kind in (JOB_SET, JOB):
                        ended = {it["type"] for it in item.get("status", {}).get("conditions", [])}
                        count = 0 if ended else _pods_of(item)
                    for number in range(count):
                        wanted[f"{item['metadata']['name']}-{number}"] = component, item
        for item in self.server.of(LEADER_WORKER_SET).values():
            size = item["spec"]["leaderWorkerTemplate"]["size"]
            for number in range(item["spec"]["replicas"]):
                name = f"{item['metadata']['name']}-{number}"
                wanted |= {name + (f"-{rank}" if rank else ""): (GENERATION, item) for rank in range(size)}
        there = self.server.of(POD)
        for name in set(there) - set(wanted):
            self.server.delete(POD, there[name])
            self.server.calls.pop()
        for name in sorted(set(wanted) - set(there)):
            component, item = wanted[name]
            is_member = LEADER_WORKER_SET.is_of(item) and name.count("-") > item["metadata"]["name"].count("-") + 1
            self.server.put(a_pod(name, component, item, is_leader=not is_member))
        made = False
        for domain in self.server.of(COMPUTE_DOMAIN).values():
            template = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
            if template not in self.server.of(CLAIM_TEMPLATE):
                meta = {"name": template, "namespace": "rl"}
                self.server.put(
                    {"apiVersion": CLAIM_TEMPLATE.api_version, "kind": CLAIM_TEMPLATE.name, "metadata": meta}
                )
                made = True
        return made or set(wanted) != set(there)

    def end_pod(self, name: str, code: int, message: str = "", restarts: int = 0) -> None:
        """A pod's container ends."""
        pod = self.server.of(POD)[name]
        ended = {"terminated": {"exitCode": code, "message": message}}
        container = {"name": "x", "restartCount": restarts, "state": ended}
        pod["status"] = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [container]}
        self.server.put(pod)

    def conclude(self, kind: Any, name: str, condition: str, message: str = "") -> None:
        """A controller says how a workload ended."""
        item = self.server.of(kind)[name]
        item["status"] = {"conditions": [{"type": condition, "status": "True", "message": message}]}
        self.server.put(item)

    # -- what is there ----------------------------------------------------------------------------------------------

    @property
    def rljob(self) -> Object:
        return self.server.of(RLJOB)["tiny"]

    @property
    def status(self) -> Object:
        return self.rljob.get("status") or {}

    def said(self, condition: str) -> tuple[str | None, str | None]:
        """Status and reason of a condition."""
        found = condition_of(self.status, condition)
        return found.get("status"), found.get("reason")

    def names(self) -> set[tuple[str, str]]:
        """Kind and name of all that is there but for events."""
        return {(place[1], place[3]) for place in self.server.objects if place[1] != EVENT.name}

    def reasons(self) -> list[str]:
        """Reasons of all events, in their order."""
        found = [it for place, it in self.server.objects.items() if place[1] == EVENT.name]
        found.sort(key=lambda it: int(it["metadata"]["resourceVersion"]))
        return [it["reason"] for it in found]

    def state(self) -> Object:
        """Everything that is there, without what differs from one time to the next."""
        found = {}
        for place, item in sorted(self.server.objects.items()):
            if place[1] in (EVENT.name,):
                continue
            kept = {name: value for name, value in item.items() if place[1] != SECRET.name or name != "stringData"}
            meta = {
                name: value
                for name, value in item["metadata"].items()
                if name not in ("uid", "resourceVersion", "generation", "ownerReferences")
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
    """A pod as a kubelet reports it. is_leader: of its replica; other roles have none."""
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
