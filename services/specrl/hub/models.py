"""Fetches a model: config, tokenizer, chat template and safetensors files. It fetches no code.

The small files come first. A model that cannot be trained is refused by its config, and one without weights in
safetensors by its list of files, before the first of many gigabytes. Called by `run_sources` and `specrl fetch`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from specrl.errors import FetchFailed
from specrl.files import read_object
from specrl.hub.client import Listing, Repository, list_repository
from specrl.hub.fetching import NO_DISPLAY, FetchDisplay, check_room, fetch_files
from specrl.hub.gguf_models import GgufWish, convert_gguf
from specrl.models.policy_config import parse_policy_config
from specrl.spec.base import is_gguf
from specrl.tensor_files import INDEX, NEEDED_FILES

SMALL_FILES = (*NEEDED_FILES, INDEX)
"""Files at the top of a repository that are fetched beside the weights, by name or pattern."""

WEIGHTS = "model.safetensors"

_SHARD = re.compile(r"(?P<stem>[A-Za-z0-9][\w.-]*)-[0-9]{5}-of-(?P<count>[0-9]{5})\.safetensors", re.ASCII)

_SEE = "fetch it again, or use another revision"


@dataclass(frozen=True)
class ModelWish:
    """A model on the hub. is_policy: it must be of a family that specrl trains.

    check: is called with the folder and the bytes of the weights before these are fetched, and may raise a SpecrlError.
    has_weights: False fetches all but the weights.
    """

    repository: Repository
    is_policy: bool = True
    check: Callable[[Path, int], None] | None = None
    has_weights: bool = True


@dataclass(frozen=True)
class FetchedModel:
    """A model that has been fetched. folder: of its files. gguf: types of the matrices of the GGUF file that it was
    converted from; None: nothing was converted."""

    listing: Listing
    folder: Path
    gguf: str | None = None


def fetch_model(
    wish: ModelWish, display: FetchDisplay = NO_DISPLAY, cache: Path | None = None, out: Path | None = None
) -> FetchedModel:
    """Fetch a model. out: folder to fetch it into; None: the cache.

    The one GGUF file of a repository without safetensors is fetched and converted, but not into `out`. Raises
    FetchFailed, and CheckpointInvalid for a policy that specrl cannot train.
    """
    repository = wish.repository
    listing = replace(list_repository(repository, cache), out=out)
    if out is None and INDEX not in listing.sizes and not _list_unindexed(listing):
        files = [file for file in listing.sizes if is_gguf(file) and "/" not in file]
        if len(files) == 1:
            return _fetch_gguf(wish, listing, files[0], display)
    small = [file for file in listing.sizes if any(fnmatchcase(file, known) for known in SMALL_FILES)]
    if "config.json" not in small:
        raise FetchFailed(
            f"{repository.field} must be a model in the format of Hugging Face, got {repository.name} without a "
            f"config.json{_describe_place(listing)}; {_suggest_format(listing)}"
        )
    fetch_files(listing, small, display)
    try:
        config = read_object(listing.folder / "config.json")
    except (OSError, ValueError) as error:
        raise FetchFailed(f"{repository.field} must have a readable config.json, got {error}; {_SEE}") from error
    if wish.is_policy:
        parse_policy_config(config, listing.folder)
    weights = _list_weights(listing) if wish.has_weights else []
    check_room(listing, weights)
    if wish.check is not None:
        wish.check(listing.folder, sum(listing.sizes[file] for file in weights))
    fetch_files(listing, weights, display)
    return FetchedModel(listing, listing.folder)


def _fetch_gguf(wish: ModelWish, listing: Listing, file: str, display: FetchDisplay) -> FetchedModel:
    fetch_files(listing, [file], display)
    converted = convert_gguf(GgufWish(listing.folder / file, wish.repository.field, wish.check), display)
    return FetchedModel(listing, converted.folder, converted.kinds)


def _suggest_format(listing: Listing) -> str:
    if any(is_gguf(file) for file in listing.sizes):
        return f"download one of its GGUF files from {listing.repository.url}, and name that file"
    return f"see {listing.repository.url}"


def _list_weights(listing: Listing) -> list[str]:
    """Return the files of the weights: those of the index, if there is one.

    Other safetensors files are left out: some repositories hold a second copy in one file, or an adapter.
    """
    repository = listing.repository
    files = _list_unindexed(listing)
    if INDEX in listing.sizes:
        try:
            named = read_object(listing.folder / INDEX)["weight_map"].values()
            files = sorted({str(file) for file in named})
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise FetchFailed(f"{repository.field} must have a readable {INDEX}, got {error}; {_SEE}") from error
    absent = [file for file in files if file not in listing.sizes or "/" in file]
    if absent:
        raise FetchFailed(f"{repository.field} must have every file of its index, got none named {absent[0]}; {_SEE}")
    if not files:
        raise FetchFailed(
            f"{repository.field} must have its weights as safetensors, got none in {repository.name}"
            f"{_describe_place(listing)}; {_suggest_weights(listing)}"
        )
    return files


def _list_unindexed(listing: Listing) -> list[str]:
    """List the files of the weights of a repository without an index: model.safetensors, or all shards of one model.

    Empty if there is neither: an adapter or a file of another format is no model.
    """
    if WEIGHTS in listing.sizes:
        return [WEIGHTS]
    shards: dict[tuple[str, str], list[str]] = {}
    for file in sorted(listing.sizes):
        if found := _SHARD.fullmatch(file):
            shards.setdefault((found["stem"], found["count"]), []).append(file)
    whole = [files for (_, count), files in shards.items() if len(files) == int(count)]
    return whole[0] if len(whole) == 1 else []


def _describe_place(listing: Listing) -> str:
    """Describe that only the cache was looked at, if that is so."""
    return f" in the cache, which may lack files ({listing.notice})" if listing.notice else ""


def _suggest_weights(listing: Listing) -> str:
    kinds = {Path(file).suffix for file in listing.sizes}
    if ".bin" in kinds or ".pt" in kinds or ".pth" in kinds:
        return (
            "its .bin files may hold code and are not read: save it with transformers' save_pretrained, "
            f"or look for a revision with safetensors at {listing.repository.url}/discussions"
        )
    if ".gguf" in kinds:
        return f"download one of its GGUF files from {listing.repository.url}, and name that file"
    return "use another one"
