"""The chart starts the operator as its command line is, and lets it do what it does, and no more."""

from __future__ import annotations

import pytest
from tests.integration.chart.rendering import arguments_of, of_kind, render
from tests.unit.operator.builders import a_job, facts

from specrl_operator import access
from specrl_operator.api import (
    CHILDREN,
    CLAIM_TEMPLATE,
    EVENT,
    LEASE,
    POD,
    RLJOB,
    SECRET,
    Kind,
)
from specrl_operator.children import desired
from specrl_operator.main import parse, settings_of

EVERYTHING = (
    "--set",
    "integrations.volcano=true,integrations.keda=true,"
    "monitoring.prometheusUrl=http://prometheus:9090,operator.watchNamespaces={a,b},jobs.storeClass=fast,"
    "images.pullSecrets={one,two},networkPolicy.metricsScraperNamespace=monitoring,operator.logLevel=warning",
)
OWNED = {"get", "list", "watch", "create", "patch", "delete"}


def granted() -> dict[tuple[str, str], set[str]]:
    """Verbs by (group, resource) that the operator has in a namespace that it watches, and in its own."""
    objects = render(*EVERYTHING)
    found: dict[tuple[str, str], set[str]] = {}
    for role in of_kind(objects, "Role"):
        if role["metadata"]["namespace"] in ("a", "specrl-system") and "test" not in role["metadata"]["name"]:
            for rule in role["rules"]:
                for group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        found.setdefault((group, resource), set()).update(rule["verbs"])
    return found


def name_of(kind: Kind) -> tuple[str, str]:
    group, slash, _ = kind.api_version.partition("/")
    return (group if slash else "", kind.plural)


def test_every_argument_is_one_of_the_operators() -> None:
    program, *arguments = arguments_of(render(*EVERYTHING))
    assert program == "specrl-operator"
    options = parse(arguments)
    settings = settings_of(options)
    assert options.namespace == ["a", "b"]
    assert options.lease_name == "specrl"
    assert options.port == 8080
    assert options.log_level == "warning"
    assert settings.control_image == "specrl-control:0.1.0"
    assert settings.pull_secrets == ("one", "two")
    assert (settings.store_size, settings.store_class) == ("8Gi", "fast")
    assert settings.metrics_namespaces == ("monitoring",)
    assert settings.api_server_ports == (443, 6443)
    assert settings.prometheus_url == "http://prometheus:9090"


@pytest.mark.parametrize("kind", CHILDREN, ids=lambda kind: kind.name)
def test_operator_may_do_with_its_children_what_it_does(kind: Kind) -> None:
    assert granted()[name_of(kind)] == OWNED


def test_operator_may_do_nothing_else() -> None:
    read = {"get", "list", "watch"}
    others = {
        name_of(RLJOB): {*read, "delete"},
        ("specrl.dev", "rljobs/status"): {"patch"},
        ("specrl.dev", "rljobs/finalizers"): {"update"},
        name_of(POD): read,
        name_of(SECRET): {"get", "create"},
        name_of(EVENT): {"create"},
        name_of(LEASE): {"create", "get", "update"},
        name_of(CLAIM_TEMPLATE): {"get"},
    }
    assert granted() == {name_of(kind): OWNED for kind in CHILDREN} | others


def test_pod_monitor_finds_the_ports_that_serve_metrics() -> None:
    (monitor,) = of_kind(render("--set", "monitoring.podMonitor.enabled=true"), "PodMonitor")
    selector = monitor["spec"]["selector"]["matchLabels"]
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    served: dict[str, set[str]] = {}
    for child in desired(a_job(), facts()):
        if child["kind"] in ("Deployment", "StatefulSet"):
            template = child["spec"]["template"]
            component = template["metadata"]["labels"]["app.kubernetes.io/component"]
            (container,) = template["spec"]["containers"]
            served[component] = {port["name"] for port in container["ports"]} & scraped
            assert selector.items() <= template["metadata"]["labels"].items()
            assert "specrl.dev/rljob" in template["metadata"]["labels"]
    assert served["coordinator"] == {"http"}
    assert served["generation"] == {"metrics"}
    assert not served.get("store")


def test_what_the_operator_grants_to_coordinators_it_has_itself() -> None:
    """Else the API server refuses the Role as an escalation."""

    (role,) = [item for item in access.objects(a_job()) if item["kind"] == "Role"]
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                assert set(rule["verbs"]) <= granted()[(group, resource)]
