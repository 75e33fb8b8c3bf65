"""The best policy version by validation, whose checkpoint is kept with `checkpoint.keepBest`. Pure.

Called by the coordinator after each validation, and by the commands that list and delete checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from specrl.formats.reports import BestVersion, ValidationReport

if TYPE_CHECKING:
    from specrl.spec import RunSpec  # formats read no files, and the spec's loader does


def choose_better(best: BestVersion | None, report: ValidationReport, spec: RunSpec) -> BestVersion | None:
    """Return the better of the best version so far and a newly validated one. Of equal ones the older stays.

    A version counts if it has a checkpoint and the verifier judged any of its answers. None without keepBest.
    """
    version = report.policy_version
    has_checkpoint = version > 0 and (version % spec.checkpoint.every_steps == 0 or version == spec.schedule.steps)
    if not spec.checkpoint.keep_best or not has_checkpoint or not report.is_judged:
        return best
    if best is not None and report.reward <= best.reward:
        return best
    return BestVersion(policy_version=version, reward=report.reward)


def find_best(reports: Iterable[ValidationReport], spec: RunSpec) -> BestVersion | None:
    """Find the best version among all validations of a run, in their order."""
    best: BestVersion | None = None
    for report in reports:
        best = choose_better(best, report, spec)
    return best
