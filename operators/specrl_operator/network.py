"""Who may talk to a job's pods: the job itself, and whoever scrapes metrics. Pure.

NCCL and torch's rendezvous know no passwords, so that these policies are what keeps jobs apart; with hostNetwork they
do not apply.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from specrl.spec.sinks import WandbMode
from specrl_operator.api import (
    COMPONENT_LABEL,
    COORDINATOR,
    GENERATION,
    JOB_LABEL,
    NETWORK_POLICY,
    TRAINER,
    Job,
    Object,
)
from specrl_operator.facts import Facts
from specrl_operator.pods import HTTP_PORT, METRICS_PORT, TRAINER_METRICS_PORT


def objects(job: Job, facts: Facts) -> list[Object]:
    """Policies that deny everything but what is named."""
    own = {"podSelector": {"matchLabels": {JOB_LABEL: job.name}}}
    names = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    peers = _policy(
        job,
        "peers",
        {JOB_LABEL: job.name},
        {"ingress": [{"from": [own]}], "egress": [{"to": [own]}, {"ports": names}, *_to_collector(job)]},
    )
    ports = sorted({*facts.settings.api_server_ports, *_store_ports(job), *_sink_ports(job)})
    outwards = _policy(
        job,
        COORDINATOR,
        job.selector(COORDINATOR),
        {"egress": [{"ports": [{"protocol": "TCP", "port": port} for port in ports]}]},
    )
    if not facts.settings.metrics_namespaces:
        return [peers, outwards]
    scrapers = {
        "namespaceSelector": {
            "matchExpressions": [
                {
                    "key": "kubernetes.io/metadata.name",
                    "operator": "In",
                    "values": list(facts.settings.metrics_namespaces),
                }
            ]
        }
    }
    served = [{"protocol": "TCP", "port": port} for port in (HTTP_PORT, METRICS_PORT, TRAINER_METRICS_PORT)]
    metrics = _policy(job, "metrics", {JOB_LABEL: job.name}, {"ingress": [{"from": [scrapers], "ports": served}]})
    metrics["spec"]["podSelector"] = {
        "matchLabels": {JOB_LABEL: job.name},
        "matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": [COORDINATOR, GENERATION, TRAINER]}],
    }
    return [peers, outwards, metrics]


def _to_collector(job: Job) -> list[Object]:
    """Every pod sends its traces to the collector that the run file names, wherever that is."""
    traces = job.spec.telemetry.traces
    if traces is None or traces.endpoint is None:
        return []
    url = urlsplit(traces.endpoint)
    return [{"ports": [{"protocol": "TCP", "port": url.port or (443 if url.scheme == "https" else 80)}]}]


def _store_ports(job: Job) -> set[int]:
    """Ports of a Redis server that is not the job's own."""
    redis = job.spec.redis
    if redis is None:
        return set()
    addresses = redis.sentinel.addresses if redis.sentinel is not None else redis.addresses
    ports = {int(match[1]) for address in addresses if (match := re.search(r":(\d+)$", address))}
    return ports | ({6379} if redis.sentinel is not None else set())  # Sentinels name the servers


def _sink_ports(job: Job) -> set[int]:
    """Ports of the servers that the coordinator shows its steps: of one that only its environment names, https."""
    sinks, ports = job.spec.telemetry.sinks, set[int]()
    if sinks.wandb is not None and sinks.wandb.mode is WandbMode.ONLINE:
        ports.add(443)
    if sinks.mlflow is not None:
        named = re.match(r"(https?)://[^/]*?(?::(\d{1,5}))?(?:/|$)", sinks.mlflow.tracking_uri or "")
        ports.add(int(named[2]) if named and named[2] else 80 if named and named[1] == "http" else 443)
    return ports


def _policy(job: Job, part: str, selector: dict[str, str], rules: Object) -> Object:
    kinds = {"ingress": "Ingress", "egress": "Egress"}
    spec = {"podSelector": {"matchLabels": selector}, "policyTypes": [kinds[name] for name in rules], **rules}
    return NETWORK_POLICY.object({"name": job.child(part), "labels": job.labels()}, spec=spec)
