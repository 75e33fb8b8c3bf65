"""Writes the checksums of a checkpoint that a test made, in the trainer's format."""

from __future__ import annotations

from pathlib import Path

from specrl.trainer.checkpointing import checksums


def write_checksums(folder: Path) -> None:
    """Write the checksums of every file below a folder, without checksums.json, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / checksums.FILE)
    checksums.write_checksums(folder, {str(path.relative_to(folder)): checksums.checksum_file(path) for path in files})
