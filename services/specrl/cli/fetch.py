"""`specrl fetch`: fetches a model or a data set before a run does, or converts a GGUF file.

With --out it is also the init container of an RLJob's pods, for `volumes[].uri`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specrl.cli.command_exit import print_error
from specrl.cli.options import Plain, refuse_existing
from specrl.errors import FetchInterrupted, SpecInvalid, SpecProblem, SpecrlError, raise_problems
from specrl.hub import fetch_run_sources
from specrl.hub.client import Repository, RepositoryKind
from specrl.hub.data_sets import DataSetWish, fetch_data_set
from specrl.hub.folders import HUB_SCHEME, FetchedFolder, FolderWish, fetch_folder
from specrl.hub.gguf_models import GgufWish, convert_gguf, describe_precision
from specrl.hub.models import ModelWish, fetch_model
from specrl.launcher.terminal.check_progress import open_fetch_display
from specrl.launcher.terminal.view import View, choose_view, format_bytes
from specrl.spec import load_spec
from specrl.spec.base import is_gguf, is_hub_name
from specrl.termination import record_error

EPILOG = """Examples:

\b
  specrl fetch Qwen/Qwen3-0.6B
  specrl fetch openai/gsm8k --data-set --config main
  specrl fetch -f run.yaml
  specrl fetch SmolLM2-135M-Instruct.Q8_0.gguf --out smollm2
  specrl fetch s3://models/qwen3 --out qwen3
"""
MOST_WAIT_S = 60
"""Longest wait between two attempts, in seconds. The first is 1, and each is twice the one before."""


def fetch_by_name(  # noqa: PLR0913, PLR0917 - one argument per option
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Model or data set on the hub, as OWNER/NAME, or a GGUF file to convert. With --out also a URI: "
            "hf://OWNER/NAME@REVISION, hf://datasets/OWNER/NAME, s3://BUCKET/FOLDER.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Instead, fetch all that this run file names."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Branch, tag or commit. Default: the main branch.")
    ] = None,
    is_data_set: Annotated[bool, typer.Option("--data-set", help="NAME is a data set.")] = False,
    config: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --data-set: only this configuration. Default: all.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --data-set: only this split. Default: all.")
    ] = None,
    is_drafter: Annotated[
        bool, typer.Option("--drafter", help="NAME is an EAGLE-3 head or a draft model, of any family.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the files. Default: one in Hugging Face's, or specrl's, cache."),
    ] = None,
    skips_weights: Annotated[
        bool, typer.Option("--skip-weights", help="With --out: fetch all but safetensors files.")
    ] = False,
    attempts: Annotated[
        int, typer.Option(metavar="N", min=1, help="With --out: attempts, if a source does not answer.")
    ] = 1,
    plain: Plain = False,
) -> None:
    """Fetch a model or a data set into Hugging Face's cache, or convert a GGUF file, and print the folder.

    A run fetches what it names by itself. This command does so beforehand, such as where there is a network, or with
    HF_HOME on a cluster's volume. Of a model it fetches config, tokenizer and safetensors files. Of a data set, it
    fetches Parquet, JSON Lines, JSON and CSV files. No code is fetched. It looks at the disk's free space first. After
    Ctrl-C or a broken connection, the same command goes on: files that are whole stay.

    With --out, the files are put into that folder once they are whole and their checksums are right. A folder that is
    complete stays as it is.

    A GGUF file of a family that can be trained becomes an ordinary model folder. Its quantised weights are written as
    float32; they stay less precise than the original model's.

    HF_TOKEN is a token for private and gated repositories. HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE are used, too.
    """
    if (name is None) == (file is None):
        raise typer.BadParameter("give either NAME or -f FILE")
    view = choose_view(Console(), plain)
    if name is None:
        if is_data_set or is_drafter or revision is not None or out is not None:
            raise typer.BadParameter("--revision, --data-set, --drafter and --out need NAME; a run file has its own")
        assert file is not None
        _fetch_run(file, view)
    elif is_gguf(name):
        if is_data_set or is_drafter or revision is not None:
            raise typer.BadParameter("--revision, --data-set and --drafter need a name on the hub, not a GGUF file")
        _convert_file(Path(name), out, view)
    else:
        if out is None and "://" in name:
            raise typer.BadParameter("a URI needs --out DIR")
        if out is None and skips_weights:
            raise typer.BadParameter("--skip-weights needs --out DIR")
        if out is not None and (config is not None or split is not None):
            raise typer.BadParameter("--config and --split do not go with --out, which gets all files of a data set")
        if is_data_set and is_drafter:
            raise typer.BadParameter("give either --data-set or --drafter")
        if not is_data_set and (config is not None or split is not None):
            raise typer.BadParameter("--config and --split need --data-set")
        if out is not None:
            uri = name if "://" in name else _build_uri(name, revision, is_data_set)
            _fetch_into(FolderWish(uri, out, not is_drafter, not skips_weights), view, attempts)
            return
        kind = RepositoryKind.DATA_SET if is_data_set else RepositoryKind.MODEL
        repository = Repository(kind, name, revision, "NAME")
        _fetch_repository(
            DataSetWish(repository, config, split) if is_data_set else ModelWish(repository, not is_drafter), view
        )


def _fetch_run(file: Path, view: View) -> None:
    """Fetch all that a run file names."""
    with open_fetch_display(view) as display:
        fetched = fetch_run_sources(load_spec(file), display=display)
    for notice in fetched.notices:
        typer.echo(notice)
    raise_problems(fetched.problems)
    if not fetched.notices:
        typer.echo(f"{file} names nothing on the hub")


def _build_uri(name: str, revision: str | None, is_data_set: bool) -> str:
    """Build the URI of a name on the hub."""
    return f"{HUB_SCHEME}{'datasets/' if is_data_set else ''}{name}{'' if revision is None else f'@{revision}'}"


def _fetch_into(wish: FolderWish, view: View, attempts: int) -> None:
    """Fetch into a folder, and print it. In a pod, an error becomes the message of the container."""
    # Imported here: a command that runs in a container has its own handler, or none.
    import specrl.exit_on_sigterm  # noqa: F401

    def say_waiting() -> None:
        typer.echo(f"another process fetches into {wish.out}; waiting for it")

    try:
        with open_fetch_display(view) as display:
            fetched = _repeat(lambda: fetch_folder(wish, display, say_waiting), attempts)
    except SpecrlError as error:
        record_error("specrl fetch", error)
        print_error(str(error))
        raise typer.Exit(error.exit_code) from error
    commit = f" at commit {fetched.commit}" if fetched.commit else ""
    typer.echo(f"{wish.uri}{commit}: {len(fetched.sizes)} files, {format_bytes(sum(fetched.sizes.values()))}")
    typer.echo(wish.out)


def _repeat(fetch: Callable[[], FetchedFolder], attempts: int) -> FetchedFolder:
    """Fetch until the source has answered, at most so many times. Raises the last error."""
    for number in range(attempts - 1):
        try:
            return fetch()
        except FetchInterrupted as error:
            wait_s = min(2**number, MOST_WAIT_S)
            print_error(f"{error}; attempt {number + 2} of {attempts} follows in {wait_s} s")
            time.sleep(wait_s)
    return fetch()


def _fetch_repository(wish: ModelWish | DataSetWish, view: View) -> None:
    """Fetch a repository, and print its folder."""
    name = wish.repository.name
    if not is_hub_name(name):
        rule = f"must be OWNER/NAME, got {name}"
        raise SpecInvalid((SpecProblem("NAME", rule, "as in Qwen/Qwen3-0.6B; a folder needs no fetching"),))
    gguf = None
    with open_fetch_display(view) as display:
        if isinstance(wish, DataSetWish):
            listing, files = fetch_data_set(wish, display)
            folder = listing.folder
        else:
            model = fetch_model(wish, display)
            listing = model.listing
            folder = model.folder
            gguf = model.gguf
            files = [file for file in listing.sizes if listing.has_file(file)]
    revision = wish.repository.revision
    asked = f" ({revision})" if revision not in {None, listing.commit} else ""
    size = format_bytes(sum(listing.sizes[it] for it in files))
    typer.echo(f"{name} at commit {listing.commit}{asked}: {len(files)} files, {size}")
    if listing.notice:
        typer.echo(f"this is the newest commit in the cache, since {listing.notice}")
    if gguf is not None:
        typer.echo(f"its GGUF file is converted; {describe_precision(gguf)}")
    typer.echo(folder)


def _convert_file(file: Path, out: Path | None, view: View) -> None:
    """Convert a GGUF file into a folder, and print it."""
    if out is not None:
        refuse_existing(out)
    with open_fetch_display(view) as display:
        converted = convert_gguf(GgufWish(file, "NAME", target=out), display)
    typer.echo(f"{file.name} is converted; {describe_precision(converted.kinds)}")
    typer.echo(converted.folder)
