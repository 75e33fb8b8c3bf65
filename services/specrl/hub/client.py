"""Asks the Hugging Face Hub for a repository's commit and files, and downloads files, by huggingface_hub 2.4.

The token (HF_TOKEN, or `hf auth login`), the cache (HF_HOME, HF_HUB_CACHE), the address (HF_ENDPOINT) and offline mode
(HF_HUB_OFFLINE) are huggingface_hub's own. Every request has a deadline. Every error becomes one message that says what
to change. The hub's answer about a repository is kept beside its files in the cache. So a run can be resumed without
network, and a file that was cut short is noticed. A file that arrives is compared with the hash that the hub says.

Called by `fetching`, `data_sets` and `folders`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from specrl.errors import FetchFailed, FetchInterrupted, first_line
from specrl.files import JSON_BYTES, open_regular, read_object, read_text, write_text

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REQUEST_S = 30.0
"""Deadline of a question about a repository, in seconds. The hub answers in less than one."""

COMMIT_LENGTH = 40
SHA256_LENGTH = 64

URI = "uri"
"""Field of a repository that a URI names, as in hf://OWNER/NAME@COMMIT: `volumes[].uri` of an RLJob."""


class RepositoryKind(StrEnum):
    MODEL = "model"
    DATA_SET = "dataset"

    @property
    def noun(self) -> str:
        return "model" if self is RepositoryKind.MODEL else "data set"


@dataclass(frozen=True)
class Repository:
    """A repository that somebody named.

    revision: branch, tag or commit; None: the main branch. field: names it in messages, as in `model.path`.
    """

    kind: RepositoryKind
    name: str
    revision: str | None
    field: str

    @property
    def revision_field(self) -> str:
        """The field of the revision, beside that of the name."""
        if self.field == URI:
            return f"the revision of {URI}"
        return "--revision" if self.field == "NAME" else f"{self.field.rpartition('.')[0]}.revision"

    @property
    def url(self) -> str:
        """The repository's page."""
        prefix = "datasets/" if self.kind is RepositoryKind.DATA_SET else ""
        return f"{hub_address()}/{prefix}{self.name}"


@dataclass(frozen=True)
class Listing:
    """The files of one commit of a repository.

    sizes: in bytes, by name. cache: folder of Hugging Face's cache. notice: why it is the cache's and not the hub's
    answer; empty if the hub has answered. digests: by name, the SHA-256 of a large file and git's SHA-1 of a small one,
    as far as they are known. out: folder that files are moved to when they have arrived and are compared; None: they
    stay in the cache.
    """

    repository: Repository
    commit: str
    sizes: dict[str, int]
    cache: Path
    notice: str = ""
    digests: dict[str, str] = field(default_factory=dict)
    out: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder in which the fetched files of the commit appear."""
        return self.snapshot if self.out is None else self.out

    @property
    def snapshot(self) -> Path:
        """The folder of the commit in the cache."""
        return repository_folder(self.repository, self.cache) / "snapshots" / self.commit

    def find_missing(self, files: list[str]) -> list[str]:
        """Return those of the files that are not in the cache, or not whole."""
        return [file for file in files if not self.has_file(file)]

    def has_file(self, file: str) -> bool:
        """Whether the folder has the file, with all its bytes."""
        return measure_file(self.folder / file) == self.sizes.get(file)


def measure_file(path: Path) -> int | None:
    """Return the size of a file in bytes; None if there is no regular file, or a link that leads to none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def repository_folder(repository: Repository, cache_root: Path) -> Path:
    """Return a repository's folder in Hugging Face's cache (huggingface_hub's guide, "Understand caching")."""
    return cache_root / f"{repository.kind}s--{repository.name.replace('/', '--')}"


def hub_address() -> str:
    """Return the hub's address: HF_ENDPOINT, or https://huggingface.co."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def cache_root() -> Path:
    """Return the folder of Hugging Face's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


@cache
def _open_api() -> HfApi:
    # Imported here: it takes a second, and most commands need no hub.
    from huggingface_hub import HfApi

    # Its warnings would be printed between the lines of the progress.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return HfApi(library_name="specrl")


def list_repository(repository: Repository, cache: Path | None = None) -> Listing:
    """Ask the hub for the commit and the files of a repository.

    cache: folder of the cache; None: huggingface_hub's. If the hub does not answer, or in offline mode, the cache's
    newest answer counts, and the listing has a notice. A commit that is in the cache needs no request.
    Raises FetchFailed.
    """
    root = cache_root() if cache is None else cache
    if is_commit(repository.revision):
        stored = _read_listing(repository, root)
        if stored is not None:
            return stored
    try:
        with _translate_errors(repository, root):
            info: Any = _open_api().repo_info(
                repository.name,
                repo_type=repository.kind.value,
                revision=repository.revision,
                files_metadata=True,
                timeout=REQUEST_S,
            )
    except FetchFailed as error:
        if not error.silence:
            raise
        stored = _read_listing(repository, root) or _list_snapshot(repository, root)
        if stored is None:
            raise
        return replace(stored, notice=error.silence)
    if not is_commit(info.sha):  # it becomes the name of a folder
        raise FetchFailed(f"{_describe_wish(repository)}, whose commit is {info.sha!r}; check HF_ENDPOINT")
    sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or ()}
    digests = {file.rfilename: file.lfs.sha256 if file.lfs else str(file.blob_id or "") for file in info.siblings or ()}
    listing = Listing(repository, str(info.sha), sizes, root, digests=digests)
    with suppress(OSError):  # a cache that cannot be written to is noticed by the first download
        _write_listing(listing)
    return listing


def fetch_file(listing: Listing, file: str, on_bytes: Any) -> None:
    """Download a file into the cache. on_bytes: is called with the number of bytes that have arrived since.

    A file of another size than the hub says is downloaded again, and one of another content is deleted. Raises
    FetchFailed.
    """
    from huggingface_hub import hf_hub_download

    repository = listing.repository
    arrived = listing.snapshot / file
    if ".." in arrived.parts:
        raise FetchFailed(f"{repository.field} must have files in its own folder, got {file} in {repository.name}")
    with _translate_errors(repository, listing.cache, file):
        hf_hub_download(
            repository.name,
            file,
            repo_type=repository.kind.value,
            revision=listing.commit,
            cache_dir=listing.cache,
            library_name="specrl",
            force_download=measure_file(arrived) not in {None, listing.sizes.get(file)},
            tqdm_class=_make_meter(on_bytes),
        )
    if measure_file(arrived) != listing.sizes[file]:
        raise FetchFailed(
            f"{repository.field} must come whole, got {file} of another size than {listing.sizes[file]} bytes; "
            "run the command again"
        )
    blob = arrived.resolve()  # a link, except where the file system has none
    expected = listing.digests.get(file, "")
    found = compute_digest(blob, expected) if expected else ""
    if found != expected:
        for path in (arrived, blob):
            path.unlink(missing_ok=True)
        raise FetchFailed(
            f"{repository.field} must come as it is on {hub_address()}, got {file} of {repository.name} with the "
            f"checksum {found} instead of {expected}; it is deleted: run the command again, and look for a faulty "
            "proxy or disk if that repeats"
        )
    if listing.out is not None:
        with _translate_errors(repository, listing.out, file):
            (listing.out / file).parent.mkdir(parents=True, exist_ok=True)
            blob.replace(listing.out / file)
            arrived.unlink(missing_ok=True)


def compute_digest(path: Path, like: str) -> str:
    """Compute the digest of a file: its SHA-256, or the hash that git gives it. like: a digest of the wanted kind."""
    is_git = len(like) != SHA256_LENGTH
    head = b"blob %d\0" % path.stat().st_size
    digest = hashlib.sha1(head, usedforsecurity=False) if is_git else hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _make_meter(on_bytes: Any) -> Any:
    """Make a class that huggingface_hub uses as its progress bar: it counts bytes, and draws nothing."""

    class ByteMeter:
        n = 0
        total = 0

        def __init__(self, *_: Any, **__: Any) -> None:
            return

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            return

        def update(self, count: float | None = 1) -> None:
            on_bytes(int(count or 0))

        # For files in Xet storage: it reports what arrives and what is written. The latter counts.
        def update_transfer(self, count: float | None = 1) -> None:
            return

        def set_postfix_str(self, *_: Any, **__: Any) -> None:
            return

        set_transfer_postfix_str = set_description = set_description_str = refresh = close = set_postfix_str

    return ByteMeter


def is_commit(revision: object) -> bool:
    """Whether a revision names a commit."""
    is_long = isinstance(revision, str) and len(revision) == COMMIT_LENGTH
    return is_long and all(char in "0123456789abcdef" for char in str(revision))


def _listing_file(repository: Repository, root: Path, revision: str | None) -> Path:
    # Beside refs/ and snapshots/: whoever deletes the repository from the cache deletes the answer, too.
    return repository_folder(repository, root) / "specrl" / f"{quote(revision or 'main', safe='')}.json"


def _write_listing(listing: Listing) -> None:
    repository = listing.repository
    text = json.dumps({"commit": listing.commit, "sizes": listing.sizes, "digests": listing.digests})
    for revision in {repository.revision, listing.commit}:
        file = _listing_file(repository, listing.cache, revision)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)


def _read_listing(repository: Repository, root: Path) -> Listing | None:
    """Read the newest answer about a repository that the cache has; None if it has none."""
    try:
        stored = read_object(_listing_file(repository, root, repository.revision), JSON_BYTES)
        sizes = {str(name): int(size) for name, size in stored["sizes"].items()}
        digests = {str(name): str(digest) for name, digest in stored.get("digests", {}).items()}
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError):
        return None
    commit = str(stored.get("commit"))
    return Listing(repository, commit, sizes, root, digests=digests) if is_commit(commit) else None


def _list_snapshot(repository: Repository, root: Path) -> Listing | None:
    """List what another program, such as transformers, has fetched of a repository; None if there is nothing.

    Only its files are known, not whether they are all. So this is for a hub that cannot be asked.
    """
    folder = repository_folder(repository, root)
    commit = repository.revision if is_commit(repository.revision) else None
    with suppress(OSError, ValueError):
        commit = commit or read_text(folder / "refs" / (repository.revision or "main")).strip()
    snapshot = folder / "snapshots" / (commit or "none")
    if commit is None or not snapshot.is_dir():
        return None
    files = [path for path in snapshot.rglob("*") if path.is_file()]
    sizes = {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in files}
    return Listing(repository, commit, sizes, root)


@contextmanager
def _translate_errors(repository: Repository, root: Path, file: str = "") -> Iterator[None]:
    """Raise FetchFailed, with what to change, for every error of huggingface_hub."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise _describe_error(repository, root, error) from error
    except (errors.HFValidationError, errors.FileMetadataError) as error:
        raise FetchFailed(f"{_describe_wish(repository)}: {first_line(error)}; correct it") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        raise _describe_silence(repository, error, file) from error
    except OSError as error:
        if error.errno is not None:
            elsewhere = "use a larger volume" if repository.field == URI else "set HF_HOME to another folder"
            raise FetchFailed(
                f"{root} must be a folder with room that can be written to, got {error.strerror}; "
                f"make room, or {elsewhere}"
            ) from error
        raise FetchInterrupted(  # huggingface_hub raises a bare OSError for a body of another length than announced
            f"{repository.field}: {file} of {repository.name} arrived cut short ({first_line(error)}); "
            "run the command again: files that are whole stay"
        ) from error
    except ValueError as error:  # an answer that is not JSON, a file that is too large without hf_xet
        raise FetchFailed(
            f"{repository.field}: {hub_address()} gave an answer that is none of a hub for {repository.name} "
            f"({first_line(error)}); check HF_ENDPOINT, or a proxy in between"
        ) from error


def _describe_wish(repository: Repository) -> str:
    return f"{repository.field} must name a {repository.kind.noun} on {hub_address()}, got {repository.name}"


def _describe_error(repository: Repository, root: Path, error: Exception) -> FetchFailed:
    """Return what to raise for an error of huggingface_hub."""
    from huggingface_hub import errors

    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    if isinstance(cause, errors.HfHubHTTPError | errors.OfflineModeIsEnabled):
        return _describe_error(repository, root, cause)
    if isinstance(error, errors.OfflineModeIsEnabled):
        offline = FetchFailed(
            f"{repository.field} must be in the cache {root} in offline mode, got {repository.name}, which is not; "
            f"unset HF_HUB_OFFLINE, or run {_format_fetch(repository)} where there is a network"
        )
        offline.silence = "HF_HUB_OFFLINE is set"
        return offline
    if not isinstance(error, errors.HfHubHTTPError):
        return _describe_silence(repository, cause or error)
    wish = _describe_wish(repository)
    status = error.response.status_code
    has_token = "authorization" in error.response.request.headers
    set_token = "set HF_TOKEN" + (", in an RLJob in the Secret of secretName" if repository.field == URI else "")
    if isinstance(error, errors.GatedRepoError):
        then = "wait for the owner's consent, or use another account's token" if has_token else set_token
        return FetchFailed(
            f"{wish}, which is gated ({status}): its owner lets only accounts read it that agreed to the terms; "
            f"agree at {repository.url}, then {then}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return FetchFailed(
            f"{repository.revision_field} must be a branch, tag or commit of {repository.name}, got "
            f"{repository.revision}; {repository.url} lists them"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        may_be_folder = repository.kind is RepositoryKind.MODEL and repository.field != URI
        folder = f", or write ./{repository.name} for a folder" if may_be_folder else ""
        return FetchFailed(
            f"{wish}, which does not exist there, or is private ({status}); check the spelling, {set_token} for a "
            f"private one{folder}"
        )
    if status in {401, 403}:
        return FetchFailed(
            f"{wish}, which the hub refuses to this {'token' if has_token else 'anonymous request'} ({status}); "
            "set HF_TOKEN to a valid token that may read it"
        )
    if status == 429:
        return _make_silent(
            f"{wish}, but the hub refuses more requests for now (429); wait some minutes"
            + ("" if has_token else ", or set HF_TOKEN, which raises the limit"),
            "the hub refuses more requests for now (429)",
        )
    if status >= 500:
        return _make_silent(
            f"{wish}, but the hub is out of order ({status}); try again later", f"the hub is out of order ({status})"
        )
    return FetchFailed(f"{wish}, but the hub answers {status}: {first_line(error)}; see {repository.url}")


def _describe_silence(repository: Repository, error: BaseException, file: str = "") -> FetchFailed:
    """Return what to raise if the hub cannot be reached, or if the connection broke while `file` was downloaded."""
    reason = f"{type(error).__name__}: {first_line(error)}"
    if file:
        return FetchInterrupted(
            f"{repository.field}: the connection broke while {file} of {repository.name} was fetched ({reason}); run "
            "the command again: files that are whole stay"
        )
    return _make_silent(
        f"{_describe_wish(repository)}, but the hub does not answer ({reason}); check the network, its proxy and "
        f"HF_ENDPOINT, or run {_format_fetch(repository)} elsewhere and name the folder that it prints",
        f"the hub does not answer ({reason})",
    )


def _make_silent(message: str, silence: str) -> FetchInterrupted:
    error = FetchInterrupted(message)
    error.silence = silence
    return error


def _format_fetch(repository: Repository) -> str:
    revision = "" if repository.revision is None else f" --revision {repository.revision}"
    flag = " --data-set" if repository.kind is RepositoryKind.DATA_SET else ""
    return f"`specrl fetch {repository.name}{revision}{flag}`"
