"""Reads and replaces whole files, writes whole folders, and follows files of lines that grow.

Reading is bounded: another program, version or person may have written the file. Only regular files are read: a FIFO
would wait for its writer, and a device has no end. Callers catch OSError and ValueError, and say which file it is and
what to do. Libraries that open files by name are called after `check_regular`.

Writing is atomic: readers find the old content or the new. Every file that is replaced goes through `replace_file`. All
packages use this module, so it imports none of them.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

LINES_BYTES = 1 << 30
"""Limit of a run's own files of lines: a million steps of 1 KB."""

SMALL_BYTES = 1 << 20
"""Limit of files that people write or that hold a few numbers: run files, endpoints, a checkpoint's state, costs."""

JSON_BYTES = 64 << 20
"""Limit of a model's JSON files. The largest in use are tokenizers of about 250,000 tokens, 35 MB. Python needs up to
25 times as many bytes for what it parses: for a list of empty lists, for example."""

PRIVATE_UMASK = 0o077
"""Permissions that files and folders of a local run do not have: those of everybody but their owner."""

CHUNK_BYTES = 1 << 20
"""Bytes that `LineFollower.read_lines` reads at once, so that a long run's file is never in memory as a whole."""


def cache_folder() -> Path:
    """Return the folder of files that can be made again: $SPECRL_CACHE_DIR, or `specrl` in the user's cache folder."""
    named = os.environ.get("SPECRL_CACHE_DIR")
    if named:
        return Path(named)
    try:
        home = Path.home()
    except RuntimeError:  # a user without an entry in /etc/passwd, and no $HOME
        home = Path("/nonexistent")
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "specrl"


@contextmanager
def private_umask() -> Iterator[None]:
    """Have this process, and those that it starts, make files and folders that only their owner can use.

    Whatever the user's umask is. It is one per process, so other threads are affected, too.
    """
    before = os.umask(PRIVATE_UMASK)
    try:
        yield
    finally:
        os.umask(before)


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner can use, or make an existing one so. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def take_from_others(folder: Path) -> int:
    """Take the permissions of everybody but the owner from a folder and all below it. Returns how many had some.

    Links are left alone. Raises OSError for what belongs to another user.
    """
    changed = 0
    for parent, folders, files in folder.walk():
        for path in (parent, *(parent / name for name in folders), *(parent / name for name in files)):
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & PRIVATE_UMASK:
                path.chmod(stat.S_IMODE(mode) & ~PRIVATE_UMASK)
                changed += 1
    return changed


_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_regular(path: Path, most_bytes: int | None = None) -> None:
    """Raise OSError unless a path leads to a regular file, of at most `most_bytes`. Opens nothing."""
    try:
        found = path.stat()
    except ValueError as error:  # a NUL or a lone surrogate
        raise OSError(errno.EINVAL, f"must be a name of a file, got {error}", repr(path)) from error
    _check_kind(found, path)
    if most_bytes is not None and found.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"must be at most {most_bytes} bytes, got {found.st_size}", str(path))


def _check_kind(found: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    for is_kind, name in _KINDS:
        if is_kind(found.st_mode):
            raise OSError(errno.EINVAL, f"must be a regular file, got {name}", str(path))


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. It never waits. Raises OSError for anything else."""
    check_regular(path)  # before it is opened, which alone rewinds a tape
    # Without waiting: the path may have become a FIFO since, and some files of the kernel wait for events.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_kind(os.fstat(handle), path)
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def resolve_path(path: Path) -> Path:
    """Make a path absolute, with its links followed. Whoever opens a link that leads to itself gets an OSError."""
    return Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for such a link


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """Read a file of at most `most_bytes`.

    Raises OSError, with EFBIG for a larger one, which is not read to its end.
    """
    with open_regular(path) as file:
        # Not st_size, which is 0 for files of the kernel. None: what Python returns if a read would have to wait.
        content = cast("bytes | None", file.read(most_bytes + 1))
    if content is None:
        raise OSError(errno.EAGAIN, "must be a file with content, got one that waits for events", str(path))
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"must be at most {most_bytes} bytes, got more", str(path))
    return content


def read_text(path: Path, most_bytes: int = SMALL_BYTES) -> str:
    """Read UTF-8 text. Raises OSError, and ValueError for other bytes."""
    return read_bytes(path, most_bytes).decode("utf-8")


@contextmanager
def replace_file(path: Path, *, mode: int = 0o666, is_synced: bool = False) -> Iterator[Path]:
    """Yield a scratch file in the same folder; it replaces `path` when the context ends without an error.

    After an error, such as a full disk, the old file stays unchanged and the scratch file is deleted.

    mode: permissions before the process's umask. is_synced: the new content survives a power cut once the context has
    ended. Otherwise a power cut may leave the old content or the new. Raises OSError.
    """
    with _scratch_file(path, mode) as scratch:
        yield scratch
        if is_synced:
            sync_to_disk(scratch)  # before the rename: a name that survives must not lead to content that did not
        scratch.replace(path)
    if is_synced:
        sync_to_disk(path.parent)  # the new name is an entry of the folder


def write_bytes(path: Path, content: bytes, *, mode: int = 0o666, is_synced: bool = False) -> None:
    """Replace a file's content; see `replace_file`. Raises OSError."""
    with replace_file(path, mode=mode, is_synced=is_synced) as scratch:
        scratch.write_bytes(content)


def write_text(path: Path, text: str, *, mode: int = 0o666, is_synced: bool = False) -> None:
    """Replace a file's content with UTF-8 text; see `replace_file`. Raises OSError."""
    write_bytes(path, text.encode("utf-8"), mode=mode, is_synced=is_synced)


@contextmanager
def write_folder(target: Path) -> Iterator[Path]:
    """Yield an empty scratch folder beside `target`, which becomes `target` when the context ends without an error.

    After an error the scratch folder is deleted. That of a killed process stays until the next call. Raises OSError,
    also if `target` exists by then and is not an empty folder.
    """
    scratch = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir(parents=True)
    try:
        yield scratch
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # does nothing after the rename


def create_text(path: Path, text: str) -> None:
    """Write a new file atomically and durably.

    If several processes create the same file, one succeeds. Raises OSError, which is FileExistsError for the others.
    """
    with _scratch_file(path, 0o666) as scratch:
        scratch.write_text(text, encoding="utf-8")
        sync_to_disk(scratch)
        os.link(scratch, path)  # a rename would replace the other process's file
    sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _scratch_file(path: Path, mode: int) -> Iterator[Path]:
    """Yield an empty file beside `path`, and delete it when the context ends.

    Its name is random, so that two writers of one file never share a scratch file. The scratch file of a killed process
    therefore stays; it is hidden, and ends in .part.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    # Not tempfile, which makes files that only their owner can read.
    os.close(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield scratch
    finally:
        with suppress(OSError):  # renamed already, or an error is being raised that this must not hide
            scratch.unlink()


def read_object(path: Path, most_bytes: int = JSON_BYTES) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raises OSError or ValueError."""
    return parse_object(read_text(path, most_bytes))


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError, also for too deep a nesting, where Python raises RecursionError."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("must be nested less deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object, got {type(found).__name__}")
    return found


class LineFollower:
    """Reads the lines of a file while another process appends to it.

    A file that was truncated is read again from its start. A missing file counts as empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read_lines(self) -> list[bytes]:
        """Return complete lines since the last call, of about CHUNK_BYTES: call again until it returns none.

        A line without its line break is still being written, and is returned later. Raises OSError.
        """
        try:
            with open_regular(self._path) as file:
                if file.seek(0, os.SEEK_END) < self._at:  # truncated
                    self._at = 0
                file.seek(self._at)
                read = file.read(CHUNK_BYTES)
                # A line longer than a chunk. What is longer than any line is passed over.
                while b"\n" not in read and len(read) < JSON_BYTES and (more := file.read(CHUNK_BYTES)):
                    read += more
        except FileNotFoundError:
            return []
        whole = read[: read.rfind(b"\n") + 1]
        if not whole and len(read) >= JSON_BYTES:
            self._at += len(read)
        self._at += len(whole)
        return whole.splitlines()
