"""Initialises a new drafter, once per run: samples answers of the policy and trains on them until that gains little.

    prompts -> answers, each stored when finished -> epochs, each saved by the trainer and measured on held-out answers
            -> more answers, if these are what is missing -> checkpoint -> report in the ledger

`drafter_schedule.py` decides what comes next. Restartable: after a crash the loop calls it again. Stored answers are
not sampled again, and finished epochs are not trained again. The answers are stored under step 0, which no training
step has; the first trained step deletes them.

Called by the loop before its first step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from specrl.coordinator.context import RunContext
from specrl.coordinator.ledger import StoredRollout
from specrl.coordinator.ledger.ledger import Ledger
from specrl.coordinator.members.trainer_link import TrainerLink
from specrl.coordinator.rollouts.drafter_conclusion import build_report
from specrl.coordinator.rollouts.drafter_schedule import (
    AnswersGiven,
    AskForAnswers,
    Stop,
    choose_next,
)
from specrl.coordinator.rollouts.sampling import derive_seed, make_training_sampling
from specrl.coordinator.rollouts.side_rollouts import make_side_requests, sample_rollouts
from specrl.drafting.registry import find_kind
from specrl.errors import NothingGraded, PeerUnavailable, RecordInvalid
from specrl.formats.durations import format_duration
from specrl.formats.reports import DrafterInitReport, Phase
from specrl.records import (
    DrafterEpoch,
    DrafterEpochMetrics,
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

DRAFTER_DEADLINE_S = 3600.0
"""Deadline of training one epoch. Only for a trainer that hangs: heartbeats detect a dead one much earlier. A trainer
that has lost its progress repeats all epochs in one call, so their number multiplies it."""

PROGRESS_EVERY_S = 10.0
"""Seconds between two estimates of the time left while answers are sampled: each is a line in plain output."""

_STEP = 0
"""Step under which the answers are stored. Training steps count from 1."""

PromptedRequests = Sequence[tuple[RolloutRequest, Prompt]]

log = structlog.get_logger(__name__)


def is_initialisation_due(spec: RunSpec, status: TrainerStatus, ledger: Ledger) -> bool:
    """Whether the run has a new drafter whose initialisation has not begun, or was not recorded before a crash."""
    kind = find_kind(spec)
    if kind is None or not kind.is_fresh(spec):
        return False
    return not status.is_drafter_initialised or (ledger.last_trained_step == 0 and ledger.facts.drafter_start is None)


@dataclass(frozen=True)
class _Lessons:
    """Answers, as the trainer takes them. given: their numbers."""

    training: list[TrainRollout]
    held_out: list[TrainRollout]
    given: AnswersGiven


async def initialise_drafter(
    context: RunContext, link: TrainerLink, wait_for_replica: Callable[[], Awaitable[None]]
) -> DrafterInitReport:
    """Train the new drafter on the policy's answers to the run's own prompts, and measure its acceptance.

    The caller must then write a checkpoint and record the report in the ledger, in this order.
    wait_for_replica: called when all replicas are lost; returns once another one serves the policy.
    """
    plan = context.spec.trainer.drafter.initialisation
    held_out = select_held_out_prompts(
        [context.prompts.prompt(position).prompt_id for position in range(plan.prompts)], float(plan.held_out)
    )
    answering = _Answering(context, wait_for_replica)
    finished: list[DrafterEpochMetrics] = []
    lessons = await _collect_lessons(answering, plan.prompts, held_out)
    while True:
        trained_s = sum(item.trained.seconds for item in finished)
        decision = choose_next(plan, finished, lessons.given, trained_s + answering.seconds)
        if isinstance(decision, Stop):
            break
        if isinstance(decision, AskForAnswers):
            log.info("drafter_answers_increased", prompts=decision.prompts, rollouts=lessons.given.rollouts)
            lessons = await _collect_lessons(answering, decision.prompts, held_out)
            continue
        context.phase.update(Phase.INITIALISING, *describe_training(finished, decision.epoch, plan.epochs))
        # A trainer that has finished these epochs and more, before this coordinator was started, returns all of them.
        finished = await _train_epochs(link, lessons, [*(item.epoch for item in finished), decision.epoch])
        _log_epoch(finished)
    report = build_report(plan, finished, lessons.given, len(held_out), decision.reason)
    log.info("drafter_initialised", **report.model_dump())
    return report


async def _train_epochs(
    link: TrainerLink, lessons: _Lessons, epochs: Sequence[DrafterEpoch]
) -> list[DrafterEpochMetrics]:
    deadline_s = DRAFTER_DEADLINE_S * len(epochs)
    return await link.call_with_recovery(
        lambda trainer: trainer.client.train_drafter(lessons.training, lessons.held_out, epochs, deadline_s),
        "training",
    )


def _log_epoch(finished: Sequence[DrafterEpochMetrics]) -> None:
    last = finished[-1]
    log.info(
        "drafter_epoch_finished",
        epoch=len(finished),
        rollouts=last.epoch.rollouts,
        loss=round(last.trained.loss, 4),
        acceptance_length=round(last.trained.acceptance_length, 3),
        held_out_length=round(last.held_out.acceptance_length, 3) if last.held_out is not None else None,
        seconds=round(last.trained.seconds, 3),
    )


def describe_training(finished: Sequence[DrafterEpochMetrics], epoch: DrafterEpoch, most: int) -> tuple[str, int, int]:
    """Return what the next epoch is, in words, with the number of epochs that are done and of all on these answers."""
    done = sum(item.epoch.rollouts == epoch.rollouts for item in finished)
    said = f"drafter: epoch {done + 1} of at most {most} on {epoch.rollouts} answers"
    lengths = [item.held_out.acceptance_length for item in finished if item.held_out is not None]
    if lengths:
        said += f", held-out acceptance length {lengths[-1]:.2f}"
    if len(lengths) > 1:
        said += f" ({lengths[-1] - lengths[-2]:+.2f})"
    if finished:
        # Epochs on more answers take longer in proportion.
        per_answer_s = finished[-1].trained.seconds / finished[-1].epoch.rollouts
        said += f", at most {format_duration(per_answer_s * epoch.rollouts * (most - done))} left on these answers"
    return said, done, most


def select_held_out_prompts(prompt_ids: Sequence[str], share: float) -> set[str]:
    """Select the prompts on which acceptance is measured: the last `share` of the distinct ones, rounded up.

    At least one prompt is left for training.
    """
    distinct = list(dict.fromkeys(prompt_ids))
    count = min(math.ceil(share * len(distinct)), len(distinct) - 1)
    return set(distinct[len(distinct) - count :])


async def _collect_lessons(answering: _Answering, prompts: int, held_out: set[str]) -> _Lessons:
    """Sample what is missing of the answers to the first `prompts` prompts. Returns them all.

    Held-out answers are those of the first prompts alone, so that acceptance is measured on the same ones throughout.
    Answers that were given up are left out.
    """
    requests = answering.make_requests(prompts)
    answers = await answering.load_or_sample(requests)
    first = answering.plan.prompts * answering.plan.samples_per_prompt
    # In request order, not in the order of arrival: the training must be repeatable.
    pairs = [
        (prompt.prompt_id in held_out, place < first, TrainRollout(prompt.token_ids, answers[request.rollout_id], 0.0))
        for place, (request, prompt) in enumerate(requests)
        if request.rollout_id in answers
    ]
    training = [rollout for is_held_out, _, rollout in pairs if not is_held_out]  # a drafter needs no advantage
    if not training:
        raise NothingGraded(
            f"the drafter must have a well-formed answer to learn from, got none of {len(requests)}; see "
            "side_rollout_poisoned in the log, then resume"
        )
    measured = [rollout for is_held_out, is_first, rollout in pairs if is_held_out and is_first]
    drafts = sum(max(0, item.rollout.sampled_length - 1) for item in measured)
    return _Lessons(training, measured, AnswersGiven(prompts, len(training), drafts))


class _Answering:
    """Samples and stores the policy's answers. seconds: that this process has waited for them."""

    def __init__(self, context: RunContext, wait_for_replica: Callable[[], Awaitable[None]]) -> None:
        self._context = context
        self._wait_for_replica = wait_for_replica
        self.plan = context.spec.trainer.drafter.initialisation
        self.seconds = 0.0
        self._given_up: set[str] = set()  # rollout ids; they stay left out, since an epoch is on the first N answers

    def make_requests(self, prompts: int) -> PromptedRequests:
        """Make the requests of the first `prompts` prompts. Those of fewer prompts are the first of them."""
        spec = self._context.spec
        seed = spec.schedule.seed
        return make_side_requests(
            "drafter",
            [self._context.prompts.prompt(position) for position in range(prompts)],
            self.plan.samples_per_prompt,
            lambda place, sample: make_training_sampling(spec, derive_seed(seed, "drafter", place, sample)),
        )

    async def load_or_sample(self, requests: PromptedRequests) -> dict[str, Rollout]:
        """Return the answers by rollout id. Missing ones are sampled and stored. The wait for replicas has no limit.

        An answer that is malformed in every attempt is given up, and not returned.
        """
        ledger = self._context.ledger
        wanted = {request.rollout_id: request for request, _ in requests}
        stored = (wire.graded_from_bytes(row.data).rollout for row in await ledger.read_rollouts() if row.step == _STEP)
        found = {
            rollout.rollout_id: rollout
            for rollout in stored
            if rollout.rollout_id in wanted and self._is_well_formed(rollout, wanted[rollout.rollout_id])
        }
        places = {request.rollout_id: place for place, (request, _) in enumerate(requests)}
        progress = AnswerProgress(len(found), len(requests), time.monotonic)
        began = time.monotonic()

        async def store_answer(rollout: Rollout) -> None:
            # The store keeps graded ones.
            data = wire.graded_to_bytes(GradedRollout(rollout, Reward(None, "not graded")))
            await ledger.keep_rollout(StoredRollout(_STEP, places[rollout.rollout_id], 0, 0, data))
            found[rollout.rollout_id] = rollout
            self._context.phase.update(Phase.INITIALISING, progress.describe(len(found)), len(found), len(requests))

        log.info("drafter_rollouts_requested", missing=len(requests) - len(found), stored=len(found))
        self._context.phase.update(Phase.INITIALISING, progress.describe(len(found)), len(found), len(requests))
        while missing := [item for item in requests if item[0].rollout_id not in found.keys() | self._given_up]:
            try:
                ended = await sample_rollouts(self._context, missing, store_answer)
            except PeerUnavailable:
                await self._wait_for_replica()
            else:
                self._given_up |= {item.rollout.rollout_id for item in ended} - found.keys()
        self.seconds += time.monotonic() - began
        return found

    def _is_well_formed(self, stored: Rollout, request: RolloutRequest) -> bool:
        """Whether a stored answer may be trained on. Earlier versions stored answers unchecked."""
        try:
            self._context.check_rollout(stored, len(request.prompt_token_ids), request.sampling.max_tokens)
        except RecordInvalid as error:
            log.warning("stored_answer_refused", rollout=stored.rollout_id, reason=str(error))
            return False
        return True


class AnswerProgress:
    """Says how long the answers will take. stored: answers that were there before this process asked for any."""

    def __init__(self, stored: int, total: int, clock: Callable[[], float]) -> None:
        self._stored = stored
        self._clock = clock
        self._began_at = self._said_at = clock()
        self._text = f"drafter: the policy answers prompts, {total} answers are needed"
        self._total = total

    def describe(self, done: int) -> str:
        """Describe the sampling, with an estimate of the time left that is renewed every PROGRESS_EVERY_S."""
        now = self._clock()
        if done > self._stored and now - self._said_at >= PROGRESS_EVERY_S:
            self._said_at = now
            left_s = (now - self._began_at) / (done - self._stored) * (self._total - done)
            self._text = (
                f"drafter: the policy answers prompts, {done} of {self._total} answers, about "
                f"{format_duration(left_s)} left"
            )
        return self._text
