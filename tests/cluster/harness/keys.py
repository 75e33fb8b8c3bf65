"""The certificates by which API server and kubelet know each other."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ClientKeys:
    """An authority for clients, and the API server's certificate as a client of kubelets."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def create(cls, folder: Path) -> ClientKeys:
        """Make the keys in a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        keys = cls(folder / "authority.crt", folder / "client.crt", folder / "client.key")
        new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "7"]
        authority_key = folder / "authority.key"
        _run(*new, "-subj", "/CN=clients", "-keyout", authority_key, "-out", keys.authority)
        signed = ["-CA", keys.authority, "-CAkey", authority_key, "-addext", "extendedKeyUsage=clientAuth"]
        signed += ["-addext", "basicConstraints=critical,CA:false"]
        subject = "/O=system:masters/CN=apiserver-kubelet-client"
        _run(*new, "-subj", subject, *signed, "-keyout", keys.key, "-out", keys.certificate)
        return keys


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
