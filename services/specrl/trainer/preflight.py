"""The trainer's preflight checks: can it train what the run file asks for? Without torch, before anything starts.

Called by the launcher's preflight.
"""

from __future__ import annotations

from specrl.errors import SpecProblem, collect_problems
from specrl.models import RunModels
from specrl.models.policy_config import check_reference
from specrl.spec import RunSpec
from specrl.spec.trainer import Routing
from specrl.trainer.checkpointing import mirror
from specrl.trainer.layout import find_layout_problems


def check(spec: RunSpec, models: RunModels) -> list[SpecProblem]:
    """Check the parallel layout, the reference, routing and the checkpoint mirror.

    Returns every problem that was found.
    """
    problems: list[SpecProblem] = []
    if models.policy is not None:
        with collect_problems(problems):
            config = models.policy.policy_config
            problems += find_layout_problems(spec.trainer.parallelism, config)
            if spec.trainer.routing is Routing.REPLAY and config.experts is None:
                rule = "must be Anew, since the model's layers have no experts, got Replay"
                problems.append(SpecProblem("trainer.routing", rule, "omit it"))
    if models.reference is not None:
        with collect_problems(problems):
            reference = models.reference.policy_config
            problems += find_layout_problems(spec.trainer.parallelism, reference, "the reference's")
            if models.policy_config is not None:
                check_reference(reference, models.policy_config)
    with collect_problems(problems):
        mirror.open_mirror(spec)  # raises if the library of its file system is not installed
    return problems
