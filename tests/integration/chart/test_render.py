"""The objects that the chart renders from its values, checked without a cluster."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.integration.chart.rendering import (
    CHART,
    EXAMPLES,
    MONITORING,
    ROOT,
    Object,
    arguments_of,
    helm,
    of_kind,
    pods,
    refusal,
    render,
    render_text,
    the,
)
from tests.rljob_admission import admit

from specrl.spec import parse_rljob

GOLDEN = Path(__file__).parent / "golden"
KUBERNETES = "1.36"
# Kinds of other operators without an offline schema. Their CRDs and webhooks validate them in a cluster.
FOREIGN = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
CLUSTER_SCOPED = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
NODES = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}
EVERYTHING = ("--set", "valkey.enabled=true,valkey.existingSecret=store-users,operator.replicas=2", *MONITORING)
RENDERS = {
    "defaults": (),
    "everything": EVERYTHING,
    **{path.name.split(".")[1].removesuffix("-example"): ("-f", str(path)) for path in EXAMPLES},
}


def test_every_example_of_values_is_listed_in_the_readme() -> None:
    assert [path.name for path in EXAMPLES] == [
        "values.gb200-example.yaml",
        "values.local-example.yaml",
        "values.namespaced-example.yaml",
    ]
    readme = (CHART / "README.md").read_text()
    assert all(path.name in readme for path in EXAMPLES)


@pytest.mark.parametrize("name", RENDERS)
def test_objects_are_valid_by_the_schemas_of_kubernetes(name: str) -> None:
    objects = render(*RENDERS[name])
    assert of_kind(objects, "Deployment")
    for item in objects:
        if item["kind"] in FOREIGN:
            assert item["apiVersion"] == "monitoring.coreos.com/v1"
        else:
            kubernetes_validate.validate(item, KUBERNETES, strict=True)
        assert ("namespace" in item["metadata"]) == (item["kind"] not in CLUSTER_SCOPED), item["metadata"]
        if item["kind"] != "CustomResourceDefinition":  # generated, and also applied without Helm
            assert item["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"


def test_the_operators_rights_equal_the_golden_file() -> None:
    """SPECRL_REWRITE_GOLDEN=1 rewrites the file; review the diff."""
    chunks = render_text(*RENDERS["defaults"]).split("\n---\n")
    source = "# Source: specrl/templates/operator/rbac.yaml"
    rights = [chunk.removeprefix("---\n") for chunk in chunks if source in chunk]
    text = "\n---\n".join(rights).rstrip("\n") + "\n"
    golden = GOLDEN / "operator-rbac.yaml"
    if os.environ.get("SPECRL_REWRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", RENDERS)
def test_every_pod_is_restricted(name: str) -> None:
    for owner, pod in pods(render(*RENDERS[name])).items():
        assert pod["securityContext"]["runAsNonRoot"] is True, owner
        assert pod["securityContext"]["runAsUser"] > 0, owner
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, owner
        assert not pod.get("hostNetwork"), owner
        assert pod["automountServiceAccountToken"] is ("operator" in owner or "test-rljob" in owner), owner
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, owner
            assert container["resources"]["requests"], owner
            assert container["resources"]["limits"]["memory"], owner


def test_without_fixed_uids_no_pod_names_one() -> None:
    """OpenShift's SCC restricted-v2 refuses a uid, a group or an fsGroup outside of the namespace's range."""
    for owner, pod in pods(render(*EVERYTHING, "--set", "podSecurity.fixedUids=false")).items():
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}, owner


def test_common_labels_are_on_every_object_and_pod() -> None:
    objects = render(*EVERYTHING, "--set", "commonLabels.team=rl")
    for item in objects:
        if item["kind"] != "CustomResourceDefinition":  # generated, and also applied without Helm
            assert item["metadata"]["labels"]["team"] == "rl", item["metadata"]
        if "template" in item.get("spec", {}):
            assert item["spec"]["template"]["metadata"]["labels"]["team"] == "rl"
            assert "team" not in item["spec"]["selector"]["matchLabels"], "a selector cannot be changed"


@pytest.mark.parametrize("name", RENDERS)
def test_no_secret_is_rendered_and_no_rule_is_a_wildcard(name: str) -> None:
    objects = render(*RENDERS[name])
    assert not of_kind(objects, "Secret")
    for role in of_kind(objects, "Role", "ClusterRole"):
        for rule in role["rules"]:
            assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]
            if "secrets" in rule["resources"]:
                assert set(rule["verbs"]) == {"get", "create"}


def operator_rules(objects: list[Object]) -> list[Object]:
    """Return the rules of the operator's roles, without the lease's."""
    return [
        rule
        for role in of_kind(objects, "Role", "ClusterRole")
        if role["metadata"]["name"].endswith("-operator")
        for rule in role["rules"]
    ]


def test_operator_writes_no_spec_of_an_rljob() -> None:
    verbs = {
        resource: set(rule["verbs"])
        for rule in operator_rules(render())
        for resource in rule["resources"]
        if "specrl.dev" in rule["apiGroups"]
    }
    assert verbs["rljobs"] == {"get", "list", "watch", "delete"}
    assert verbs["rljobs/status"] == {"patch"}


@pytest.mark.parametrize(
    ("integration", "groups"),
    [
        ("jobSet", {"jobset.x-k8s.io"}),
        ("leaderWorkerSet", {"leaderworkerset.x-k8s.io"}),
        ("computeDomain", {"resource.nvidia.com", "resource.k8s.io"}),
        ("volcano", {"scheduling.volcano.sh"}),
        ("keda", {"keda.sh"}),
    ],
)
def test_each_integration_adds_its_rules_and_no_others(integration: str, groups: set[str]) -> None:
    def groups_with(value: str) -> set[str]:
        rules = operator_rules(
            render("--set", f"integrations.{integration}={value},monitoring.prometheusUrl=http://prometheus")
        )
        return {group for rule in rules for group in rule["apiGroups"]}

    assert groups_with("true") - groups_with("false") == groups
    assert groups_with("false") <= groups_with("true")


@pytest.mark.parametrize(
    ("namespaces", "groups"),
    [
        (["*"], ["system:serviceaccounts"]),
        (["team-a", "team-b"], ["system:serviceaccounts:team-a", "system:serviceaccounts:team-b"]),
    ],
)
def test_coordinators_of_named_namespaces_may_review_tokens_and_nothing_else(
    namespaces: list[str], groups: list[str]
) -> None:
    objects = [
        item
        for item in render(f"--set-json=rbac.tokenReviewNamespaces={json.dumps(namespaces)}")
        if item["metadata"]["name"].endswith("-token-reviews")
    ]
    (role,) = of_kind(objects, "ClusterRole")
    assert role["rules"] == [
        {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}
    ]
    (binding,) = of_kind(objects, "ClusterRoleBinding")
    assert [subject["name"] for subject in binding["subjects"]] == groups


def test_a_bare_installation_gives_rights_to_its_own_accounts_alone() -> None:
    """H6: every service account of the cluster could ask what any user may do."""
    bindings = of_kind(render(), "ClusterRoleBinding", "RoleBinding")
    assert bindings
    subjects = [each for item in bindings for each in item["subjects"]]
    assert {(each["kind"], each["namespace"]) for each in subjects} == {("ServiceAccount", "specrl-system")}


def test_namespaced_mode_creates_no_cluster_scoped_objects() -> None:
    objects = render("-f", str(CHART / "values.namespaced-example.yaml"))
    assert not of_kind(objects, *CLUSTER_SCOPED)
    roles = [item for item in of_kind(objects, "Role") if item["metadata"]["name"] == "specrl-operator"]
    assert [role["metadata"]["namespace"] for role in roles] == ["team-a", "team-a-dev"]
    for role in roles:
        binding = next(
            item
            for item in of_kind(objects, "RoleBinding")
            if item["metadata"]["namespace"] == role["metadata"]["namespace"]
        )
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "specrl", "namespace": "specrl-system"}]
    assert [*roles[0]["rules"], NODES] == operator_rules(render()), "nodes belong to no namespace"
    assert [word for word in arguments_of(objects) if word.startswith("--namespace=")] == [
        "--namespace=team-a",
        "--namespace=team-a-dev",
    ]


@pytest.mark.parametrize("kind", ["ServiceMonitor", "PodMonitor", "PrometheusRule"])
def test_monitors_are_created_if_the_cluster_has_their_crds_unless_set(kind: str) -> None:
    value = f"monitoring.{kind[0].lower()}{kind[1:]}.enabled"
    assert not of_kind(render(), kind)
    assert of_kind(render(*MONITORING), kind)
    assert of_kind(render("--set", f"{value}=true"), kind)
    assert not of_kind(render("--set", f"{value}=false", *MONITORING), kind)


def test_pod_monitor_watches_the_namespaces_that_the_operator_does() -> None:
    everywhere = the(render(*MONITORING), "PodMonitor", "specrl-jobs")
    assert everywhere["spec"]["namespaceSelector"] == {"any": True}
    named = render("--set", "operator.watchNamespaces={a,b}", *MONITORING)
    assert the(named, "PodMonitor", "specrl-jobs")["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}


def test_the_alert_on_an_absent_operator_is_about_the_releases_own() -> None:
    for namespace in ("specrl-system", "team-a"):
        text = render_text(*MONITORING, namespace=namespace)
        assert f'expr: absent(specrl_operator_is_leader{{namespace="{namespace}"}})' in text


def test_runbook_urls_start_with_the_given_base() -> None:
    rules = the(
        render(*MONITORING, "--set", "monitoring.prometheusRule.runbookBase=https://docs.example.com/specrl/"),
        "PrometheusRule",
        "specrl",
    )
    urls = [
        rule["annotations"]["runbook_url"]
        for group in rules["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert urls
    assert all(url.startswith("https://docs.example.com/specrl/alerts.md#specrl") for url in urls)


def test_images_are_versioned_like_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == chart["version"] == project["version"]
    assert f"--trainer-image=specrl-trainer:{project['version']}" in arguments_of(render())


def test_digest_wins_over_tag_and_registry_comes_first() -> None:
    digest = "sha256:" + "a" * 64
    words = arguments_of(
        render("--set", f"images.registry=registry.example.com/specrl/,images.generation.digest={digest}")
    )
    assert f"--generation-image=registry.example.com/specrl/specrl-generation@{digest}" in words
    assert "--control-image=registry.example.com/specrl/specrl-control:0.1.0" in words
    assert any(word.startswith("--store-image=docker.io/valkey/valkey:") for word in words)


def test_longest_names_fit() -> None:
    objects = render(*EVERYTHING, release="r" * 53, namespace="n" * 63)
    for item in objects:
        limit = 63 if item["kind"] in ("Service", "Deployment", "StatefulSet", "Pod") else 253
        assert len(item["metadata"]["name"]) <= limit, item["metadata"]["name"]
        for key, value in item["metadata"].get("labels", {}).items():
            assert len(value) <= 63, (item["kind"], key, value)


def test_the_crd_is_kept_after_an_uninstall_unless_disabled() -> None:
    (crd,) = of_kind(render(), "CustomResourceDefinition")
    assert crd["metadata"]["name"] == "rljobs.specrl.dev"
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    (bare,) = of_kind(render("--set", "crds.keep=false"), "CustomResourceDefinition")
    assert "annotations" not in bare["metadata"]
    assert bare["spec"] == crd["spec"]
    assert not of_kind(render("--set", "crds.enabled=false"), "CustomResourceDefinition")


def test_a_disruption_budget_exists_from_the_second_replica_on() -> None:
    assert not of_kind(render(), "PodDisruptionBudget")
    assert of_kind(render("--set", "operator.replicas=2"), "PodDisruptionBudget")


def test_several_operators_prefer_nodes_of_their_own() -> None:
    """Two replicas, of which one takes over, could share a node and be lost with it."""

    def spread(*values: str) -> Any:
        (operator,) = (it for it in of_kind(render(*values), "Deployment") if "operator" in it["metadata"]["name"])
        return operator["spec"]["template"]["spec"].get("topologySpreadConstraints"), operator["spec"]["selector"]

    assert spread()[0] is None
    found, selector = spread("--set", "operator.replicas=2")
    (only,) = found
    assert (only["topologyKey"], only["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert only["labelSelector"] == selector
    own = [{"topologyKey": "rack", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}]
    given = ("--set-json", f"operator.topologySpreadConstraints={json.dumps(own)}", "--set", "operator.replicas=2")
    assert spread(*given)[0] == own


def test_every_selector_matches_its_pods() -> None:
    objects = render(*EVERYTHING)
    labelled = [
        item["metadata"]["labels"] if item["kind"] == "Pod" else item["spec"]["template"]["metadata"]["labels"]
        for item in objects
        if item["kind"] in ("Pod", "Deployment", "StatefulSet")
    ]
    selectors: list[dict[str, str]] = [item["spec"]["selector"] for item in of_kind(objects, "Service")]
    selectors += [item["spec"]["podSelector"]["matchLabels"] for item in of_kind(objects, "NetworkPolicy")]
    selectors += [item["spec"]["selector"]["matchLabels"] for item in of_kind(objects, "PodDisruptionBudget")]
    assert len(selectors) == 5
    for selector in selectors:
        assert len([labels for labels in labelled if selector.items() <= labels.items()]) == 1, selector


def test_network_policies_can_be_disabled() -> None:
    assert not of_kind(render("--set", "networkPolicy.enabled=false", *EVERYTHING), "NetworkPolicy")


def test_prometheus_may_scrape_from_the_given_namespace() -> None:
    policy = the(
        render("--set", "networkPolicy.metricsScraperNamespace=monitoring"), "NetworkPolicy", "specrl-operator"
    )
    senders = policy["spec"]["ingress"][0]["from"]
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}} in senders


def test_every_value_is_described_and_unknown_values_are_refused() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def undescribed(node: dict[str, Any], path: str) -> list[str]:
        found = [] if "description" in node or not path else [path]
        if "properties" in node and node.get("additionalProperties") is not False:
            found.append(f"{path}: takes any name")
        for name, inner in node.get("properties", {}).items():
            found += undescribed(inner, f"{path}.{name}")
        return found

    assert not undescribed(schema, "")
    assert not [name for name, node in schema["definitions"].items() if undescribed(node, name)]

    def names(node: object, path: str) -> set[str]:
        if not isinstance(node, dict):
            return {path}
        return {path} | {deeper for key, inner in node.items() for deeper in names(inner, f"{path}.{key}")}

    def known(node: dict[str, Any], path: str) -> set[str]:
        for part in node.get("allOf", []):
            node = schema["definitions"][part["$ref"].rpartition("/")[2]]
        return {path} | {
            deeper for key, inner in node.get("properties", {}).items() for deeper in known(inner, f"{path}.{key}")
        }

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    unset = {path for path in known(schema, "") - names(values, "") if not path.startswith(".global")}
    # Resources and tolerations are Kubernetes' own objects. Their members need no default.
    assert not {path for path in unset if not re.search(r"\.(resources|tolerations)\.", path)}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("operator.replicas=0", "at '/operator/replicas'"),
        ("operator.replica=2", "additional properties 'replica' not allowed"),
        ("images.control.tag=1", "at '/images/control/tag'"),
        ("images.control.digest=sha256:abc", "at '/images/control/digest'"),
        ("images.pullPolicy=always", "one of 'Always', 'IfNotPresent', 'Never'"),
        ("operator.watchNamespaces={Team}", "at '/operator/watchNamespaces/0'"),
        ("monitoring.podMonitor.enabled=auto", "at '/monitoring/podMonitor/enabled'"),
        ("images.preloaded=yes", "at '/images/preloaded'"),
        ("podSecurity.fixedUids=0", "at '/podSecurity/fixedUids'"),
        ("valkey.password=secret", "additional properties 'password' not allowed"),
        ("jobs.storeSize=lots", "at '/jobs/storeSize'"),
    ],
)
def test_wrong_values_are_refused_by_path(setting: str, words: str) -> None:
    assert words in refusal("--set", setting)


def test_lint_finds_nothing() -> None:
    for arguments in ((), *(("-f", str(path)) for path in EXAMPLES)):
        done = helm("lint", "--strict", str(CHART), *arguments)
        assert done.returncode == 0, done.stdout + done.stderr


def test_notes_warn_about_disabled_features() -> None:
    def notes(*arguments: str) -> str:
        done = helm("install", "specrl", str(CHART), "--dry-run=client", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("\nNOTES:\n")[2]

    assert "WARNING: images.preloaded is true" in notes("--set", "images.preloaded=true")
    off = notes("--set", "crds.enabled=false,networkPolicy.enabled=false,images.registry=registry.example.com")
    assert "WARNING: crds.enabled is false" in off
    assert "WARNING: networkPolicy.enabled is false" in off
    assert "WARNING: rbac.tokenReviewNamespaces is empty" in off
    assert "WARNING: images.preloaded" not in off
    assert "WARNING" not in notes(
        "--set",
        "images.registry=registry.example.com,networkPolicy.metricsScraperNamespace=monitoring,"
        "monitoring.podMonitor.enabled=true,rbac.tokenReviewNamespaces={team-a}",
    )


def test_smallest_job_of_notes_and_helm_test_is_accepted() -> None:
    (pod,) = [pod for owner, pod in pods(render()).items() if owner == "Pod/specrl-test-rljob"]
    sent = json.loads(pod["containers"][0]["args"][-1])
    assert sent == yaml.safe_load((CHART / "files" / "smallest-rljob.yaml").read_text())
    assert admit(sent)[1] == []
    assert parse_rljob(sent).name == "smallest"
