"""Certificates for tests of TLS, made by openssl: an authority, and what it signs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.requirements import OPENSSL

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
KEY_IDENTIFIERS = "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
KEY_USAGE = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")


class Authority:
    """`folder` gets NAME.pem and NAME.key of the authority, and those of whatever it signs. Skips without openssl.

    Python 3.13 refuses authorities without a key usage, which those of older clusters are: `has_key_usage=False`.
    """

    def __init__(self, folder: Path, name: str = "ca", has_key_usage: bool = True) -> None:
        OPENSSL.require()
        self.folder, self.name = folder, name
        folder.mkdir(parents=True, exist_ok=True)
        self._openssl(
            *("req", "-x509", *KEY, "-days", "2", "-subj", f"/CN={name}", "-keyout", f"{name}.key"),
            *(*(KEY_USAGE if has_key_usage else ()), "-out", f"{name}.pem"),
        )

    @property
    def file(self) -> Path:
        """Its own certificate."""
        return self.folder / f"{self.name}.pem"

    def sign(self, name: str, names: Sequence[str]) -> None:
        """NAME.pem and NAME.key: a certificate for `names`, each as openssl writes them: DNS:example, IP:127.0.0.1."""
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={','.join(names)}\n{KEY_IDENTIFIERS}")
        self._openssl(*("req", *KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"))
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{self.name}.pem", "-CAkey", f"{self.name}.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )

    def secret(self, names: Sequence[str]) -> dict[str, bytes]:
        """What a Secret of a process with these DNS names holds."""
        self.sign("secret", [f"DNS:{name}" for name in names])
        found = {"tls.crt": "secret.pem", "tls.key": "secret.key", "ca.crt": f"{self.name}.pem"}
        return {name: (self.folder / file).read_bytes() for name, file in found.items()}

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True, timeout=60)


def mount(folder: Path, secret: dict[str, bytes]) -> Path:
    """A folder with the files of a Secret, changed at once as a kubelet does it: by a link to a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"..{len(list(folder.iterdir()))}"
    fresh.mkdir()
    for name, content in secret.items():
        (fresh / name).write_bytes(content)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    link = folder / "..next"
    link.symlink_to(fresh.name)
    link.replace(folder / "..data")
    return folder
