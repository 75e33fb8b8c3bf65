"""Fetches a folder of an object store, such as s3://models/qwen3: known files, and no code.

A file arrives in parts, which are appended to a scratch file: a process that was killed goes on where it was. A whole
file is compared with the folder's SHA256SUMS, which `sha256sum` writes, and then gets its name. So a file that has its
name is whole.

Called by `folders`.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from specrl.errors import FetchFailed, FetchInterrupted, SpecrlError, first_line
from specrl.file_systems import open_file_system
from specrl.hub.client import URI, compute_digest, measure_file
from specrl.hub.data_sets import COMPRESSED
from specrl.hub.fetching import NO_DISPLAY, SPARE_BYTES, FetchDisplay, measure_free_bytes, show_regularly
from specrl.hub.models import SMALL_FILES

SUMS = "SHA256SUMS"
WEIGHTS = "*.safetensors"
KNOWN_FILES = (*SMALL_FILES, WEIGHTS, *(f"*{suffix}" for suffix in COMPRESSED))
"""Files that are fetched, by name or pattern. Others, such as scripts and pickles, stay where they are."""
PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4
"""Parts that are asked for at once: one connection to an object store carries about 100 MB/s."""
MOST_SUMS_BYTES = 1 << 20
_SUM = re.compile(r"^([0-9a-f]{64}) [ *](?:\./)?(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class RemoteFile:
    """A file of the folder. name: relative to it. version: changes with the content."""

    name: str
    path: str
    size: int
    version: str


def fetch_objects(
    uri: str, out: Path, scratch: Path, display: FetchDisplay = NO_DISPLAY, *, has_weights: bool = True
) -> dict[str, int]:
    """Fetch the known files of a folder of an object store that `out` lacks. Returns sizes by name.

    scratch: folder for files that have not arrived whole. has_weights: False leaves out safetensors files. Raises
    FetchFailed, before the first byte if the disk is too small.
    """
    store = open_store(uri)
    with _translate_errors(uri):
        found = list_files(*store)
        sums = _read_sums(*store)
    if not found:
        raise FetchFailed(
            f"{URI} must be a folder with a model in safetensors or with data files, got {uri}, which does not exist "
            "or has neither; check the spelling"
        )
    absent = sorted(name for name in sums if _is_known(name) and name not in {it.name for it in found})
    if absent:
        raise FetchFailed(f"{URI} must have every file of its {SUMS}, got none named {absent[0]} in {uri}; upload it")
    unlisted = [it.name for it in found if sums and it.name not in sums]
    if unlisted:
        raise FetchFailed(
            f"{URI} must have a {SUMS} that lists every file, got none of {unlisted[0]} in {uri}; write it again with "
            f"find . -type f ! -name {SUMS} -exec sha256sum {{}} + > {SUMS}"
        )
    wanted = [it for it in found if has_weights or not fnmatchcase(it.name, WEIGHTS)]
    missing = [it for it in wanted if measure_file(out / it.name) != it.size]
    total = sum(it.size for it in missing)
    _check_room(uri, out, total - sum(measure_file(scratch / it.version) or 0 for it in missing))
    done = 0

    def add_bytes(count: int) -> None:
        nonlocal done
        done += count

    with show_regularly(lambda: display.show(f"fetching {uri}", min(done, total), total), display.every_s):
        for it in missing:
            part = scratch / it.version
            with _translate_errors(uri, it.name):
                _append_parts(store[0], it, part, add_bytes)
            _compare(uri, it, part, sums.get(it.name))
            (out / it.name).parent.mkdir(parents=True, exist_ok=True)
            part.replace(out / it.name)
    return {it.name: it.size for it in wanted}


def open_store(uri: str) -> tuple[Any, str]:
    """Return the file system of a folder, and the folder's path on it. Raises FetchFailed."""
    try:
        files, root = open_file_system(uri)
    except (ImportError, ValueError) as error:
        raise FetchFailed(
            f"{URI} must be a URI whose file system is installed, got {uri}: {first_line(error)}; "
            "install the extra `s3`, `gcs` or `azure` (docs/install.md), for pods in the image specrl-control"
        ) from error
    return files, root.rstrip("/")


def list_files(files: Any, root: str) -> list[RemoteFile]:
    """List the known files of a folder, sorted by name. Raises what the file system raises."""
    files.invalidate_cache()
    found = []
    for path, info in sorted(files.find(root, detail=True).items()):
        name = path.removeprefix(f"{root}/")
        parts = name.split("/")
        # A part that begins with a dot could lead out of the folder, or name specrl's own scratch folder.
        if path.startswith(f"{root}/") and _is_known(name) and not any(it == "" or it[0] == "." for it in parts):
            said = [str(info.get(key)) for key in ("ETag", "etag", "mtime", "created", "LastModified")]
            version = hashlib.sha256("\0".join([name, str(info["size"]), *said]).encode()).hexdigest()
            found.append(RemoteFile(name, path, int(info["size"]), version))
    return found


def _is_known(name: str) -> bool:
    last = name.rpartition("/")[2]
    return any(fnmatchcase(last, pattern) for pattern in KNOWN_FILES)


def _read_sums(files: Any, root: str) -> dict[str, str]:
    """Read the SHA-256 of files by name; none if the folder has no SHA256SUMS."""
    path = f"{root}/{SUMS}"
    if not files.exists(path):
        return {}
    text = files.cat_file(path, start=0, end=MOST_SUMS_BYTES).decode("utf-8", "replace")
    return {name: digest for digest, name in _SUM.findall(text)}


def _check_room(uri: str, out: Path, need: int) -> None:
    free = max(measure_free_bytes(out) - SPARE_BYTES, 0)
    if need > free:
        raise FetchFailed(
            f"{URI} must fit on the disk of {out}, got {need / 2**30:.1f} GiB of {uri} for {free / 2**30:.1f} GiB that "
            "are free beside a reserve of 1 GiB; make room, or use a larger volume"
        )


def _append_parts(files: Any, it: RemoteFile, part: Path, on_bytes: Callable[[int], None]) -> None:
    """Append what a scratch file lacks of a file."""
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as file:
        start = file.tell()
        on_bytes(start)
        while start < it.size:
            most = min(it.size, start + PARTS_AT_ONCE * PART_BYTES)
            starts = list(range(start, most, PART_BYTES))
            ends = [min(first + PART_BYTES, most) for first in starts]
            for content in files.cat_ranges([it.path] * len(starts), starts, ends, on_error="raise"):
                file.write(content)
                on_bytes(len(content))
                start += len(content)
            if start != most:
                raise EOFError(f"{start} bytes instead of {most}")


def _compare(uri: str, it: RemoteFile, part: Path, expected: str | None) -> None:
    """Compare a file that has arrived whole with its checksum. A damaged one is deleted."""
    if expected is None:
        return
    found = compute_digest(part, expected)
    if found != expected:
        part.unlink()
        raise FetchFailed(
            f"{URI} must come as its {SUMS} says, got {it.name} of {uri} with the SHA-256 {found} instead of "
            f"{expected}; it is deleted: run the command again, and upload the file again if that repeats"
        )


_WITHOUT_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ClientAuthenticationError", "RefreshError")
"""Errors of the stores' libraries for credentials that are missing or no longer valid, by class name: the libraries are
not imported here."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def _translate_errors(uri: str, file: str = "") -> Iterator[None]:
    """Raise FetchFailed, with what to change, for every error of a file system. file: that is fetched."""
    try:
        yield
    except SpecrlError:
        raise
    except FileNotFoundError as error:
        raise FetchFailed(f"{URI} must be a folder that exists, got {uri}; check the spelling") from error
    except Exception as error:  # the seam to fsspec, whose file systems raise their own libraries' errors
        reason = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, PermissionError) or type(error).__name__ in _WITHOUT_CREDENTIALS:
            raise FetchFailed(
                f"{URI} must be a folder that may be read, got {uri} ({reason}); set credentials, in an RLJob in the "
                "Secret of secretName"
            ) from error
        if isinstance(error, OSError) and error.errno in _FULL:
            raise FetchFailed(
                f"{URI} must fit on the disk, got {error.strerror} while {file} of {uri} was written; make room, or "
                "use a larger volume"
            ) from error
        raise FetchInterrupted(
            f"{URI}: the connection broke while {file or 'the list of files'} of {uri} was fetched ({reason}); run the "
            "command again: what has arrived stays"
        ) from error
