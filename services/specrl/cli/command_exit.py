"""Ends commands with one message on stderr and one exit code. Used by every command."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from specrl.errors import RunInvalid, SpecrlError
from specrl.formats.reports import Phase, RunSummary, StatusReport
from specrl.formats.saved_steps import describe_saved
from specrl.launcher.launch import LaunchResult
from specrl.launcher.processes.supervisor import RunEnd
from specrl.launcher.terminal.rows import make_printable
from specrl.launcher.terminal.view import View
from specrl.spec import RunSpec, load_spec

FAILED_CODE = 1
REFUSED_CODE = 2  # the same code as for wrong usage of a command
INTERRUPTED_CODE = 130  # 128 + SIGINT, as shells report it


class ErrorReportingGroup(TyperGroup):
    """The outermost layer of every command: turns a SpecrlError into a message and Ctrl-C into an exit code."""

    def invoke(self, ctx: Any) -> Any:  # typer's own copy of click, which has no public name
        try:
            return super().invoke(ctx)
        except SpecrlError as error:
            print_error(str(error))
            raise typer.Exit(REFUSED_CODE) from error
        except KeyboardInterrupt as interrupt:
            print_error("interrupted; all of its processes have ended")
            raise typer.Exit(INTERRUPTED_CODE) from interrupt


def confirm_deletion(question: str) -> None:
    """Ask on the terminal. Raises typer.Exit with code 1 unless the answer is yes, also where nobody can answer."""
    try:
        typer.confirm(question, abort=True)
    except typer.Abort as refused:
        print_error("not confirmed, so nothing was deleted; answer y, or pass --yes")
        raise typer.Exit(FAILED_CODE) from refused


@contextmanager
def report_unwritable(option: str, path: Path) -> Iterator[None]:
    """Raise RunInvalid for an OSError of writing to the path that an option names."""
    try:
        yield
    except OSError as error:
        raise RunInvalid(
            f"{option} must be a place that can be written to, got {path}: {error.strerror or error}; name another, or "
            "free some space"
        ) from error


def print_error(message: str) -> None:
    """Print a message on stderr. Line breaks are kept; control characters do not reach the terminal."""
    typer.echo("specrl: " + "\n".join(make_printable(line) for line in message.splitlines()), err=True)


def run_module(module: str, *arguments: str) -> str:
    """Run one of our modules in a separate process and return its stdout.

    When it fails, prints the last line of its stderr and raises typer.Exit with its exit code.
    """
    done = subprocess.run([sys.executable, "-m", module, *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        print_error(said[-1] if said else f"{module} failed without a message")
        raise typer.Exit(done.returncode if done.returncode > 0 else FAILED_CODE)  # negative: killed by a signal
    return done.stdout.strip()


def report_outcome(
    launched: LaunchResult,
    view: View,
    resume: str = "specrl run --resume {}",
    facts: Mapping[str, str] | None = None,
) -> None:
    """Print how a launch ended. Returns after a successful end; otherwise raises typer.Exit with the matching code.

    resume: the command that resumes the run, with {} for the run's folder. facts: where its results are, by name; None:
    those of a run with steps.
    """
    outcome = launched.outcome
    directory = launched.directory
    again = resume.format(directory.path)
    if outcome.end is RunEnd.FINISHED:
        assert outcome.status is not None
        view.show_summary(
            outcome.status,
            dict(facts)
            if facts is not None
            else {
                "metrics": str(directory.metrics_file),
                "logs": str(directory.logs_folder),
                "show again": f"specrl status {directory.path}",
                "write a report": f"specrl report {directory.path}",
                "serve its page": f"specrl run --resume {directory.path} --serve",
            },
        )
        summary = outcome.status.summary
        if summary is not None and summary.policy_path:
            # Printed without the view, which would break the line and add a border.
            typer.echo("serve the policy, with vLLM alone (docs/serving.md):")
            typer.echo(build_serving_line(summary, load_spec(directory.run_file)))
        return
    if outcome.end is RunEnd.INTERRUPTED:
        print_error(f"{describe_stop(outcome.status)}; resume with `{again}`")
        raise typer.Exit(outcome.end.exit_code)
    if outcome.end is RunEnd.REFUSED:
        # A program that refused at its start has said everything in its message.
        had_begun = outcome.status is not None and outcome.status.phase is Phase.FAILED
        after = f"\n  logs: {directory.logs_folder}\n  after fixing that, resume with `{again}`" if had_begun else ""
        print_error(outcome.message + after)
        raise typer.Exit(outcome.end.exit_code)
    print_error(f"{outcome.message}\n  logs: {directory.logs_folder}\n  resume with `{again}`")
    raise typer.Exit(outcome.end.exit_code)


def describe_stop(status: StatusReport | None) -> str:
    """Say what a run that was stopped has saved. status: the last one that its coordinator wrote; None: it wrote none.

    Without a coordinator that ended by itself, as after a second Ctrl-C, the newest checkpoint is what remains.
    """
    if status is None:
        return "stopped before the run had begun"
    if status.phase is Phase.STOPPED and status.detail:
        return status.detail
    return f"stopped; {describe_saved(status.step, status.checkpoint_step)}"


def build_serving_line(summary: RunSummary, spec: RunSpec) -> str:
    """Build the shell command that serves a run's export with vLLM, with its drafter or native heads if it has them.

    A draft model that was not trained is not in the export. It is served from its own folder.
    """
    words = ["vllm", "serve", summary.policy_path, "--dtype", spec.model.dtype.value]
    speculation = spec.generation.speculation
    drafts = speculation.num_draft_tokens
    if speculation.mtp is not None:
        # vLLM knows MiMo, but reads its config by the code that comes with the model.
        words += ["--trust-remote-code", "--speculative-config"]
        words += [json.dumps({"method": "mtp", "num_speculative_tokens": drafts})]
    drafter = summary.drafter_path or (speculation.draft_model.path if speculation.draft_model is not None else None)
    if drafter:
        config = {"method": speculation.kind, "model": drafter, "num_speculative_tokens": drafts}
        words += ["--speculative-config", json.dumps(config)]
    return shlex.join(words)
