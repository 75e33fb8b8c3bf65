"""Sections about the cluster that a run is placed on. The operator reads them, and of some the coordinator
(`observe/rljob_status.py`). A local run accepts and ignores them.

Names and enums follow Kubernetes' own. Cross-field rules are in `rules/cluster_rules.py`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema

from specrl.spec.base import (
    HUB_URI_PATTERN,
    ChangePolicy,
    ObjectName,
    OnCluster,
    PathText,
    Section,
    ShortText,
    WholeNumber,
)
from specrl.spec.data import NotNegative

Schema = dict[str, Any]

# The schema of a podTemplate: what is merged by name. The whole schema of a PodTemplateSpec would exceed a CRD's size
# limit, so the API server checks the rest when the pods' owner is made. But an item without a name, in a list that is
# merged by name, could not be merged at all. One schema is in the CRD and in `check_pod_template`, which checks files.
# Null removes a field of the operator's, so everything may be null.
_OBJECT: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_ANYTHING: Schema = _OBJECT | {"nullable": True}
_TEXTS: Schema = {
    "type": "object",
    "additionalProperties": {"type": "string", "maxLength": 65536, "nullable": True},
    "maxProperties": 64,
    "nullable": True,
}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items, "maxItems": 64, "nullable": True, "x-kubernetes-list-type": "atomic"}


def _object_with(required: str, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "required": [required],
        "properties": {required: {"type": "string", "minLength": 1, "maxLength": 4096}, **properties},
        "x-kubernetes-preserve-unknown-fields": True,
    }


_CONTAINER = _object_with(
    "name",
    env=_list_of(_object_with("name")),
    volumeMounts=_list_of(_object_with("mountPath")),
    ports=_list_of(_OBJECT),
    resources=_ANYTHING
    | {"properties": {"requests": _ANYTHING, "limits": _ANYTHING, "claims": _list_of(_object_with("name"))}},
    securityContext=_ANYTHING,
)
_NAMED = _list_of(_object_with("name"))
POD_TEMPLATE: Schema = {
    "type": "object",
    "properties": {
        "metadata": {"type": "object", "properties": {"labels": _TEXTS, "annotations": _TEXTS}, "nullable": True},
        "spec": _ANYTHING
        | {
            "properties": {
                "containers": _list_of(_CONTAINER),
                "initContainers": _list_of(_CONTAINER),
                "volumes": _NAMED,
                "resourceClaims": _NAMED,
                "imagePullSecrets": _NAMED,
                "tolerations": _list_of(_ANYTHING),
                "securityContext": _ANYTHING,
                "nodeSelector": _TEXTS,
                "affinity": _ANYTHING,
            }
        },
    },
}
_TYPES: dict[str, tuple[type[Any], str]] = {
    "object": (dict, "a mapping"),
    "array": (list, "a list"),
    "string": (str, "text"),
}


def check_pod_template(value: Any, schema: Schema = POD_TEMPLATE, path: str = "podTemplate") -> Any:
    """Return the value if it has the shape of the schema. Raises ValueError, which names the path."""
    if value is None and schema.get("nullable"):
        return value
    wanted, words = _TYPES[schema["type"]]
    if not isinstance(value, wanted):
        raise ValueError(f"{path} must be {words}, got {type(value).__name__}")
    most = next((schema[name] for name in ("maxItems", "maxProperties", "maxLength") if name in schema), None)
    if most is not None and len(value) > most:
        raise ValueError(f"{path} must have a length of at most {most}, got {len(value)}")
    if len(value) < schema.get("minLength", 0):
        raise ValueError(f"{path} must not be empty")
    if isinstance(value, list):
        for number, item in enumerate(value):
            check_pod_template(item, schema["items"], f"{path}.{number}")
    if isinstance(value, dict):
        _check_fields(value, schema, path)
    return value


def _check_fields(value: dict[str, Any], schema: Schema, path: str) -> None:
    for name in schema.get("required", ()):
        if name not in value:
            raise ValueError(f"{path}.{name} must be given, got none")
    known = schema.get("properties", {})
    for name, item in value.items():
        if name in known:
            check_pod_template(item, known[name], f"{path}.{name}")
        elif "additionalProperties" in schema:
            check_pod_template(item, schema["additionalProperties"], f"{path}.{name}")
        elif not schema.get("x-kubernetes-preserve-unknown-fields"):
            raise ValueError(f"{path}.{name} is not a field here; there are {', '.join(known)}")


PodTemplate = Annotated[dict[str, Any], AfterValidator(check_pod_template), WithJsonSchema(POD_TEMPLATE)]
"""A part of a Kubernetes PodTemplateSpec."""

Seconds = Annotated[WholeNumber, Field(ge=1, le=2**31 - 1)]
# Upper bounds are generous. They keep products of counts in CEL rules within 64 bits.
NodeCount = Annotated[WholeNumber, Field(ge=1, le=1024)]
ReplicaCount = Annotated[WholeNumber, Field(ge=1, le=4096)]


class ManagedBy(StrEnum):
    OPERATOR = "specrl.dev/operator"
    MULTIKUEUE = "kueue.x-k8s.io/multikueue"


class CoordinatorPod(Section):
    """The coordinator's pod."""

    pod_template: Annotated[PodTemplate | None, ChangePolicy.SUSPENDED, OnCluster.ONLY] = None
    """Part of a PodTemplateSpec, merged over the operator's. Containers are matched by name; the coordinator's
    container is `coordinator`. Null: no change."""


class StoreServer(Section):
    """The pod of the Redis server that the operator starts for a run without `store`."""

    pod_template: Annotated[PodTemplate | None, ChangePolicy.SUSPENDED, OnCluster.ONLY] = None
    """As coordinator.podTemplate, for the server's pod. Its container is `store`."""


_STORE_URI = r"^(s3|gs|abfs)://[^@\s?#]+$"
"""A folder of an object store, without user and password, since run files must not contain credentials."""


class Volume(Section):
    """Files that every pod of the run but the store's mounts read-only: of a claim, of a container image, or fetched
    by an init container before the pod's process starts."""

    mount_path: PathText
    """Absolute path of the mount. model.path and prompt files may be it, or below it."""
    claim_name: ObjectName | None = None
    """PersistentVolumeClaim in the job's namespace. With uri, the claim on which pods and jobs share what is fetched;
    it is ReadWriteMany where the pods are on several nodes. Null with uri: every pod fetches into a folder of its
    own."""
    image: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^\S+$")] | None = None
    """Container image, or OCI artifact, whose files are mounted, such as registry.example.com/models/qwen3:1. Needs
    Kubernetes 1.35, or the feature gate ImageVolume."""
    uri: Annotated[str, Field(max_length=1024, pattern=f"{HUB_URI_PATTERN}|{_STORE_URI}")] | None = None
    """Source to fetch (docs/hub.md): a model or a data set on the Hugging Face Hub, as in hf://OWNER/NAME@COMMIT or
    hf://datasets/OWNER/NAME@COMMIT, or a folder of an object store, as in s3://BUCKET/FOLDER. Checksums are compared.
    The coordinator's pod fetches no safetensors files."""
    secret_name: ObjectName | None = None
    """Secret whose keys become environment variables of the init container that fetches uri, such as HF_TOKEN or
    AWS_ACCESS_KEY_ID. Null: none."""


class Scaler(StrEnum):
    HPA = "HPA"
    KEDA = "KEDA"


class Autoscaling(Section):
    """Scales replicas to the run's needs: up while training waits for rollouts, down while it does not. It follows
    specrl_coordinator_replicas_demand, which is measured over 15 minutes and at least 4 steps."""

    min_replicas: ReplicaCount = 1
    """Fewest replicas."""
    max_replicas: ReplicaCount
    """Most replicas."""
    target_exposed_percent: Annotated[WholeNumber, Field(ge=1, le=99)] = 10
    """Percentage of a step's time that training may wait for rollouts. Replicas are added above it, and removed if it
    would still hold without them."""
    added_per_period: ReplicaCount = 2
    """Most replicas that are added within 5 minutes. They are removed one by one, 15 minutes after they were last
    needed."""
    by: Scaler = Scaler.HPA
    """Autoscaler to use. `HPA`: a HorizontalPodAutoscaler on an external metric, which needs a metrics adapter (the
    chart's monitoring.metricsAdapter). `KEDA`: a ScaledObject that queries Prometheus itself."""


class Profile(StrEnum):
    GENERIC = "Generic"
    CPU = "CPU"
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
    """RDMA network between nodes, as the cluster's provider offers it."""

    resource_name: ShortText | None = None
    """Extended resource, such as `rdma/ib`, which every GPU pod requests. Null: none."""
    count: Annotated[WholeNumber, Field(ge=1, le=64)] = 1
    """How many of resourceName every GPU pod requests. GB200 nodes have four network cards, H100 nodes eight."""
    host_network: HostNetwork = HostNetwork.DISABLED
    """`Enabled`: GPU pods use the network of their node. NetworkPolicies do not apply to them. The job
    is not accepted unless the chart's networkPolicy.nodeCidrs is set."""


GB200_GPUS = 4
"""GPUs of a compute tray of GB200 NVL72."""
MOST_GPUS = 16
"""Most GPUs of a node."""


class Placement(Section):
    """Nodes that the run's GPU pods are placed on."""

    profile: Profile = Profile.GENERIC
    """Type of nodes. `Generic`: any node that has the GPUs. `GB200`: GB200 or GB300 nodes (arm64), selected by their
    labels and taints. `CPU`: any node; trainer and replicas ask for no GPUs and compute on CPUs."""
    nvlink: NvLink = NvLink.DISABLED
    """NVLink between nodes, through a ComputeDomain of NVIDIA's DRA driver. `Preferred`: used if the driver is
    installed, wherever pods share a domain; status.placement shows whether weights use it. `Required`: only with layout
    `SameDomain`; the job is not accepted without the driver, and CollectiveReady is False if weights do not use it."""
    layout: Layout = Layout.ANY
    """`SameDomain`: trainer and replicas share one NVLink domain. `SeparateDomains`: the trainer is in one domain, the
    replicas are in others. `Any`: no constraint. With every layout, a replica never straddles domains."""
    topology_key: ShortText = "nvidia.com/gpu.clique"  # a label that NVIDIA's GPU feature discovery sets
    """Node label whose value identifies the NVLink domain."""
    gpus_per_node: Annotated[WholeNumber, Field(ge=1, le=MOST_GPUS)] | None = None
    """GPUs of one node. Null: 4 with profile `GB200`. With `Generic` a replica of up to 16 GPUs is then
    one pod, whatever the nodes have. A replica that is larger than a node needs the number."""
    # The default is that of a GB200 NVL72: 18 compute trays.
    nodes_per_domain: NodeCount = 18
    """Nodes of one NVLink domain."""
    rdma: Rdma | None = None
    """RDMA network between nodes. Null: the pod network."""

    @property
    def gpus_per_domain(self) -> int:
        """GPUs of one NVLink domain."""
        return self.nodes_per_domain * self.node_gpus

    @property
    def node_gpus(self) -> int:
        """GPUs of one node, or the most that a pod may ask for where that is not known."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        return GB200_GPUS if self.profile is Profile.GB200 else MOST_GPUS


class Gang(StrEnum):
    AUTO = "Auto"
    NONE = "None"
    KUEUE = "Kueue"
    KAI = "KAI"
    VOLCANO = "Volcano"


class Scheduling(Section):
    """Queue, priority and gang scheduling of the run."""

    queue_name: ObjectName | None = None
    """Queue that admits the job: a Kueue LocalQueue, a KAI queue or a Volcano queue. Null: no queue."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of all pods. Null: the cluster's default."""
    gang: Gang = Gang.AUTO
    """Gang scheduler of trainer and replicas. `Kueue` admits the trainer, and each replica, by itself. `KAI` places the
    pods of one workload together. `Volcano` places the trainer and failurePolicy.minGenerationReplicas replicas
    together or not at all. `Auto`: Kueue if queueName is set, else none."""


class OnTrainerFailure(StrEnum):
    RESTART = "RestartFromCheckpoint"
    FAIL = "Fail"


class FailurePolicy(Section):
    """Reaction to the failure of a part of the job. The loss of a node does not count as a failure of the trainer where
    JobSet is installed."""

    max_restarts: Annotated[NotNegative, ChangePolicy.SUSPENDED] = 3
    """Restarts of the trainer, and of the coordinator's container. The job fails at the next failure after them, and at
    once after an error that its user must correct."""
    on_trainer_failure: Annotated[OnTrainerFailure, ChangePolicy.SUSPENDED] = OnTrainerFailure.RESTART
    """`RestartFromCheckpoint`: the trainer is restarted, and the steps since its checkpoint are replayed. `Fail`: the
    job fails."""
    min_generation_replicas: Annotated[ReplicaCount, ChangePolicy.ANY_TIME] = 1
    """Fewest ready replicas with which the job counts as ready."""


class TlsMode(StrEnum):
    DISABLED = "Disabled"
    CERT_MANAGER = "CertManager"
    EXISTING_SECRET = "ExistingSecret"  # noqa: S105 - the name of a mode


class IssuerKind(StrEnum):
    ISSUER = "Issuer"
    CLUSTER_ISSUER = "ClusterIssuer"


class Issuer(Section):
    """The cert-manager issuer that signs the certificates."""

    name: ObjectName
    """Name of the issuer."""
    kind: IssuerKind = IssuerKind.ISSUER
    """`Issuer`: in the job's namespace. `ClusterIssuer`: for the whole cluster."""


class PeerTls(Section):
    """Mutual TLS between coordinator, replicas and trainer. A role's certificate has the DNS name
    `<role>.<job>.<namespace>.specrl`, where the role is coordinator, generation or trainer. Renewed certificates are
    used without a restart."""

    mode: TlsMode = TlsMode.DISABLED
    """`CertManager`: the operator requests a certificate per role from cert-manager. `ExistingSecret`: all roles use
    the certificate in secretName. `Disabled`: no encryption; only NetworkPolicies isolate the job."""
    issuer: Issuer | None = None
    """cert-manager issuer. Required with mode `CertManager`, not allowed with others."""
    secret_name: ObjectName | None = None
    """Secret with tls.crt, tls.key and ca.crt. Required with mode `ExistingSecret`, not allowed with others."""
