"""Certificates of an RLJob from the real cert-manager: names, authority and renewal. docs/deploy.md."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.controllers.cert_manager import CertManager
from tests.e2e.harness.api import RLJOBS, Api, find_condition, wait_until
from tests.e2e.harness.control_plane import ControlPlane
from tests.e2e.harness.release import Release
from tests.e2e.harness.workloads import Workloads
from tests.e2e.jobs import cpu_job, describe_job, make_place, until_condition
from tests.requirements import OPENSSL

ROLES = ("coordinator", "generation", "trainer")


@pytest.fixture(scope="module")
def cert_manager(control_plane: ControlPlane) -> Iterator[CertManager]:
    """cert-manager, installed for these tests alone."""
    OPENSSL.require()
    installed = CertManager(control_plane)
    installed.install()
    yield installed
    installed.uninstall()


@pytest.fixture
def place(admin: Api, release: Release, namespace: str, jobset: Workloads) -> str:
    """A restricted namespace with a claim for checkpoints that the operator watches."""
    return make_place(admin, namespace)


def read_certificate(admin: Api, job: str, role: str, namespace: str) -> dict[str, bytes]:
    """Wait until a role's Secret is filled. Returns its files."""

    def find_content() -> dict[str, str] | None:
        content: dict[str, str] = (admin.find("v1/secrets", f"{job}-{role}-tls", namespace) or {}).get("data") or {}
        return content if content.keys() >= {"tls.crt", "tls.key", "ca.crt"} else None

    found = wait_until(find_content, f"{role} has a certificate")
    return {name: base64.b64decode(content) for name, content in found.items()}


def describe_certificate(content: dict[str, bytes], folder: Path) -> str:
    """Return the names and uses of a certificate, after its authority and its key were checked."""
    folder.mkdir(exist_ok=True)
    for name, each in content.items():
        (folder / name).write_bytes(each)

    def openssl(*words: str) -> str:
        done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    assert "tls.crt: OK" in openssl("verify", "-CAfile", "ca.crt", "tls.crt")
    key = openssl("pkey", "-in", "tls.key", "-pubout")
    assert openssl("x509", "-in", "tls.crt", "-noout", "-pubkey") == key
    return openssl("x509", "-in", "tls.crt", "-noout", "-ext", "subjectAltName,extendedKeyUsage")


def test_each_role_gets_a_certificate_with_its_name_and_a_renewed_one_replaces_it(
    admin: Api, place: str, cert_manager: CertManager, tmp_path: Path
) -> None:
    cert_manager.add_authority("team-ca", place)
    tls = {"mode": "CertManager", "issuer": {"name": "team-ca"}}
    job = admin.create(cpu_job("secret", place, tls=tls))
    found = {role: read_certificate(admin, "secret", role, place) for role in ROLES}
    for role, content in found.items():
        said = describe_certificate(content, tmp_path / role)
        assert f"DNS:{role}.secret.{place}.specrl, DNS:secret-{role}.{place}.svc" in said
        assert "TLS Web Server Authentication, TLS Web Client Authentication" in said
        # A certificate of one role must not pass for another one.
        assert not any(f"DNS:{other}." in said for other in ROLES if other != role)
    assert len({content["ca.crt"] for content in found.values()}) == 1
    assert len({content["tls.key"] for content in found.values()}) == len(ROLES)
    until_condition(admin, job, "Ready")

    cert_manager.renew("secret-trainer-tls", place)
    wait_until(
        lambda: read_certificate(admin, "secret", "trainer", place)["tls.crt"] != found["trainer"]["tls.crt"],
        "a renewed certificate",
        explain=cert_manager.describe,
    )
    renewed = read_certificate(admin, "secret", "trainer", place)
    assert renewed["ca.crt"] == found["trainer"]["ca.crt"], "processes with the old authority trust it"
    assert renewed["tls.key"] != found["trainer"]["tls.key"], "rotationPolicy: Always"
    assert f"DNS:trainer.secret.{place}.specrl" in describe_certificate(renewed, tmp_path / "renewed")
    assert find_condition(admin.get(RLJOBS, "secret", place), "Ready")["status"] == "True"

    admin.delete(RLJOBS, "secret", place)
    secrets = [f"secret-{role}-tls" for role in ROLES]
    wait_until(
        lambda: not any(admin.find("v1/secrets", name, place) for name in secrets),
        "the Secrets are deleted with the job",
        explain=lambda: describe_job(admin, job),
    )
