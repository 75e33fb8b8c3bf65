"""Fetches what a URI names into a folder: a model or a data set on the hub, or a folder of an object store.

    hf://OWNER/NAME@REVISION, hf://datasets/OWNER/NAME, s3://BUCKET/FOLDER and what else fsspec opens

It is what the init containers of an RLJob's pods run (`volumes[].uri`). So one process fetches into a folder at a
time, and the others wait for its lock, which ends with the process. A file has its name in the folder only once it is
whole and has been compared with its checksum. `FOLDER/.fetch` has what is under way, and a record of the source: the
commit is resolved once, and a folder that is complete is not compared with its source again.

Called by `specrl fetch`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specrl.errors import FetchFailed
from specrl.files import JSON_BYTES, read_object, write_text
from specrl.hub.client import URI, Repository, RepositoryKind, is_commit, list_repository, measure_file
from specrl.hub.data_sets import DataSetWish, fetch_data_set
from specrl.hub.fetching import NO_DISPLAY, FetchDisplay
from specrl.hub.models import ModelWish, fetch_model
from specrl.hub.object_stores import fetch_objects
from specrl.spec.base import HUB_URI_PATTERN

SCRATCH = ".fetch"
RECORD = "source.json"
HUB_SCHEME = "hf://"


@dataclass(frozen=True)
class FolderWish:
    """A wish for the content of a folder.

    uri: of the source. out: the folder. is_policy: a model on the hub must be of a family that specrl trains.
    has_weights: False leaves out safetensors files, for a process that reads the tokenizer alone.
    """

    uri: str
    out: Path
    is_policy: bool = True
    has_weights: bool = True


@dataclass(frozen=True)
class FetchedFolder:
    """The content of a folder. commit: of a repository on the hub; empty for an object store. sizes: in bytes, by
    name. has_weights: whether safetensors files were asked for."""

    uri: str
    commit: str
    sizes: dict[str, int]
    has_weights: bool


def fetch_folder(
    wish: FolderWish, display: FetchDisplay = NO_DISPLAY, on_wait: Callable[[], None] = lambda: None
) -> FetchedFolder:
    """Fetch what the folder lacks. on_wait: is called if another process fetches into the folder, before the wait.

    Raises FetchFailed, and CheckpointInvalid for a policy that specrl cannot train.
    """
    scratch = wish.out / SCRATCH
    with _lock_folder(scratch, on_wait):
        known = _read_record(scratch / RECORD)
        if known is not None and known.uri != wish.uri:
            raise FetchFailed(
                f"{wish.out} must be empty, or have files of {wish.uri}, got those of {known.uri}; name another folder"
            )
        if known is not None and _is_complete(known, wish):
            return known
        found = (_fetch_repository if wish.uri.startswith(HUB_SCHEME) else _fetch_store)(wish, known, display)
        _write_record(scratch / RECORD, found)
        return found


def _fetch_repository(wish: FolderWish, known: FetchedFolder | None, display: FetchDisplay) -> FetchedFolder:
    matched = re.fullmatch(HUB_URI_PATTERN, wish.uri)
    if matched is None:
        raise FetchFailed(f"{URI} must be as in hf://OWNER/NAME@REVISION or hf://datasets/OWNER/NAME, got {wish.uri}")
    kind = RepositoryKind.DATA_SET if matched[1] else RepositoryKind.MODEL
    asked = matched[3].removeprefix("@") if matched[3] else None
    cache = wish.out / SCRATCH
    for left in cache.rglob("*.incomplete"):  # of a process that was killed; huggingface_hub begins such a file anew
        left.unlink()
    if known is not None and is_commit(known.commit):
        commit = known.commit
    else:
        commit = list_repository(Repository(kind, matched[2], asked, URI), cache).commit
    # Before the first file: a process that goes on takes the same commit.
    _write_record(cache / RECORD, FetchedFolder(wish.uri, commit, {}, has_weights=False))
    repository = Repository(kind, matched[2], commit, URI)
    if kind is RepositoryKind.DATA_SET:
        listing, _ = fetch_data_set(DataSetWish(repository, None, None), display, cache, wish.out)
    else:
        wanted = ModelWish(repository, wish.is_policy, has_weights=wish.has_weights)
        listing = fetch_model(wanted, display, cache, wish.out).listing
    sizes = {name: size for name, size in listing.sizes.items() if listing.has_file(name)}
    return FetchedFolder(wish.uri, commit, sizes, wish.has_weights)


def _fetch_store(wish: FolderWish, _known: FetchedFolder | None, display: FetchDisplay) -> FetchedFolder:
    parts = wish.out / SCRATCH / "parts"
    sizes = fetch_objects(wish.uri, wish.out, parts, display, has_weights=wish.has_weights)
    return FetchedFolder(wish.uri, "", sizes, wish.has_weights)


def _is_complete(known: FetchedFolder, wish: FolderWish) -> bool:
    """Whether nothing has to be fetched, so that no source has to be asked."""
    if not known.sizes or (wish.has_weights and not known.has_weights):
        return False
    return all(measure_file(wish.out / name) == size for name, size in known.sizes.items())


@contextmanager
def _lock_folder(scratch: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the folder's lock. It is the file system's, so it ends with the process, also on another machine."""
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        file = (scratch / "lock").open("a")
    except OSError as error:
        raise FetchFailed(
            f"{scratch.parent} must be a folder that uid {os.getuid()} and gid {os.getgid()} may write to, got "
            f"{error.strerror}; change its owner or mode (docs/deploy.md, Claims)"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)  # woken by the other's end; the other's own deadlines bound the wait
        except OSError as error:
            raise FetchFailed(
                f"{scratch.parent} must be on a file system with locks, got {error.strerror}; use another claim, or "
                "none, so that every pod fetches for itself"
            ) from error
        yield


def _read_record(path: Path) -> FetchedFolder | None:
    """Read what the folder's last process wrote; None if there is nothing that can be read."""
    try:
        found = read_object(path, JSON_BYTES)
        sizes = {str(name): int(size) for name, size in found["sizes"].items()}
        return FetchedFolder(str(found["uri"]), str(found["commit"]), sizes, found["hasWeights"] is True)
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError):
        return None


def _write_record(path: Path, folder: FetchedFolder) -> None:
    record = {"uri": folder.uri, "commit": folder.commit, "sizes": folder.sizes, "hasWeights": folder.has_weights}
    try:
        write_text(path, json.dumps(record))
    except OSError as error:
        raise FetchFailed(
            f"{path.parent} must be a folder with room that can be written to, got {error.strerror}; make room, or use "
            "a larger volume"
        ) from error
