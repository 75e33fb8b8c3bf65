"""`specrl rewards grade`: chooses the completions and the verifier, and reports the result.

The imports of pools and verifiers are local, so that `specrl --help` stays fast.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from rich.console import Console

from specrl.cli.command_exit import REFUSED_CODE, print_error
from specrl.cli.options import RUNS, Overrides, Runs
from specrl.errors import DatasetInvalid, SpecInvalid
from specrl.launcher import run_directory
from specrl.launcher.run_directory import RunDirectory
from specrl.spec import load_spec
from specrl.spec.base import find_section
from specrl.spec.data import RewardPool, Rewards
from specrl.spec.yaml_input import convert_error
from specrl.telemetry import logs

if TYPE_CHECKING:
    from specrl.cli.rewards.completions import Completions
    from specrl.cli.rewards.grading import GradedLine

EPILOG = """Example:

\b
  echo '{"reference": "1/2", "completion": "So the answer is 0.5."}' > try.jsonl
  specrl rewards grade --verifier math --completions try.jsonl --jsonl
"""


def _has_defaults(field: FieldInfo) -> bool:
    section = find_section(field)
    return section is not None and not any(inner.is_required() for inner in section.model_fields.values())


# Names of the verifiers, as in a run file, that can be used with default settings, and `python` with its options.
_MEMBERS = tuple(
    str(field.alias) for name, field in Rewards.model_fields.items() if _has_defaults(field) or name == "python"
)


def grade_completions(  # noqa: PLR0913, PLR0917 - one argument per option
    completions: Annotated[
        str | None, typer.Option(metavar="FILE", help="Completions to grade, as JSON lines; - reads stdin.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="Instead, grade the rollouts that this run still holds.")
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", min=1, help="With --run: only this step's rollouts.")] = None,
    verifier: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Verifier with its default settings: {', '.join(_MEMBERS)}."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Use the verifier of this run file, with its settings."),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    answer_after: Annotated[
        str | None, typer.Option(metavar="MARK", help="With --verifier: text before the final answer.")
    ] = None,
    function: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="With --verifier python: the function.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --function: folder that contains its module.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Processes. Default: the run file's; with --verifier, one per core."),
    ] = None,
    runs: Runs = RUNS,
    is_jsonl: Annotated[bool, typer.Option("--jsonl", help="Print JSON lines, for programs.")] = False,
) -> None:
    """Grade completions like a run: with the same verifier, in the same processes, with the same limits.

    Each line of FILE is an object with `reference` (text, a number or an object) and `completion`. The other keys form
    the row that a Python verifier receives. With --jsonl, each line of the output has these other keys and four more:
    `reward` (a number, or null), `extracted` (the answer that the verifier found, or null), `reason`, and `seconds`
    (the time that the verdict took). The order is that of FILE. Without --jsonl, it prints a table and a summary.
    Everything else goes to stderr.

    A line that cannot be graded has the reward null and a reason; the others are graded. Examples are a line that is
    not JSON, or a reference that a run would refuse. Exit code 0: every line has a verdict or a reason. 2: nothing can
    be graded, because the verifier does not work here or FILE has no valid line. 130: interrupted; the verdicts so far
    are printed.

    With --run, the verifier is the run's own unless --verifier or -f names another. The output then also has step,
    index, sample, prompt, reference, completion and rewardInRun. The run may be active; nothing of it changes.
    """
    if (completions is None) == (run is None):
        raise typer.BadParameter("give either --completions FILE or --run RUN")
    if step is not None and run is None:
        raise typer.BadParameter("--step N needs --run RUN")
    if verifier is not None and file is not None:
        raise typer.BadParameter("give either --verifier NAME or -f FILE")
    if verifier is None and (answer_after is not None or function is not None or folder is not None):
        raise typer.BadParameter("--answer-after, --function and --folder need --verifier NAME")
    if verifier is not None and overrides:
        raise typer.BadParameter("--set overrides a run file: it needs -f FILE or --run RUN")
    directory = run_directory.find_run(run, runs) if run is not None else None
    run_file = file if file is not None or directory is None else directory.run_file
    if verifier is not None:
        rewards = _build_rewards(verifier, answer_after, function, folder)
        # The cores that this process may use, which in a container can be fewer than the machine has.
        limits = RewardPool(workers=len(os.sched_getaffinity(0)))
    elif run_file is not None:
        spec = load_spec(run_file, overrides)
        rewards = spec.rewards
        limits = spec.reward_pool
    else:
        raise typer.BadParameter("name the verifier with --verifier NAME or -f FILE")
    if workers is not None:
        limits = limits.model_copy(update={"workers": workers})
    logs.configure_logging("error", "grade", run or "")  # by default structlog writes to stdout, which is for verdicts
    try:
        _grade_and_show(_open_completions(completions, directory, step), rewards, limits, is_jsonl=is_jsonl)
    except SpecInvalid as error:
        if verifier is None:
            raise
        print_error(_name_options(error))  # the user gave options, not fields of a run file
        raise typer.Exit(REFUSED_CODE) from error


def _build_rewards(verifier: str, answer_after: str | None, function: str | None, folder: Path | None) -> Rewards:
    """Build the verifier's settings from the options. Raises typer.BadParameter."""
    if verifier not in _MEMBERS:
        raise typer.BadParameter(f"--verifier must be one of {', '.join(_MEMBERS)}, got {verifier}")
    if (verifier == "python") != (function is not None):
        raise typer.BadParameter("--verifier python and --function MODULE:NAME need each other")
    if folder is not None and function is None:
        raise typer.BadParameter("--folder DIR needs --function MODULE:NAME")
    given: dict[str, Any] = {
        "answerAfter": answer_after,
        "function": function,
        "folder": None if folder is None else str(folder.resolve()),
    }
    settings = {name: value for name, value in given.items() if value is not None}
    try:
        return Rewards.model_validate({verifier: settings})
    except ValidationError as error:
        problems = (convert_error(detail, Rewards, "see docs/run-file.md") for detail in error.errors())
        raise typer.BadParameter("; ".join(map(str, problems))) from error


def _name_options(error: SpecInvalid) -> str:
    """Return the problems with the names of options in place of fields of a run file."""
    return "\n".join(str(problem).replace("rewards.python.", "--") for problem in error.problems)


def _open_completions(completions: str | None, directory: RunDirectory | None, step: int | None) -> Completions:
    if directory is not None:
        from specrl.cli.rewards.stored import load_stored_rollouts

        return load_stored_rollouts(directory, step)
    from specrl.cli.rewards.completions import open_completions

    assert completions is not None
    return open_completions(completions)


def _grade_and_show(completions: Completions, rewards: Rewards, limits: RewardPool, *, is_jsonl: bool) -> None:
    """Grade the lines and show every verdict.

    Raises DatasetInvalid when there are no lines, and typer.Exit when none of them could be read.
    """
    from specrl.cli.rewards.grading import grade_lines
    from specrl.cli.rewards.output import JsonVerdicts, VerdictTable, VerdictTally, reserve_stdout, show_progress
    from specrl.rewards.choice import verifiers_for

    tally = VerdictTally()
    width = Console().width  # before stdout is reserved, while it still shows whether it is a terminal
    with show_progress(completions.line_count) as count_line, reserve_stdout() as out:
        verdicts = JsonVerdicts(out) if is_jsonl else VerdictTable(out, width)

        def show_verdict(graded: GradedLine) -> None:
            verdicts.show_verdict(graded)
            tally.add(graded)
            count_line()

        asyncio.run(grade_lines(completions.lines, verifiers_for(rewards), limits, show_verdict))
        if isinstance(verdicts, VerdictTable):
            verdicts.show_summary(tally)
    if not tally.lines:
        name = completions.display_name
        raise DatasetInvalid(f"{name}: must hold at least one line to grade, got none; check the file")
    if tally.failures:
        count = sum(tally.ungraded.values())
        first = f"; the first {len(tally.failures)}" if count > len(tally.failures) else ""
        print_error(f"{count} of {tally.lines} lines have no verdict{first}:\n  " + "\n  ".join(tally.failures))
    # The exit code tells a program that it has passed the wrong file.
    if not tally.readable:
        raise typer.Exit(REFUSED_CODE)
