"""A job's certificates: the names in them, who signs them, and how pods get theirs. Pure.

A role is known by `<role>.<job>.<namespace>.specrl`, which the processes check (`specrl.rpc.tls`); the name of its
Service is there for others. With cert-manager each role has its own Secret, which the operator makes empty and its own,
so that it goes with the job: cert-manager fills what is there. Pods wait until it has.
"""

from __future__ import annotations

from specrl.spec.cluster import TlsMode
from specrl_operator.api import CERTIFICATE, COORDINATOR, GENERATION, TRAINER, Job, Object

FOLDER = "/etc/specrl-tls"
KEYS = ("tls.crt", "tls.key", "ca.crt")
ROLES = (COORDINATOR, GENERATION, TRAINER)
SCHEME_LABEL = "specrl.dev/scheme"
"""How the coordinator's pages and metrics are reached: `https`, or without the label `http`."""


def is_on(job: Job) -> bool:
    """Whether the job's processes talk by TLS."""
    return job.spec.tls.mode is not TlsMode.DISABLED


def domain(job: Job) -> str:
    """What the names of all roles end with."""
    return f"{job.name}.{job.namespace}.specrl"


def own_secrets(job: Job) -> dict[str, str]:
    """Secrets that are the job's own, by role: those that cert-manager fills."""
    if job.spec.tls.mode is not TlsMode.CERT_MANAGER:
        return {}
    return {role: job.child(f"{role}-tls") for role in ROLES}


def objects(job: Job) -> list[Object]:
    """One Certificate for each role, where cert-manager is to make them."""
    issuer = job.spec.tls.issuer
    return [
        CERTIFICATE.object(
            {"name": secret, "labels": job.labels(role)},
            spec={
                "secretName": secret,
                "dnsNames": [f"{role}.{domain(job)}", f"{job.child(role)}.{job.namespace}.svc"],
                "usages": ["digital signature", "server auth", "client auth"],
                "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
                "issuerRef": {"group": "cert-manager.io", "kind": issuer.kind.value, "name": issuer.name},
            },
        )
        for role, secret in own_secrets(job).items()
        if issuer is not None
    ]


def put_into(pod: Object, job: Job, role: str) -> None:
    """Give the one container of a pod template its certificate, if the job has any."""
    if not is_on(job):
        return
    secret = own_secrets(job).get(role, job.spec.tls.secret_name)
    items = [{"key": key, "path": key} for key in KEYS]
    container = pod["spec"]["containers"][0]
    pod["spec"]["volumes"].append({"name": "tls", "secret": {"secretName": secret, "items": items}})
    container["volumeMounts"].append({"name": "tls", "mountPath": FOLDER, "readOnly": True})
    container["command"] += ["--tls", FOLDER, "--tls-domain", domain(job)]
