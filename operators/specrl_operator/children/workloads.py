"""The workloads of a job: coordinator, trainer, replicas, and its own store; and what keeps drains from them. Pure.

`desired.py` calls this module; `pods.py` builds the pod templates.
"""

from __future__ import annotations

from specrl_operator import kinds
from specrl_operator.api import COMPONENT_LABEL, COORDINATOR, GENERATION, STORE, TRAINER, Job, Object
from specrl_operator.children import pods
from specrl_operator.plan.decision import DesiredState
from specrl_operator.plan.job_plan import JobPlan


def build_coordinator(plan: JobPlan, state: DesiredState) -> Object:
    """Build the coordinator's Deployment."""
    job = plan.job
    spec = {
        "replicas": 0 if state in (DesiredState.SAVING, DesiredState.STOPPED) else 1,
        "strategy": {"type": "Recreate"},  # two coordinators of one run would compete for its store and its replicas
        "selector": {"matchLabels": job.build_selector(COORDINATOR)},
        "template": pods.build_coordinator_pod(plan),
    }
    return kinds.DEPLOYMENT.build_object(job.build_metadata(COORDINATOR), spec=spec)


def build_trainer(plan: JobPlan) -> Object:
    """Build the trainer's JobSet, or its Job where JobSet is not installed."""
    job = plan.job
    name = plan.job.child_name(TRAINER)
    if plan.is_plain_trainer:
        template = pods.build_trainer_pod(plan, f"{name}-0.{name}")
        template["spec"]["subdomain"] = name
        return kinds.JOB.build_object(job.build_metadata(TRAINER), spec=_build_job_spec(job, template))
    template = pods.build_trainer_pod(plan, f"{name}-node-0-0.{name}")
    spec = {
        # Ranks find each other before any of them is ready.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
        "failurePolicy": {
            "maxRestarts": plan.max_restarts,
            "rules": [
                {
                    # A lost node, as the podFailurePolicy of `_build_job_spec` reports it, does not count as a failure.
                    "name": "hostLost",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": _build_job_spec(job, template)}}],
    }
    return kinds.JOB_SET.build_object(job.build_metadata(TRAINER), spec=spec)


def build_generation(plan: JobPlan, replicas: int) -> Object:
    """Build the replicas' StatefulSet, or their LeaderWorkerSet if a replica is larger than a node."""
    job = plan.job
    size = plan.replica.pods
    leader = pods.build_replica_pod(plan)
    if size == 1:
        spec: Object = {
            "replicas": replicas,
            "serviceName": job.child_name(GENERATION),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": job.build_selector(GENERATION)},
            "template": leader,
        }
        return kinds.STATEFUL_SET.build_object(job.build_metadata(GENERATION), spec=spec)
    spec = {
        "replicas": replicas,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
        },
        "leaderWorkerTemplate": {
            "size": size,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": leader,
            "workerTemplate": pods.build_replica_pod(plan, is_leader=False),
        },
    }
    return kinds.LEADER_WORKER_SET.build_object(job.build_metadata(GENERATION), spec=spec)


def build_store(plan: JobPlan, state: DesiredState) -> Object:
    """Build the StatefulSet of the job's own Redis server. Its volume outlives a suspension, but not the job."""
    job = plan.job
    settings = plan.settings
    volume: Object = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": settings.store_size}},
    }
    if settings.store_class is not None:
        volume["storageClassName"] = settings.store_class
    spec = {
        "replicas": 0 if state is DesiredState.STOPPED else 1,
        "serviceName": job.child_name(STORE),
        "selector": {"matchLabels": job.build_selector(STORE)},
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
        "volumeClaimTemplates": [{"metadata": {"name": "data", "labels": job.build_labels(STORE)}, "spec": volume}],
        "template": pods.build_store_pod(plan),
    }
    return kinds.STATEFUL_SET.build_object(job.build_metadata(STORE), spec=spec)


def build_disruption_budget(plan: JobPlan) -> Object:
    """Build the PodDisruptionBudget of the pods without which a run stops: coordinator, trainer and its own store.

    Replicas have none. They drain, and others generate what they have not finished.
    """
    job = plan.job
    parts = [COORDINATOR, TRAINER, *([STORE] if plan.has_own_store else [])]
    spec = {
        # A number, not maxUnavailable: Kubernetes cannot tell how many pods a Job wants.
        "minAvailable": len(parts) - 1 + plan.trainer.pods,
        # A job that cannot start must not keep its nodes.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {
            "matchLabels": job.build_selector(),
            "matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": parts}],
        },
    }
    return kinds.DISRUPTION_BUDGET.build_object({"name": job.name, "labels": job.build_labels()}, spec=spec)


def _build_job_spec(job: Job, template: Object) -> Object:
    """Build the trainer's Job spec: one pod per node. If one fails, the Job fails, and all pods are created again."""
    nodes = job.spec.trainer.num_nodes
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": template,
    }
