"""Scrape configurations: those that Prometheus derives from the chart's monitors, and those without a cluster.

Both scrape the same processes. The label `namespace` distinguishes their series.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from tests.integration.chart.promql_sources import groups
from tests.integration.chart.rendering import MONITORING, render, the

CLUSTER = "cluster"
LOCAL = "local"
OPERATORS = "specrl-system"
SECOND = "1s"

Config = dict[str, Any]


def config(page: str, operator: str, rule_file: str, targets: list[Config]) -> Config:
    """Scrape everything once a second. page, operator: addresses. targets: the answer of the coordinator's /targets."""
    return {
        "global": {"scrape_interval": SECOND, "scrape_timeout": SECOND, "evaluation_interval": SECOND},
        "rule_files": [rule_file],
        "scrape_configs": [*_as_pods(targets), _as_one_machine(page), _as_service(operator)],
    }


def rules_each_second() -> Config:
    """Return the chart's rules, with this Prometheus' scrape interval as evaluation interval."""
    return {"groups": [group | {"interval": SECOND} for group in groups()]}


def _as_one_machine(page: str) -> Config:
    """The configuration of docs/metrics.md, plus the namespace that only a cluster has."""
    return {
        "job_name": "specrl",
        "honor_labels": True,
        "http_sd_configs": [{"url": f"{page}/targets", "refresh_interval": SECOND}],
        "relabel_configs": [{"target_label": "namespace", "replacement": LOCAL}],
    }


def _as_service(operator: str) -> Config:
    """Derive the operator's scrape configuration from the chart's ServiceMonitor."""
    monitor = the(render(*MONITORING), "ServiceMonitor", "specrl-operator")
    (endpoint,) = monitor["spec"]["endpoints"]
    return {
        "job_name": "operator",
        "honor_labels": endpoint["honorLabels"],
        "metrics_path": endpoint["path"],
        "static_configs": [{"targets": [urlsplit(operator).netloc], "labels": {"namespace": OPERATORS}}],
    }


def _as_pods(targets: list[Config]) -> list[Config]:
    """A scrape configuration for each endpoint of the chart's PodMonitor, and pods with the labels that it looks at.

    Beside the run's own there are the second pod of a replica and of the trainer, which serve nothing.
    """
    monitor = the(render(*MONITORING), "PodMonitor", "specrl-jobs")
    silent = [
        _pod("127.0.0.1:9", {"rljob": "x", "component": "trainer"}, number="1"),
        _pod("127.0.0.1:9", {"rljob": "x", "component": "generation", "replica": "gen-0-1"}, leader=""),
    ]
    found = [_pod(group["targets"][0], group["labels"]) for group in targets]
    of_port = {"http": [pod for pod in found if _component(pod) == "coordinator"]}
    of_port["metrics"] = [pod for pod in found if _component(pod) != "coordinator"] + silent
    return [
        {
            "job_name": f"pods/{endpoint['port']}",
            "metrics_path": endpoint["path"],
            "static_configs": of_port[endpoint["port"]],
            "relabel_configs": [_as_prometheus(rule) for rule in endpoint["relabelings"]],
            "metric_relabel_configs": [_as_prometheus(rule) for rule in endpoint["metricRelabelings"]],
        }
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
    ]


def _pod(address: str, labels: dict[str, str], *, number: str = "0", leader: str = "true") -> Config:
    """A pod as service discovery describes it, with what Prometheus' operator adds: the namespace."""
    about = {"pod_name": labels.get("replica", labels["component"])}
    about |= {
        "pod_label_specrl_dev_rljob": labels["rljob"],
        "pod_label_app_kubernetes_io_component": labels["component"],
    }
    if labels["component"] == "trainer":
        about["pod_label_batch_kubernetes_io_job_completion_index"] = number
    if labels["component"] == "generation" and leader:
        about["pod_label_specrl_dev_replica_leader"] = leader
    meta = {f"__meta_kubernetes_{name}": value for name, value in about.items()}
    return {"targets": [address], "labels": {"namespace": CLUSTER, **meta}}


def _component(pod: Config) -> str:
    found: str = pod["labels"]["__meta_kubernetes_pod_label_app_kubernetes_io_component"]
    return found


def _as_prometheus(rule: Config) -> Config:
    """Convert a relabelling rule of a monitor into Prometheus' spelling."""
    return {re.sub(r"[A-Z]", lambda match: f"_{match[0].lower()}", name): value for name, value in rule.items()}
