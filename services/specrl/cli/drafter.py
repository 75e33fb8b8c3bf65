"""`specrl drafter`: make an EAGLE-3 head for a policy, or bring a published one in, or take one out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specrl.cli.endings import FAILED_CODE, complain, conclude
from specrl.cli.options import RUNS, Overrides, Plain, Runs
from specrl.errors import Problem, RunInvalid, SpecInvalid
from specrl.installation import require_engines
from specrl.launcher import launch, run_directory
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.view import view_for
from specrl.spec import RunSpec, load_spec

ACCEPTANCE = "acceptance.json"

app = typer.Typer(help="Drafters: small models that propose tokens for the policy to verify.", no_args_is_help=True)

Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder to write the drafter to; must not exist.")]


class Format(StrEnum):
    SPECULATORS = "speculators"
    EAGLE3 = "eagle3"


@app.command()
def init(  # noqa: PLR0913, PLR0917 - one argument per option
    out: Out,
    file: Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Run file (YAML).")] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Go on with this initialisation: its folder, or its name in --runs."),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    runs: Runs = RUNS,
    plain: Plain = False,
) -> None:
    """Train a fresh drafter on the policy's own rollouts of the run's prompts, without moving the policy.

    This is the run of FILE with no steps and no validation; what `trainer.drafter.initialisation` says is done, and
    the drafter is written to DIR, for `generation.speculation.eagle3.path` of later runs, with its acceptance on
    held-out prompts in acceptance.json. After Ctrl-C or a crash `--resume` goes on: no finished rollout is generated
    again, no finished epoch trained again.
    """
    if (file is None) == (resume is None):
        raise typer.BadParameter("give either -f FILE for a new drafter, or --resume RUN")
    refuse_existing(out)
    view = view_for(Console(), plain)
    if file is not None:
        launched = launch.begin(initialisation_only(load_spec(file, overrides)), runs, view)
    else:
        assert resume is not None
        launched = launch.resume(initialisation(run_directory.find(resume, runs)), overrides, view)
    conclude(launched, view, f"specrl drafter init --resume {{}} --out {out}")
    assert launched.outcome.status is not None
    summary = launched.outcome.status.summary
    if summary is None or not summary.drafter_path:
        raise RunInvalid(f"the run must export a drafter, got none; see {launched.directory.logs}")
    acceptance = summary.drafter_start.model_dump(by_alias=True) if summary.drafter_start is not None else None
    copy_whole(Path(summary.drafter_path), out, {ACCEPTANCE: acceptance} if acceptance else {})
    typer.echo(f"drafter written to {out}")


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="Folder of a published EAGLE-3 head.")],
    policy: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the policy that it is to draft for.")],
    out: Out,
) -> None:
    """Check a published head against the policy and write it as a drafter that specrl trains and vLLM loads.

    Reads the layout of the EAGLE authors, SpecForge and vLLM (LlamaForCausalLMEagle3; safetensors or
    pytorch_model.bin) and that of the speculators library.
    """
    convert("import", source, out, "--policy", str(policy))


@app.command()
def export(
    drafter: Annotated[Path, typer.Argument(help="Folder of a drafter, as `specrl` writes it.")],
    format: Annotated[Format, typer.Option(help="Whose layout.")],
    out: Out,
    policy: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of its policy; speculators names it as the verifier.")
    ] = None,
) -> None:
    """Write a drafter in another layout: of the speculators library, or of the EAGLE authors and SpecForge."""
    convert("export", drafter, out, "--format", format.value, *(() if policy is None else ("--policy", str(policy))))


def convert(direction: str, source: Path, out: Path, *options: str) -> None:
    """Convert in a process of its own, which needs torch. Its message and exit code are the command's."""
    require_engines("torch")
    refuse_existing(out)
    command = [sys.executable, "-m", "specrl.drafting.convert", direction, str(source), "--out", str(out), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        complain(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the conversion failed")
        raise typer.Exit(done.returncode if done.returncode > 0 else FAILED_CODE)
    typer.echo(done.stdout.strip())


def refuse_existing(out: Path) -> None:
    """Raise RunInvalid when there is something at `out`."""
    if out.exists():
        raise RunInvalid(f"--out must not exist, got out={out}; name a new folder")


def initialisation_only(spec: RunSpec) -> RunSpec:
    """The run without steps and validation. Raises SpecInvalid when it has no fresh drafter to train."""
    eagle3 = spec.generation.speculation.eagle3
    path = "generation.speculation.eagle3"
    if eagle3 is None:
        kind = spec.generation.speculation.kind
        raise SpecInvalid(
            (Problem(path, f"must be given to train a drafter, got {kind}", f"--set {path}.numDraftTokens=3"),)
        )
    if eagle3.path is not None:
        raise SpecInvalid(
            (Problem(f"{path}.path", f"must be null for a fresh drafter, got {eagle3.path}", "leave it out"),)
        )
    schedule = spec.schedule.model_copy(update={"steps": 0})
    return spec.model_copy(update={"schedule": schedule, "validation": None})


def initialisation(directory: RunDirectory) -> RunDirectory:
    """A run that is nothing else. Raises RunInvalid for any other."""
    steps = load_spec(directory.run_file).schedule.steps
    if steps:
        raise RunInvalid(
            f"--resume must name a run of `specrl drafter init`, got {directory.path} with {steps} steps; "
            f"go on with that one by `specrl run --resume {directory.path}`"
        )
    return directory


def copy_whole(source: Path, out: Path, beside: Mapping[str, Any]) -> None:
    """Copy a folder, and JSON files beside, to a name that is free: it appears there complete, or not at all.

    Raises RunInvalid.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        shutil.copytree(source, unfinished, dirs_exist_ok=True)
        for name, content in beside.items():
            (unfinished / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        unfinished.chmod(0o755)  # mkdtemp's 0700 would hide it from other users
        unfinished.rename(out)
    except OSError as error:
        raise RunInvalid(f"the drafter must be written to {out}, got {error}; it is still in {source}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
