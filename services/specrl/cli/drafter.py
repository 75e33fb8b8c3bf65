"""`specrl drafter`: trains a drafter for a policy, imports a published EAGLE-3 head, or exports one."""

from __future__ import annotations

import json
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specrl.cli.command_exit import report_outcome, run_module
from specrl.cli.options import RUNS, Overrides, Plain, Runs, refuse_existing
from specrl.drafting.registry import find_kind
from specrl.errors import RunInvalid, SpecInvalid, SpecProblem
from specrl.files import write_folder
from specrl.formats.reports import DrafterInitReport
from specrl.installation import require_engines
from specrl.launcher import launch, run_directory
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.terminal.view import choose_view
from specrl.spec import RunSpec, load_spec

# File in the drafter's folder with its acceptance on held-out prompts.
ACCEPTANCE = "acceptance.json"

app = typer.Typer(help="Drafters: small models that propose tokens for the policy to verify.", no_args_is_help=True)

Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder to write the drafter to; must not exist.")]


class Format(StrEnum):
    SPECULATORS = "speculators"
    EAGLE3 = "eagle3"


@app.command("init")
def init_drafter(  # noqa: PLR0913, PLR0917 - one argument per option
    out: Out,
    file: Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Run file (YAML).")] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Resume this initialisation: its folder, or its name in --runs."),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    runs: Runs = RUNS,
    plain: Plain = False,
) -> None:
    """Train a fresh drafter, or a draft model, on the policy's own rollouts of the run's prompts.

    This is the run of FILE without steps and validation. It does what `trainer.drafter.initialisation` says: epochs go
    on while the acceptance on held-out prompts grows, and more rollouts are sampled if they are missing. It writes the
    drafter to DIR, for `generation.speculation.eagle3.path` or `draftModel.path` of later runs. With `mtp` it
    trains the heads that the policy ships, and DIR is the policy's folder with the new heads, for `model.path` of later
    runs. DIR/acceptance.json has the acceptance on held-out prompts and why training ended. After Ctrl-C or a crash,
    `--resume` continues: finished rollouts are not generated again, and finished epochs are not trained again.
    """
    if (file is None) == (resume is None):
        raise typer.BadParameter("give either -f FILE for a new drafter, or --resume RUN")
    refuse_existing(out)  # before hours of training, not after them
    view = choose_view(Console(), plain)
    if file is not None:
        launched = launch.start_run(keep_only_initialisation(load_spec(file, overrides)), runs, view)
    else:
        assert resume is not None
        launched = launch.resume_run(require_initialisation(run_directory.find_run(resume, runs)), overrides, view)
    directory = launched.directory
    report_outcome(
        launched,
        view,
        f"specrl drafter init --resume {{}} --out {out}",
        # No report and no page: there are no steps to show.
        facts={"logs": str(directory.logs_folder), "show again": f"specrl status {directory.path}"},
    )
    assert launched.outcome.status is not None
    summary = launched.outcome.status.summary
    # Native heads are in the policy's folder.
    exported = (summary.drafter_path or summary.policy_path) if summary is not None else ""
    if summary is None or not exported:
        raise RunInvalid(f"the run ended without exporting a drafter; see {directory.logs_folder}")
    copy_atomically(Path(exported), out, summary.drafter_start)
    field = choose_path_field(load_spec(directory.run_file))
    typer.echo(f"drafter written to {out}; use it in a run with --set {field}={out}")


@app.command("import")
def import_drafter(
    source: Annotated[Path, typer.Argument(help="Folder of a published EAGLE-3 head.")],
    policy: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the policy that it will draft for.")],
    out: Out,
) -> None:
    """Check a published head against the policy and write it as a drafter that specrl trains and vLLM loads.

    Reads the layout of the EAGLE authors, SpecForge and vLLM (LlamaForCausalLMEagle3; safetensors or
    pytorch_model.bin), and that of the speculators library.
    """
    convert_drafter("import", source, out, "--policy", str(policy))


@app.command("export")
def export_drafter(
    drafter: Annotated[Path, typer.Argument(help="Folder of a drafter that specrl wrote.")],
    format: Annotated[Format, typer.Option(help="Layout to write.")],
    out: Out,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of its policy; required by speculators."),
    ] = None,
) -> None:
    """Write a drafter in the layout of the speculators library, or in that of the EAGLE authors and SpecForge."""
    convert_drafter(
        "export", drafter, out, "--format", format.value, *(() if policy is None else ("--policy", str(policy)))
    )


def convert_drafter(direction: str, source: Path, out: Path, *options: str) -> None:
    """Convert a drafter in a separate process, since that needs torch. Raises RunInvalid when `out` exists."""
    require_engines("torch")
    refuse_existing(out)
    typer.echo(run_module("specrl.drafting.eagle3.convert", direction, str(source), "--out", str(out), *options))


def keep_only_initialisation(spec: RunSpec) -> RunSpec:
    """Return the run without steps and validation. Raises SpecInvalid when it has no drafter to train."""
    # A run of 0 steps ends after its drafter is initialised and exported.
    schedule = spec.schedule.model_copy(update={"steps": 0})
    run = spec.model_copy(update={"schedule": schedule, "validation": None})
    kind = find_kind(run)
    path = "generation.speculation.eagle3"
    if kind is None:
        rule = f"must be given to train a drafter, got {spec.generation.speculation.kind}"
        remedy = f"--set {path}.numDraftTokens=3, or mtp for a policy that has heads"
        raise SpecInvalid((SpecProblem(path, rule, remedy),))
    if not kind.is_fresh(run):  # of all kinds, only a head can be named that was initialised before
        rule = "must be null for a fresh drafter, got a folder"
        raise SpecInvalid((SpecProblem(f"{path}.path", rule, "leave it out"),))
    return run


def choose_path_field(spec: RunSpec) -> str:
    """Return the field of a run file that names a drafter of this kind. Native heads are a part of the policy."""
    speculation = spec.generation.speculation
    if speculation.mtp is not None:
        return "model.path"
    kind = "eagle3" if speculation.eagle3 is not None else "draftModel"
    return f"generation.speculation.{kind}.path"


def require_initialisation(directory: RunDirectory) -> RunDirectory:
    """Return the folder unchanged if its run only initialises a drafter; raise RunInvalid otherwise."""
    steps = load_spec(directory.run_file).schedule.steps
    if steps:
        raise RunInvalid(
            f"--resume must name a run of `specrl drafter init`, got {directory.path} with {steps} steps; "
            f"resume that one with `specrl run --resume {directory.path}`"
        )
    return directory


def copy_atomically(source: Path, out: Path, start: DrafterInitReport | None) -> None:
    """Copy a drafter and its acceptance to a free name. It appears there complete or not at all. Raises RunInvalid."""
    out = out.absolute()
    try:
        with write_folder(out) as unfinished:
            shutil.copytree(source, unfinished, dirs_exist_ok=True)
            if start is not None:
                acceptance = json.dumps(start.model_dump(by_alias=True), indent=2)
                (unfinished / ACCEPTANCE).write_text(acceptance + "\n", encoding="utf-8")
            unfinished.chmod(0o755)  # the mode of a run's folder would hide it from other users
    except OSError as error:
        raise RunInvalid(f"writing the drafter to {out} failed: {error}; the run keeps it in {source}") from error
