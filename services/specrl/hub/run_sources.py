"""Fetches what a run file names on the hub, converts its GGUF files, and puts folders and files into the run file.

    model.path: Qwen/Qwen3-0.6B              becomes the folder of the commit in Hugging Face's cache
    model.path: policy.gguf                  becomes a folder in specrl's own cache
    generation.speculation.eagle3.path       as model.path, and so do draftModel.path and referenceKl.path
    prompts.source.dataset                   gets `files`, absolute paths, and the commit as its revision
    validation.source.dataset

So every process of a run reads folders, and never asks the hub. `sources.json` in the run's folder says what was taken.
A resumed run gets the same commit, and needs no network as long as the cache has it.

Called by preflight, `specrl sft` and `specrl fetch`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from specrl.errors import RunInvalid, SpecProblem, collect_problems, first_line
from specrl.files import SMALL_BYTES, read_text, write_text
from specrl.hub.client import COMMIT_LENGTH, Listing, Repository, RepositoryKind
from specrl.hub.data_sets import DataSetWish, fetch_data_set
from specrl.hub.fetching import NO_DISPLAY, FetchDisplay
from specrl.hub.gguf_models import GgufWish, convert_gguf, describe_precision
from specrl.hub.models import ModelWish, fetch_model
from specrl.spec import RunSpec
from specrl.spec.base import HubName, Section, is_gguf, is_hub_name, rewrite_sections
from specrl.spec.data import MOST_FILES, HubSource

SOURCES_FILE = "sources.json"

_POLICIES = {"model.path", "trainer.loss.referenceKl.path"}
"""Models that must be of a family that specrl trains. Drafters are checked by `generation`."""

_SHA256_LENGTH = 64

CheckModel = Callable[[RunSpec, Path, int], None]
"""Checks a model's folder, and the bytes of its weights, before these are fetched. May raise a SpecrlError."""


class FetchedSource(BaseModel):
    """One entry of sources.json.

    field: of the run file. name: on the hub, or the path of a GGUF file. revision: as the user gave it; null: the main
    branch. commit: what it stood for; of a GGUF file on this machine, its SHA-256. folder: of the commit's files in the
    cache, or of the converted model. gguf: types of the matrices of a GGUF file that was converted; null: none was.
    """

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)

    field: str
    name: str
    revision: str | None
    commit: str
    folder: str
    gguf: str | None = None

    @property
    def is_file(self) -> bool:
        """Whether it is a GGUF file on this machine."""
        return Path(self.name).is_absolute()

    def describe(self) -> str:
        """Describe the source in a line."""
        asked = "" if self.revision in {None, self.commit} else f" ({self.revision})"
        digest = "SHA-256" if self.is_file else "at commit"
        made = "" if self.gguf is None else f", converted; {describe_precision(self.gguf)}"
        return f"{self.field}: {self.name} {digest} {self.commit[:12]}{asked}, in {self.folder}{made}"


@dataclass(frozen=True)
class FetchedRun:
    """A run file whose names on the hub have been replaced. problems: of what could not be fetched."""

    spec: RunSpec
    sources: tuple[FetchedSource, ...] = ()
    notices: tuple[str, ...] = ()
    problems: tuple[SpecProblem, ...] = ()


def fetch_run_sources(
    spec: RunSpec,
    known: Sequence[FetchedSource] = (),
    display: FetchDisplay = NO_DISPLAY,
    check_model: CheckModel | None = None,
) -> FetchedRun:
    """Fetch everything that the run names on the hub, and convert its GGUF files.

    known: sources of a run that is resumed. The same name and revision gets the same commit again, and files that have
    left the cache are fetched again into the same folder. check_model: for the policy.
    """
    fetching = _RunFetching(known, display, None if check_model is None else partial(check_model, spec))
    fetched = rewrite_sections(spec, fetching.replace_names)
    # A resumed run keeps its earlier entries, whatever its run file says by now.
    kept = [source for source in known if source.field not in {it.field for it in fetching.sources}]
    return FetchedRun(fetched, (*fetching.sources, *kept), tuple(fetching.notices), tuple(fetching.problems))


class _RunFetching:
    """Replaces the names in a run file's sections, and collects what was taken and what could not be."""

    def __init__(
        self,
        known: Sequence[FetchedSource],
        display: FetchDisplay,
        check_policy: Callable[[Path, int], None] | None,
    ) -> None:
        self.sources = list[FetchedSource]()
        self.notices = list[str]()
        self.problems = list[SpecProblem]()
        self._known = known
        self._display = display
        self._check_policy = check_policy

    def replace_names(self, place: str, section: Section) -> Section:
        """Return a section with a folder, or files, in place of a name. place: of the section in the run file."""
        with collect_problems(self.problems):
            if isinstance(section, HubSource):
                return self._replace_data_set(place, section)
            if _names_model(section):
                return self._replace_model(f"{place}.path", section)
        return section

    def _replace_model(self, field: str, section: Any) -> Section:
        """Fetch or convert the model of a section with `path` and `revision`."""
        path: str | None = section.path
        if path is None:
            return cast(Section, section)
        before = next((it for it in self._known if (it.field, it.folder) == (field, path)), None)
        if before is not None and not _is_there(Path(path)):
            folder = self._restore_model(before)
        elif is_hub_name(path):
            commit = self._find_commit(field, path, section.revision)
            repository = Repository(RepositoryKind.MODEL, path, commit or section.revision, field)
            folder = self._fetch_model(repository, section.revision, None)
        elif section.revision is not None:
            raise RunInvalid(
                f"{field.removesuffix('path')}revision must not be given for a folder, got {section.revision} with "
                f"{path}, which exists; leave it out, or name another model"
            )
        elif is_gguf(path):
            folder = self._convert_model(Path(path), field, None)
        else:
            return cast(Section, section)
        return cast(Section, section.model_copy(update={"path": str(folder), "revision": None}))

    def _restore_model(self, before: FetchedSource) -> Path:
        """Fetch or convert again what has left the cache since the run began, into the same folder."""
        if before.is_file:
            return self._convert_model(Path(before.name), before.field, Path(before.folder))
        # CACHE/models--OWNER--NAME/snapshots/COMMIT. A converted model is in specrl's own cache.
        cache = Path(before.folder).parents[2] if before.gguf is None else None
        repository = Repository(RepositoryKind.MODEL, before.name, before.commit, before.field)
        return self._fetch_model(repository, before.revision, cache)

    def _convert_model(self, file: Path, field: str, target: Path | None) -> Path:
        before = next((it for it in self._known if (it.field, it.name) == (field, str(file))), None)
        sha256 = None if before is None else before.commit
        converted = convert_gguf(GgufWish(file, field, self._choose_check(field), target, sha256), self._display)
        source = FetchedSource(
            field=field,
            name=str(file),
            revision=None,
            commit=converted.sha256,
            folder=str(converted.folder),
            gguf=converted.kinds,
        )
        self.sources.append(source)
        self.notices.append(source.describe())
        return converted.folder

    def _fetch_model(self, repository: Repository, asked: str | None, cache: Path | None) -> Path:
        """Fetch a model on the hub. asked: the revision in the run file. Returns its folder."""
        wish = ModelWish(
            repository, is_policy=repository.field in _POLICIES, check=self._choose_check(repository.field)
        )
        model = fetch_model(wish, self._display, cache)
        self._note_listing(model.listing, asked, model.folder, model.gguf)
        return model.folder

    def _choose_check(self, field: str) -> Callable[[Path, int], None] | None:
        return self._check_policy if field == "model.path" else None

    def _replace_data_set(self, place: str, source: HubSource) -> HubSource:
        """Fetch a data set's split, unless the run file has its files already."""
        cache = None
        field = f"{place}.name"
        files = source.files
        revision = source.revision
        if source.is_fetched:
            before = next((it for it in self._known if it.field == field), None)
            if before is None or all(Path(file).is_file() for file in files):
                return source
            folder = Path(before.folder)
            cache = folder.parents[2]
            revision = before.commit
            files = tuple(Path(file).relative_to(folder).as_posix() for file in files)
        else:
            revision = self._find_commit(field, source.name, revision) or revision
        repository = Repository(RepositoryKind.DATA_SET, source.name, revision, field)
        wish = DataSetWish(repository, source.config, source.split, files, most_files=MOST_FILES)
        listing, names = fetch_data_set(wish, self._display, cache)
        self._note_listing(listing, source.revision, listing.folder, None)
        found = tuple(str(listing.folder / name) for name in names)
        return source.model_copy(update={"files": found, "revision": listing.commit})

    def _find_commit(self, field: str, name: str, revision: str | None) -> str | None:
        """Return the commit that an earlier start took for the same name and revision."""
        wanted = (field, name, revision)
        return next((it.commit for it in self._known if (it.field, it.name, it.revision) == wanted), None)

    def _note_listing(self, listing: Listing, asked: str | None, folder: Path, gguf: str | None) -> None:
        """Add what was taken to the sources, and to the notices what the user should know of it."""
        repository = listing.repository
        taken = (repository.field, listing.commit)
        before = next((it for it in self._known if (it.field, it.commit) == taken), None)
        source = FetchedSource(
            field=repository.field,
            name=repository.name,
            revision=asked if before is None else before.revision,
            commit=listing.commit,
            folder=str(folder),
            gguf=gguf,
        )
        self.sources.append(source)
        why = f"; the cache's newest is used, since {listing.notice}" if listing.notice else ""
        self.notices.append(f"{source.describe()}{why}")


def _names_model(section: Section) -> bool:
    """Whether the section's `path` may be a name on the hub."""
    field = type(section).model_fields.get("path")
    return field is not None and HubName.ALLOWED in field.metadata


def _is_there(folder: Path) -> bool:
    """Whether the cache still has a model: its folder holds links, which lead to nothing once the files are deleted."""
    return (folder / "config.json").exists() and all(path.exists() for path in folder.iterdir())


def read_sources(folder: Path) -> tuple[FetchedSource, ...]:
    """Read sources.json of a run's folder; a run without one names nothing on the hub. Raises RunInvalid."""
    try:
        found = json.loads(read_text(folder / SOURCES_FILE, SMALL_BYTES))
        sources = tuple(FetchedSource.model_validate(it) for it in found)
        if any(len(it.commit) != (_SHA256_LENGTH if it.is_file else COMMIT_LENGTH) for it in sources):
            raise ValueError("a commit must have 40 digits, and the SHA-256 of a file 64")
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, RecursionError, ValidationError) as error:
        raise RunInvalid(
            f"{folder / SOURCES_FILE} must be as specrl wrote it, got {first_line(error)}; delete it, and the "
            "run reads the folders in its run file"
        ) from error
    return sources


def write_sources(folder: Path, sources: Sequence[FetchedSource]) -> None:
    """Write sources.json, if the run names something on the hub. Raises OSError."""
    if sources:
        text = json.dumps([it.model_dump(by_alias=True) for it in sources], indent=1)
        write_text(folder / SOURCES_FILE, text + "\n", is_synced=True)
