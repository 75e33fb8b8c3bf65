"""Images of one static program, or of data, as OCI archives. No builder is needed: a layer is a tar of the files."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_image(archive: Path, name: str, program: Path, user: str = "65532:65532") -> str:
    """Write an image with `/PROGRAM`, its entrypoint, and an empty /tmp. Returns the manifest's digest."""
    config = {"Entrypoint": [f"/{program.name}"], "User": user}
    return write_data_image(archive, name, {program.name: program.read_bytes()}, config)


def write_data_image(
    archive: Path, name: str, files: Mapping[str, bytes], config: Mapping[str, object] | None = None
) -> str:
    """Write an image with these files at its root, and an empty /tmp. Returns the manifest's digest."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        folder = tarfile.TarInfo("tmp")
        folder.type = tarfile.DIRTYPE
        folder.mode = 0o1777
        tar.addfile(folder)
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            entry.mode = 0o755
            tar.addfile(entry, io.BytesIO(content))
    blobs: dict[str, bytes] = {}

    def add(kind: str, content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        media_type = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    unpacked = add("layer.v1.tar", layer.getvalue())
    image = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": config or {},
        "rootfs": {"type": "layers", "diff_ids": [unpacked["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": add("config.v1+json", json.dumps(image).encode()),
        "layers": [unpacked],
    }
    described = add("manifest.v1+json", json.dumps(manifest).encode())
    index = {"schemaVersion": 2, "manifests": [described | {"annotations": {"io.containerd.image.name": name}}]}
    layout = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": json.dumps(index).encode()}
    layout |= {f"blobs/sha256/{digest}": content for digest, content in blobs.items()}
    with tarfile.open(archive, "w") as tar:
        for path, content in layout.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return str(described["digest"])
