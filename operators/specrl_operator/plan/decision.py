"""Decide how much of a job runs now, and whether its trainer is created, kept or deleted. Pure.

    WAITING -> RUNNING -> ENDED                when the run is complete
               RUNNING -> SAVING -> STOPPED    when the job is suspended or has failed
               STOPPED -> RUNNING              when a suspended job is resumed

`reconcile.py` decides once per reconciliation; `children` and `status` read the decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from specrl_operator import kinds
from specrl_operator.api import COORDINATOR, has_elapsed
from specrl_operator.observed import ObservedState, is_pod_lost
from specrl_operator.plan.acceptance import Refusal, find_refusal
from specrl_operator.plan.job_plan import JobPlan
from specrl_operator.plan.restarts import read_attempt, read_restarts
from specrl_operator.plan.termination import TerminalCondition, find_terminal_condition

TRAINER_EXIT_S = 300
"""Seconds after completionTime that a trainer may take to exit by itself, before it is deleted."""


class DesiredState(StrEnum):
    """The part of a job that should run."""

    WAITING = "coordinator and store, until the ComputeDomain's claim template exists and the sandbox is tried"
    RUNNING = "everything"
    SAVING = "the coordinator is stopped first, so that it can save the run while trainer and replicas still answer"
    STOPPED = "nothing that has pods"
    ENDED = "the coordinator, which serves the finished run's page, and a trainer that exits by itself"

    @property
    def starts_pods(self) -> bool:
        """Whether pods may be started in this state. In the others they are only stopped, which nothing may block."""
        return self in (DesiredState.WAITING, DesiredState.RUNNING)


class TrainerAction(StrEnum):
    """The action on the trainer's JobSet or Job, which is never patched."""

    CREATE = "created if it does not exist"
    KEEP = "kept if it exists, and not created"
    DELETE = "deleted"


@dataclass(frozen=True)
class Decision:
    """The decision about one job at this moment."""

    state: DesiredState
    trainer: TrainerAction
    replicas: int | None
    """Replicas that are asked for; None: not even their workload exists."""
    terminal: TerminalCondition | None = None
    """Complete or Failed; None while the job goes on."""
    refusal: Refusal | None = None
    """Why the cluster cannot run the job; None when it can."""
    changes_children: bool = True
    """False: the job is refused, and its children stay as they are."""


def make_decision(plan: JobPlan, observed: ObservedState, now: datetime) -> Decision:
    """Decide about a job from its plan and its observed children."""
    terminal = find_terminal_condition(plan, observed, now)
    refusal = find_refusal(plan)
    state = choose_state(plan, observed, terminal)
    has_begun = observed.trainer is not None or observed.generation is not None
    # A job that is refused keeps its children, but it must still be possible to end or suspend it.
    return Decision(
        state=state,
        trainer=_choose_trainer_action(plan, observed, state, terminal, now),
        replicas=_choose_replicas(plan, observed, state),
        terminal=terminal,
        refusal=refusal,
        changes_children=refusal is None or terminal is not None or (has_begun and plan.job.spec.suspend),
    )


def choose_state(plan: JobPlan, observed: ObservedState, terminal: TerminalCondition | None) -> DesiredState:
    """Choose how much of the job should run now."""
    if terminal is not None and terminal.type == "Complete":
        return DesiredState.ENDED
    if terminal is not None or plan.job.spec.suspend:
        # The coordinator's pod exits when it has saved the run, within its grace period.
        is_saving = any(not is_pod_lost(pod, observed.moment) for pod in observed.pods_of(COORDINATOR))
        return DesiredState.SAVING if is_saving else DesiredState.STOPPED
    waits = plan.awaits_sandbox or (plan.has_compute_domain and not observed.has_claim_template)
    # A job whose pods already run keeps them if the claim template disappears.
    if waits and not observed.has_requested_parts:
        return DesiredState.WAITING
    return DesiredState.RUNNING


def _choose_replicas(plan: JobPlan, observed: ObservedState, state: DesiredState) -> int | None:
    if state is DesiredState.WAITING:
        return None
    if state is DesiredState.RUNNING:
        return plan.job.spec.generation.replicas
    if state is DesiredState.SAVING:
        # As many as before. A job that was WAITING has none, and must not ask for GPUs when it ends.
        return observed.count_wanted_replicas()
    return 0


def _choose_trainer_action(
    plan: JobPlan, observed: ObservedState, state: DesiredState, terminal: TerminalCondition | None, now: datetime
) -> TrainerAction:
    trainer = observed.trainer
    if state is DesiredState.RUNNING:
        # A Job with an attempt below the counted restarts has failed, and the status counts the failure already. It is
        # deleted now; its deletion triggers the reconciliation that creates the next attempt. JobSet restarts itself.
        is_spent = (
            trainer is not None and kinds.JOB.is_kind_of(trainer) and read_attempt(trainer) < read_restarts(plan.job)
        )
        return TrainerAction.DELETE if is_spent and plan.is_plain_trainer else TrainerAction.CREATE
    if terminal is not None and observed.has_trainer_ended:
        return TrainerAction.KEEP  # its pods hold no GPUs any more, and their logs stay readable
    # While the run is saved, the trainer stays as long as the coordinator, whose grace period may be longer.
    is_over = state is DesiredState.STOPPED or (
        state is DesiredState.ENDED and has_elapsed(plan.job.status.get("completionTime"), TRAINER_EXIT_S, now)
    )
    return TrainerAction.DELETE if is_over else TrainerAction.KEEP
