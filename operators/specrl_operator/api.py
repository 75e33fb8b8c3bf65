"""What the operator knows of the Kubernetes API: kinds, labels, names, and an RLJob as it reads it. Pure.

An object is a mapping, as the API server sends it: most of the kinds here have no typed model in any client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from specrl.spec import RunSpec, parse_rljob

Object = dict[str, Any]
"""A Kubernetes object as JSON."""

MANAGER = "specrl-operator"
"""Field manager of everything that the operator applies."""


@dataclass(frozen=True)
class Kind:
    """A kind of object, and where the API server serves it."""

    api_version: str
    name: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """URL path of one object, of a namespace's, or of all."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        inside = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{inside}/{self.plural}" + (f"/{name}" if name else "")

    def object(self, metadata: Object, **rest: object) -> Object:
        """An object of this kind."""
        return {"apiVersion": self.api_version, "kind": self.name, "metadata": metadata, **rest}

    def is_of(self, item: Mapping[str, Any]) -> bool:
        """Whether an object is of this kind."""
        return item.get("kind") == self.name and item.get("apiVersion") == self.api_version


RLJOB = Kind("specrl.dev/v1alpha1", "RLJob", "rljobs")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
SERVICE = Kind("v1", "Service", "services")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
POD = Kind("v1", "Pod", "pods")
NODE = Kind("v1", "Node", "nodes")
ROLE = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets")
JOB = Kind("batch/v1", "Job", "jobs")
AUTOSCALER = Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
EVENT = Kind("events.k8s.io/v1", "Event", "events")
JOB_SET = Kind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets")
LEADER_WORKER_SET = Kind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets")
COMPUTE_DOMAIN = Kind("resource.nvidia.com/v1beta1", "ComputeDomain", "computedomains")
CLAIM_TEMPLATE = Kind("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates")
LOCAL_QUEUE = Kind("kueue.x-k8s.io/v1beta1", "LocalQueue", "localqueues")
KAI_QUEUE = Kind("scheduling.run.ai/v2", "Queue", "queues")
POD_GROUP = Kind("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups")
CERTIFICATE = Kind("cert-manager.io/v1", "Certificate", "certificates")
SCALED_OBJECT = Kind("keda.sh/v1alpha1", "ScaledObject", "scaledobjects")

OPTIONAL = (
    JOB_SET,
    LEADER_WORKER_SET,
    COMPUTE_DOMAIN,
    CLAIM_TEMPLATE,
    LOCAL_QUEUE,
    KAI_QUEUE,
    POD_GROUP,
    CERTIFICATE,
    SCALED_OBJECT,
)
"""Kinds that a cluster may lack. Which of them it serves is asked again and again."""

CHILDREN = (
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    CONFIG_MAP,
    SERVICE,
    NETWORK_POLICY,
    CERTIFICATE,
    COMPUTE_DOMAIN,
    POD_GROUP,
    JOB_SET,
    JOB,
    LEADER_WORKER_SET,
    STATEFUL_SET,
    DEPLOYMENT,
    AUTOSCALER,
    SCALED_OBJECT,
)
"""Kinds that the operator makes, finds again by label, and removes when a job no longer wants them. Secrets are not
among them: it may make and read them by name, and never list them."""

SEEN = ("replicas", "suspend", "nodeName", "schedulingGates")
"""Fields of a child's or a pod's spec that decisions rest on."""

JOB_LABEL = "specrl.dev/rljob"
COMPONENT_LABEL = "app.kubernetes.io/component"
LEADER_LABEL = "specrl.dev/replica-leader"
ACCELERATED_LABEL = "specrl.dev/accelerated"
NVLINK_LABEL = "specrl.dev/multi-node-nvlink"
MANAGED_LABEL = "app.kubernetes.io/managed-by"
HASH_ANNOTATION = "specrl.dev/desired-hash"
TEMPLATE_ANNOTATION = "specrl.dev/template-hash"
ATTEMPT_ANNOTATION = "specrl.dev/attempt"

COORDINATOR, TRAINER, GENERATION, STORE = "coordinator", "trainer", "generation", "store"


@dataclass(frozen=True)
class Job:
    """An RLJob that could be read."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    generation: int
    created: datetime
    spec: RunSpec
    status: Object

    def child(self, part: str) -> str:
        """Name of a child."""
        return f"{self.name}-{part}"

    @property
    def run_name(self) -> str:
        """Name of the run in places that outlive the job: another RLJob of the same name is another run."""
        return f"{self.name}-{self.uid[:8]}"

    def labels(self, component: str | None = None) -> dict[str, str]:
        """Labels of a child."""
        labels = {
            "app.kubernetes.io/name": "specrl",
            "app.kubernetes.io/instance": self.name,
            MANAGED_LABEL: MANAGER,
            JOB_LABEL: self.name,
        }
        return labels | ({COMPONENT_LABEL: component} if component else {})

    def selector(self, component: str) -> dict[str, str]:
        """Labels by which the pods of a component are selected; these never change."""
        return {JOB_LABEL: self.name, COMPONENT_LABEL: component}

    @property
    def scale_selector(self) -> str:
        """One pod of every replica: what autoscalers divide by."""
        return f"{JOB_LABEL}={self.name},{COMPONENT_LABEL}={GENERATION},{LEADER_LABEL}=true"

    @property
    def owner(self) -> Object:
        """The reference that every child carries; its removal removes them."""
        return {
            "apiVersion": RLJOB.api_version,
            "kind": RLJOB.name,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def read_job(item: Object) -> Job:
    """An RLJob as the API server sent it. Raises SpecInvalid with every problem of its spec."""
    meta = item["metadata"]
    return Job(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        resource_version=meta.get("resourceVersion", ""),
        generation=meta.get("generation", 0),
        created=read_time(meta["creationTimestamp"]),
        spec=parse_rljob(item),
        status=item.get("status") or {},
    )


def seen(item: Object) -> Object:
    """What a look reads of an object that was listed or watched: its metadata, its status, and SEEN of its spec.

    An operator keeps every child of every job in memory, and what they were made of, and by whom each of their fields
    is managed, is nine tenths of them.
    """
    found: Object = {name: item[name] for name in ("apiVersion", "kind", "status") if name in item}
    found["metadata"] = {name: value for name, value in item["metadata"].items() if name != "managedFields"}
    spec = item.get("spec") or {}
    return found | {"spec": {name: spec[name] for name in SEEN if name in spec}}


def key_of(item: Mapping[str, Any]) -> tuple[str, str]:
    """(namespace, name)."""
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def is_controlled_by(item: Mapping[str, Any], uid: str) -> bool:
    """Whether an object's controller is the one with this uid."""
    owners = item["metadata"].get("ownerReferences") or []
    return any(owner.get("uid") == uid and owner.get("controller") for owner in owners)


def read_time(text: str) -> datetime:
    """A time as Kubernetes writes it."""
    return datetime.fromisoformat(text)


def write_time(moment: datetime) -> str:
    """A time as Kubernetes reads it: whole seconds, UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_micro_time(moment: datetime) -> str:
    """The same, in microseconds: what leases and events have."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def condition_of(status: Mapping[str, Any], kind: str) -> Object:
    """The condition of that type; empty when there is none."""
    return next((it for it in status.get("conditions") or [] if it.get("type") == kind), {})


def is_true(status: Mapping[str, Any], kind: str) -> bool:
    """Whether the condition of that type says True."""
    return condition_of(status, kind).get("status") == "True"
