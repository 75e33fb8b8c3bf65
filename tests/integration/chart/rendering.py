"""Render the chart with the real helm."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tests.e2e.binaries import find
from tests.requirements import HELM

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm"
EXAMPLES = sorted(CHART.glob("values.*-example.yaml"))
MONITORING = tuple(
    word
    for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule")
    for word in ("--api-versions", f"monitoring.coreos.com/v1/{kind}")
)
"""Arguments that make the chart believe the Prometheus operator's CRDs are there."""

PRELOADED = ("--set", "images.preloaded=true")
"""The chart refuses to be installed without images; a checkout has none."""

Object = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm without checking its exit code."""
    HELM.require()
    return subprocess.run([find("helm"), *arguments], capture_output=True, text=True, timeout=300, check=False)


@cache
def render_text(*arguments: str, release: str = "specrl", namespace: str = "specrl-system") -> str:
    """Return the output of `helm template`."""
    done = helm("template", release, str(CHART), "--namespace", namespace, *PRELOADED, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(*arguments: str, **names: str) -> list[Object]:
    """Return the objects of a release."""
    return [item for item in yaml.load_all(render_text(*arguments, **names), yaml.CSafeLoader) if item]


def refusal(*arguments: str) -> str:
    """Return helm's error message for refused values."""
    done = helm("template", "specrl", str(CHART), *PRELOADED, *arguments)
    assert done.returncode != 0, f"{arguments} must be refused, got {len(done.stdout)} characters of YAML"
    return done.stderr


def of_kind(objects: Iterable[Object], *kinds: str) -> list[Object]:
    """Return the objects of a kind."""
    return [item for item in objects if item["kind"] in kinds]


def the(objects: Iterable[Object], kind: str, name: str) -> Object:
    """Return the one object of a kind and name."""
    (found,) = [item for item in of_kind(objects, kind) if item["metadata"]["name"] == name]
    return found


def pods(objects: Iterable[Object]) -> dict[str, Object]:
    """Return the specs of all pods, by kind and name of their workload."""
    found: dict[str, Object] = {}
    for item in objects:
        spec: Mapping[str, Any] = item.get("spec") or {}
        pod = spec if item["kind"] == "Pod" else (spec.get("template") or {}).get("spec")
        if isinstance(pod, dict) and "containers" in pod:
            found[f"{item['kind']}/{item['metadata']['name']}"] = pod
    return found


def arguments_of(objects: Iterable[Object]) -> list[str]:
    """Return the operator's command line."""
    (container,) = pods(objects)["Deployment/specrl-operator"]["containers"]
    return list(container["command"]) + list(container["args"])
