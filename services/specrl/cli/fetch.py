"""`specrl fetch`: fetches a model or a data set on the Hugging Face Hub, or converts a GGUF file, before a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specrl.cli.options import Plain, refuse_existing
from specrl.errors import SpecInvalid, SpecProblem, raise_problems
from specrl.hub import fetch_run_sources
from specrl.hub.client import Repository, RepositoryKind
from specrl.hub.data_sets import DataSetWish, fetch_data_set
from specrl.hub.gguf_models import GgufWish, convert_gguf, describe_precision
from specrl.hub.models import ModelWish, fetch_model
from specrl.launcher.terminal.check_progress import open_fetch_display
from specrl.launcher.terminal.view import View, choose_view, format_bytes
from specrl.spec import load_spec
from specrl.spec.base import is_gguf, is_hub_name

EPILOG = """Examples:

\b
  specrl fetch Qwen/Qwen3-0.6B
  specrl fetch openai/gsm8k --data-set --config main
  specrl fetch -f run.yaml
  specrl fetch SmolLM2-135M-Instruct.Q8_0.gguf --out smollm2
"""


def fetch_by_name(  # noqa: PLR0913, PLR0917 - one argument per option
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Model or data set on the hub, as OWNER/NAME, or a GGUF file to convert."),
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
        typer.Option(metavar="DIR", help="With a GGUF file: the folder to make. Default: one in specrl's cache."),
    ] = None,
    plain: Plain = False,
) -> None:
    """Fetch a model or a data set into Hugging Face's cache, or convert a GGUF file, and print the folder.

    A run fetches what it names by itself. This command does so beforehand, such as where there is a network, or with
    HF_HOME on a cluster's volume. Of a model it fetches config, tokenizer and safetensors files. Of a data set, it
    fetches Parquet, JSON Lines, JSON and CSV files. No code is fetched. It looks at the disk's free space first. After
    Ctrl-C or a broken connection, the same command goes on: files that are whole stay.

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
        if out is not None:
            raise typer.BadParameter("--out needs a GGUF file; HF_HOME names the cache for what is fetched")
        if is_data_set and is_drafter:
            raise typer.BadParameter("give either --data-set or --drafter")
        if not is_data_set and (config is not None or split is not None):
            raise typer.BadParameter("--config and --split need --data-set")
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
