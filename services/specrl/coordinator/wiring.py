"""Builds the parts of a coordinator and connects them. Called by `main`, by tests and by benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from specrl.coordinator.context import Grader, PromptStream, RunContext
from specrl.coordinator.controls import Controls
from specrl.coordinator.ledger.ledger import Ledger
from specrl.coordinator.ledger.store_link import StoreLink
from specrl.coordinator.loop import Loop
from specrl.coordinator.members.registry import Registry
from specrl.coordinator.members.replica_session import TurnSettings
from specrl.coordinator.phase import RunPhase
from specrl.coordinator.reports import StepTally
from specrl.coordinator.run_events import RunEvents
from specrl.coordinator.run_spans import RunSpans
from specrl.models.policy_config import PolicyConfig
from specrl.records import Prompt
from specrl.spec import RunSpec


def wire_coordinator(  # noqa: PLR0913, PLR0917 - all that a run is wired from
    spec: RunSpec,
    directory: Path,
    store: StoreLink,
    registry: Registry,
    prompts: PromptStream,
    grader: Grader,
    *,
    validation_prompts: Sequence[Prompt] = (),
    turns: TurnSettings | None = None,
    policy: PolicyConfig | None = None,
    spans: RunSpans | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Loop:
    """Build the loop of the run whose state is in this open store. Observers read the loop and its context.

    turns: tool settings; None if rollouts have one turn. policy: what rollouts must fit; not checked if None. spans:
    traces; not recorded if None. clock: measures the steps, in seconds.
    Raises StoreInvalid when the store's content is not that of a run.
    """
    ledger = Ledger(store)
    events = RunEvents()
    context = RunContext(
        spec=spec,
        directory=directory,
        registry=registry,
        ledger=ledger,
        phase=RunPhase(ledger, events),
        tally=StepTally(registry),
        controls=Controls(spec, directory, ledger, events),
        prompts=prompts,
        validation_prompts=validation_prompts,
        grader=grader,
        turns=turns,
        policy=policy,
        events=events,
        spans=spans or RunSpans(),
    )
    return Loop(context, clock)
