"""Sizes and checksums of a checkpoint's files, stored beside them in checksums.json. Without torch.

Written before the rename that completes a checkpoint. Verified before a checkpoint is loaded
(`megatron_backend/checkpoint.py`) or exported, after it is fetched from a mirror, and by `specrl checkpoint verify`.
xxh3 detects corruption by disks and copies. It is not a signature.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from specrl.errors import CheckpointInvalid
from specrl.files import read_object

FILE = "checksums.json"
_CHUNK_BYTES = 16 << 20  # read at a time, which bounds the memory of a checksum


@dataclass(frozen=True)
class FileChecksum:
    """Size and checksum of one file. xxh3: 128 bits, as hexadecimal digits."""

    size_bytes: int
    xxh3: str


def checksum_file(file: Path) -> FileChecksum:
    """Compute size and checksum of a file. Raises OSError."""
    found = xxhash.xxh3_128()
    size = 0
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            found.update(chunk)
            size += len(chunk)
    return FileChecksum(size, found.hexdigest())


def write_checksums(folder: Path, checksums: Mapping[str, FileChecksum]) -> None:
    """Write checksums.json into a checkpoint's folder. checksums: by path in the folder. Raises OSError."""
    content = {name: asdict(item) for name, item in sorted(checksums.items())}
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_checksums(folder: Path) -> dict[str, FileChecksum]:
    """Read checksums.json: checksums by path in the folder. Raises CheckpointInvalid."""
    try:
        found = {name: FileChecksum(**item) for name, item in read_object(folder / FILE).items()}
        for name, item in found.items():
            if [type(item.size_bytes), type(item.xxh3)] != [int, str]:
                raise ValueError(f"got {item}")
            # A file of another origin must not make its reader open files outside of the folder.
            if not name or ".." in Path(name).parts or Path(name).is_absolute() or "\0" in name:
                raise ValueError(f"got the file name {name!r}")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointInvalid(
            f"could not read {FILE} of checkpoint {folder}: {error}; delete the checkpoint to use the one before it"
        ) from error
    return found


def describe_damage(folder: Path, name: str, expected: FileChecksum) -> str | None:
    """Describe how a file differs from its checksum; None if it does not."""
    file = folder / name
    try:
        size = file.stat().st_size
        if size != expected.size_bytes:  # found without reading the file
            return f"{name} has {size} bytes instead of {expected.size_bytes}"
        return None if checksum_file(file) == expected else f"{name} does not have the checksum {expected.xxh3}"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"


def list_damages(folder: Path) -> list[str]:
    """Verify all files of a checkpoint. Returns a description of each damaged one.

    Raises CheckpointInvalid when checksums.json cannot be read.
    """
    return [
        found
        for name, item in read_checksums(folder).items()
        if (found := describe_damage(folder, name, item)) is not None
    ]
