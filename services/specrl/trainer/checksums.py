"""Sizes and checksums of a checkpoint's files, in checksums.json beside them. Without torch.

Written before the rename that makes a checkpoint; checked before one is loaded (`megatron_backend/checkpoint.py`) or
exported, and by `specrl checkpoint verify`. xxh3 finds what disks and copies do; it is no signature.
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
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Checksum:
    """Of one file. xxh3: 128 bits, in hexadecimal digits."""

    size_bytes: int
    xxh3: str


def checksum(file: Path) -> Checksum:
    """Read a file once. Raises OSError."""
    found, size = xxhash.xxh3_128(), 0
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            found.update(chunk)
            size += len(chunk)
    return Checksum(size, found.hexdigest())


def of_folder(folder: Path) -> dict[str, Checksum]:
    """Of every file below a folder but checksums.json itself, by its path there. Raises OSError."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): checksum(path) for path in files if path != folder / FILE}


def write(folder: Path, checksums: Mapping[str, Checksum]) -> None:
    """Raises OSError."""
    content = {name: asdict(item) for name, item in sorted(checksums.items())}
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Checksum]:
    """What `write` wrote, by path. Raises CheckpointInvalid."""
    try:
        found = {name: Checksum(**item) for name, item in read_object(folder / FILE).items()}
        for name, item in found.items():
            if [type(item.size_bytes), type(item.xxh3)] != [int, str]:
                raise ValueError(f"got {item}")
            if not name or ".." in Path(name).parts or Path(name).is_absolute() or "\0" in name:
                raise ValueError(f"got the file name {name!r}")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointInvalid(
            f"a checkpoint must have its {FILE}, got {folder}: {error}; delete it and the one before it is used"
        ) from error
    return found


def damage(folder: Path, name: str, expected: Checksum) -> str | None:
    """What is wrong with one file, in words; None when it is as it was written."""
    file = folder / name
    try:
        size = file.stat().st_size
        if size != expected.size_bytes:
            return f"{name} must have {expected.size_bytes} bytes, got {size}"
        return None if checksum(file) == expected else f"{name} must have the checksum {expected.xxh3}, got another"
    except OSError as error:
        return f"{name} must be readable, got {error.strerror}"


def damages(folder: Path) -> list[str]:
    """Everything that is wrong with a checkpoint's files. Raises CheckpointInvalid where no checksums can be read."""
    return [found for name, item in read(folder).items() if (found := damage(folder, name, item)) is not None]
