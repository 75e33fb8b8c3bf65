"""Files that are read and written whole, and files of lines that grow.

Reading: no more of a file than it may be large, and JSON that cannot be read is a ValueError. Below everything, since
every part reads some file that another program, version or hand has written. A reader catches OSError and ValueError,
and says which file it is and what to do. Writing: a reader finds the old content or the new, never half of one. Every
file that is replaced goes through `replace_file`. Following: lines, as another process adds them.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SMALL_BYTES = 1 << 20
"""Of files that people write or that hold a few numbers: run files, endpoints, the state of a checkpoint, costs."""

JSON_BYTES = 256 << 20
"""Of a model's JSON. The largest in use are tokenizers of some 250,000 tokens, 35 MB; indices are smaller."""

CHUNK_BYTES = 1 << 20
"""Of a file that is followed, at once: a long run's is not in memory."""


def cache_folder() -> Path:
    """Where things are kept that can be made again: $SPECRL_CACHE_DIR, or `specrl` in the user's cache folder."""
    named = os.environ.get("SPECRL_CACHE_DIR")
    if named:
        return Path(named)
    try:
        home = Path.home()
    except RuntimeError:  # a user without an entry in /etc/passwd, and no $HOME
        home = Path("/nonexistent")
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "specrl"


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


@contextmanager
def replace_file(path: Path, *, mode: int = 0o666, is_synced: bool = False) -> Iterator[Path]:
    """Give a scratch file in `path`'s folder to write; it takes the name `path` when the context ends without an error.

    After an error the old file stays as it was, and the scratch file is deleted. That includes a full disk.

    mode: permissions of the file before the process's umask. is_synced: the new content survives a power cut once the
    context has ended; without it a power cut may leave the old content or the new. Raises OSError.
    """
    with _scratch_file(path, mode) as scratch:
        yield scratch
        if is_synced:
            sync(scratch)  # before the rename: a name that survives must not lead to content that did not
        scratch.replace(path)
    if is_synced:
        sync(path.parent)


def write_bytes(path: Path, content: bytes, *, mode: int = 0o666, is_synced: bool = False) -> None:
    """Replace a file's content; see `replace_file`. Raises OSError."""
    with replace_file(path, mode=mode, is_synced=is_synced) as scratch:
        scratch.write_bytes(content)


def write_text(path: Path, text: str, *, mode: int = 0o666, is_synced: bool = False) -> None:
    """Replace a file's content with UTF-8 text; see `replace_file`. Raises OSError."""
    write_bytes(path, text.encode("utf-8"), mode=mode, is_synced=is_synced)


def create_text(path: Path, text: str) -> None:
    """Write a file that does not exist yet, as `write_text` does with `is_synced`.

    Of several processes that create the same file, one succeeds. Raises OSError, FileExistsError for the others.
    """
    with _scratch_file(path, 0o666) as scratch:
        scratch.write_text(text, encoding="utf-8")
        sync(scratch)
        os.link(scratch, path)  # a rename would replace the other process's file
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _scratch_file(path: Path, mode: int) -> Iterator[Path]:
    """An empty file beside `path`, which is gone when the context ends.

    Its name is drawn, so that two writers of one file never write into one scratch file. The price: the scratch file of
    a process that is killed stays. It is hidden, and ends in .part.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    os.close(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield scratch
    finally:
        with suppress(OSError):  # it was renamed; or it must not hide the error that led here
            scratch.unlink()


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
