"""Each rule of the chart's _validation.tpl, broken by values that break no other rule."""

from __future__ import annotations

import pytest
from tests.integration.chart.rendering import CHART, refusal, render

NO_DIGESTS = ",".join(f"images.{name}.digest=" for name in ("control", "generation", "trainer"))
BROKEN = {
    "images.registry must name where the nodes pull": (
        f"images.preloaded=false,{NO_DIGESTS}",
        f"images.preloaded=false,{NO_DIGESTS},images.registry=registry.example.com/specrl",
    ),
    "images.registry must be a registry and a folder without a scheme": (
        "images.registry=oci://registry.example.com",
        "images.registry=localhost:5000/specrl",
    ),
    "commonLabels must not set app.kubernetes.io/name": (
        "commonLabels.app\\.kubernetes\\.io/name=mine",
        "commonLabels.example\\.com/team=rl",
    ),
    "operator.serviceAccount.name must name an existing ServiceAccount": (
        "operator.serviceAccount.create=false",
        "operator.serviceAccount.create=false,operator.serviceAccount.name=mine",
    ),
    "rbac.create must be true": (
        "rbac.create=false",
        "rbac.create=false,operator.serviceAccount.create=false,operator.serviceAccount.name=mine",
    ),
    "operator.watchNamespaces must name each namespace once": (
        "operator.watchNamespaces={a,b,a}",
        "operator.watchNamespaces={a,b}",
    ),
    "networkPolicy.apiServerPorts must name the API server's port": (
        "networkPolicy.apiServerPorts=null",
        "networkPolicy.apiServerPorts=null,networkPolicy.enabled=false",
    ),
    "valkey.existingSecret must name a Secret": (
        "valkey.enabled=true",
        "valkey.enabled=true,valkey.existingSecret=store-users",
    ),
    "monitoring.prometheusUrl must be set": (
        "integrations.keda=true",
        "integrations.keda=true,monitoring.prometheusUrl=http://prometheus:9090",
    ),
    "monitoring.podMonitor.labels must not set app.kubernetes.io/name": (
        "monitoring.podMonitor.labels.app\\.kubernetes\\.io/name=mine",
        "monitoring.podMonitor.labels.release=mine",
    ),
}
"""Start of a rule's message: values that the rule refuses, and similar ones that it accepts."""


@pytest.mark.parametrize("message", BROKEN)
def test_every_validation_rule_refuses_only_what_it_describes(message: str) -> None:
    refused, accepted = BROKEN[message]
    said = refusal("--set", refused)
    assert message in said
    assert "got " in said or "must not set" in said
    assert render("--set", accepted)


def test_a_bare_installation_fails_at_once_and_says_what_to_do() -> None:
    """It used to succeed, and its pods then waited for images that do not exist."""
    said = refusal("--set", f"images.preloaded=false,{NO_DIGESTS}")
    for remedy in ("make images", "docs/release.md", "images.preloaded=true"):
        assert remedy in said


def test_digests_of_all_images_stand_for_a_registry() -> None:
    digests = [f"images.{name}.digest=sha256:{'a' * 64}" for name in ("control", "generation", "trainer")]
    assert render("--set", f"images.preloaded=false,{','.join(digests)}")
    assert "no images.trainer.digest" in refusal(
        "--set", f"images.preloaded=false,{NO_DIGESTS},{','.join(digests[:2])}"
    )


def test_every_rule_is_broken_here() -> None:
    template = (CHART / "templates" / "_validation.tpl").read_text()
    assert template.count("{{- fail ") == len(BROKEN)
