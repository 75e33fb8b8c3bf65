"""Converts GGUF files to model folders in specrl's own cache: `gguf/SHA256-VERSION` of `files.cache_folder()`.

A folder appears by one rename, so it is complete. Two processes that need the same one wait for each other: one
converts. Called by `run_sources`, `models` and `specrl fetch`.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specrl.errors import CheckpointInvalid, FetchFailed, RunInvalid
from specrl.files import cache_folder, open_regular, write_folder
from specrl.hub.fetching import NO_DISPLAY, SPARE_BYTES, FetchDisplay, measure_free_bytes, show_regularly

if TYPE_CHECKING:
    from specrl.models.gguf_files.conversion import GgufModel

_WHOLE = {"F32", "F16", "BF16"}  # types that are not quantised

CONVERSION = 1
"""Version of the conversion, a part of the folder's name. Raise it if the same file becomes another folder."""

CheckFolder = Callable[[Path, int], None]
"""Checks a folder with config and tokenizer, and the bytes of the weights, before these are written. May raise."""


@dataclass(frozen=True)
class ConvertedModel:
    """A folder that was made of a GGUF file. sha256: of the file. kinds: types of its matrices, as in Q4_1, Q8_0."""

    file: Path
    sha256: str
    folder: Path
    kinds: str


def describe_precision(kinds: str) -> str:
    """Describe what a file's weights have lost. kinds: types of its matrices."""
    if set(kinds.split(", ")) <= _WHOLE:
        return f"its weights are those of the file ({kinds})"
    return f"its weights are quantised ({kinds}), so they are less precise than the original model's"


@dataclass(frozen=True)
class GgufWish:
    """A GGUF file to convert.

    field: names the file in messages. check: is called with config and tokenizer. target: the folder to make; None: its
    place in the cache. sha256: of the content that a run began with; None: any.
    """

    file: Path
    field: str
    check: CheckFolder | None = None
    target: Path | None = None
    sha256: str | None = None


def convert_gguf(wish: GgufWish, display: FetchDisplay = NO_DISPLAY) -> ConvertedModel:
    """Convert a GGUF file, unless the folder is there already.

    Raises CheckpointInvalid for a file that cannot be converted, RunInvalid for another content, FetchFailed without
    room for the folder, and what `check` raises.
    """
    from specrl.models.gguf_files.conversion import read_gguf

    file = wish.file
    field = wish.field
    model = read_gguf(file, field)
    before = file.stat()
    sha256 = _hash_file(file, display)
    if wish.sha256 not in {None, sha256}:
        raise RunInvalid(
            f"{field} must be the file that the run began with, got {file} of another content; restore it, or start a "
            "new run"
        )
    folder = wish.target or cache_folder() / "gguf" / f"{sha256}-{CONVERSION}"
    try:
        with _lock_folder(folder, model, display) if wish.target is None else nullcontext():
            if not folder.exists():
                _check_room(model, folder, field)
                with write_folder(folder) as scratch:
                    _write_model(model, scratch, display, wish.check)
                    after = file.stat()
                    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                        raise CheckpointInvalid(f"{field} must not change while it is converted, got {file}; try again")
    except OSError as error:
        if isinstance(error, FetchFailed):
            raise
        raise FetchFailed(
            f"{folder.parent} must be a folder with room that can be written to, got {error.strerror or error}; "
            "make room, or set SPECRL_CACHE_DIR to another folder"
        ) from error
    return ConvertedModel(file, sha256, folder, model.kinds)


def _write_model(model: GgufModel, folder: Path, display: FetchDisplay, check: CheckFolder | None) -> None:
    from specrl.models.gguf_files.conversion import write_small_files, write_weights

    write_small_files(model, folder)
    if check is not None:
        check(folder, model.num_bytes)
    total = sum(it.source.num_bytes for it in model.tensors)
    done = 0

    def add_bytes(count: int) -> None:
        nonlocal done
        done += count

    what = f"converting {model.path.name}"
    with show_regularly(lambda: display.show(what, done, total), display.every_s):
        write_weights(model, folder, add_bytes)


def _hash_file(file: Path, display: FetchDisplay) -> str:
    """Compute the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    total = file.stat().st_size
    done = 0
    with (
        open_regular(file) as content,
        show_regularly(lambda: display.show(f"reading {file.name}", done, total), display.every_s),
    ):
        while chunk := content.read(1 << 22):
            digest.update(chunk)
            done += len(chunk)
    return digest.hexdigest()


@contextmanager
def _lock_folder(folder: Path, model: GgufModel, display: FetchDisplay) -> Iterator[None]:
    """Hold the lock of a folder that is being made of `model`. Raises OSError.

    If another process makes it, this one shows that it waits. The other's conversion bounds the wait: the kernel
    releases the lock of a process that was killed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"waiting for another process, which converts {model.path.name}"
            with show_regularly(lambda: display.show(what, 0, model.num_bytes), display.every_s):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_room(model: GgufModel, folder: Path, field: str) -> None:
    free = max(0, measure_free_bytes(folder) - SPARE_BYTES)
    if model.num_bytes > free:
        raise FetchFailed(
            f"{field} must fit on the disk of {folder.parent}, got {model.num_bytes / 2**30:.1f} GiB of weights for "
            f"{free / 2**30:.1f} GiB that are free beside a reserve of 1 GiB; make room, or set SPECRL_CACHE_DIR to a "
            "folder on another disk"
        )
