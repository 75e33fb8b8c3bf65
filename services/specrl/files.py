"""Files that are read and written whole, and files of lines that grow.

Reading: no more of a file than it may be large, and JSON that cannot be read is a ValueError. Below everything, since
every part reads some file that another program, version or hand has written. A reader catches OSError and ValueError,
and says which file it is and what to do. Writing: a reader finds the old content or the new, never half of one.
Following: lines, as another process adds them.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

SMALL_BYTES = 1 << 20
"""Of files that people write or that hold a few numbers: run files, endpoints, the state of a checkpoint, costs."""

JSON_BYTES = 256 << 20
"""Of a model's JSON. The largest in use are tokenizers of some 250,000 tokens, 35 MB; indices are smaller."""

CHUNK_BYTES = 1 << 20
"""Of a file that is followed, at once: a long run's is not in memory."""


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """A file's content. Raises OSError, with EFBIG for one that is larger than `most_bytes`; then little was read."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)  # not by its size: of a device or a pipe that says nothing
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"must be at most {most_bytes} bytes, got more", str(path))
    return content


def read_text(path: Path, most_bytes: int = SMALL_BYTES) -> str:
    """UTF-8 text. Raises OSError, and ValueError for other bytes."""
    return read_bytes(path, most_bytes).decode("utf-8")


def write_text(path: Path, text: str) -> None:
    """Replace a file's content, in one rename. Not synced: for what a power cut may take. Raises OSError."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def read_object(path: Path, most_bytes: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object that a file holds. Raises OSError or ValueError."""
    return parse_object(read_text(path, most_bytes))


def parse_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError, for too deep a nesting too, which Python reports as something else."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("must be nested less deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object, got {type(found).__name__}")
    return found


class Follow:
    """The lines of a file that grows. One that is cut back is read anew; one that is not there has none yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def lines(self) -> list[bytes]:
        """Whole lines since the last call, some of them where there are many: call again until there are none.

        A line without its end is being written, and comes later. Raises OSError.
        """
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._at:
                    self._at = 0
                file.seek(self._at)
                read = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return []
        whole = read[: read.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.splitlines()
