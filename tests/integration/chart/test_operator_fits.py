"""The chart starts the operator with valid arguments, and gives it the rights that it needs and no others."""

from __future__ import annotations

import json

import pytest
from tests.integration.chart.rendering import arguments_of, of_kind, render
from tests.unit.operator.builders import ClusterFacts, a_job, children_of

from specrl_operator.children.access import build_coordinator_access
from specrl_operator.kinds import CHILD_KINDS, CLAIM_TEMPLATE, EVENT, LEASE, POD, RLJOB, SECRET, Kind
from specrl_operator.main import parse_arguments, read_settings

EGRESS = [{"ports": [{"port": 9000}]}, {"to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}]}]
EVERYTHING = (
    "--set",
    "integrations.volcano=true,integrations.keda=true,"
    "monitoring.prometheusUrl=http://prometheus:9090,operator.watchNamespaces={a,b},jobs.storeClass=fast,"
    "images.pullSecrets={one,two},networkPolicy.metricsScraperNamespace=monitoring,operator.logLevel=warning",
    "--set=operator.workers=8,operator.extraArgs={--log-level=debug},networkPolicy.extraScraperNamespaces={agents},"
    "networkPolicy.nodeCidrs={10.0.0.0/16,fd00::/64}",
    "--set=jobs.ttlSecondsAfterFinished=0,jobs.disruptionBudgets=false",
    "--set-json=jobs.extraEgress=" + json.dumps(EGRESS),
)
OWNED = {"get", "list", "watch", "create", "patch", "delete"}


def granted() -> dict[tuple[str, str], set[str]]:
    """Return the operator's verbs by (group, resource), in a watched namespace and in its own."""
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
    options = parse_arguments(arguments)
    settings = read_settings(options)
    assert options.namespace == ["a", "b"]
    assert options.lease_name == "specrl"
    assert options.port == 8080
    assert options.log_level == "debug", "extraArgs come last, and count"
    assert options.workers == 8
    assert settings.control_image == "specrl-control:0.1.0"
    assert settings.pull_secrets == ("one", "two")
    assert (settings.store_size, settings.store_class) == ("8Gi", "fast")
    assert settings.metrics_namespaces == ("monitoring", "agents")
    assert settings.api_server_ports == (443, 6443)
    assert settings.node_cidrs == ("10.0.0.0/16", "fd00::/64")
    assert (settings.finished_job_ttl_s, settings.has_disruption_budgets) == (0, False)
    defaults = read_settings(parse_arguments(arguments_of(render())[1:]))
    assert (defaults.finished_job_ttl_s, defaults.has_disruption_budgets) == (None, True)
    assert settings.job_egress == tuple(EGRESS)
    assert settings.prometheus_url == "http://prometheus:9090"


@pytest.mark.parametrize("kind", CHILD_KINDS, ids=lambda kind: kind.name)
def test_the_operators_role_permits_all_its_requests(kind: Kind) -> None:
    assert granted()[name_of(kind)] == OWNED


def test_the_operators_role_permits_no_other_requests() -> None:
    read = {"get", "list", "watch"}
    others = {
        name_of(RLJOB): {*read, "delete"},
        ("specrl.dev", "rljobs/status"): {"patch"},
        ("specrl.dev", "rljobs/finalizers"): {"update"},
        name_of(POD): read,
        name_of(SECRET): {"get", "create"},
        name_of(EVENT): {"create"},
        ("", "events"): {"list"},
        name_of(LEASE): {"create", "get", "update"},
        ("authorization.k8s.io", "localsubjectaccessreviews"): {"create"},
        name_of(CLAIM_TEMPLATE): {"list", "watch"},
    }
    assert granted() == {name_of(kind): OWNED for kind in CHILD_KINDS} | others


def test_pod_monitor_finds_the_ports_that_serve_metrics() -> None:
    (monitor,) = of_kind(render("--set", "monitoring.podMonitor.enabled=true"), "PodMonitor")
    selector = monitor["spec"]["selector"]["matchLabels"]
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    served: dict[str, set[str]] = {}
    for child in children_of(a_job(), ClusterFacts()):
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


def test_the_operator_has_every_right_that_it_grants_to_coordinators() -> None:
    """Otherwise the API server would refuse the Role as a privilege escalation."""

    (role,) = [item for item in build_coordinator_access(a_job()) if item["kind"] == "Role"]
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                assert set(rule["verbs"]) <= granted()[(group, resource)]
