"""The rights of a job's coordinator at the API server. Pure.

It may patch the status of its own job, and ask who may read the run: only about its own namespace. To learn whose a
token is, it needs a right that no Role can grant (deploy/helm/templates/users/tokenreviews.yaml).
"""

from __future__ import annotations

from specrl_operator import kinds
from specrl_operator.api import Job, Object


def build_coordinator_access(job: Job) -> list[Object]:
    """Build the ServiceAccount, Role and RoleBinding of the coordinator."""
    metadata = {"name": job.name, "labels": job.build_labels()}
    group = "rbac.authorization.k8s.io"
    # Kubernetes lets the operator grant only rights that it has itself: the chart's rules must include these.
    rules = [
        {
            "apiGroups": ["specrl.dev"],
            "resources": ["rljobs/status"],
            "resourceNames": [job.name],
            "verbs": ["patch"],
        },
        {
            "apiGroups": ["authorization.k8s.io"],
            "resources": ["localsubjectaccessreviews"],
            "verbs": ["create"],
        },
    ]
    subject = {"kind": "ServiceAccount", "name": job.name, "namespace": job.namespace}
    return [
        # The coordinator's pod asks for its own token.
        kinds.SERVICE_ACCOUNT.build_object(metadata, automountServiceAccountToken=False),
        kinds.ROLE.build_object(metadata, rules=rules),
        kinds.ROLE_BINDING.build_object(
            metadata, roleRef={"apiGroup": group, "kind": "Role", "name": job.name}, subjects=[subject]
        ),
    ]
