"""The plan of a job: everything that follows from its spec and the cluster, computed once per reconciliation. Pure.

`acceptance.py` says whether the cluster can run it. `decision.py` adds what depends on the moment: pods, exit codes,
deadlines. `children` and `status` read plan and decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrl.spec.cluster import Gang, HostNetwork, Layout, NvLink, OnTrainerFailure
from specrl.spec.rljob.status import CoordinatorCondition
from specrl_operator import kinds
from specrl_operator.api import CLAIM_SUFFIX, TRAINER, Job, Object, is_condition_true
from specrl_operator.kinds import Kind
from specrl_operator.observed import list_trainers


@dataclass(frozen=True)
class Settings:
    """The operator's command-line flags about children; the same for every job."""

    control_image: str = "specrl/control:0.1.0"
    generation_image: str = "specrl/generation:0.1.0"
    trainer_image: str = "specrl/trainer:0.1.0"
    store_image: str = "valkey/valkey:8.1-alpine"
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    store_size: str = "8Gi"
    store_class: str | None = None
    """StorageClass of the store's volume; None: the cluster's default."""
    metrics_namespaces: tuple[str, ...] = ()
    """Namespaces whose pods may scrape metrics."""
    api_server_ports: tuple[int, ...] = (443, 6443)
    """TCP ports that coordinators may reach at any address. A NetworkPolicy cannot name the API server: 443 is its
    Service's port, 6443 the usual port behind it."""
    node_cidrs: tuple[str, ...] = ()
    """Addresses of the nodes, as CIDRs. Pods in the network of their node have these, and no policy selects them."""
    finished_job_ttl_s: int | None = None
    """Seconds after which a finished job that names no ttlSecondsAfterFinished is deleted; None: never."""
    has_disruption_budgets: bool = True
    """Whether a running job gets a PodDisruptionBudget."""
    job_egress: tuple[Object, ...] = ()
    """Egress rules, as in a NetworkPolicy, that every pod of a job gets besides its own."""
    prometheus_url: str | None = None
    """Prometheus server that KEDA's triggers query."""


@dataclass(frozen=True)
class PodShape:
    """Pods of the trainer or of one replica, and GPUs of each pod."""

    pods: int
    gpus_per_pod: int


@dataclass(frozen=True)
class JobPlan:
    """The plan by which one job runs on this cluster."""

    job: Job
    settings: Settings
    served: frozenset[str]
    """Group versions that the API server serves, as in `apps/v1`."""
    trainer: PodShape
    replica: PodShape
    """One pod; or one per node, if its GPUs fill several whole nodes."""
    has_compute_domain: bool
    """The job gets a ComputeDomain, and each GPU pod an IMEX channel: the driver is there, and NVLink can be used."""
    is_plain_trainer: bool
    """The trainer is a Job: JobSet is not installed, or was not when it started. It stays a Job until it ends."""

    @property
    def gang(self) -> Gang:
        """The scheduler that places the job's pods together; never `Auto`."""
        scheduling = self.job.spec.scheduling
        if scheduling.gang is not Gang.AUTO:
            return scheduling.gang
        return Gang.KUEUE if scheduling.queue_name is not None else Gang.NONE

    @property
    def max_restarts(self) -> int:
        """Restarts of the trainer before the job fails."""
        policy = self.job.spec.failure_policy
        return 0 if policy.on_trainer_failure is OnTrainerFailure.FAIL else policy.max_restarts

    @property
    def has_own_store(self) -> bool:
        """Whether the operator starts a Redis server for the job."""
        return self.job.spec.store is None

    @property
    def awaits_sandbox(self) -> bool:
        """Whether the coordinator has yet to say that it can isolate the policy's programs."""
        ready = CoordinatorCondition.SANDBOX_READY
        return self.job.spec.runs_programs and not is_condition_true(self.job.status, ready)

    @property
    def uses_host_network(self) -> bool:
        """Whether pods with GPUs are in the network of their node."""
        rdma = self.job.spec.placement.rdma
        has_gpus = bool(self.trainer.gpus_per_pod or self.replica.gpus_per_pod)
        return rdma is not None and rdma.host_network is HostNetwork.ENABLED and has_gpus

    @property
    def claim_template(self) -> str:
        """Name of the ResourceClaimTemplate that the ComputeDomain's controller creates."""
        return f"{self.job.name}{CLAIM_SUFFIX}"

    def shape_of(self, role: str) -> PodShape:
        """Return the shape of a role: the trainer's, or one replica's."""
        return self.trainer if role == TRAINER else self.replica


def find_ttl_s(job: Job, settings: Settings) -> int | None:
    """Return the seconds after its end at which a job is deleted; None: never."""
    own = job.spec.ttl_seconds_after_finished
    return settings.finished_job_ttl_s if own is None else own


def can_use_nvlink(job: Job, trainer: PodShape, replica: PodShape) -> bool:
    """Whether some of the job's pods exchange data within one NVLink domain, so that IMEX channels are of use.

    Pods of one replica share a domain, those of a trainer may. Trainer and replicas do with layout SameDomain.
    """
    placement = job.spec.placement
    if placement.nvlink is NvLink.DISABLED:
        return False
    return placement.layout is Layout.SAME_DOMAIN or trainer.pods > 1 or replica.pods > 1


def plan_job(
    job: Job, settings: Settings, served: frozenset[str], children: Mapping[Kind, Sequence[Object]]
) -> JobPlan:
    """Compute the plan of a job from its spec, the served group versions and its existing children."""
    spec = job.spec.placement
    gpus = job.spec.generation.gpus_per_replica
    trainers = list_trainers(children)
    trainer = PodShape(job.spec.trainer.num_nodes, job.spec.trainer.gpus_per_node)
    # Rounded up. A rule of the spec requires whole nodes, so there is a remainder only in specs that are refused.
    replica = PodShape(1, gpus) if gpus <= spec.node_gpus else PodShape(-(-gpus // spec.node_gpus), spec.node_gpus)
    # The driver was installed after the pods were created, which have no IMEX channel. With a ComputeDomain now, new
    # pods would get NCCL settings that the running ones do not have.
    is_driver_late = spec.nvlink is NvLink.PREFERRED and trainers and not children[kinds.COMPUTE_DOMAIN]
    has_driver = kinds.COMPUTE_DOMAIN.is_served(served) and kinds.CLAIM_TEMPLATE.is_served(served)
    runs_as_job = any(kinds.JOB.is_kind_of(item) and "deletionTimestamp" not in item["metadata"] for item in trainers)
    return JobPlan(
        job=job,
        settings=settings,
        served=served,
        trainer=trainer,
        replica=replica,
        has_compute_domain=can_use_nvlink(job, trainer, replica) and has_driver and not is_driver_late,
        is_plain_trainer=runs_as_job or not kinds.JOB_SET.is_served(served),
    )
