"""Affinity, tolerations, resource claims and NCCL environment of a job's GPU pods. Pure.

Invariants:
- A pod that claims an IMEX channel takes its whole node, since a node has one channel to give out. The spec's rules
  ensure it (`spec/rules/cluster_rules.py`).
- A replica never straddles NVLink domains.
- Both ends of the weight communicator get the same NCCL settings, from `build_nccl_environment`.

The GB200 settings follow NVIDIA's DRA driver: https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu. NCCL's
environment variables: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
"""

from __future__ import annotations

from specrl.spec.cluster import HostNetwork, Layout, Profile
from specrl_operator import kinds
from specrl_operator.api import ACCELERATED_LABEL, GENERATION, NVLINK_LABEL, TRAINER, Job, Object
from specrl_operator.plan.job_plan import JobPlan

GPU = "nvidia.com/gpu"
PRODUCT_LABEL = "nvidia.com/gpu.product"
GB200_PRODUCTS = ("NVIDIA-GB200", "NVIDIA-GB300")
GROUP_KEY = "leaderworkerset.sigs.k8s.io/group-key"
"""Label with the same value on all pods of one LeaderWorkerSet group, that is of one replica."""
NCCL_LOG = "/tmp/nccl-%p.log"  # noqa: S108 - the pod's own scratch folder; %p: NCCL puts the process id here
"""NCCL's log file in a GPU pod. `specrl/weights/nccl_log.py` reads there which transport NCCL has chosen."""
SHARED_MEMORY = "64Gi"
"""Size limit of /dev/shm in a GPU pod, for NCCL and vLLM on four GPUs. Memory is used only as it fills."""


def build_nccl_environment(plan: JobPlan) -> dict[str, str]:
    """Build the NCCL settings of every GPU pod, of trainer and generation alike. Users may set others."""
    # INIT has a line for each channel, with its transport, when a communicator is made, and none later.
    environment = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": NCCL_LOG}
    if not plan.has_compute_domain:
        # NCCL would find the NVLink domain by itself, and fail where it has no channel.
        return environment | {"NCCL_MNNVL_ENABLE": "0"}
    # MNNVL needs CUMEM, which vLLM may turn off by itself.
    environment["NCCL_CUMEM_ENABLE"] = "1"
    if plan.job.spec.placement.layout is Layout.SAME_DOMAIN:
        environment["NCCL_MNNVL_ENABLE"] = "1"
    # Otherwise it is not set: NCCL then groups the ranks of each communicator by domain (src/mnnvl.cc). Forced on with
    # ranks in several domains, a communicator never gets ready.
    return environment


def bind_to_nodes(pod: Object, plan: JobPlan, role: str) -> None:
    """Add GPUs, network, shared memory, tolerations, claims and affinity to a role's pod template, in place.

    A pod without GPUs is left as it is.
    """
    job = plan.job
    gpus = plan.shape_of(role).gpus_per_pod
    if not gpus:
        return
    spec = pod["spec"]
    container = pod["spec"]["containers"][0]
    placement = job.spec.placement
    labels = pod["metadata"]["labels"]
    labels[ACCELERATED_LABEL] = "true"

    # Extended resources: limits and requests must be equal.
    resources = container.setdefault("resources", {})
    counted = {GPU: str(gpus)}
    if placement.rdma is not None:
        if placement.rdma.resource_name is not None:
            counted[placement.rdma.resource_name] = str(placement.rdma.count)
        if placement.rdma.host_network is HostNetwork.ENABLED:
            spec["hostNetwork"] = True
            spec["dnsPolicy"] = "ClusterFirstWithHostNet"
    resources["limits"] = dict(counted)
    resources["requests"] = dict(counted)

    # NCCL and vLLM share memory between processes. A container's own /dev/shm has 64 MiB. RDMA locks memory, too, but
    # IPC_LOCK would have no effect: Kubernetes has no ambient capabilities, so a user other than root does not get any.
    # The container runtime must allow it instead (LimitMEMLOCK=infinity).
    spec.setdefault("volumes", []).append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}})
    container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - NCCL's, by its name
    container["env"] += [{"name": name, "value": value} for name, value in build_nccl_environment(plan).items()]

    # Nodes with GPUs are usually tainted, and GB200 nodes by their architecture, too.
    spec["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if placement.profile is Profile.GB200:
        spec["nodeSelector"] = {"kubernetes.io/arch": "arm64"}
        spec["tolerations"].append(
            {"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"}
        )

    # The channel of the job's ComputeDomain. The label keeps pods of other jobs out of the NVLink domain.
    if plan.has_compute_domain:
        labels[NVLINK_LABEL] = job.uid
        spec["resourceClaims"] = [{"name": "imex", "resourceClaimTemplateName": plan.claim_template}]
        resources["claims"] = [{"name": "imex"}]
    affinity = _build_affinity(plan, role)
    if affinity:
        spec["affinity"] = affinity


def build_compute_domain(plan: JobPlan) -> Object:
    """Build the job's ComputeDomain: one for trainer and generation, since two in one NVLink domain would conflict."""
    # numNodes 0: the domain grows and shrinks with the pods, since generation scales.
    channel = {"allocationMode": "Single", "resourceClaimTemplate": {"name": plan.claim_template}}
    metadata = {"name": plan.job.name, "labels": plan.job.build_labels()}
    return kinds.COMPUTE_DOMAIN.build_object(metadata, spec={"numNodes": 0, "channel": channel})


def _build_affinity(plan: JobPlan, role: str) -> Object:
    placement = plan.job.spec.placement
    affinity = {}
    if placement.profile is Profile.GB200:
        wanted: list[Object] = [{"key": PRODUCT_LABEL, "operator": "In", "values": list(GB200_PRODUCTS)}]
        if plan.has_compute_domain or placement.layout is not Layout.ANY:
            # On a node outside any NVLink domain, a pod with a channel would never start.
            wanted.append({"key": placement.topology_key, "operator": "Exists"})
        affinity["nodeAffinity"] = _require_at_scheduling({"nodeSelectorTerms": [{"matchExpressions": wanted}]})
    together = _list_affinity_terms(plan, role)
    apart = _list_anti_affinity_terms(plan, role)
    if together:
        affinity["podAffinity"] = _require_at_scheduling(together)
    if apart:
        affinity["podAntiAffinity"] = _require_at_scheduling(apart)
    return affinity


def shares_domain(plan: JobPlan, role: str) -> bool:
    """Whether the trainer's pods, or the pods of each replica, must share one NVLink domain."""
    placement = plan.job.spec.placement
    if role == GENERATION:
        return plan.replica.pods > 1
    return placement.layout is not Layout.ANY


def _list_affinity_terms(plan: JobPlan, role: str) -> list[Object]:
    """List the terms of pods that a pod shares its NVLink domain with."""
    job = plan.job
    # Each term matches the pod itself, too. The scheduler then lets the first pod of a set choose any domain.
    if job.spec.placement.layout is Layout.SAME_DOMAIN:
        return [_build_term(job, job.build_selector() | {ACCELERATED_LABEL: "true"})]
    if not shares_domain(plan, role):
        return []
    if role == GENERATION:
        # matchLabelKeys limits the term to the pods of the same replica. Kubernetes has it from 1.31 on.
        return [_build_term(job, job.build_selector(GENERATION)) | {"matchLabelKeys": [GROUP_KEY]}]
    return [_build_term(job, job.build_selector(TRAINER))] if plan.trainer.pods > 1 else []


def _list_anti_affinity_terms(plan: JobPlan, role: str) -> list[Object]:
    """List the terms of pods that must be in other NVLink domains: of the other role, and of other jobs with NVLink."""
    job = plan.job
    terms = []
    if job.spec.placement.layout is Layout.SEPARATE_DOMAINS:
        terms.append(_build_term(job, job.build_selector(GENERATION if role == TRAINER else TRAINER)))
    if plan.has_compute_domain:
        others = [
            {"key": NVLINK_LABEL, "operator": "Exists"},
            {"key": NVLINK_LABEL, "operator": "NotIn", "values": [job.uid]},
        ]
        key = job.spec.placement.topology_key
        # The empty namespaceSelector selects all namespaces: domains are shared by the whole cluster.
        terms.append({"topologyKey": key, "labelSelector": {"matchExpressions": others}, "namespaceSelector": {}})
    return terms


def _build_term(job: Job, labels: dict[str, str]) -> Object:
    return {"topologyKey": job.spec.placement.topology_key, "labelSelector": {"matchLabels": labels}}


def _require_at_scheduling(what: object) -> Object:
    return {"requiredDuringSchedulingIgnoredDuringExecution": what}
