"""What a job's coordinator may do at the API server: say how far its own job is, and nothing else. Pure."""

from __future__ import annotations

from specrl_operator.api import ROLE, ROLE_BINDING, SERVICE_ACCOUNT, Job, Object


def objects(job: Job) -> list[Object]:
    """ServiceAccount, Role and RoleBinding of the coordinator. The operator can only grant what it may do itself."""
    metadata = {"name": job.name, "labels": job.labels()}
    group = "rbac.authorization.k8s.io"
    rule = {
        "apiGroups": ["specrl.dev"],
        "resources": ["rljobs/status"],
        "resourceNames": [job.name],
        "verbs": ["patch"],
    }
    subject = {"kind": "ServiceAccount", "name": job.name, "namespace": job.namespace}
    return [
        SERVICE_ACCOUNT.object(metadata, automountServiceAccountToken=False),
        ROLE.object(metadata, rules=[rule]),
        ROLE_BINDING.object(
            metadata, roleRef={"apiGroup": group, "kind": "Role", "name": job.name}, subjects=[subject]
        ),
    ]
