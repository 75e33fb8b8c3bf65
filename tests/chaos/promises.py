"""The promises that every finished run must have kept, checked against its store, reports and trained batches.

Each check returns violations in words; none means that the promise was kept.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.coordinator.ledger import open_store_reader
from specrl.coordinator.ledger.ledger import DurableFacts
from specrl.coordinator.schedule.scheduler import ScheduleShape
from specrl.records import Batch, wire
from specrl.spec import RunSpec, load_spec


@dataclass(frozen=True)
class Evidence:
    """The results of one finished run.

    trained: every batch that the trainer started to train, replays included. failed: reasons by group id.
    """

    spec: RunSpec
    trained: Sequence[Batch]
    failed: Mapping[str, str]
    reports: Sequence[Mapping[str, Any]]
    lines: Sequence[Mapping[str, Any]]
    status: Mapping[str, Any]


def evidence(directory: Path, ledger: Path) -> Evidence:
    """Read the results of the run in `folder`. Its store must be reachable."""
    spec = load_spec(directory / "run.yaml")
    with closing(open_store_reader(spec, directory)) as store:
        reports = store.read_reports()
        failed = DurableFacts.model_validate(store.read_facts()).collect_failed_prompts(reports)
    return Evidence(
        spec=spec,
        trained=[wire.batch_from_bytes(file.read_bytes()) for file in sorted(ledger.glob("[0-9]*.pb"))],
        failed=failed,
        reports=reports,
        lines=[json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()],
        status=json.loads((directory / "status.json").read_text()),
    )


def violations(found: Evidence) -> list[str]:
    """Return every broken promise, in words."""
    return [*replays(found), *every_prompt_once(found), *lags(found), *discards(found), *steps_reported(found)]


def replays(found: Evidence) -> list[str]:
    """A step that was trained again after a crash was trained on the same bytes."""
    contents: dict[int, set[bytes]] = {}
    for batch in found.trained:
        contents.setdefault(batch.step, set()).add(wire.batch_to_bytes(batch))
    return [
        f"step {step} was trained on {len(ways)} different batches" for step, ways in contents.items() if len(ways) > 1
    ]


def every_prompt_once(found: Evidence) -> list[str]:
    """Each position is settled by one step: trained with its whole group, or failed with a reason."""
    schedule = found.spec.schedule
    shape = ScheduleShape(schedule.steps, schedule.prompts_per_step, schedule.group_size, schedule.max_policy_lag)
    batches = {batch.step: batch for batch in found.trained}.values()
    settled = Counter(position for batch in batches for position in batch.positions)
    wanted = range(schedule.steps * schedule.prompts_per_step)
    wrong = [f"prompt {place} was settled {settled[place]} times" for place in wanted if settled[place] != 1]
    wrong += [f"prompt {place} is none of this run's" for place in settled if place not in wanted]
    rollouts = [item.rollout for batch in batches for item in batch.rollouts]
    samples = Counter((rollout.group_id, rollout.sample_index) for rollout in rollouts)
    wrong += [f"rollout {name} was trained {times} times" for name, times in samples.items() if times > 1]
    groups = Counter(group for group, _ in samples)
    for place in wanted:
        group = shape.group_id_at(place)
        complete = groups[group] == schedule.group_size
        reason = found.failed.get(group)
        if not (complete and reason is None) and not (groups[group] == 0 and reason):
            wrong.append(
                f"{group} must be trained whole or failed with a reason, got {groups[group]} rollouts and {reason!r}"
            )
    return wrong


def lags(found: Evidence) -> list[str]:
    """The oldest token of every trained rollout is within the lag bound, and the reports agree."""
    bound = found.spec.schedule.max_policy_lag
    wrong = [
        f"{item.rollout.rollout_id} was trained at step {batch.step} with lag {lag}, the bound is {bound}"
        for batch in found.trained
        for item, lag in zip(batch.rollouts, batch.policy_lags, strict=True)
        if not 0 <= lag <= bound
    ]
    largest = {batch.step: max(batch.policy_lags, default=0) for batch in found.trained}
    return wrong + [
        f"the report of step {report['step']} says lag {report['policyLagMax']}, its batch {largest[report['step']]}"
        for report in found.reports
        if largest.get(report["step"], 0) != report["policyLagMax"]
    ]


def discards(found: Evidence) -> list[str]:
    """Every graded rollout was trained, left out with its group, or belongs to a failed prompt."""
    count = found.status["summary"]["unaccountedRollouts"]
    return [f"{count} graded rollouts are unaccounted for"] if count else []


def steps_reported(found: Evidence) -> list[str]:
    """Every step is reported once, in order, in the store and in metrics.jsonl, with its weights verified."""
    wanted = list(range(1, found.spec.schedule.steps + 1))
    wrong = []
    for place, rows in (("the store", found.reports), ("metrics.jsonl", found.lines)):
        steps = [row["step"] for row in rows]
        if steps != wanted:
            wrong.append(f"{place} must report steps 1 to {wanted[-1]} once each, got {steps}")
    return wrong
