"""The NetworkPolicies of a job's pods: they may reach each other, and Prometheus may scrape them. Pure.

NCCL and torch's rendezvous have no authentication, so these policies are what isolates jobs from each other. They do
not apply to pods with hostNetwork, which are known by the addresses of all nodes.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from specrl.spec.sinks import WandbMode
from specrl_operator import kinds
from specrl_operator.api import COMPONENT_LABEL, COORDINATOR, GENERATION, TRAINER, Job, Object
from specrl_operator.children.pods import (
    GRPC_PORT,
    HTTP_PORT,
    METRICS_PORT,
    REPLICA_PORT,
    STORE_PORT,
    TRAINER_METRICS_PORT,
    TRAINER_PORT,
)
from specrl_operator.plan.job_plan import JobPlan


def build_network_policies(plan: JobPlan) -> list[Object]:
    """Build the job's policies. Traffic that no policy allows is denied."""
    job = plan.job
    settings = plan.settings

    # All pods of the job reach each other, DNS, and the collector of traces.
    own = {"podSelector": {"matchLabels": job.build_selector()}}
    names = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    peers = _build_policy(
        job,
        "peers",
        job.build_selector(),
        {
            "ingress": [{"from": [own]}],
            "egress": [{"to": [own]}, {"ports": names}, *_allow_collector(job), *settings.job_egress],
        },
    )

    # The coordinator also reaches the API server, an external store and sinks. By port: a policy selects addresses, and
    # these servers may have any.
    ports = sorted({*settings.api_server_ports, *_store_ports(job), *_sink_ports(job)})
    outwards = _build_policy(
        job,
        COORDINATOR,
        job.build_selector(COORDINATOR),
        {"egress": [{"ports": [{"protocol": "TCP", "port": port} for port in ports]}]},
    )

    policies = [peers, outwards]
    if plan.uses_host_network:
        # For coordinator and store, which are in the pod network.
        nodes = [{"ipBlock": {"cidr": cidr}} for cidr in settings.node_cidrs]
        served = [{"protocol": "TCP", "port": port} for port in (GRPC_PORT, STORE_PORT)]
        called = [{"protocol": "TCP", "port": port} for port in (REPLICA_PORT, TRAINER_PORT)]
        rules = {"ingress": [{"from": nodes, "ports": served}], "egress": [{"to": nodes, "ports": called}]}
        policies.append(_build_policy(job, "nodes", job.build_selector(), rules))
    # Object stores, the hub, and the services that give out credentials. Other ports: the operator's --job-egress.
    https = {"egress": [{"ports": [{"protocol": "TCP", "port": 443}]}]}
    if any(volume.uri is not None for volume in job.spec.volumes):
        policies.append(_build_policy(job, "fetch", job.build_selector(), https))
    elif _has_remote_mirror(job):
        policies.append(_build_policy(job, TRAINER, job.build_selector(TRAINER), https))

    # Prometheus reaches the metrics ports from the namespaces that the operator's flags name.
    if not settings.metrics_namespaces:
        return policies
    scrapers = {
        "namespaceSelector": {
            "matchExpressions": [
                {
                    "key": "kubernetes.io/metadata.name",
                    "operator": "In",
                    "values": list(settings.metrics_namespaces),
                }
            ]
        }
    }
    served = [{"protocol": "TCP", "port": port} for port in (HTTP_PORT, METRICS_PORT, TRAINER_METRICS_PORT)]
    metrics = _build_policy(job, "metrics", job.build_selector(), {"ingress": [{"from": [scrapers], "ports": served}]})
    metrics["spec"]["podSelector"] = {
        "matchLabels": job.build_selector(),
        "matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": [COORDINATOR, GENERATION, TRAINER]}],
    }
    return [*policies, metrics]


def _has_remote_mirror(job: Job) -> bool:
    """Whether the trainer copies its checkpoints to another machine."""
    mirror = job.spec.checkpoint.mirror
    return mirror is not None and not mirror.startswith("file:")


def _allow_collector(job: Job) -> list[Object]:
    """Allow egress to the port of the collector of traces that the run file names; nothing if it names none."""
    traces = job.spec.telemetry.traces
    if traces is None or traces.endpoint is None:
        return []
    url = urlsplit(traces.endpoint)
    return [{"ports": [{"protocol": "TCP", "port": url.port or (443 if url.scheme == "https" else 80)}]}]


def _store_ports(job: Job) -> set[int]:
    """Return the ports of an external Redis server; none if the store is the job's own."""
    redis = job.spec.redis
    if redis is None:
        return set()
    addresses = redis.sentinel.addresses if redis.sentinel is not None else redis.addresses
    ports = {int(match[1]) for address in addresses if (match := re.search(r":(\d+)$", address))}
    # Sentinels tell the servers' addresses at run time. Redis' default port is assumed.
    return ports | ({6379} if redis.sentinel is not None else set())


def _sink_ports(job: Job) -> set[int]:
    """Return the ports of Weights & Biases and MLflow: 443 for a server that only the environment names."""
    sinks = job.spec.telemetry.sinks
    ports = set[int]()
    if sinks.wandb is not None and sinks.wandb.mode is WandbMode.ONLINE:
        ports.add(443)
    if sinks.mlflow is not None:
        # The port of the URL; without one, that of its scheme. Any other URI is looked up by the client at run time.
        named = re.match(r"(https?)://[^/]*?(?::(\d{1,5}))?(?:/|$)", sinks.mlflow.tracking_uri or "")
        ports.add(int(named[2]) if named and named[2] else 80 if named and named[1] == "http" else 443)
    return ports


def _build_policy(job: Job, part: str, selector: dict[str, str], rules: Object) -> Object:
    types = [name.capitalize() for name in rules]
    spec = {"podSelector": {"matchLabels": selector}, "policyTypes": types, **rules}
    return kinds.NETWORK_POLICY.build_object({"name": job.child_name(part), "labels": job.build_labels()}, spec=spec)
