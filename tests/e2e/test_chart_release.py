"""The chart in a cluster: helm installs, tests, upgrades and uninstalls it, and RBAC limits its operator."""

from __future__ import annotations

import pytest
from tests.e2e.harness.api import RLJOBS, Api, Refused, is_condition_true, wait_until
from tests.e2e.harness.release import Release
from tests.e2e.jobs import cpu_job, list_remaining_objects, until_condition

DEFINITIONS = "apiextensions.k8s.io/v1/customresourcedefinitions"
CRD = "rljobs.specrl.dev"


def test_helm_lints_the_chart(release: Release) -> None:
    said = release.run("lint", "deploy/helm", "--strict")
    assert "0 chart(s) failed" in said


def test_operator_runs_under_the_charts_account(admin: Api, release: Release) -> None:
    deployment = admin.get("apps/v1/deployments", f"{release.name}-operator", release.namespace)
    assert deployment["status"]["availableReplicas"] == 1
    (pod,) = admin.list("v1/pods", release.namespace, "app.kubernetes.io/component=operator")
    assert pod["spec"]["serviceAccountName"] == release.account
    assert is_condition_true(admin.get(DEFINITIONS, CRD), "Established")


def test_charts_own_tests_pass(release: Release) -> None:
    release.test()


@pytest.mark.parametrize(
    ("verb", "resource"),
    [("list", "v1/secrets"), ("create", "rbac.authorization.k8s.io/v1/clusterroles"), ("delete", "v1/nodes")],
)
def test_the_operators_account_has_no_dangerous_right(admin: Api, release: Release, verb: str, resource: str) -> None:
    """Rights that a compromised operator must not have."""
    operator = admin.with_token(admin.token_of(release.account, release.namespace))
    group, _, plural = resource.rpartition("/")
    attributes = {"verb": verb, "group": group.rpartition("/")[0], "resource": plural}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answer = operator.send_request("POST", path, review | {"spec": {"resourceAttributes": attributes}})
    assert answer["status"]["allowed"] is False


def test_the_operators_account_has_the_rights_of_its_role_and_no_others(admin: Api, release: Release) -> None:
    operator = admin.with_token(admin.token_of(release.account, release.namespace))
    operator.list(RLJOBS)
    with pytest.raises(Refused) as refused:
        operator.list("v1/secrets")
    assert refused.value.status == 403


def test_upgrade_changes_the_operator_and_keeps_jobs(admin: Api, release: Release, namespace: str) -> None:
    job = admin.create(cpu_job("kept", namespace, suspend=True))
    release.upgrade(operator={"logLevel": "warning"})
    deployment = admin.get("apps/v1/deployments", f"{release.name}-operator", release.namespace)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--log-level=warning" in container["args"]
    assert admin.get(RLJOBS, "kept", namespace)["metadata"]["uid"] == job["metadata"]["uid"]
    release.upgrade()


def test_an_operator_of_named_namespaces_cannot_touch_a_job_elsewhere(
    admin: Api, release: Release, namespace: str, other_namespace: str
) -> None:
    """Its Role enforces that: the API server does not even let it read the other job."""
    release.upgrade(operator={"watchNamespaces": [namespace]}, rbac={"userRoles": False, "tokenReviewNamespaces": []})
    try:
        cluster = [each["metadata"]["name"] for each in admin.list("rbac.authorization.k8s.io/v1/clusterroles")]
        assert [name for name in cluster if "specrl" in name] == []
        theirs = admin.create(cpu_job("theirs", other_namespace))
        until_condition(admin, admin.create(cpu_job("ours", namespace)), "Accepted", timeout_s=300)
        operator = admin.with_token(admin.token_of(release.account, release.namespace))
        operator.get(RLJOBS, "ours", namespace)
        for attempt in (
            lambda: operator.get(RLJOBS, "theirs", other_namespace),
            lambda: operator.list(RLJOBS),
            lambda: operator.delete(RLJOBS, "theirs", other_namespace),
            lambda: operator.list("v1/pods", other_namespace),
        ):
            with pytest.raises(Refused) as refused:
                attempt()
            assert refused.value.status == 403
        assert "status" not in admin.get(RLJOBS, "theirs", other_namespace)
        assert list_remaining_objects(admin, theirs) == []
    finally:
        admin.delete(RLJOBS, "theirs", other_namespace)
        release.upgrade()


def test_uninstall_deletes_everything_but_the_definition_and_its_jobs(
    admin: Api, release: Release, namespace: str
) -> None:
    job = admin.create(cpu_job("survives", namespace, suspend=True))
    release.uninstall()
    try:
        kinds = ("v1/pods", "v1/services", "apps/v1/deployments", "rbac.authorization.k8s.io/v1/roles")
        wait_until(lambda: not any(admin.list(kind, release.namespace) for kind in kinds), "the release is gone")
        accounts = [each["metadata"]["name"] for each in admin.list("v1/serviceaccounts", release.namespace)]
        assert accounts == ["default"]
        cluster = [each["metadata"]["name"] for each in admin.list("rbac.authorization.k8s.io/v1/clusterroles")]
        assert [name for name in cluster if "specrl" in name] == []
        assert admin.get(RLJOBS, "survives", namespace)["metadata"]["uid"] == job["metadata"]["uid"]
    finally:
        release.install()
