"""What a run is made from: its run file, the problems of its sources, and the files of its own reward functions.

The first start of a run records them in the ledger. Every later start compares: the coordinator always, and the
launcher before any process starts. Invariant: a run goes on only with its run file and its problems. A changed reward
function is accepted, because a run may be resumed to repair it, but it is said and recorded with the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import xxhash
from pydantic import Field

from specrl.errors import RunInvalid
from specrl.formats.reports import ReportModel
from specrl.prompts import SourceIdentity
from specrl.records import Prompt
from specrl.records.run_file import RecordedRun, find_edits, record_run
from specrl.rewards.function_files import digest_function_files
from specrl.spec import RunSpec

CONTINUING_COMMAND = "specrl run RUN/run.yaml --checkpoint RUN/checkpoints/STEP"
MOST_SHOWN = 10
"""Changes named in one message. An edited run file mostly has one."""


class FunctionChange(ReportModel):
    """A start at which files of reward functions or tools were other than at the start before."""

    step: int
    """First step that was not trained yet."""
    files: list[str]


class RunInputs(ReportModel):
    """What a run is made from. A digest tells contents apart; it says nothing about them."""

    run_file: dict[str, Any]
    """All fields that decide what the run computes, with defaults and without nulls."""
    given: dict[str, Any] = Field(default_factory=dict)
    """Fields of `run_file` that differ from their defaults."""
    training: list[SourceIdentity]
    validation: list[SourceIdentity]
    functions: dict[str, str]
    """Digest of each file of the run's own functions, by path."""
    function_changes: list[FunctionChange] = Field(default_factory=list)
    """Changes of these files since the run began."""

    def list_changed_functions(self, before: RunInputs) -> list[str]:
        """List the files of functions that differ, or that only one of the two has."""
        paths = sorted({*self.functions, *before.functions})
        return [path for path in paths if self.functions.get(path) != before.functions.get(path)]


def collect_inputs(spec: RunSpec, training: Sequence[SourceIdentity], validation: Sequence[Prompt]) -> RunInputs:
    """Collect what this start of the run is made from."""
    recorded = record_run(spec)
    return RunInputs(
        run_file=recorded.run_file,
        given=recorded.given,
        training=list(training),
        validation=_identify_validation(validation),
        functions=digest_function_files(spec),
    )


def continue_with(before: RunInputs | None, now: RunInputs, next_step: int) -> RunInputs:
    """Return what to record at a start before `next_step`. before: as recorded; None at the first start.

    Raises RunInvalid with every difference, unless only files of functions differ.
    """
    if before is None:
        return now
    edits = list(_list_edits(before, RecordedRun(now.run_file, now.given)))
    changed = [*_list_other_sources("prompts", before.training, now.training)]
    changed += _list_other_sources("validation", before.validation, now.validation)
    if edits or changed:
        # An edited run file may name other data. Then the data are no fault of their own.
        raise RunInvalid(_describe_edits(edits) if edits else _describe_sources(changed))
    files = now.list_changed_functions(before)
    changes = [*before.function_changes, *([FunctionChange(step=next_step, files=files)] if files else [])]
    return now.model_copy(update={"function_changes": changes})


def compare_inputs(
    before: RunInputs | None,
    spec: RunSpec,
    training: Sequence[SourceIdentity],
    validation: Sequence[Prompt],
    next_step: int,
) -> tuple[RunInputs, str]:
    """Compare what a start of the run is made from with what the run began with.

    Returns what to record, and what a user should know of changed files of functions; empty if none has changed.
    Raises RunInvalid as `continue_with` does.
    """
    now = continue_with(before, collect_inputs(spec, training, validation), next_step)
    files = now.list_changed_functions(before) if before is not None else []
    return now, _describe_function_change(files, next_step) if files else ""


def check_run_file(before: RunInputs | None, spec: RunSpec, command: str) -> None:
    """Raise RunInvalid with every field of the run file that has changed since the run began.

    before: as recorded; None if nothing is. command: goes on in a new run with the edited file.
    """
    edits = list(_list_edits(before, record_run(spec))) if before is not None else []
    if edits:
        raise RunInvalid(_describe_edits(edits, command))


def _describe_function_change(files: Sequence[str], next_step: int) -> str:
    return (
        f"{', '.join(files)} changed since the run was last started: rollouts are graded by the changed code from now "
        f"on, before step {next_step}; those that the run holds keep their rewards"
    )


def _describe_edits(edits: Sequence[str], command: str = CONTINUING_COMMAND) -> str:
    more = f"\n  and {len(edits) - MOST_SHOWN} more" if len(edits) > MOST_SHOWN else ""
    return (
        "run.yaml must be as it was when the run began; restore it, or go on in a new run with the edited file: "
        f"`{command}`. Changed since then:" + "".join(f"\n  {edit}" for edit in edits[:MOST_SHOWN]) + more
    )


def _describe_sources(changed: Sequence[str]) -> str:
    return (
        "the data must be as they were when the run began; restore them, or start a new run with model.path at the "
        "exported policy. Changed since then:" + "".join(f"\n  {it}" for it in changed)
    )


def _list_edits(before: RunInputs, now: RecordedRun) -> Iterator[str]:
    """Yield each changed field with both values."""
    for path, (was, found) in find_edits(RecordedRun(before.run_file, before.given), now).items():
        yield f"{path}: {_quote(found)}, was {_quote(was)}"


def _quote(value: Any) -> str:
    text = "not given" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _list_other_sources(section: str, before: Sequence[SourceIdentity], now: Sequence[SourceIdentity]) -> Iterator[str]:
    """Yield each source whose problems differ. The names are those of the run file, which is compared by itself."""
    known = {source.name: source for source in now}
    for was in before:
        found = known.get(was.name)
        if found is not None and found != was:
            yield f"{section} source {was.name}: {_describe_source(found)}, was {_describe_source(was)}"


def _describe_source(source: SourceIdentity) -> str:
    revision = f" of revision {source.revision}" if source.revision else ""
    rows = f", columns {source.rows[:12]}" if source.rows else ""
    return f"{source.problems} problems{revision} (digest {source.digest[:12]}{rows})"


def _identify_validation(prompts: Sequence[Prompt]) -> list[SourceIdentity]:
    """Identify the validation sources by the prompts that are used of them. Their ids have digests of the content."""
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    return [
        SourceIdentity(name, 1, "", len(found), _digest_values([[it.prompt_id, it.answer, it.row] for it in found]))
        for name, found in by_source.items()
    ]


def _digest_values(values: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values).encode())
