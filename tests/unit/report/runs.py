"""Makes run folders as a coordinator leaves them, for tests of their readers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.run_files import a_run

from specrl.formats.reports import Phase, PhaseSeconds, StatusReport, StepReport, ValidationReport
from specrl.launcher.run_directory import RunDirectory, create_run
from specrl.spec import parse_spec


def a_step(step: int, **changes: Any) -> StepReport:
    """Make the report of a step of ten seconds, four of them exposed, five hidden. Keywords replace fields."""
    numbers = {name: 0 for name, field in StepReport.model_fields.items() if field.is_required()}
    phases = PhaseSeconds(data=0.5, prepare=1.0, generation=4.0, logprob=1.5, train=3.0)
    known: dict[str, Any] = {
        "step": step,
        "policy_version": step,
        "phases": phases,
        "exposed_generation": 4.0,
        "generation_under_way": 8.5,
        "hidden_generation": 5.0,
        "exposed_by_cause": {"bufferWait": 3.0, "syncDrain": 1.0},
        "reward": 0.5,
        "reward_error": 0.1,
        "rollouts": 8,
        "tokens": 80,
        "acceptance_length": 2.0,
        "accepted_per_position": [0.7, 0.3],
        "draft_length": 2.0,
        "policy_lag_max": 1,
        "policy_lag_mean": 0.75,
        "policy_lags": [2, 6],
    }
    return StepReport.model_validate(numbers | known | changes)


def a_folder(
    runs: Path,
    steps: Sequence[StepReport] = (a_step(1), a_step(2)),
    validations: Sequence[ValidationReport] = (),
    phase: Phase | None = Phase.FINISHED,
    **sections: Any,
) -> RunDirectory:
    """Make a run folder below `runs`. sections: replace those of the run file. phase: None writes no status."""
    directory = create_run(runs, parse_spec(a_run(runs, **sections)))
    lines = [report.model_dump_json(by_alias=True) for report in steps]
    directory.metrics_file.write_text("".join(f"{line}\n" for line in lines))
    if validations:
        lines = [report.model_dump_json(by_alias=True) for report in validations]
        directory.validations_file.write_text("".join(f"{line}\n" for line in lines))
    if phase is not None:
        status = StatusReport(run="tiny", phase=phase, step=len(steps), counters={"requeued": 3, "poisoned": 0})
        directory.status_file.write_text(status.model_dump_json(by_alias=True))
    directory.origin_file.write_text(json.dumps({"specrl": "0.1.0", "processor": "Z80"}))
    return directory
