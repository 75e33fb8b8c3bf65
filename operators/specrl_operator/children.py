"""Every object that a job needs, in the order in which they are applied. Pure: the same job and facts, the same list.

    access, network, certificates, run file -> store -> ComputeDomain, gang -> trainer -> generation -> coordinator
    -> scaling

What takes nodes comes after what it needs: Kueue reads the ComputeDomain's claim template when it sees the trainer. The
list is also what is kept: `reconcile.py` removes whatever the job owns and does not find here.
"""

from __future__ import annotations

from specrl.spec import dump
from specrl.spec.cluster import OnTrainerFailure, Scaler
from specrl.spec.store import Durability, RedisStore, Secret, Store
from specrl_operator import access, network, placement, pods, schedulers, tls
from specrl_operator.api import (
    AUTOSCALER,
    CONFIG_MAP,
    COORDINATOR,
    DEPLOYMENT,
    GENERATION,
    JOB,
    JOB_SET,
    LEADER_WORKER_SET,
    RLJOB,
    SCALED_OBJECT,
    SERVICE,
    STATEFUL_SET,
    STORE,
    TRAINER,
    Job,
    Object,
)
from specrl_operator.facts import Facts, Want

STORE_PORT = 6379
SCALE_DOWN_S = 900
"""Share of waiting is looked at over so long before a replica is taken away: steps take minutes."""


def desired(job: Job, facts: Facts) -> list[Object]:
    """All children of the job, as they are to be. Each is complete but for owner, namespace and hash."""
    children = [*access.objects(job), *network.objects(job, facts), *tls.objects(job), run_file(job)]
    children += [service(job, COORDINATOR, {"grpc": pods.GRPC_PORT, "http": pods.HTTP_PORT}, is_headless=False)]
    children += [service(job, GENERATION, {"grpc": pods.REPLICA_PORT, "metrics": pods.METRICS_PORT})]
    if pods.needs_store(job):
        children += [service(job, STORE, {"redis": STORE_PORT}), store(job, facts)]
    if placement.has_domain(job, facts):
        children.append(placement.compute_domain(job))
    running: list[Object] = []
    if facts.want in (Want.RUNNING, Want.SAVING, Want.ENDED):
        running += trainer(job, facts)
    if facts.want is not Want.WAITING:
        running.append(generation(job, facts))
    running.append(coordinator(job, facts))
    if facts.want is Want.RUNNING and job.spec.generation.autoscaling is not None:
        running.append(autoscaler(job, facts))
    return schedulers.decorate(children + running, job)


def run_file(job: Job) -> Object:
    """The run file of all pods, with the operator's own Redis server where the job names no store."""
    spec = job.spec
    if pods.needs_store(job):
        redis = RedisStore(
            addresses=(f"{job.child(STORE)}:{STORE_PORT}",),
            password=Secret(environment=pods.STORE_PASSWORD),
            key_prefix=f"specrl:{job.name}",
            durability=Durability.EVERY_WRITE,
        )
        spec = spec.model_copy(update={"store": Store(redis=redis)})
    elif spec.redis is not None and spec.redis.key_prefix is None:
        redis = spec.redis.model_copy(update={"key_prefix": f"specrl:{job.namespace}/{job.run_name}"})
        spec = spec.model_copy(update={"store": Store(redis=redis)})
    metadata = {"name": job.child("run"), "labels": job.labels()}
    return CONFIG_MAP.object(metadata, data={"run.yaml": dump(spec)})


def service(job: Job, component: str, ports: dict[str, int], *, is_headless: bool = True) -> Object:
    """A component's Service. Headless unless clients are to have one address: its names then lead to every pod.

    Pods that are not ready are led to, too: the coordinator is ready once those who must find it have.
    """
    spec: Object = {
        "selector": job.selector(component),
        "publishNotReadyAddresses": True,
        "ports": [{"name": name, "port": port, "targetPort": port} for name, port in ports.items()],
    }
    if is_headless:
        spec["clusterIP"] = "None"
    return SERVICE.object({"name": job.child(component), "labels": job.labels(component)}, spec=spec)


def coordinator(job: Job, facts: Facts) -> Object:
    """The coordinator: one, and never a second beside it."""
    is_wanted = facts.want in (Want.RUNNING, Want.ENDED)
    spec = {
        "replicas": 1 if is_wanted else 0,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": job.selector(COORDINATOR)},
        "template": pods.coordinator_pod(job, facts),
    }
    return DEPLOYMENT.object(_metadata(job, COORDINATOR), spec=spec)


def trainer(job: Job, facts: Facts) -> list[Object]:
    """The trainer as a JobSet; where there is none, as a Job and the Service that gives its pods names."""
    name = job.child(TRAINER)
    if is_plain(facts):
        template = pods.trainer_pod(job, facts, f"{name}-0.{name}")
        template["spec"]["subdomain"] = name
        plain = JOB.object(_metadata(job, TRAINER), spec=_job(job, template))
        return [service(job, TRAINER, {"grpc": pods.TRAINER_PORT}), plain]
    template = pods.trainer_pod(job, facts, f"{name}-node-0-0.{name}")
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
        "failurePolicy": {
            "maxRestarts": max_restarts(job),
            "rules": [
                {
                    "name": "hostLost",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": _job(job, template)}}],
    }
    return [JOB_SET.object(_metadata(job, TRAINER), spec=spec)]


def is_plain(facts: Facts) -> bool:
    """Whether the trainer is a Job: JobSet is not installed, or was not when it started."""
    return facts.has_plain_trainer or not facts.serves(JOB_SET)


def max_restarts(job: Job) -> int:
    """Restarts of the trainer before the job has failed."""
    policy = job.spec.failure_policy
    return 0 if policy.on_trainer_failure is OnTrainerFailure.FAIL else policy.max_restarts


def generation(job: Job, facts: Facts) -> Object:
    """The replicas: a StatefulSet, or a LeaderWorkerSet where one is larger than a node."""
    replicas = job.spec.generation.replicas if facts.want in (Want.RUNNING, Want.SAVING) else 0
    size = placement.replica_shape(job).pods
    leader = pods.replica_pod(job, facts)
    if size == 1:
        spec: Object = {
            "replicas": replicas,
            "serviceName": job.child(GENERATION),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": job.selector(GENERATION)},
            "template": leader,
        }
        return STATEFUL_SET.object(_metadata(job, GENERATION), spec=spec)
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
            "workerTemplate": pods.replica_pod(job, facts, is_leader=False),
        },
    }
    return LEADER_WORKER_SET.object(_metadata(job, GENERATION), spec=spec)


def store(job: Job, facts: Facts) -> Object:
    """A Redis server that loses no acknowledged write. Its volume goes with the job, not with a suspension."""
    settings = facts.settings
    container = {
        "name": STORE,
        "image": settings.store_image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["sh", "-c", 'exec $(command -v valkey-server || command -v redis-server) "$@"', "store"],
        "args": [
            *("--dir", "/data", "--appendonly", "yes", "--appendfsync", "always", "--save", ""),
            *("--protected-mode", "no", "--requirepass", f"$({pods.STORE_PASSWORD})"),
        ],
        "env": [
            {
                "name": pods.STORE_PASSWORD,
                "valueFrom": {"secretKeyRef": {"name": job.child(STORE), "key": "password"}},
            }
        ],
        "ports": [{"name": "redis", "containerPort": STORE_PORT}],
        "readinessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": 5},
        "securityContext": pods.container_security(),
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    template: Object = {
        "metadata": {"labels": job.labels(STORE)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 30,
            "securityContext": pods.pod_security(),
            "containers": [container],
        },
    }
    if settings.pull_secrets:
        template["spec"]["imagePullSecrets"] = [{"name": name} for name in settings.pull_secrets]
    volume: Object = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": settings.store_size}},
    }
    if settings.store_class is not None:
        volume["storageClassName"] = settings.store_class
    spec = {
        "replicas": 0 if facts.want is Want.STOPPED else 1,
        "serviceName": job.child(STORE),
        "selector": {"matchLabels": job.selector(STORE)},
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
        "volumeClaimTemplates": [{"metadata": {"name": "data", "labels": job.labels(STORE)}, "spec": volume}],
        "template": template,
    }
    return STATEFUL_SET.object(_metadata(job, STORE), spec=spec)


def autoscaler(job: Job, facts: Facts) -> Object:
    """What scales the RLJob itself, on the share of a step's time in which training waited for rollouts."""
    wanted = job.spec.generation.autoscaling
    assert wanted is not None
    target = {"apiVersion": RLJOB.api_version, "kind": RLJOB.name, "name": job.name}
    slowly = {
        "scaleUp": {
            "stabilizationWindowSeconds": 120,
            "policies": [{"type": "Pods", "value": 2, "periodSeconds": 300}],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": SCALE_DOWN_S,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 300}],
        },
    }
    if wanted.by is Scaler.HPA:
        labels = {"matchLabels": {"rljob": job.name, "namespace": job.namespace}}
        spec: Object = {
            "scaleTargetRef": target,
            "minReplicas": wanted.min_replicas,
            "maxReplicas": wanted.max_replicas,
            "behavior": slowly,
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {"name": "specrl_exposed_generation_percent", "selector": labels},
                        "target": {"type": "Value", "value": str(wanted.target_exposed_percent)},
                    },
                }
            ],
        }
        return AUTOSCALER.object(_metadata(job, GENERATION), spec=spec)
    series = f'namespace="{job.namespace}",rljob="{job.name}"'
    waited = f"sum(rate(specrl_coordinator_exposed_generation_seconds_total{{{series}}}[15m]))"
    query = f"100 * {waited} / sum(rate(specrl_coordinator_step_seconds_sum{{{series}}}[15m]))"
    spec = {
        "scaleTargetRef": target,
        "minReplicaCount": wanted.min_replicas,
        "maxReplicaCount": wanted.max_replicas,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": slowly}},
        "triggers": [
            {
                "type": "prometheus",
                "metricType": "Value",
                "metadata": {
                    "serverAddress": facts.settings.prometheus_url,
                    "query": query,
                    "threshold": str(wanted.target_exposed_percent),
                },
            }
        ],
    }
    return SCALED_OBJECT.object(_metadata(job, GENERATION), spec=spec)


def _job(job: Job, template: Object) -> Object:
    """One pod per node, all or none: any that is lost ends the Job, and whoever made it starts all again."""
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


def _metadata(job: Job, component: str) -> Object:
    return {"name": job.child(component), "labels": job.labels(component)}
