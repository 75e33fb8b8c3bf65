"""Reads and writes OCI layouts: the images in one, with digest, architecture and size as pulled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "org.opencontainers.image.ref.name"
BUILDKIT_NAME = "io.containerd.image.name"
COMPRESSED = "compressed.json"
"""Beside the layout that buildah writes: digest and size of each layer, by its digest before compression."""
GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass(frozen=True)
class Image:
    """An image of a layout. layers: digests, the first layer first. size_bytes: compressed, as a node pulls it."""

    name: str
    digest: str
    architecture: str
    size_bytes: int
    layers: tuple[str, ...]


def read_image(layout: Path, name: str) -> Image:
    """Return an image of a layout. Raises KeyError if the layout has none of this name."""
    entry = next((each for each in _entries(layout) if _name_of(each) == name), None)
    if entry is None:
        raise KeyError(f"{layout} must have an image {name}, got {[_name_of(each) for each in _entries(layout)]}")
    manifest = _blob(layout, entry["digest"])
    config = _blob(layout, manifest["config"]["digest"])
    size_bytes = manifest["config"]["size"] + sum(layer["size"] for layer in manifest["layers"])
    layers = tuple(layer["digest"] for layer in manifest["layers"])
    return Image(name, entry["digest"], config["architecture"], size_bytes, layers)


def move_image(source: Path, target: Path, name: str) -> None:
    """Move an image from the layout that buildah writes to another.

    buildah compresses every layer of an image at every push: minutes for the packages. It leaves out a layer whose file
    is there under the digest that the layer has before compression. So an empty file of that name stays in the source,
    `COMPRESSED` says which file of the target it stands for, and a rebuild compresses changed layers alone.
    """
    entry = next(each for each in _entries(source) if _name_of(each) == name)
    manifest = _blob(source, entry["digest"])
    plain = _blob(source, manifest["config"]["digest"])["rootfs"]["diff_ids"]
    known = read_compressed(source)
    for layer, before in zip(manifest["layers"], plain, strict=True):
        if before not in known:
            known[before] = {"digest": layer["digest"], "size": layer["size"]}
            place = _path(target, layer["digest"])
            place.parent.mkdir(parents=True, exist_ok=True)
            _path(source, layer["digest"]).replace(place)
            _path(source, before).touch()
            (source / COMPRESSED).write_text(json.dumps(known), encoding="utf-8")
        layer |= {"mediaType": GZIP, **known[before]}
    _add(target, _path(source, manifest["config"]["digest"]).read_bytes())
    content = json.dumps(manifest, separators=(",", ":")).encode()
    found = {"mediaType": entry["mediaType"], "digest": _add(target, content), "size": len(content)}
    others = [each for each in _entries(target) if _name_of(each) != name] if (target / "index.json").is_file() else []
    (target / "oci-layout").write_bytes((source / "oci-layout").read_bytes())
    _write_index(target, [*others, found | {"annotations": {NAME: name}}])
    (source / "index.json").unlink()  # a second push under one name would add a second entry


def forget_lost_layers(source: Path, target: Path) -> None:
    """Have layers compressed again whose file is no longer in the target."""
    known = read_compressed(source)
    for before, after in list(known.items()):
        if not _path(target, after["digest"]).is_file():
            _path(source, before).unlink(missing_ok=True)
            del known[before]
    if source.is_dir():
        (source / COMPRESSED).write_text(json.dumps(known), encoding="utf-8")


def read_compressed(source: Path) -> dict[str, dict[str, Any]]:
    """Return digest and size of compressed layers, by the digest before."""
    file = source / COMPRESSED
    found: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def _add(layout: Path, content: bytes) -> str:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    _path(layout, digest).parent.mkdir(parents=True, exist_ok=True)
    _path(layout, digest).write_bytes(content)
    return digest


def make_view(layout: Path, image: Image, folder: Path) -> None:
    """Make a layout with one image in an empty folder, for programs that take no other. It links to the blobs."""
    folder.mkdir(parents=True)
    (folder / "blobs").symlink_to(layout / "blobs")
    (folder / "oci-layout").write_bytes((layout / "oci-layout").read_bytes())
    _write_index(folder, [each for each in _entries(layout) if each["digest"] == image.digest][:1])


def remove_unused_blobs(layout: Path) -> None:
    """Delete what no image of a layout uses any more."""
    used = set()
    for entry in _entries(layout):
        manifest = _blob(layout, entry["digest"])
        used |= {entry["digest"], manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])}
    for blob in (layout / "blobs" / "sha256").iterdir():
        if f"sha256:{blob.name}" not in used:
            blob.unlink()


def _entries(layout: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((layout / "index.json").read_text(encoding="utf-8"))["manifests"]
    return found


def _write_index(layout: Path, entries: list[dict[str, Any]]) -> None:
    content = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": entries}
    (layout / "index.json").write_text(json.dumps(content), encoding="utf-8")


def _blob(layout: Path, digest: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_path(layout, digest).read_text(encoding="utf-8"))
    return content


def _path(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/")


def _name_of(entry: Mapping[str, Any]) -> str:
    """Return the image's full name. BuildKit has the tag alone where buildah has this."""
    notes = entry.get("annotations", {})
    return str(notes.get(BUILDKIT_NAME) or notes.get(NAME, ""))


@dataclass(frozen=True)
class Blob:
    """Content of a layout, with its media type."""

    media_type: str
    content: bytes


def write_artifact(layout: Path, name: str, config: Blob, content: Blob) -> str:
    """Write a layout with one artifact of one layer. Returns the manifest's digest."""
    described = []
    for blob in (config, content):
        digest = _add(layout, blob.content)
        described.append({"mediaType": blob.media_type, "digest": digest, "size": len(blob.content)})
    media_type = "application/vnd.oci.image.manifest.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": media_type, "config": described[0], "layers": described[1:]}
    text = json.dumps(manifest, separators=(",", ":")).encode()
    digest = _add(layout, text)
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n', encoding="utf-8")
    entry = {"mediaType": media_type, "digest": digest, "size": len(text), "annotations": {NAME: name}}
    _write_index(layout, [entry])
    return digest
