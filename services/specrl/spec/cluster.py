"""Sections about the cluster that a run is placed on. The operator reads them; a local run accepts and ignores them.

Names and enums follow Kubernetes where it has them. What a field can mean only together with another one is a rule in
`rules.py`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from specrl.spec.base import Change, ObjectName, OnCluster, PathText, Section, ShortText
from specrl.spec.data import NotNegative

PodTemplate = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
]
"""A part of a Kubernetes PodTemplateSpec. Its full schema alone would be larger than a CRD may be."""

Seconds = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
NodeCount = Annotated[int, Field(ge=1, le=1024, strict=True)]
ReplicaCount = Annotated[int, Field(ge=1, le=4096, strict=True)]


class ManagedBy(StrEnum):
    OPERATOR = "specrl.dev/operator"
    MULTIKUEUE = "kueue.x-k8s.io/multikueue"


class CoordinatorPod(Section):
    """The coordinator's pod."""

    pod_template: Annotated[PodTemplate | None, Change.SUSPENDED, OnCluster.ONLY] = None
    """Part of a PodTemplateSpec that is merged over what the operator makes; containers are matched by name, and the
    coordinator's is `coordinator`. Null: nothing is changed."""


class Volume(Section):
    """A persistent volume claim that every pod of the run mounts, read only."""

    claim_name: ObjectName
    """PersistentVolumeClaim in the job's namespace."""
    mount_path: PathText
    """Absolute path that it is mounted at; model.path and prompt files may lie below it."""


class Scaler(StrEnum):
    HPA = "HPA"
    KEDA = "KEDA"


class Autoscaling(Section):
    """Replicas as the run needs them: more while training waits for rollouts, fewer while it does not."""

    min_replicas: ReplicaCount = 1
    """Fewest replicas."""
    max_replicas: ReplicaCount
    """Most replicas."""
    target_exposed_percent: Annotated[int, Field(ge=1, le=99, strict=True)] = 10
    """Share of a step's time, in percent, that training may wait for rollouts; replicas are added above it."""
    by: Scaler = Scaler.HPA
    """What scales. `HPA`: a HorizontalPodAutoscaler on an external metric, which needs a metrics adapter. `KEDA`: a
    ScaledObject that asks Prometheus itself."""


class Profile(StrEnum):
    GENERIC = "Generic"
    GB200 = "GB200"


class NvLink(StrEnum):
    DISABLED = "Disabled"
    PREFERRED = "Preferred"
    REQUIRED = "Required"


class Layout(StrEnum):
    ANY = "Any"
    SAME_DOMAIN = "SameDomain"
    SEPARATE_DOMAINS = "SeparateDomains"


class HostNetwork(StrEnum):
    DISABLED = "Disabled"
    ENABLED = "Enabled"


class Rdma(Section):
    """The network between nodes, as providers offer it."""

    resource_name: ShortText | None = None
    """Extended resource of which every GPU pod takes one, such as `rdma/ib`. Null: none."""
    host_network: HostNetwork = HostNetwork.DISABLED
    """`Enabled`: GPU pods use their node's network, past every NetworkPolicy."""


class Placement(Section):
    """Which nodes the run's GPU pods land on."""

    profile: Profile = Profile.GENERIC
    """`Generic`: any node that has the resources. `GB200`: GB200 or GB300 nodes (arm64), by their labels and taints,
    with shared memory and locked memory for NCCL."""
    nvlink: NvLink = NvLink.DISABLED
    """NVLink between nodes, which a ComputeDomain of NVIDIA's DRA driver opens. `Preferred`: used where it is to be
    had, and status.placement says so. `Required`: the job is not accepted without it."""
    layout: Layout = Layout.ANY
    """`SameDomain`: trainer and replicas in one NVLink domain. `SeparateDomains`: the trainer in one, replicas in
    others. `Any`: as they fit, but for the trainer, which is in one domain with nvlink `Required`. No replica ever
    straddles domains."""
    topology_key: ShortText = "nvidia.com/gpu.clique"
    """Node label that is equal within one NVLink domain."""
    gpus_per_node: Annotated[int, Field(ge=1, le=16, strict=True)] = 4
    """GPUs of one node."""
    nodes_per_domain: NodeCount = 18
    """Nodes of one NVLink domain."""
    rdma: Rdma | None = None
    """The network between nodes. Null: the pods' own."""


class Gang(StrEnum):
    AUTO = "Auto"
    NONE = "None"
    KUEUE = "Kueue"
    KAI = "KAI"
    VOLCANO = "Volcano"


class Scheduling(Section):
    """How the run gets its share of a cluster."""

    queue_name: ObjectName | None = None
    """Queue that admits the job: a Kueue LocalQueue, a KAI or a Volcano queue. Null: no queue."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of all pods. Null: the cluster's default."""
    gang: Gang = Gang.AUTO
    """What places pods together or not at all. `Auto`: Kueue if queueName is set, else none."""


class OnTrainerFailure(StrEnum):
    RESTART = "RestartFromCheckpoint"
    FAIL = "Fail"


class FailurePolicy(Section):
    """What becomes of the job when a part of it fails. The loss of a node is not counted as a failure."""

    max_restarts: NotNegative = 3
    """Restarts of the trainer, after which the job has failed."""
    on_trainer_failure: OnTrainerFailure = OnTrainerFailure.RESTART
    """`RestartFromCheckpoint`: the trainer starts again, and steps since its checkpoint are replayed. `Fail`: the job
    has failed."""
    min_generation_replicas: ReplicaCount = 1
    """Ready replicas below which the job counts as not ready."""


class TlsMode(StrEnum):
    DISABLED = "Disabled"
    CERT_MANAGER = "CertManager"
    EXISTING_SECRET = "ExistingSecret"  # noqa: S105 - the name of a mode


class IssuerKind(StrEnum):
    ISSUER = "Issuer"
    CLUSTER_ISSUER = "ClusterIssuer"


class Issuer(Section):
    """What signs the certificates."""

    name: ObjectName
    """Name of the issuer."""
    kind: IssuerKind = IssuerKind.ISSUER
    """`Issuer`: one of the job's namespace. `ClusterIssuer`: one for all."""


class PeerTls(Section):
    """Mutual TLS between coordinator, replicas and trainer. A role's certificate names it, as
    `<role>.<job>.<namespace>.specrl` with the roles coordinator, generation and trainer; renewals need no restart."""

    mode: TlsMode = TlsMode.DISABLED
    """`CertManager`: the operator asks cert-manager for a certificate per role. `ExistingSecret`: all roles use the one
    in secretName. `Disabled`: no encryption; NetworkPolicies alone keep others out."""
    issuer: Issuer | None = None
    """cert-manager's issuer; given with mode `CertManager` alone."""
    secret_name: ObjectName | None = None
    """Secret with tls.crt, tls.key and ca.crt; given with mode `ExistingSecret` alone."""
