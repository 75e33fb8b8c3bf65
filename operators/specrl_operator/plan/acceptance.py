"""Decide whether this cluster can run a job: the condition Accepted. Pure.

The API server and `parse_rljob` reject specs that are invalid by themselves. This module checks what depends on the
cluster. A job that is not accepted gets no children; one that already runs keeps its children. `decision.py` calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

from specrl.spec.cluster import Gang, Layout, NvLink, Scaler, TlsMode
from specrl_operator import kinds
from specrl_operator.kinds import Kind
from specrl_operator.plan.job_plan import JobPlan, can_use_nvlink

INSTALL_PAGES = {
    kinds.LEADER_WORKER_SET: "https://lws.sigs.k8s.io/docs/installation",
    kinds.COMPUTE_DOMAIN: "https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu",
    kinds.LOCAL_QUEUE: "https://kueue.sigs.k8s.io/docs/installation",
    kinds.KAI_QUEUE: "https://github.com/NVIDIA/KAI-Scheduler",
    kinds.POD_GROUP: "https://volcano.sh/en/docs/installation",
    kinds.CERTIFICATE: "https://cert-manager.io/docs/installation",
    kinds.SCALED_OBJECT: "https://keda.sh/docs/latest/deploy",
}
"""Installation pages. ResourceClaimTemplate needs none: Kubernetes serves resource.k8s.io/v1 from 1.34 on."""
GANG_KINDS: dict[Gang, Kind] = {Gang.KUEUE: kinds.LOCAL_QUEUE, Gang.KAI: kinds.KAI_QUEUE, Gang.VOLCANO: kinds.POD_GROUP}
"""A kind of each gang scheduler. The scheduler counts as installed if the API server serves it."""


@dataclass(frozen=True)
class Refusal:
    """Reason and message of the condition Accepted of a job that is not accepted."""

    reason: str
    message: str


def find_refusal(plan: JobPlan) -> Refusal | None:
    """Return why this cluster cannot run the job, with every missing kind in the message; None if it can."""
    problems = []
    for kind, needed_by, remedy in _list_needed_kinds(plan):
        if not kind.is_served(plan.served):
            where = f" ({INSTALL_PAGES[kind]})" if kind in INSTALL_PAGES else ""
            problems.append(
                f"{needed_by} needs {kind.name} of {kind.api_version}, which this cluster does not serve; "
                f"install it{where}, or {remedy}"
            )
    if problems:
        return Refusal("DependencyMissing", "; ".join(problems))
    if plan.uses_host_network and not plan.settings.node_cidrs:
        # NetworkPolicies select pods by labels, and those in the host network by their nodes' addresses alone. Without
        # these the coordinator could not reach trainer and replicas, nor they it.
        return Refusal(
            "Unsupported",
            "placement.rdma.hostNetwork Enabled needs the addresses of the nodes, which the operator was not given; an "
            "administrator sets networkPolicy.nodeCidrs of the chart, or use hostNetwork: Disabled with "
            "placement.rdma.resourceName",
        )
    return None


def list_notes(plan: JobPlan) -> list[str]:
    """List the features that an accepted job runs without, for the message of its condition Accepted."""
    notes = []
    if plan.job.unknown_fields:
        names = ", ".join(plan.job.unknown_fields)
        notes.append(f"the CRD is newer than the operator, which ignores {names}; upgrade the operator")
    if not kinds.JOB_SET.is_served(plan.served):
        notes.append("JobSet is not installed: the trainer runs as a Job, and the operator restarts it")
    placement = plan.job.spec.placement
    if placement.nvlink is not NvLink.DISABLED:
        if not can_use_nvlink(plan.job, plan.trainer, plan.replica):
            why = "trainer and each replica fit one node, and placement.layout is not SameDomain"
            notes.append(f"multi-node NVLink is off: {why}")
        elif not plan.has_compute_domain:
            page = INSTALL_PAGES[kinds.COMPUTE_DOMAIN]
            notes.append(f"multi-node NVLink is off: ComputeDomain is not installed ({page})")
        elif placement.layout is not Layout.SAME_DOMAIN:
            notes.append("weights may cross NVLink domains: placement.layout is not SameDomain")
    if plan.job.spec.checkpoint.claim_name is None:
        notes.append("checkpoint.claimName is not set: checkpoints are lost when the trainer's pod is deleted")
    return notes


def _list_needed_kinds(plan: JobPlan) -> list[tuple[Kind, str, str]]:
    """List the optional kinds that the job needs; for each, what needs it, and what to do without it."""
    spec = plan.job.spec
    needs: list[tuple[Kind, str, str]] = []
    if plan.replica.pods > 1:
        needs.append(
            (kinds.LEADER_WORKER_SET, "generation.gpusPerReplica > placement.gpusPerNode", "lower gpusPerReplica")
        )
    if spec.placement.nvlink is NvLink.REQUIRED:
        remedy = "use placement.nvlink Preferred"
        needs += [(kind, "placement.nvlink Required", remedy) for kind in (kinds.COMPUTE_DOMAIN, kinds.CLAIM_TEMPLATE)]
    if plan.gang in GANG_KINDS:
        remedy = "leave out scheduling.queueName and scheduling.gang"
        needs.append((GANG_KINDS[plan.gang], f"scheduling with {plan.gang.value}", remedy))
    if spec.generation.autoscaling is not None and spec.generation.autoscaling.by is Scaler.KEDA:
        needs.append((kinds.SCALED_OBJECT, "generation.autoscaling.by KEDA", "use HPA"))
    if spec.tls.mode is TlsMode.CERT_MANAGER:
        needs.append((kinds.CERTIFICATE, "tls.mode CertManager", "use ExistingSecret"))
    return needs
