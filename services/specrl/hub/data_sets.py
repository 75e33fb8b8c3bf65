"""Finds the files of a data set's split, and fetches them.

The repository's card (README.md) may list them under `configs`, each with `data_files`. Without that, names say it, as
in the library `datasets`: `data/train-00000-of-00001.parquet`, a folder `train/`, a file `train.jsonl`; a repository
without any such name is one split, train. `datasets` itself is not used, since it brings dill (decision 0010). No
script of a repository is run.

Called by `run_sources` and `specrl fetch`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specrl.errors import FetchFailed
from specrl.files import SMALL_BYTES, read_text
from specrl.hub.client import Listing, Repository, list_repository
from specrl.hub.fetching import NO_DISPLAY, FetchDisplay, fetch_files
from specrl.spec.yaml_input import YAML_ERRORS, parse_card

CARD = "README.md"
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
COMPRESSED = (*SUFFIXES, ".jsonl.gz", ".json.gz", ".csv.gz", ".tsv.gz")
_NOT_DATA = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}

# Other words for the usual splits, as `datasets` knows them (data_files.py, SPLIT_KEYWORDS).
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
CONVERTED = "refs/convert/parquet"
"""Branch with a Parquet copy of a data set, which the hub makes of most data sets."""

SHOWN = 20
"""Configurations or files that a message lists."""


@dataclass(frozen=True)
class DataSetWish:
    """The wanted part of a repository. config, split: None for every one. files: names or patterns instead of them.

    most_files: a split of more files is refused; 0: any number.
    """

    repository: Repository
    config: str | None = None
    split: str | None = "train"
    files: tuple[str, ...] = ()
    most_files: int = 0


def fetch_data_set(
    wish: DataSetWish, display: FetchDisplay = NO_DISPLAY, cache: Path | None = None, out: Path | None = None
) -> tuple[Listing, list[str]]:
    """Fetch the files of a split. Returns the listing and the files' names, in the order in which they are read.

    out: folder to fetch them into; None: the cache. Raises FetchFailed.
    """
    listing = replace(list_repository(wish.repository, cache), out=out)
    configs = dict[str, Any]()
    if CARD in listing.sizes and not wish.files:
        fetch_files(listing, [CARD], display)
        configs = read_card(listing)
    files = find_files(wish, list(listing.sizes), configs)
    if 0 < wish.most_files < len(files):
        raise FetchFailed(
            f"{wish.repository.field} must have at most {wish.most_files} files of a split, got {len(files)} in "
            f"{wish.repository.name}; name some of them, as in files: [{files[0]}]"
        )
    fetch_files(listing, files, display)
    return listing, files


def read_card(listing: Listing) -> dict[str, Any]:
    """Read the configurations of a data set's card, by name. A card without a valid head has none."""
    try:
        text = read_text(listing.folder / CARD, 16 * SMALL_BYTES)
        head = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
        found = parse_card(head[1]) if head is not None else None
    except (OSError, *YAML_ERRORS):
        return {}
    configs = found.get("configs") if isinstance(found, dict) else None
    named = [it for it in configs if isinstance(it, dict)] if isinstance(configs, list) else []
    return {str(it.get("config_name", "default")): it for it in named}


def find_files(wish: DataSetWish, names: Sequence[str], configs: Mapping[str, Any]) -> list[str]:
    """Find the files of the wish among those of a repository. Raises FetchFailed if there are none.

    names: of all files. configs: of the card.
    """
    data = sorted(name for name in names if _is_data(name))
    if wish.files:
        found = _match_all(wish.files, data)
        if not found:
            raise _refuse(wish, "files", ", ".join(wish.files), "match a file of", data)
        return found
    if not data:
        raise FetchFailed(
            f"{wish.repository.field} must be a data set of Parquet, JSON Lines, JSON or CSV files, got "
            f"{wish.repository.name} without any; {_suggest_copy(wish, names)}"
        )
    if wish.config is None and wish.split is None:
        return data
    splits = _list_splits(wish, data, configs)
    if wish.split is None:
        return sorted({file for files in splits.values() for file in files})
    found = splits.get(wish.split, [])
    if not found:
        raise _refuse(wish, "split", wish.split, "be a split of", list(splits))
    return found


def _suggest_copy(wish: DataSetWish, names: Sequence[str]) -> str:
    own = f"{wish.repository.name.rpartition('/')[2]}.py"
    reason = "its script would have to be run, which specrl does not do: " if own in names else ""
    return f"{reason}try its Parquet copy, {wish.repository.revision_field}: {CONVERTED}"


def _is_data(name: str) -> bool:
    if ".." in name.split("/"):  # no such name is one of a file in the repository
        return False
    base = name.rpartition("/")[2]
    return base.lower().endswith(COMPRESSED) and base not in _NOT_DATA and not base.startswith(".")


def _list_splits(wish: DataSetWish, data: list[str], configs: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the files of each split of the wished configuration."""
    if configs:
        config = configs[_choose_config(wish, configs)]
        below = str(config.get("data_dir") or "").strip("/")
        data = [name for name in data if not below or name.startswith(f"{below}/")]
        given = config.get("data_files")
        if given is not None:
            return _read_data_files(wish, given, data)
    elif wish.config is not None:
        # The usual layout without a card: a folder for each configuration, also below data/.
        inside = [name for name in data if wish.config in name.split("/")[:-1]]
        if not inside and wish.config != "default":
            folders = sorted({name.split("/")[0] for name in data if "/" in name})
            raise _refuse(wish, "config", wish.config, "be a configuration of", folders)
        data = inside or data
    return group_by_split(data, wish.split)


def _choose_config(wish: DataSetWish, configs: Mapping[str, Any]) -> str:
    if wish.config is not None:
        if wish.config in configs:
            return wish.config
        raise _refuse(wish, "config", wish.config, "be a configuration of", list(configs))
    for name, config in configs.items():
        if config.get("default") is True or name == "default" or len(configs) == 1:
            return name
    raise _refuse(wish, "config", "none", "be given for", list(configs))


def _read_data_files(wish: DataSetWish, given: Any, data: list[str]) -> dict[str, list[str]]:
    """Read a card's `data_files`: a pattern, several, or one or several for each split."""
    patterns = dict[str, list[str]]()
    if isinstance(given, Mapping):
        given = [{"split": split, "path": path} for split, path in given.items()]
    for item in given if isinstance(given, list) else [given]:
        split, path = (item.get("split", "train"), item.get("path")) if isinstance(item, Mapping) else ("train", item)
        paths = path if isinstance(path, list) else [path]
        patterns.setdefault(str(split), []).extend(str(one) for one in paths)
    if any("://" in pattern for pattern in patterns.get(wish.split or "", [])):
        raise FetchFailed(
            f"{wish.repository.field} must have its files in its own repository, got {wish.repository.name} with files "
            f"elsewhere; try its Parquet copy, {wish.repository.revision_field}: {CONVERTED}"
        )
    return {split: found for split, wanted in patterns.items() if (found := _match_all(wanted, data))}


def group_by_split(data: Sequence[str], wanted: str | None) -> dict[str, list[str]]:
    """Group files by the splits that their names tell; without any such name, all are of train.

    wanted: a split that may have another name than the usual ones.
    """
    words = dict(SPLIT_WORDS)
    if wanted is not None and wanted not in words:
        words = {wanted: (wanted,), **words}
    found = {split: files for split in words if (files := [name for name in data if _tells(name, words[split])])}
    return found or {"train": list(data)}


def _tells(name: str, words: Sequence[str]) -> bool:
    """Whether a folder of the path, or the file's name, has one of the words, apart from other letters."""
    *folders, base = name.split("/")
    # The nearest part that tells a split counts: train/test_0.parquet would be of both.
    for part in (base, *reversed(folders)):
        tokens = re.split(r"[-._ 0-9]+", part.lower())
        if any(word.lower() in tokens or word.lower() == part.lower() for word in words):
            return True
        if any(word in tokens for known in SPLIT_WORDS.values() for word in known):
            return False
    return False


def _match_all(patterns: Iterable[str], data: Sequence[str]) -> list[str]:
    """Return the files that match a pattern, each once. A folder stands for all files below it."""
    found = dict[str, None]()
    for pattern in patterns:
        compiled = _compile_pattern(pattern.removeprefix("./").rstrip("/"))
        found |= dict.fromkeys(name for name in data if compiled.fullmatch(name))
    return list(found)


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern: `**` matches any path, `*` and `?` within one part, [a-z] one letter."""
    parts = re.split(r"(\*\*/?|\*|\?|\[[^\]]+\])", pattern)
    signs = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    text = "".join(
        signs.get(part) or (part.replace("[!", "[^") if re.fullmatch(r"\[[^\]]+\]", part) else re.escape(part))
        for part in parts
    )
    return re.compile(f"{text}(?:/.*)?")


def _refuse(wish: DataSetWish, name: str, got: str, must: str, known: Sequence[str]) -> FetchFailed:
    """Return the error of a wish that names something that the repository does not have."""
    repository = wish.repository
    field = f"--{name}" if repository.field == "NAME" else f"{repository.field.rpartition('.')[0]}.{name}"
    shown = ", ".join(known[:SHOWN]) + (", ..." if len(known) > SHOWN else "")
    return FetchFailed(f"{field} must {must} {repository.name}, got {got}; use one of these: {shown or 'none'}")
