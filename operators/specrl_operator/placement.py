"""Where a job's GPU pods may land, and what NCCL is told: affinity, tolerations, claims, environment. Pure.

Invariants: a pod that claims an IMEX channel takes its whole node, since a node's channel is given out once (the
spec's rules see to it: `spec/cluster_rules.py`); a replica never straddles NVLink domains; both ends of the weight
communicator get the same NCCL settings, from `nccl_environment`.

The recipe is NVIDIA's own for GB200: https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu, NCCL's environment
variables: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
"""

from __future__ import annotations

from dataclasses import dataclass

from specrl.spec.cluster import HostNetwork, Layout, NvLink, Profile
from specrl_operator.api import (
    ACCELERATED_LABEL,
    CLAIM_TEMPLATE,
    COMPUTE_DOMAIN,
    GENERATION,
    JOB_LABEL,
    NVLINK_LABEL,
    TRAINER,
    Job,
    Object,
)
from specrl_operator.facts import Facts

GPU = "nvidia.com/gpu"
PRODUCT_LABEL = "nvidia.com/gpu.product"
GB200_PRODUCTS = ("NVIDIA-GB200", "NVIDIA-GB300")
GROUP_KEY = "leaderworkerset.sigs.k8s.io/group-key"
SHARED_MEMORY = "64Gi"
"""Most shared memory of a GPU pod: NCCL's and vLLM's, of four GPUs; taken only as it is used."""


@dataclass(frozen=True)
class Shape:
    """Pods and GPUs of a role. A generation role counts one replica."""

    pods: int
    gpus_per_pod: int


def trainer_shape(job: Job) -> Shape:
    """Pods of the trainer."""
    return Shape(job.spec.trainer.num_nodes, job.spec.trainer.gpus_per_node)


def replica_shape(job: Job) -> Shape:
    """Pods of one replica: one, or as many whole nodes as its GPUs fill."""
    gpus, per_node = job.spec.generation.gpus_per_replica, job.spec.placement.gpus_per_node
    return Shape(1, gpus) if gpus <= per_node else Shape(-(-gpus // per_node), per_node)


def has_domain(job: Job, facts: Facts) -> bool:
    """Whether the job gets a ComputeDomain, and its pods a channel."""
    return (
        job.spec.placement.nvlink is not NvLink.DISABLED
        and facts.serves(COMPUTE_DOMAIN)
        and facts.serves(CLAIM_TEMPLATE)
    )


def is_nvlink_active(job: Job, facts: Facts) -> bool:
    """Whether all ranks of the weight communicator can talk over NVLink: one domain, and every one with a channel."""
    return has_domain(job, facts) and job.spec.placement.layout is Layout.SAME_DOMAIN


def nccl_environment(job: Job, facts: Facts) -> dict[str, str]:
    """What NCCL is told in every GPU pod, trainer and generation alike.

    Forced on where not all ranks are in one domain, the communicator never gets ready; on at one end alone, it fails.
    CUMEM is needed for it, and vLLM may turn it off by itself. What is not named here is left to the user.
    """
    active = "1" if is_nvlink_active(job, facts) else "0"
    environment = {"NCCL_MNNVL_ENABLE": active, "NCCL_DEBUG": "WARN"}
    return environment | ({"NCCL_CUMEM_ENABLE": "1"} if active == "1" else {})


def place(pod: Object, job: Job, facts: Facts, role: str) -> None:
    """Bind a role's pod template to the nodes it belongs on. A pod without GPUs is left as it is."""
    shape = trainer_shape(job) if role == TRAINER else replica_shape(job)
    if not shape.gpus_per_pod:
        return
    spec, container, placement = pod["spec"], pod["spec"]["containers"][0], job.spec.placement
    labels = pod["metadata"]["labels"]
    labels[ACCELERATED_LABEL] = "true"
    resources = container.setdefault("resources", {})
    counted = {GPU: str(shape.gpus_per_pod)}
    if placement.rdma is not None:
        if placement.rdma.resource_name is not None:
            counted[placement.rdma.resource_name] = "1"
        if placement.rdma.host_network is HostNetwork.ENABLED:
            spec["hostNetwork"], spec["dnsPolicy"] = True, "ClusterFirstWithHostNet"
    resources["limits"] = dict(counted)
    resources["requests"] = dict(counted)
    spec.setdefault("volumes", []).append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}})
    container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - NCCL's, by its name
    container["env"] += [{"name": name, "value": value} for name, value in nccl_environment(job, facts).items()]
    container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
    spec["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if placement.profile is Profile.GB200:
        spec["nodeSelector"] = {"kubernetes.io/arch": "arm64"}
        spec["tolerations"].append(
            {"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"}
        )
    if has_domain(job, facts):
        labels[NVLINK_LABEL] = job.uid
        spec["resourceClaims"] = [{"name": "imex", "resourceClaimTemplateName": claim_template(job)}]
        resources["claims"] = [{"name": "imex"}]
    affinity = _affinity(job, facts, role)
    if affinity:
        spec["affinity"] = affinity


def claim_template(job: Job) -> str:
    """Name of the ResourceClaimTemplate that the ComputeDomain's controller makes."""
    return job.child("imex")


def compute_domain(job: Job) -> Object:
    """The job's one ComputeDomain, over trainer and generation: two in one NVLink domain would conflict.

    numNodes 0: as many nodes as pods come, since generation scales.
    """
    channel = {"allocationMode": "Single", "resourceClaimTemplate": {"name": claim_template(job)}}
    metadata = {"name": job.name, "labels": job.labels()}
    return COMPUTE_DOMAIN.object(metadata, spec={"numNodes": 0, "channel": channel})


def _affinity(job: Job, facts: Facts, role: str) -> Object:
    placement, affinity = job.spec.placement, {}
    if placement.profile is Profile.GB200:
        wanted: list[Object] = [{"key": PRODUCT_LABEL, "operator": "In", "values": list(GB200_PRODUCTS)}]
        if has_domain(job, facts) or placement.layout is not Layout.ANY:
            # A pod with a channel on a node outside any NVLink domain never starts.
            wanted.append({"key": placement.topology_key, "operator": "Exists"})
        affinity["nodeAffinity"] = _required({"nodeSelectorTerms": [{"matchExpressions": wanted}]})
    together, apart = _together(job, role), _apart(job, facts, role)
    if together:
        affinity["podAffinity"] = _required(together)
    if apart:
        affinity["podAntiAffinity"] = _required(apart)
    return affinity


def keeps_together(job: Job, role: str) -> bool:
    """Whether a role's pods, or those of one replica, share one NVLink domain."""
    placement = job.spec.placement
    if role == GENERATION:
        return replica_shape(job).pods > 1
    return placement.layout is not Layout.ANY or placement.nvlink is NvLink.REQUIRED


def _together(job: Job, role: str) -> list[Object]:
    """With whom a pod shares its domain. A term that matches the pod itself lets the first one choose."""
    if job.spec.placement.layout is Layout.SAME_DOMAIN:
        return [_term(job, {JOB_LABEL: job.name, ACCELERATED_LABEL: "true"})]
    if not keeps_together(job, role):
        return []
    if role == GENERATION:
        return [_term(job, job.selector(GENERATION)) | {"matchLabelKeys": [GROUP_KEY]}]
    return [_term(job, job.selector(TRAINER))] if trainer_shape(job).pods > 1 else []


def _apart(job: Job, facts: Facts, role: str) -> list[Object]:
    """From whom a pod keeps its domain: the other role, and other jobs with multi-node NVLink."""
    terms = []
    if job.spec.placement.layout is Layout.SEPARATE_DOMAINS:
        terms.append(_term(job, job.selector(GENERATION if role == TRAINER else TRAINER)))
    if has_domain(job, facts):
        others = [
            {"key": NVLINK_LABEL, "operator": "Exists"},
            {"key": NVLINK_LABEL, "operator": "NotIn", "values": [job.uid]},
        ]
        key = job.spec.placement.topology_key
        terms.append({"topologyKey": key, "labelSelector": {"matchExpressions": others}, "namespaceSelector": {}})
    return terms


def _term(job: Job, labels: dict[str, str]) -> Object:
    return {"topologyKey": job.spec.placement.topology_key, "labelSelector": {"matchLabels": labels}}


def _required(what: object) -> Object:
    return {"requiredDuringSchedulingIgnoredDuringExecution": what}
