"""`specrl rewards grade`: what is graded, by which verifier, and how it ends."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from specrl.cli.endings import REFUSED_CODE, complain
from specrl.cli.options import RUNS, Overrides, Runs
from specrl.errors import DatasetInvalid, SpecInvalid
from specrl.launcher import run_directory
from specrl.launcher.run_directory import RunDirectory
from specrl.spec import load_spec
from specrl.spec.data import RewardPool, Rewards
from specrl.spec.yaml_input import problem_of
from specrl.telemetry import logs

if TYPE_CHECKING:
    from specrl.cli.rewards.completions import Completions
    from specrl.cli.rewards.grading import Graded
    from specrl.cli.rewards.stored import StoredRollouts

EPILOG = """Example:

\b
  echo '{"reference": "1/2", "completion": "So the answer is 0.5."}' > try.jsonl
  specrl rewards grade --verifier math --completions try.jsonl --jsonl
"""
_MEMBERS = tuple(str(field.alias) for field in Rewards.model_fields.values())
"""Names of the verifiers, as a run file has them."""


def grade(  # noqa: PLR0913, PLR0917 - one argument per option
    completions: Annotated[
        str | None, typer.Option(metavar="FILE", help="Completions to grade, as JSON lines. -: from stdin.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="Grade the rollouts that this run still holds, instead.")
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", min=1, help="With --run: of this step's prompts.")] = None,
    verifier: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Verifier with its default settings: {', '.join(_MEMBERS)}."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="The verifier of this run file, with its settings."),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    answer_after: Annotated[
        str | None, typer.Option(metavar="MARK", help="With --verifier: where the final answer begins.")
    ] = None,
    function: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="With --verifier python: the function.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --function: folder that its module is in.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Processes. Default: the run file's; one a processor with --verifier."),
    ] = None,
    runs: Runs = RUNS,
    is_jsonl: Annotated[bool, typer.Option("--jsonl", help="Print JSON lines, for programs.")] = False,
) -> None:
    """Grade completions as a run would: the same verifier, in the same processes, with the same limits.

    Each line of FILE is an object with `reference` (text, a number or an object) and `completion`. The other keys are
    the row that a Python verifier is given. With --jsonl each line of the output, in the same order, has these other
    keys, `reward` (a number, or null), `extracted` (what the verifier took for the answer, or null), `reason` and
    `seconds` (that the verdict took). Without it there are a table and a summary. Everything else goes to stderr.

    A line that cannot be graded, as one that is no JSON or whose reference a run would refuse, has the reward null and
    the reason, and the others are graded. Exit code 0: every line has a verdict or a reason. 2: nothing can be graded,
    since the verifier does not work here, or no line of FILE is one. 130: interrupted; what was graded is printed.

    With --run, the verifier is the run's own unless --verifier or -f names another one, and the output has step, index,
    sample, prompt, reference, completion and rewardInRun, too. The run may be under way: nothing of it is changed.
    """
    if (completions is None) == (run is None):
        raise typer.BadParameter("give either --completions FILE or --run RUN")
    if step is not None and run is None:
        raise typer.BadParameter("--step N goes with --run RUN")
    if verifier is not None and file is not None:
        raise typer.BadParameter("give either --verifier NAME or -f FILE")
    if verifier is None and (answer_after is not None or function is not None or folder is not None):
        raise typer.BadParameter("--answer-after, --function and --folder go with --verifier NAME")
    if verifier is not None and overrides:
        raise typer.BadParameter("--set changes a run file: it goes with -f FILE or --run RUN")
    directory = run_directory.find(run, runs) if run is not None else None
    run_file = file if file is not None or directory is None else directory.run_file
    if verifier is not None:
        rewards = _settings(verifier, answer_after, function, folder)
        limits = RewardPool(workers=len(os.sched_getaffinity(0)))
    elif run_file is not None:
        spec = load_spec(run_file, overrides)
        rewards, limits = spec.rewards, spec.reward_pool
    else:
        raise typer.BadParameter("name the verifier with --verifier NAME or -f FILE")
    if workers is not None:
        limits = limits.model_copy(update={"workers": workers})
    logs.configure("error", "grade", run or "")  # or structlog writes to stdout
    try:
        _grade(_lines(completions, directory, step), rewards, limits, is_jsonl=is_jsonl)
    except SpecInvalid as error:
        if verifier is None:
            raise
        complain(_words(error))  # which names options, not fields of a run file
        raise typer.Exit(REFUSED_CODE) from error


def _settings(verifier: str, answer_after: str | None, function: str | None, folder: Path | None) -> Rewards:
    """The verifier of this name, with what the options say. Raises typer.BadParameter."""
    if verifier not in _MEMBERS:
        raise typer.BadParameter(f"--verifier must be one of {', '.join(_MEMBERS)}, got {verifier}")
    if (verifier == "python") != (function is not None):
        raise typer.BadParameter("--verifier python and --function MODULE:NAME go together")
    if folder is not None and function is None:
        raise typer.BadParameter("--folder DIR goes with --function MODULE:NAME")
    given: dict[str, Any] = {
        "answerAfter": answer_after,
        "function": function,
        "folder": None if folder is None else str(folder.resolve()),
    }
    settings = {name: value for name, value in given.items() if value is not None}
    try:
        return Rewards.model_validate({verifier: settings})
    except ValidationError as error:
        problems = (problem_of(detail, Rewards, "see docs/run-file.md") for detail in error.errors())
        raise typer.BadParameter("; ".join(map(str, problems))) from error


def _words(error: SpecInvalid) -> str:
    """What is wrong, with options where a run file has fields."""
    return "\n".join(str(problem).replace("rewards.python.", "--") for problem in error.problems)


def _lines(completions: str | None, directory: RunDirectory | None, step: int | None) -> Completions | StoredRollouts:
    if directory is not None:
        from specrl.cli.rewards.stored import stored_rollouts

        return stored_rollouts(directory, step)
    from specrl.cli.rewards.completions import open_completions

    assert completions is not None
    return open_completions(completions)


def _grade(lines: Completions | StoredRollouts, rewards: Rewards, limits: RewardPool, *, is_jsonl: bool) -> None:
    """Grade the lines and show every verdict. Raises typer.Exit when no line could be read as one."""
    from specrl.cli.rewards.grading import grade_lines
    from specrl.cli.rewards.output import Counted, JsonLines, Rows, Tally, own_stdout
    from specrl.rewards import verifier_for

    tally, width = Tally(), Console().width
    with Counted(lines.total) as progress, own_stdout() as out:
        verdicts = JsonLines(out) if is_jsonl else Rows(out, width)

        def show(graded: Graded) -> None:
            verdicts.show(graded)
            tally.add(graded)
            progress.advance()

        asyncio.run(grade_lines(lines, verifier_for(rewards), limits, show))
        verdicts.end(tally)
    if not tally.lines:
        raise DatasetInvalid(f"{lines.name}: must hold at least one line to grade, got none; check the file")
    if tally.failures:
        count = sum(tally.ungraded.values())
        first = f"; the first {len(tally.failures)}" if count > len(tally.failures) else ""
        complain(f"{count} of {tally.lines} lines have no verdict{first}:\n  " + "\n  ".join(tally.failures))
    if not tally.readable:
        raise typer.Exit(REFUSED_CODE)
