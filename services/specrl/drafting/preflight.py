"""Checks that the drafter of a run fits the policy. Called by preflight, and by a replica at its start."""

from __future__ import annotations

from specrl.drafting.registry import find_kind
from specrl.errors import SpecProblem
from specrl.models import RunModels
from specrl.spec import RunSpec


def check(spec: RunSpec, models: RunModels) -> list[SpecProblem]:
    """Report what keeps the run's drafter from fitting its policy; see `DrafterKind.check`."""
    kind = find_kind(spec)
    if kind is None or models.policy is None:
        return []
    return kind.check(spec, models)
