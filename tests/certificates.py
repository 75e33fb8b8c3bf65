"""Makes certificates for tests of TLS with openssl: an authority, and the certificates that it signs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.requirements import OPENSSL

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
KEY_IDENTIFIERS = "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
KEY_USAGE = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")


class Authority:
    """A certificate authority. It writes NAME.pem and NAME.key, its own and those that it signs, to `folder`.

    Skips the test without openssl. `has_key_usage=False` makes an authority as older clusters have it, which Python
    3.13 refuses.
    """

    def __init__(self, folder: Path, name: str = "ca", has_key_usage: bool = True) -> None:
        OPENSSL.require()
        self.folder = folder
        self.name = name
        folder.mkdir(parents=True, exist_ok=True)
        self._openssl(
            *("req", "-x509", *KEY, "-days", "2", "-subj", f"/CN={name}", "-keyout", f"{name}.key"),
            *(*(KEY_USAGE if has_key_usage else ()), "-out", f"{name}.pem"),
        )

    @property
    def file(self) -> Path:
        """The authority's own certificate."""
        return self.folder / f"{self.name}.pem"

    def sign(self, name: str, names: Sequence[str]) -> None:
        """Write NAME.pem and NAME.key, a certificate for `names`.

        names: in openssl's form, such as DNS:example or IP:127.0.0.1.
        """
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={','.join(names)}\n{KEY_IDENTIFIERS}")
        self._openssl(*("req", *KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"))
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{self.name}.pem", "-CAkey", f"{self.name}.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )

    def secret(self, names: Sequence[str]) -> dict[str, bytes]:
        """Make the content of a Secret for a process with these DNS names."""
        self.sign("secret", [f"DNS:{name}" for name in names])
        found = {"tls.crt": "secret.pem", "tls.key": "secret.key", "ca.crt": f"{self.name}.pem"}
        return {name: (self.folder / file).read_bytes() for name, file in found.items()}

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True, timeout=60)


def mount_secret(folder: Path, secret: dict[str, bytes]) -> Path:
    """Write the files of a Secret as a kubelet does: one link to a new folder replaces all of them at once."""
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
