"""The kinds of Kubernetes objects that the operator reads or writes. Pure.

Used with the module's name, as in `kinds.POD`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A kind of object, and its place in the API server's URLs."""

    api_version: str
    name: str
    plural: str
    is_optional: bool = False
    """A cluster may lack it. `cluster/watches.py` asks every DISCOVERY_S which kinds are served."""

    def is_served(self, versions: frozenset[str]) -> bool:
        """Whether an API server with these group versions, as in `apps/v1`, serves the kind."""
        if self in (LOCAL_QUEUE, KAI_QUEUE):
            # The operator only writes the names of queues, so any version of their API is good enough.
            group = self.api_version.partition("/")[0]
            return any(version.startswith(f"{group}/") for version in versions)
        return not self.is_optional or self.api_version in versions

    def build_path(self, namespace: str | None, name: str | None = None) -> str:
        """Build the URL path of one object, of a namespace's objects, or of all objects."""
        # The core group, `v1`, has its own root.
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        inside = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{inside}/{self.plural}" + (f"/{name}" if name else "")

    def build_object(self, metadata: dict[str, Any], **rest: object) -> dict[str, Any]:
        """Build an object of this kind."""
        return self.build_reference(metadata=metadata, **rest)

    def build_reference(self, **fields: object) -> dict[str, Any]:
        """Build a reference to an object of this kind."""
        return {"apiVersion": self.api_version, "kind": self.name, **fields}

    def is_kind_of(self, item: Mapping[str, Any]) -> bool:
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
DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets")
JOB = Kind("batch/v1", "Job", "jobs")
AUTOSCALER = Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
EVENT = Kind("events.k8s.io/v1", "Event", "events")
JOB_SET = Kind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets", is_optional=True)
LEADER_WORKER_SET = Kind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets", is_optional=True)
COMPUTE_DOMAIN = Kind("resource.nvidia.com/v1beta1", "ComputeDomain", "computedomains", is_optional=True)
CLAIM_TEMPLATE = Kind("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates", is_optional=True)
LOCAL_QUEUE = Kind("kueue.x-k8s.io/v1beta1", "LocalQueue", "localqueues", is_optional=True)
KAI_QUEUE = Kind("scheduling.run.ai/v2", "Queue", "queues", is_optional=True)
POD_GROUP = Kind("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups", is_optional=True)
CERTIFICATE = Kind("cert-manager.io/v1", "Certificate", "certificates", is_optional=True)
SCALED_OBJECT = Kind("keda.sh/v1alpha1", "ScaledObject", "scaledobjects", is_optional=True)

REPAIRED_KINDS = (SERVICE, NETWORK_POLICY, ROLE, ROLE_BINDING)
"""Kinds of small children without a replica count, which the operator applies again when others have changed them."""
CHILD_KINDS = (
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    CONFIG_MAP,
    SERVICE,
    NETWORK_POLICY,
    DISRUPTION_BUDGET,
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
"""Kinds of children that the operator applies, lists by label and deletes, in the order of creation. Secrets are not
among them: the operator has no right to list Secrets, so it gets and creates them by name."""
