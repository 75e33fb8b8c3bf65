"""A process with the unpatched huggingface_hub, whose address and cache come from the environment, as a user's do.

It reads one call per line of JSON, {"call": NAME, arguments}, and answers with one line: the result, or the error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specrl.errors import SpecrlError
from specrl.hub import fetch_run_sources, read_sources, write_sources
from specrl.hub.client import Listing, Repository, RepositoryKind
from specrl.hub.data_sets import DataSetWish, fetch_data_set
from specrl.hub.fetching import FetchDisplay
from specrl.hub.models import ModelWish, fetch_model
from specrl.launcher.preflight import check_model_before_weights
from specrl.prompts.sources import open_problem_source
from specrl.spec import dump_spec, load_spec


def describe(listing: Listing) -> dict[str, Any]:
    """Return a listing, and the files that are in the cache."""
    there = sorted(path.relative_to(listing.folder).as_posix() for path in listing.folder.rglob("*") if path.is_file())
    return {
        "commit": listing.commit,
        "folder": str(listing.folder),
        "files": there,
        "notice": listing.notice,
    }


def fetch_a_model(name: str, revision: str | None = None) -> dict[str, Any]:
    """Fetch a model, and count the calls of the display."""
    shown = list[tuple[str, int, int]]()
    display = FetchDisplay(lambda *what: shown.append(what), 0.05)
    wish = ModelWish(Repository(RepositoryKind.MODEL, name, revision, "model.path"))
    found = describe(fetch_model(wish, display).listing)
    return {**found, "shown": shown}


def fetch_a_data_set(name: str, **wish: Any) -> dict[str, Any]:
    """Fetch a split of a data set."""
    revision = wish.pop("revision", None)
    repository = Repository(RepositoryKind.DATA_SET, name, revision, "prompts.source.dataset.name")
    listing, files = fetch_data_set(DataSetWish(repository, **wish))
    return {**describe(listing), "split": files}


def fetch_a_run(file: str, run: str) -> dict[str, Any]:
    """Fetch what a run file names, as the launcher does, and write the run file and sources.json into the run's folder.

    Returns the run file, and the first problem of its prompts.
    """
    folder = Path(run)
    fetched = fetch_run_sources(
        load_spec(Path(file)),
        read_sources(folder),
        check_model=lambda *it: check_model_before_weights(lambda: 10**9, *it),
    )
    if fetched.problems:
        return {"problems": [str(it) for it in fetched.problems]}
    write_sources(folder, fetched.sources)
    (folder / "run.yaml").write_text(dump_spec(fetched.spec))
    source = open_problem_source(fetched.spec.prompts.source, keeps_rows=True)
    return {
        "path": fetched.spec.model.path,
        "notices": list(fetched.notices),
        "count": len(source),
        "first": [source.problems[0].question, source.problems[0].answer],
        "place": source.locate_problem(0),
    }


CALLS: dict[str, Callable[..., dict[str, Any]]] = {
    "model": fetch_a_model,
    "data set": fetch_a_data_set,
    "run": fetch_a_run,
}


def main() -> None:
    """Answer calls until the input ends."""
    for line in sys.stdin:
        given = json.loads(line)
        token = given.pop("token", None)
        os.environ.pop("HF_TOKEN", None)
        if token is not None:
            os.environ["HF_TOKEN"] = token  # huggingface_hub reads it at every request
        try:
            answer = CALLS[given.pop("call")](**given)
        except SpecrlError as error:
            answer = {"error": str(error), "class": type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
