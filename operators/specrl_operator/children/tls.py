"""A job's TLS certificates: their names, their issuer, and how pods mount them. Pure.

A role's certificate has the name `<role>.<job>.<namespace>.specrl`, which the processes verify (`specrl.rpc.tls`), and
the name of its Service, for other clients.

With cert-manager each role has its own Secret. The operator creates it empty, with the job as its owner, so that it is
deleted with the job. cert-manager fills the existing Secret. Until then the kubelet cannot mount it, and pods wait.
"""

from __future__ import annotations

from specrl.spec.cluster import TlsMode
from specrl_operator import kinds
from specrl_operator.api import COORDINATOR, GENERATION, TRAINER, Job, Object
from specrl_operator.plan.acceptance import Refusal

CERTIFICATE_FOLDER = "/etc/specrl-tls"
SECRET_KEYS = ("tls.crt", "tls.key", "ca.crt")
"""Keys of a Secret, as cert-manager writes them."""
CERTIFICATE_ROLES = (COORDINATOR, GENERATION, TRAINER)
SCHEME_LABEL = "specrl.dev/scheme"
"""URL scheme of the coordinator's pages and metrics, for the chart's PodMonitor: `https`; no label means `http`."""


def is_enabled(job: Job) -> bool:
    """Whether the job's processes use TLS."""
    return job.spec.tls.mode is not TlsMode.DISABLED


def certificate_domain(job: Job) -> str:
    """Return the domain of the certificate names of all roles."""
    return f"{job.name}.{job.namespace}.specrl"


def own_secrets(job: Job) -> dict[str, str]:
    """Return the names of the Secrets that cert-manager fills, by role; empty without cert-manager."""
    if job.spec.tls.mode is not TlsMode.CERT_MANAGER:
        return {}
    return {role: job.child_name(f"{role}-tls") for role in CERTIFICATE_ROLES}


def find_missing_secret(job: Job, found: Object | None) -> Refusal | None:
    """Return why the Secret of tls.secretName cannot be used; None if it can. found: the Secret, if it exists."""
    missing = [key for key in SECRET_KEYS if key not in ((found or {}).get("data") or {})]
    if not missing:
        return None
    got = "which does not exist" if found is None else f"which lacks {', '.join(missing)}"
    return Refusal(
        "SecretMissing",
        f"tls.secretName must name a Secret in {job.namespace} with {', '.join(SECRET_KEYS)}, got "
        f"{job.spec.tls.secret_name}, {got}; create it, with a certificate for coordinator, generation and trainer in "
        f"the domain {certificate_domain(job)}",
    )


def build_certificates(job: Job) -> list[Object]:
    """Build one cert-manager Certificate per role; none without cert-manager."""
    issuer = job.spec.tls.issuer
    return [
        kinds.CERTIFICATE.build_object(
            {"name": secret, "labels": job.build_labels(role)},
            spec={
                "secretName": secret,
                "dnsNames": [f"{role}.{certificate_domain(job)}", f"{job.child_name(role)}.{job.namespace}.svc"],
                "usages": ["digital signature", "server auth", "client auth"],
                "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
                "issuerRef": {"group": "cert-manager.io", "kind": issuer.kind.value, "name": issuer.name},
            },
        )
        for role, secret in own_secrets(job).items()
        if issuer is not None
    ]


def mount_certificate(pod: Object, job: Job, role: str) -> None:
    """Mount the role's certificate into the container of a pod template, in place, if the job uses TLS."""
    if not is_enabled(job):
        return
    secret = own_secrets(job).get(role, job.spec.tls.secret_name)
    # Listed: the kubelet refuses to mount a Secret without one of the items, so pods wait for cert-manager.
    items = [{"key": key, "path": key} for key in SECRET_KEYS]
    container = pod["spec"]["containers"][0]
    pod["spec"]["volumes"].append({"name": "tls", "secret": {"secretName": secret, "items": items}})
    container["volumeMounts"].append({"name": "tls", "mountPath": CERTIFICATE_FOLDER, "readOnly": True})
    container["command"] += ["--tls", CERTIFICATE_FOLDER, "--tls-domain", certificate_domain(job)]
