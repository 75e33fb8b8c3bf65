"""The Kubernetes API as the operator uses it: labels, names, and the parsed RLJob. Pure.

Objects are plain mappings, as the API server sends them: most kinds here have no typed model in any Python client.
Every module of the operator imports this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from specrl.errors import SpecInvalid
from specrl.spec import RunSpec, parse_rljob
from specrl.spec.load import find_differences, keep_known_fields
from specrl_operator import kinds

Object = dict[str, Any]
"""A Kubernetes object as JSON."""

MANAGER = "specrl-operator"
"""Field manager of everything that the operator applies."""

CLAIM_SUFFIX = "-imex"
"""The name of a job's ResourceClaimTemplate is the job's name with this suffix."""

KEPT_SPEC_FIELDS = ("replicas", "suspend", "nodeName", "schedulingGates", "readinessGates")
"""Fields of the specs of children and pods that decisions read. `trim_object` drops the others."""

JOB_LABEL = "specrl.dev/rljob"
UID_LABEL = "specrl.dev/rljob-uid"
"""Label of every child and pod. A deleted job and the next one of its name share names and JOB_LABEL. Their pods may
run side by side for a whole grace period."""
COMPONENT_LABEL = "app.kubernetes.io/component"
LEADER_LABEL = "specrl.dev/replica-leader"
ACCELERATED_LABEL = "specrl.dev/accelerated"
NVLINK_LABEL = "specrl.dev/multi-node-nvlink"
MANAGED_LABEL = "app.kubernetes.io/managed-by"
HASH_ANNOTATION = "specrl.dev/desired-hash"
TEMPLATE_ANNOTATION = "specrl.dev/template-hash"
RUN_FILE_ANNOTATION = "specrl.dev/run-file"
"""Annotation of a workload: the ConfigMap that its pod template mounts. The operator's cache holds no templates."""
ATTEMPT_ANNOTATION = "specrl.dev/attempt"

COORDINATOR = "coordinator"
TRAINER = "trainer"
GENERATION = "generation"
STORE = "store"
"""Components. Each is also the name of its container."""

FETCH_PREFIX = "fetch-"
"""Names of the init containers that fetch volumes begin with it; a number follows."""

MAX_MESSAGE_LENGTH = 1024
"""Most characters of a condition's or event's message. The API server's limit for an event's note is 1 KiB."""


@dataclass(frozen=True)
class Job:
    """An RLJob whose spec is valid."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    generation: int
    created: datetime
    spec: RunSpec
    status: Object
    unknown_fields: tuple[str, ...] = ()
    """Paths of fields of a newer CRD, which this operator ignores."""

    def child_name(self, part: str) -> str:
        """Return the name of a child: the job's name and the part."""
        return f"{self.name}-{part}"

    @property
    def run_name(self) -> str:
        """Name of the run in stores and volumes that outlive the job. The uid tells jobs of the same name apart."""
        return f"{self.name}-{self.uid[:8]}"

    def build_labels(self, component: str | None = None) -> dict[str, str]:
        """Build the labels of a child."""
        labels = {
            "app.kubernetes.io/name": "specrl",
            "app.kubernetes.io/instance": self.name,
            MANAGED_LABEL: MANAGER,
            JOB_LABEL: self.name,
            UID_LABEL: self.uid,
        }
        return labels | ({COMPONENT_LABEL: component} if component else {})

    def build_metadata(self, component: str) -> Object:
        """Build the metadata of the child that is a component."""
        return {"name": self.child_name(component), "labels": self.build_labels(component)}

    def build_selector(self, component: str | None = None) -> dict[str, str]:
        """Build the labels that select the pods of the job, or of one component.

        Selectors of workloads are immutable.
        """
        labels = {JOB_LABEL: self.name, UID_LABEL: self.uid}
        return labels | ({COMPONENT_LABEL: component} if component else {})

    @property
    def scale_selector(self) -> str:
        """Label selector of one pod per replica. Autoscalers count the pods that it selects."""
        labels = self.build_selector(GENERATION) | {LEADER_LABEL: "true"}
        return ",".join(f"{name}={value}" for name, value in labels.items())

    @property
    def owner_reference(self) -> Object:
        """Owner reference of every child. The garbage collector deletes the children with the job."""
        return kinds.RLJOB.build_reference(name=self.name, uid=self.uid, controller=True, blockOwnerDeletion=True)


def read_job(item: Object) -> Job:
    """Parse an RLJob from the API server. Raises SpecInvalid with every problem of its spec.

    The CRD may be newer than this operator: during an upgrade, or where others install it. Then the API server fills
    defaults of fields that this operator does not know into all jobs. A job that has been accepted is parsed without
    them, and so it is still scaled, suspended and judged. Any other job is left to an operator that knows its fields.
    """
    meta = item["metadata"]
    status: Object = item.get("status") or {}
    unknown: tuple[str, ...] = ()
    try:
        spec = parse_rljob(item)
    except SpecInvalid:
        known = keep_known_fields(item["spec"])
        unknown = tuple(find_differences(item["spec"], known))
        if not unknown or not is_condition_true(status, "Accepted"):
            raise
        spec = parse_rljob({**item, "spec": known})
    return Job(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        resource_version=meta.get("resourceVersion", ""),
        generation=meta.get("generation", 0),
        created=parse_time(meta["creationTimestamp"]),
        spec=spec,
        status=status,
        unknown_fields=unknown,
    )


def trim_object(item: Object) -> Object:
    """Trim a listed or watched object to what reconciliation reads: metadata, status, KEPT_SPEC_FIELDS of its spec.

    Objects of `kinds.REPAIRED_KINDS`, which are small, stay whole but for `managedFields`.

    The operator keeps every child of every job in memory. The rest of the spec and `managedFields` are nine tenths of
    their size.
    """
    metadata = {name: value for name, value in item["metadata"].items() if name != "managedFields"}
    if any(kind.is_kind_of(item) for kind in kinds.REPAIRED_KINDS):
        return item | {"metadata": metadata}
    found: Object = {name: item[name] for name in ("apiVersion", "kind", "status") if name in item}
    found["metadata"] = metadata
    spec = item.get("spec") or {}
    return found | {"spec": {name: spec[name] for name in KEPT_SPEC_FIELDS if name in spec}}


def key_of(item: Mapping[str, Any]) -> tuple[str, str]:
    """Return the object's key: (namespace, name)."""
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def is_controlled_by(item: Mapping[str, Any], uid: str) -> bool:
    """Whether an object's controller is the one with this uid."""
    owners = item["metadata"].get("ownerReferences") or []
    return any(owner.get("uid") == uid and owner.get("controller") for owner in owners)


def has_component(item: Mapping[str, Any], component: str) -> bool:
    """Whether an object is, or belongs to, that component of its job."""
    return (item["metadata"].get("labels") or {}).get(COMPONENT_LABEL) == component


def parse_time(text: str) -> datetime:
    """Parse a Kubernetes timestamp (RFC 3339)."""
    return datetime.fromisoformat(text)


def has_elapsed(since: str | None, limit_s: float | None, now: datetime) -> bool:
    """Whether a limit in seconds has passed since a Kubernetes timestamp. False if either is not given."""
    return since is not None and limit_s is not None and now >= parse_time(since) + timedelta(seconds=limit_s)


def format_time(moment: datetime) -> str:
    """Format a time as metav1.Time: UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_micro_time(moment: datetime) -> str:
    """Format a time as metav1.MicroTime, which leases and events use: UTC, microseconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True)
class ConditionState:
    """Whether a condition is true, and why; without type and times."""

    is_true: bool
    reason: str
    message: str = ""


def find_condition(status: Mapping[str, Any], kind: str) -> Object:
    """Return the condition of a type; an empty mapping if there is none."""
    return next((it for it in status.get("conditions") or [] if it.get("type") == kind), {})


def is_condition_true(status: Mapping[str, Any], kind: str) -> bool:
    """Whether the condition of a type has status True."""
    return find_condition(status, kind).get("status") == "True"
