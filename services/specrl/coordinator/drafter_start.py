"""How a fresh drafter comes to be, once in a run: rollouts, training, acceptance on prompts that were held out.

    prompts -> answers of the policy, each durable when finished -> epochs, kept by the trainer -> checkpoint -> fact

Killed anywhere, it is called again and does what is not yet done: stored answers are not asked for again, finished
epochs are not trained again. The answers lie in the store under step 0, which no step of the run has; the first
trained step clears them away. Called by the loop, before its first step.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

import structlog

from specrl.coordinator.board import DRAFTER_START
from specrl.coordinator.parts import Parts
from specrl.coordinator.report import DrafterStart, Phase
from specrl.coordinator.rollouts import seed_of, side_requests, training_sampling
from specrl.coordinator.store import StoredRollout
from specrl.coordinator.store_link import StoreLink
from specrl.coordinator.trainer_link import TrainerLink
from specrl.records import (
    DrafterMetrics,
    GradedRollout,
    Prompt,
    Reward,
    Rollout,
    RolloutRequest,
    TrainerStatus,
    TrainRollout,
    wire,
)
from specrl.spec import RunSpec
from specrl.telemetry.spans import COORDINATOR, SpanName

DRAFTER_DEADLINE_S = 3600.0
_STEP = 0

Requests = Sequence[tuple[RolloutRequest, Prompt]]
Keep = Callable[[Rollout], Awaitable[None]]
Ask = Callable[[Requests, Keep], Awaitable[object]]

log = structlog.get_logger(__name__)


def is_due(spec: RunSpec, status: TrainerStatus, store: StoreLink) -> bool:
    """Whether the run's drafter is to be initialised, or was and died before the last of it was written down."""
    eagle3 = spec.generation.speculation.eagle3
    if eagle3 is None or eagle3.path is not None:
        return False
    return not status.is_drafter_initialised or (store.trained() == 0 and store.fact(DRAFTER_START) is None)


async def initialise(parts: Parts, link: TrainerLink, ask: Ask) -> DrafterStart:
    """Train the fresh drafter on the policy's answers to the run's own prompts, and measure it.

    The caller makes a checkpoint, and then the report a fact of the run. ask: has requests answered by whoever serves,
    and calls back with each answer.
    """
    with parts.spans.recorder.begin(SpanName.DRAFTER, COORDINATOR):
        return await _initialise(parts, link, ask)


async def _initialise(parts: Parts, link: TrainerLink, ask: Ask) -> DrafterStart:
    requests = _requests(parts)
    parts.board.say(Phase.INITIALISING, "drafter: the policy answers prompts", 0, 3)
    answers = await _answers(parts.store, requests, ask)
    held_out = held_out_prompts(
        [prompt.prompt_id for _, prompt in requests], float(parts.spec.trainer.drafter.initialisation.held_out)
    )
    taught, kept = (
        [
            TrainRollout(prompt.token_ids, answers[request.rollout_id], 0.0)
            for request, prompt in requests
            if (prompt.prompt_id in held_out) is is_held_out
        ]
        for is_held_out in (False, True)
    )
    parts.board.say(Phase.INITIALISING, "drafter: training on the answers", 1, 3)
    count = parts.spec.trainer.drafter.initialisation.epochs
    epochs = await link.call(
        lambda trainer: trainer.client.train_drafter(taught, count, DRAFTER_DEADLINE_S), "training"
    )
    parts.board.say(Phase.INITIALISING, "drafter: acceptance on held-out prompts", 2, 3)
    measured = None
    if kept:
        measured = await link.call(
            lambda trainer: trainer.client.evaluate_drafter(kept, DRAFTER_DEADLINE_S), "training"
        )
    report = _report(len(taught), epochs, len(held_out), measured)
    log.info("drafter_initialised", **report.model_dump())
    return report


def held_out_prompts(prompt_ids: Sequence[str], share: float) -> set[str]:
    """The prompts that acceptance is measured on: the last ones, share of all, rounded up; never the only one left."""
    distinct = list(dict.fromkeys(prompt_ids))
    count = min(math.ceil(share * len(distinct)), len(distinct) - 1)
    return set(distinct[len(distinct) - count :])


def _requests(parts: Parts) -> Requests:
    spec = parts.spec
    plan, seed = spec.trainer.drafter.initialisation, spec.schedule.seed
    return side_requests(
        "drafter",
        [parts.prompts.prompt(position) for position in range(plan.prompts)],
        plan.samples_per_prompt,
        lambda place, sample: training_sampling(spec, seed_of(seed, "drafter", place, sample)),
    )


async def _answers(store: StoreLink, requests: Requests, ask: Ask) -> dict[str, Rollout]:
    """The answer to every request by rollout id, from the store or from the replicas."""
    wanted = {request.rollout_id for request, _ in requests}
    stored = (wire.graded_from_bytes(row.data).rollout for row in await store.rollouts() if row.step == _STEP)
    found = {rollout.rollout_id: rollout for rollout in stored if rollout.rollout_id in wanted}
    places = {request.rollout_id: place for place, (request, _) in enumerate(requests)}

    async def keep(rollout: Rollout) -> None:
        data = wire.graded_to_bytes(GradedRollout(rollout, Reward(None, "not graded")))
        await store.put_rollout(StoredRollout(_STEP, places[rollout.rollout_id], 0, 0, data))
        found[rollout.rollout_id] = rollout

    missing = [(request, prompt) for request, prompt in requests if request.rollout_id not in found]
    log.info("drafter_rollouts_wanted", missing=len(missing), stored=len(found))
    if missing:
        await ask(missing, keep)
    return found


def _report(
    rollouts: int, epochs: Sequence[DrafterMetrics], held_out: int, measured: DrafterMetrics | None
) -> DrafterStart:
    def rounded(metrics: DrafterMetrics) -> list[float]:
        return [round(share, 4) for share in metrics.acceptance_per_position]

    return DrafterStart(
        rollouts=rollouts,
        loss_per_epoch=[round(epoch.loss, 4) for epoch in epochs],
        trained_acceptance=rounded(epochs[-1]),
        trained_acceptance_length=round(epochs[-1].acceptance_length, 3),
        held_out_prompts=held_out,
        held_out_acceptance=rounded(measured) if measured is not None else [],
        held_out_acceptance_length=round(measured.acceptance_length, 3) if measured is not None else None,
    )
