"""Whether this cluster can run a job, and if not, what to do about it. Pure.

What a spec says wrongly by itself is refused by the API server, or by `parse_rljob`; here is what depends on the
cluster. A job that is not accepted gets no children; one that runs already keeps what it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specrl.spec.cluster import NvLink, Scaler, TlsMode
from specrl_operator import placement, schedulers, tls
from specrl_operator.api import (
    CERTIFICATE,
    CLAIM_TEMPLATE,
    COMPUTE_DOMAIN,
    JOB_SET,
    LEADER_WORKER_SET,
    SCALED_OBJECT,
    Job,
    Object,
)
from specrl_operator.facts import Facts

INSTALL = {
    "LeaderWorkerSet": "https://lws.sigs.k8s.io/docs/installation",
    "ComputeDomain": "https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu",
    "LocalQueue": "https://kueue.sigs.k8s.io/docs/installation",
    "Queue": "https://github.com/NVIDIA/KAI-Scheduler",
    "PodGroup": "https://volcano.sh/en/docs/installation",
    "Certificate": "https://cert-manager.io/docs/installation",
    "ScaledObject": "https://keda.sh/docs/latest/deploy",
}


@dataclass(frozen=True)
class Refusal:
    """Why a job is not accepted: a condition's reason and message."""

    reason: str
    message: str


def refusal_of(job: Job, facts: Facts) -> Refusal | None:
    """The first reason not to run the job here, with every problem in its message; None when it can be run."""
    found = list(_missing(job, facts))
    if not found:
        return None
    return Refusal(found[0].reason, "; ".join(problem.message for problem in found))


def secret_refusal(job: Job, found: Object | None) -> Refusal | None:
    """Why the Secret that tls.secretName names cannot be mounted; None when it can."""
    missing = [key for key in tls.KEYS if key not in ((found or {}).get("data") or {})]
    if not missing:
        return None
    got = "none of that name" if found is None else f"one without {', '.join(missing)}"
    return Refusal(
        "SecretMissing",
        f"tls.secretName must name a Secret in {job.namespace} with {', '.join(tls.KEYS)}, got "
        f"{job.spec.tls.secret_name}: {got}; create it, with certificates of coordinator, generation and trainer in "
        f"{tls.domain(job)}",
    )


def notes_of(job: Job, facts: Facts) -> list[str]:
    """What an accepted job does without."""
    notes = []
    if not facts.serves(JOB_SET):
        notes.append("JobSet is not installed: the trainer is a Job, which the operator itself starts again")
    wanted = job.spec.placement.nvlink is not NvLink.DISABLED
    if wanted and not placement.has_domain(job, facts):
        notes.append(f"multi-node NVLink is off: ComputeDomain is not installed ({INSTALL['ComputeDomain']})")
    elif wanted and not placement.is_nvlink_active(job, facts):
        notes.append("multi-node NVLink is off between trainer and replicas: placement.layout is not SameDomain")
    if job.spec.checkpoint.claim_name is None:
        notes.append("checkpoint.claimName is not set: checkpoints are lost with the trainer's pod")
    return notes


def _missing(job: Job, facts: Facts) -> Iterator[Refusal]:
    needs = []
    if placement.replica_shape(job).pods > 1:
        needs.append((LEADER_WORKER_SET, "generation.gpusPerReplica > placement.gpusPerNode", "lower gpusPerReplica"))
    if job.spec.placement.nvlink is NvLink.REQUIRED:
        remedy = "use placement.nvlink Preferred"
        needs += [(kind, "placement.nvlink Required", remedy) for kind in (COMPUTE_DOMAIN, CLAIM_TEMPLATE)]
    gang = schedulers.gang_of(job)
    if gang in schedulers.NEEDS:
        remedy = "leave out scheduling.queueName and scheduling.gang"
        needs.append((schedulers.NEEDS[gang], f"scheduling with {gang.value}", remedy))
    autoscaling = job.spec.generation.autoscaling
    if autoscaling is not None and autoscaling.by is Scaler.KEDA:
        needs.append((SCALED_OBJECT, "generation.autoscaling.by KEDA", "use HPA"))
    if job.spec.tls.mode is TlsMode.CERT_MANAGER:
        needs.append((CERTIFICATE, "tls.mode CertManager", "use ExistingSecret"))
    for kind, needed_by, remedy in needs:
        if not facts.serves(kind):
            where = f" ({INSTALL[kind.name]})" if kind.name in INSTALL else ""
            yield Refusal(
                "DependencyMissing",
                f"{needed_by} needs {kind.name} of {kind.api_version}, which this cluster does not serve; "
                f"install it{where}, or {remedy}",
            )
