"""`specrl rollouts`: shows what the policy answered, from the samples in the run's folder. It changes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from specrl.cli.options import RUNS, AsJson, RunOrNewest, Runs
from specrl.errors import RunInvalid
from specrl.formats.rollout_samples import RolloutSample
from specrl.launcher import run_directory
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.stored_reports import read_stored_rollouts
from specrl.launcher.terminal.rows import make_printable
from specrl.spec import load_spec

INDENT = "    "


def show_rollouts(  # noqa: PLR0913, PLR0917 - one argument per option
    run: RunOrNewest = None,
    runs: Runs = RUNS,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=1, help="Only rollouts of this step. Default: the newest.")
    ] = None,
    best_first: Annotated[
        bool | None,
        typer.Option("--best/--worst", help="Highest or lowest reward first, of all steps unless --step is given."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="Most rollouts that are shown.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Show prompts, completions and rewards of a run's samples: rollouts.jsonl, `telemetry.rollouts` of each step.

    The run may be active. Its newest step appears once its version is served.
    """
    directory = run_directory.find_run(run, runs)
    found = read_stored_rollouts(directory)
    if not found:
        raise RunInvalid(f"RUN must have written rollouts, got none in {directory.path}; {_explain_absence(directory)}")
    chosen = choose_samples(found, step, best_first)[:limit]
    if not chosen:
        raise RunInvalid(f"--step must be a step with rollouts, got {step}; there are {_describe_steps(found)}")
    if as_json:
        typer.echo(json.dumps([sample.model_dump(mode="json", by_alias=True) for sample in chosen], indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    for sample in chosen:
        for line in render_sample(sample):
            console.print(line)


def choose_samples(found: Sequence[RolloutSample], step: int | None, best_first: bool | None) -> list[RolloutSample]:
    """Choose samples, in the order in which they are shown. found: by step.

    best_first: by reward, the highest or the lowest first; None: in the order of the file, of one step.
    An ungraded rollout comes last either way.
    """
    if best_first is None and step is None:
        step = found[-1].step
    chosen = [sample for sample in found if step is None or sample.step == step]
    if best_first is None:
        return chosen
    sign = -1 if best_first else 1
    return sorted(chosen, key=lambda sample: math.inf if sample.reward is None else sign * sample.reward)


def render_sample(sample: RolloutSample) -> Iterator[Text]:
    """Render a sample for a terminal: a header, prompt, completion, and what the verifier says."""
    versions = sorted({sample.oldest_version, sample.newest_version})
    facts = (
        _describe_reward(sample),
        f"policy version {' to '.join(map(str, versions))}",
        f"{sample.tokens} tokens in {sample.seconds:.1f} s",
        f"finish {sample.finish_reason}",
        f"{sample.replica}, {sample.id}",
    )
    yield Text(make_printable(f"step {sample.step}: " + ", ".join(facts)), style="bold")
    yield from _render_text("prompt", sample.prompt)
    yield from _render_text("completion", sample.completion)
    if sample.extracted and sample.extracted != sample.completion:
        yield from _render_text("answer found", sample.extracted)
    reasons = [reason for reason in (sample.reason, sample.error) if reason]
    if reasons:
        yield from _render_text("verdict", "\n".join(dict.fromkeys(reasons)))
    yield Text()


def _describe_reward(sample: RolloutSample) -> str:
    if sample.reward is None:
        return "not graded"
    parts = ", ".join(f"{name} {'-' if value is None else f'{value:g}'}" for name, value in sample.rewards.items())
    # A single reward has no parts worth naming.
    return f"reward {sample.reward:g}" + (f" ({parts})" if len(sample.rewards) > 1 else "")


def _render_text(name: str, text: str) -> Iterator[Text]:
    yield Text(f"  {name}", style="dim")
    for line in text.splitlines() or [""]:
        yield Text(INDENT + make_printable(line))


def _explain_absence(directory: RunDirectory) -> str:
    if load_spec(directory.run_file).telemetry.rollouts == 0:
        return "its telemetry.rollouts is 0, which a new run can change"
    return "they are written when a step's version is served"


def _describe_steps(found: Sequence[RolloutSample]) -> str:
    return f"steps {found[0].step} to {found[-1].step}"
