"""TrainerBackend on Megatron-Core: tensor and data parallel ranks, Gloo on CPUs, NCCL on CUDA.

One step: `logprob` recomputes the proximal log-probabilities; `train` runs forward and backward again with gradient,
and keeps the hidden states of what the drafter learns from; then both optimizers step, the drafter's once for each part
of that. The same batches and seed give the same weights, bit for bit, on the same number of ranks and threads.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch._C._distributed_c10d import TCPStore

from specrl.batching import batch_advantages
from specrl.drafting import budget
from specrl.drafting.budget import Lesson
from specrl.drafting.criteria import Criterion
from specrl.drafting.head import Eagle3Head, head_config, load_head, save_head
from specrl.drafting.online import DrafterTrainer, PolicyEnds, metrics_of
from specrl.drafting.packing import HeadBatch
from specrl.drafting.policy_config import PolicyConfig, read_policy_config, read_reference_config
from specrl.errors import (
    CheckpointInvalid,
    MemoryTooSmall,
    RecordInvalid,
    SpecrlError,
    StoreFailed,
    TrainerFailed,
    VersionConflict,
)
from specrl.machine import available_memory_bytes
from specrl.records import (
    NO_DRAFTER,
    Batch,
    DrafterMetrics,
    StreamPlace,
    TensorMeta,
    TrainerStatus,
    TrainMetrics,
    TrainRollout,
    WeightChecksums,
    WeightGroup,
    WeightManifest,
    WeightOwner,
)
from specrl.records.rollout import FloatArray
from specrl.spec import RunSpec
from specrl.spec.generation import DraftSampling
from specrl.spec.trainer import KlPlace, Routing
from specrl.trainer import hf_folder, losses, micro_batches
from specrl.trainer.backend import SupervisedMetrics
from specrl.trainer.layout import shares
from specrl.trainer.learning_rate import learning_rate
from specrl.trainer.megatron_backend import checkpoint, cpu_shim, groups, hf_weights, initialisation
from specrl.trainer.megatron_backend.groups import Groups
from specrl.trainer.megatron_backend.model import check_layout
from specrl.trainer.megatron_backend.policy import Policy
from specrl.trainer.megatron_backend.tensors import MicroBatch, micro_batch, padded
from specrl.trainer.megatron_backend.turns import turn_lengths, turns_of
from specrl.weights import files, stream
from specrl.weights import group as weight_group

cpu_shim.install()

T = TypeVar("T")
Taught = list[tuple[list[Lesson], HeadBatch]]
"""Lessons that this rank has, a micro-batch's together, with the hidden states that its forward pass left behind."""

# Weights and float32 gradients at every data parallel rank; of masters and both moments, in float32, each has a part.
REPLICATED_BYTES, OPTIMIZER_BYTES = 6, 12
FROZEN_BYTES = 8  # with low-rank updates: each weight as it is, and as it is computed with, at most in float32


class MegatronBackend:
    """See `trainer/backend.py` for what each method promises. All are collectives."""

    def __init__(self, spec: RunSpec) -> None:
        torch.set_num_threads(spec.trainer.threads)
        self.spec = spec
        self.config: PolicyConfig = read_policy_config(Path(spec.model.path))
        check_layout(self.config, spec.trainer.parallelism)
        self.dtype: torch.dtype = getattr(torch, spec.model.dtype.value)
        self.temperature = float(spec.generation.sampling.temperature)
        self.groups: Groups = groups.join(spec.trainer.parallelism, spec.schedule.seed)
        self._saver = checkpoint.Saver(self.groups)
        self._weight_store: TCPStore | None = None
        self._weight_group: WeightGroup | None = None
        self._joined: weight_group.BroadcastGroup | None = None
        self._step, self._is_drafter_initialised = 0, False
        self._checkpoint: tuple[int, StreamPlace | None] = (0, None)
        self._updates, self._skipped_in_a_row = 0, 0

    # -- state --------------------------------------------------------------------------------------------------------

    def load(self, checkpoint_path: Path | None) -> None:
        self._check_memory()
        self.policy = Policy(self.config, self.spec.trainer, self.dtype, self.groups, self.spec.schedule.seed)
        self.drafter: DrafterTrainer | None = None
        # Also with a checkpoint to come: the optimizer's master copies are made of weights that exist.
        self.policy.load_folder()
        self._load_reference()
        eagle3 = self.spec.generation.speculation.eagle3
        if eagle3 is not None:
            self._start_drafter()
        if checkpoint_path is not None:
            state = checkpoint.load(checkpoint_path, self.policy, self.drafter, self.groups)
            self._step, self._checkpoint = state.step, (state.step, state.stream)
            self._is_drafter_initialised = state.is_drafter_initialised
            self._updates, self._skipped_in_a_row = state.updates, state.skipped_in_a_row

    def _load_reference(self) -> None:
        """A frozen policy that the divergence is measured from. It is no part of checkpoints: its folder stays."""
        self.reference: Policy | None = None
        kl = self.spec.trainer.loss.reference_kl
        if kl is None:
            return
        config = read_reference_config(Path(kl.path or self.spec.model.path), self.config)
        frozen = self.spec.trainer.model_copy(update={"lora": None, "routing": Routing.ANEW})
        self.reference = Policy(config, frozen, self.dtype, self.groups, self.spec.schedule.seed)
        self.reference.freeze_folder()

    def _start_drafter(self) -> None:
        eagle3 = self.spec.generation.speculation.eagle3
        assert eagle3 is not None
        if eagle3.path is not None:
            head = load_head(Path(eagle3.path), self.config)
        else:
            head = Eagle3Head(head_config(self.config, eagle3))
            head.initialise(self.spec.schedule.seed)
            ends = self.policy.ends()
            head.start_from_policy(ends.norm_H, ends.lm_head_VH)
        self._is_drafter_initialised = eagle3.path is not None
        settings = self.spec.trainer.drafter
        self.drafter = DrafterTrainer(
            head.to(self.groups.device),
            float(settings.learning_rate),
            float(settings.clip_norm),
            settings.passes,
            Criterion(settings.loss, self.temperature, eagle3.draft_sampling is DraftSampling.PROBABILISTIC),
        )
        self.policy.schedule.capture(head.config.aux_layers)

    def _check_memory(self) -> None:
        """Raise MemoryTooSmall when weights, gradients and optimizer alone do not fit; activations come on top."""
        reference = self.dtype.itemsize if self.spec.trainer.loss.reference_kl is not None else 0
        needed = 0.0
        weights, of_experts = self.config.num_parameters, self.config.num_expert_parameters
        for mine, shared_by in shares(self.spec.trainer.parallelism, weights, of_experts):
            trained = REPLICATED_BYTES + OPTIMIZER_BYTES / shared_by
            needed += mine * ((trained if self.spec.trainer.lora is None else FROZEN_BYTES) + reference)
        if self.groups.device.type == "cuda":
            free, place = torch.cuda.mem_get_info()[0], "GPU"
        else:
            free, place = available_memory_bytes(), "machine"
        if needed > free:
            raise MemoryTooSmall(
                f"the trainer must hold {needed / 2**30:.1f} GiB of weights and optimizer state a rank, got "
                f"{free / 2**30:.1f} GiB free on this {place}; use a smaller model, or more "
                "trainer.parallelism.tensor, pipeline or, of a mixture, expert"
            )

    def status(self) -> TrainerStatus:
        world_size, (step, stream) = self.groups.world_size, self._checkpoint
        return TrainerStatus(self._step, step, self._is_drafter_initialised, world_size, stream)

    def save(self, directory: Path, stream: StreamPlace | None = None) -> Future[None]:
        state = checkpoint.State(
            self._step,
            self._is_drafter_initialised,
            self.drafter is not None,
            self._updates,
            self._skipped_in_a_row,
            stream,
        )
        writing = self._saver.save(directory, self.policy, self.drafter, state)

        def note(written: Future[None]) -> None:
            if written.exception() is None:
                self._checkpoint = state.step, stream

        writing.add_done_callback(note)
        return writing

    def close(self) -> None:
        self._saver.close()
        self._close_weight_group()
        groups.leave()

    # -- training -----------------------------------------------------------------------------------------------------

    def _check_step(self, step: int) -> None:
        if step != self._step + 1:
            raise VersionConflict(
                f"the trained step must be {self._step + 1}, got step={step}; ask the status and replay"
            )

    def train_supervised(self, batch: Batch) -> SupervisedMetrics:
        self._check_step(batch.step)
        self._check(batch.rollouts)
        started = time.perf_counter()
        cuts = self._micro_batches(batch.rollouts)
        tokens = sum(item.rollout.sampled_length for item in batch.rollouts)
        nats = torch.zeros((), dtype=torch.float64, device=self.groups.device)

        def loss(number: int, logits_LW: torch.Tensor) -> torch.Tensor:
            found = -self.policy.logprobs(logits_LW, cuts[number]).sum()
            nats.add_(found.detach())
            return found / tokens

        self.policy.zero_gradients()
        self.policy.passes(cuts, loss, temperature=1.0, is_training=True)
        rate = self._learning_rate(batch.step)
        norm = self.policy.step(rate)
        self._count_updates(batch.step, 0 if norm is None else 1, is_skipped=norm is None)
        self._step = batch.step
        (total,) = self._over_data([float(nats)])
        seconds = time.perf_counter() - started
        if norm is None:
            return SupervisedMetrics(0.0, 0.0, rate, tokens, seconds, is_skipped=True)
        return SupervisedMetrics(total / tokens, norm, rate, tokens, seconds)

    def train_step(self, batch: Batch) -> TrainMetrics:
        self._check_step(batch.step)
        if not batch.rollouts:
            self._step = batch.step
            return TrainMetrics.of_nothing(self._learning_rate(batch.step))
        self._check(batch.rollouts)
        self._check_experts(batch.rollouts)
        started = time.perf_counter()
        cuts = self._micro_batches(batch.rollouts)
        proximal, entropy_sum = self._proximal(cuts)
        reference = self._reference_logprobs(cuts)
        cuts = self._charged(batch, cuts, proximal, reference)
        logprob_s = time.perf_counter() - started

        started = time.perf_counter()
        tokens = sum(item.rollout.sampled_length for item in batch.rollouts)
        drafter = self.drafter if self.spec.trainer.drafter.online else None
        lessons = self._lessons(drafter, batch) if drafter is not None else []
        ends = self.policy.ends() if drafter is not None else None  # of the version that gives the hidden states
        longest = self.spec.generation.sampling.max_tokens
        policy_loss = losses.PolicyLoss(self.spec.trainer.loss, longest, tokens, len(batch.rollouts))

        def loss(number: int, logits_LW: torch.Tensor) -> losses.LossTerms:
            cut = cuts[number]
            sampled = losses.SampledTokens(
                proximal_T=proximal[number],
                sampler_T=cut.sampler_T,
                advantage_T=cut.advantage_T,
                sequences=losses.Sequences(cut.sequence_T, len(cut.indices)),
                reference_T=reference[number] if reference else None,
            )
            return policy_loss(self.policy.logprobs(logits_LW, cut), sampled)

        norms, found, taught = self._updates_of_step(batch.step, cuts, loss, lessons)
        drafter_metrics = None
        if drafter is not None and ends is not None:
            drafter_metrics = self._adapt(drafter, ends, lessons, taught)
        self._step = batch.step
        train_s = time.perf_counter() - started

        mismatch = [  # at the last stage
            losses.sampler_mismatch(p, cut.sampler_T, cut.is_current_T) for cut, p in zip(cuts, proximal, strict=False)
        ]
        difference, kl, compared, entropy = self._over_data(
            [
                sum(float(item.abs_sum) for item in mismatch),
                sum(float(item.kl_sum) for item in mismatch),
                sum(float(item.tokens) for item in mismatch),
                entropy_sum,
            ]
        )
        worst = self._over_data([max((float(item.abs_max) for item in mismatch), default=0.0)], dist.ReduceOp.MAX)[0]
        seen = max(1, len(norms)) * tokens  # each update sees every token
        return TrainMetrics(
            loss=found["loss"] / max(1, len(norms)),
            grad_norm=norms[0] if norms else 0.0,
            learning_rate=self._learning_rate(batch.step),
            tokens=tokens,
            logprob_seconds=logprob_s,
            train_seconds=train_s,
            mismatch_mean_abs=difference / max(1, compared),
            mismatch_max_abs=worst,
            mismatch_kl=kl / max(1, compared),
            mismatch_tokens=int(compared),
            importance_weight_mean=found["weight"] / seen,
            clip_fraction=found["clipped"] / seen,
            entropy=entropy / tokens,
            effective_sample_size=losses.effective_sample_size(found["weight"], found["weight_square"], seen),
            drafter=drafter_metrics,
            clip_fraction_high=found["clipped_high"] / seen,
            importance_capped_fraction=found["bounded"] / seen,
            masked_fraction=found["masked"] / seen,
            reference_kl=found["reference_kl"] / seen,
            updates=len(norms),
            is_skipped=self._skipped_in_a_row > 0,
        ).with_zeros_for_non_finite()

    def _learning_rate(self, step: int) -> float:
        return learning_rate(self.spec.trainer.optimizer, step, self.spec.schedule.steps)

    def _updates_of_step(
        self,
        step: int,
        cuts: Sequence[MicroBatch],
        loss: Callable[[int, torch.Tensor], losses.LossTerms],
        lessons: Sequence[Lesson],
    ) -> tuple[list[float], dict[str, float], Taught]:
        """Make the step's updates of the policy, until one has gradients that are not finite, at all ranks alike.

        Returns the gradient's norm at each update that was made; their `losses.SUMS`, added up over ranks; and what the
        first passes left behind for the lessons. Raises TrainerFailed after too many steps in a row that were skipped.
        """
        settings, norms = self.spec.trainer.optimizer, list[float]()
        taught: Taught = []
        sums_N = torch.zeros(len(losses.SUMS), dtype=torch.float64, device=self.groups.device)
        is_skipped = False
        while len(norms) < settings.updates_per_step and not is_skipped:
            found_N, kept = self._gradients(cuts, loss, [] if norms else lessons)
            taught += kept
            norm = self.policy.step(self._learning_rate(step))
            is_skipped = norm is None
            if norm is not None:
                norms.append(norm)
                sums_N += found_N
        self._count_updates(step, len(norms), is_skipped=is_skipped)
        return norms, dict(zip(losses.SUMS, self._over_data(sums_N.tolist()), strict=True)), taught

    def _count_updates(self, step: int, updates: int, *, is_skipped: bool) -> None:
        """Of a step. Raises TrainerFailed when it is one too many in a row whose gradients are not finite."""
        most = self.spec.trainer.optimizer.max_skipped_steps
        if is_skipped and self._skipped_in_a_row >= most:
            raise TrainerFailed(
                f"gradients of step {step} must be finite, got NaN or infinity, for the {self._skipped_in_a_row + 1}. "
                f"step in a row with trainer.optimizer.maxSkippedSteps={most}; lower learningRate, or look for what "
                "the batch holds"
            )
        self._updates += updates
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_skipped else 0

    def _check(self, rollouts: Sequence[TrainRollout]) -> None:
        """Refuse what the forward pass would fail on, at all ranks alike."""
        if not rollouts:
            raise RecordInvalid("a batch must hold rollouts, got none; send the groups of its step")
        for item in rollouts:
            item.check(self.config.max_length, self.config.vocab_size)
            item.check_experts(self._shape_of_experts())

    def _shape_of_experts(self) -> tuple[int, int, int]:
        """Layers, experts of a token, and experts there are; zeros without."""
        experts = self.config.experts
        return (self.config.num_layers, experts.per_token, experts.count) if experts is not None else (0, 0, 0)

    def _check_experts(self, rollouts: Sequence[TrainRollout]) -> None:
        """Refuse rollouts that do not say what is to be replayed. Nobody sampled what is not trained by its rewards."""
        missing = [item.rollout.rollout_id for item in rollouts if item.rollout.experts_SLK is None]
        if missing and self.spec.trainer.routing is Routing.REPLAY:
            raise RecordInvalid(
                f"rollouts must hold the experts that the sampler chose, with trainer.routing Replay, got {missing[0]} "
                "without; use replicas of the same run"
            )

    def _micro_batches(self, rollouts: Sequence[TrainRollout]) -> list[MicroBatch]:
        """This rank's share of a batch, in forward passes."""
        context = self.groups.context.size
        lengths = [padded(len(item.prompt_token_ids) + item.rollout.length, context) for item in rollouts]
        trainer, groups = self.spec.trainer, self.groups
        # The interleaved schedule goes round the pipeline with as many micro-batches as it has ranks.
        together = groups.pipeline.size if trainer.parallelism.virtual_stages > 1 else 1
        room = trainer.micro_batch_tokens * context
        cuts = micro_batches.cut(lengths, groups.data_size, room, together)[groups.data_rank]
        multiple = math.lcm(padded(1, context), groups.tensor.size * context)
        sizes = micro_batches.sizes(cuts, lengths, multiple, is_even=groups.pipeline.size > 1)
        return [
            micro_batch(rollouts, indices, self._step, groups, tokens)
            for indices, tokens in zip(cuts, sizes, strict=True)
        ]

    def _proximal(self, cuts: Sequence[MicroBatch]) -> tuple[list[torch.Tensor], float]:
        """Log-probabilities [T] of every micro-batch under the present policy, and the sum of entropies.

        Both at the last stage; nothing, and 0, elsewhere.
        """
        found, entropies = [], []

        def keep(number: int, logits_LW: torch.Tensor) -> None:
            entropies.append(float(self.policy.entropies(logits_LW, cuts[number]).double().sum()))
            found.append(self.policy.logprobs(logits_LW, cuts[number]))

        self.policy.passes(cuts, keep, self.temperature)
        return found, sum(entropies)

    def _lessons(self, drafter: DrafterTrainer, batch: Batch) -> list[Lesson]:
        """What the drafter learns from in this step; the same at every rank."""
        turns = [turn for index, item in enumerate(batch.rollouts) for turn in turns_of(index, item)]
        samples = [
            budget.Sample(batch.rollouts[turn.index].rollout.group_id, turn.context, turn.completion) for turn in turns
        ]
        most = self.spec.trainer.drafter.token_budget
        if most is not None:
            chosen = budget.choose_lessons(samples, batch.step, lambda _tokens, starts: starts, most)
        else:
            head, passes = drafter.head.config, drafter.passes
            chosen = budget.choose_lessons(
                samples,
                batch.step,
                lambda tokens, starts: budget.drafter_flops(head, passes, tokens, starts),
                budget.ONLINE_SHARE * sum(self._policy_flops(item) for item in batch.rollouts),
            )
        return [replace(lesson, index=turns[lesson.index].index) for lesson in chosen]

    def _policy_flops(self, item: TrainRollout) -> float:
        """Of one rollout in a step; what a tool wrote is read as the prompt is."""
        sampled = item.rollout.sampled_length
        return budget.policy_flops(self.config, len(item.prompt_token_ids) + item.rollout.length - sampled, sampled)

    def _reference_logprobs(self, cuts: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probabilities [T] of every micro-batch under the reference; none without one."""
        found: list[torch.Tensor] = []
        if self.reference is not None:
            policy = self.reference

            def keep(number: int, logits_LW: torch.Tensor) -> None:
                found.append(policy.logprobs(logits_LW, cuts[number]))

            policy.passes(cuts, keep, self.temperature)
        return found

    def _charged(
        self,
        batch: Batch,
        cuts: list[MicroBatch],
        proximal: Sequence[torch.Tensor],
        reference: Sequence[torch.Tensor],
    ) -> list[MicroBatch]:
        """The micro-batches, with advantages of rewards less the divergence from the reference where that is charged.

        Every rollout's divergence is needed at every rank, since an advantage is of the whole group or batch.
        """
        kl = self.spec.trainer.loss.reference_kl
        if kl is None or kl.place is not KlPlace.REWARD:
            return cuts
        costs_N = torch.zeros(len(batch.rollouts), dtype=torch.float64, device=self.groups.device)
        for cut, proximal_T, reference_T in zip(cuts, proximal, reference, strict=False):  # at the last stage
            cost_T = losses.reference_kl(proximal_T, reference_T, kl.estimator).double()
            costs_N[list(cut.indices)] = losses.Sequences(cut.sequence_T, len(cut.indices)).sums(cost_T)
        dist.all_reduce(self.groups.from_last_stage(costs_N), group=self.groups.data)
        # What is not finite here makes gradients that are not either, and the step is skipped for them.
        charged_N = np.array([item.reward for item in batch.rollouts]) - float(kl.coefficient) * costs_N.cpu().numpy()
        charged_N = np.nan_to_num(charged_N, posinf=0.0, neginf=0.0).astype(np.float32)
        sizes = [len(list(group)) for _, group in groupby(batch.rollouts, lambda item: item.rollout.group_id)]
        rewards: list[FloatArray] = np.split(charged_N, np.cumsum(sizes)[:-1])
        advantages_N = np.concatenate(batch_advantages(rewards, self.spec.trainer.loss.advantages))
        advantage_N = torch.from_numpy(advantages_N).to(self.groups.device)
        return [replace(cut, advantage_T=advantage_N[list(cut.indices)][cut.sequence_T]) for cut in cuts]

    def _gradients(
        self,
        cuts: Sequence[MicroBatch],
        loss: Callable[[int, torch.Tensor], losses.LossTerms],
        lessons: Sequence[Lesson],
    ) -> tuple[torch.Tensor, Taught]:
        """Accumulate the policy's gradients. Returns this rank's `losses.SUMS`, and its lessons with their states."""
        self.policy.zero_gradients()
        sums_N = torch.zeros(len(losses.SUMS), dtype=torch.float64, device=self.groups.device)

        def differentiated(number: int, logits_LW: torch.Tensor) -> torch.Tensor:
            terms = loss(number, logits_LW)
            sums_N.add_(terms.sums_N)
            return terms.loss

        mine = [[lesson for lesson in lessons if lesson.index in cut.indices] for cut in cuts]
        rows = [[cut.indices.index(lesson.index) for lesson in some] for cut, some in zip(cuts, mine, strict=True)]
        states = self.policy.passes(cuts, differentiated, self.temperature, is_training=True, rows=rows)
        return sums_N, [
            (some, kept.cut([lesson.context for lesson in some], [lesson.length for lesson in some]))
            for some, kept in zip(mine, states, strict=True)
            if kept is not None
        ]

    def _adapt(
        self, drafter: DrafterTrainer, ends: PolicyEnds, lessons: Sequence[Lesson], taught: Taught
    ) -> DrafterMetrics:
        """Make the step's updates of the drafter: each on a part of the lessons, of whose states this rank has some."""
        done = []
        for part in budget.updates(lessons):
            drafter.begin(ends, [lesson.completion for lesson in part])
            rows = [([i for i, lesson in enumerate(some) if lesson in part], batch) for some, batch in taught]
            held = [batch.rows(chosen) for chosen, batch in rows if chosen]
            if held:
                self._teach(drafter, HeadBatch.joined(held))
            done.append(drafter.finish(group=dist.group.WORLD))
        return metrics_of(done)

    def _dealt(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's share of what its replica holds: all of its ranks get the same states."""
        return items[self.groups.replica_rank :: self.groups.replica_size]

    def _teach(self, drafter: DrafterTrainer, states: HeadBatch) -> None:
        """Train on this rank's share of its replica's sequences."""
        mine = self._dealt(range(len(states.lengths_B)))
        if mine:
            drafter.accumulate(states.rows(mine))

    def _over_data(self, values: Sequence[float], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[float]:
        """Reduce scalars of the last stages over data parallel ranks; tensor parallel ranks hold equal ones."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.groups.device)
        self.groups.from_last_stage(tensor)
        dist.all_reduce(tensor, op, group=self.groups.data)
        found: list[float] = tensor.tolist()
        return found

    def train_drafter(
        self, rollouts: Sequence[TrainRollout], epochs: int, progress: Path | None = None
    ) -> list[DrafterMetrics]:
        drafter = self._drafter_for(rollouts)
        plan = initialisation.Plan(rollouts, epochs, self.spec.schedule.seed, progress)
        work = initialisation.Initialisation(plan, drafter, self.hidden_states)
        metrics = work.finished_epochs()
        if self._is_drafter_initialised and len(metrics) == epochs:
            return metrics
        ends = self.policy.ends()
        if metrics:
            work.restore()
        elif not self._is_drafter_initialised:
            self._choose_draft_vocabulary(drafter.head, rollouts, ends)
        for number in range(len(metrics), epochs):
            metrics.append(work.epoch(number, ends, lambda states: self._teach(drafter, states)))
            if self.groups.rank == 0:
                work.keep(metrics)
        self._is_drafter_initialised = True
        return metrics

    @torch.no_grad()
    def evaluate_drafter(self, rollouts: Sequence[TrainRollout]) -> DrafterMetrics:
        drafter = self._drafter_for(rollouts)
        drafter.begin(self.policy.ends(), turn_lengths(rollouts))
        for states in self.hidden_states(rollouts):
            self._teach(drafter, states)
        return metrics_of([drafter.measured(dist.group.WORLD)])

    def _drafter_for(self, rollouts: Sequence[TrainRollout]) -> DrafterTrainer:
        """The drafter, when there is one and the rollouts are fit to be trained on."""
        self._check(rollouts)
        if self.drafter is None:
            raise CheckpointInvalid(
                "generation.speculation must be eagle3 for a drafter to be trained, got another; change the run file"
            )
        return self.drafter

    def _choose_draft_vocabulary(self, head: Eagle3Head, rollouts: Sequence[TrainRollout], ends: PolicyEnds) -> None:
        """A reduced draft vocabulary is that of the most frequent generated tokens; ties go to the lower id."""
        if not head.config.is_reduced:
            return
        generated = np.concatenate([item.rollout.token_ids_T[item.rollout.sampled_N] for item in rollouts])
        counts_V = np.bincount(generated, minlength=self.config.vocab_size)
        chosen = np.argsort(-counts_V, kind="stable")[: head.config.draft_vocab_size]
        head.set_draft_vocabulary(torch.from_numpy(chosen.astype(np.int64)))
        head.start_from_policy(ends.norm_H, ends.lm_head_VH)

    @torch.no_grad()
    def hidden_states(self, rollouts: Sequence[TrainRollout]) -> list[HeadBatch]:
        """This rank's share of the rollouts' turns with the hidden states that the drafter learns from."""
        cuts = self._micro_batches(rollouts)
        turns = [[turn for row, i in enumerate(cut.indices) for turn in turns_of(row, rollouts[i])] for cut in cuts]
        rows = [[turn.index for turn in some] for some in turns]
        states = self.policy.passes(cuts, lambda _number, _logits: None, self.temperature, rows=rows)
        return [
            kept.cut([turn.context for turn in some], [turn.length for turn in some])
            for kept, some in zip(states, turns, strict=True)
            if kept is not None
        ]

    def score(self, rollouts: Sequence[TrainRollout]) -> list[npt.NDArray[np.float32]]:
        self._check(rollouts)
        counts = [item.rollout.sampled_length for item in rollouts]
        ends = np.cumsum([0, *counts])
        # Ranks fill in their own rollouts; the others' zeros make the sum exact.
        whole = torch.zeros(int(ends[-1]), device=self.groups.device)
        cuts = self._micro_batches(rollouts)

        def keep(number: int, logits_LW: torch.Tensor) -> None:
            found_T = self.policy.logprobs(logits_LW, cuts[number])
            for index, part in zip(
                cuts[number].indices, found_T.split([counts[i] for i in cuts[number].indices]), strict=True
            ):
                whole[ends[index] : ends[index + 1]] = part

        self.policy.passes(cuts, keep, self.temperature)
        dist.all_reduce(self.groups.from_last_stage(whole), group=self.groups.data)
        return [part.cpu().numpy() for part in torch.split(whole, counts)]

    # -- weights ------------------------------------------------------------------------------------------------------

    def describe_weights(self) -> WeightManifest:
        def meta(name: str, owner: WeightOwner, dtype: torch.dtype, shape: Sequence[int]) -> TensorMeta:
            return TensorMeta(name, owner, str(dtype).removeprefix("torch."), tuple(shape))

        found = [
            meta(name, WeightOwner.POLICY, self.dtype, shape)
            for item in self.policy.map.items
            for name, shape in zip(item.names, hf_weights.full_shapes(self.config, item), strict=True)
        ]
        for name, tensor in self._drafter_tensors():
            found.append(meta(name, WeightOwner.DRAFTER, tensor.dtype, tensor.shape))
        return WeightManifest(tuple(found), self.spec.weights.bucket_mib << 20)

    def _drafter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.drafter is not None:
            yield from self.drafter.head.tensors(self.dtype).items()

    def open_weight_group(self, group: WeightGroup) -> int:
        self._close_weight_group()
        self._weight_group = group
        if self.groups.rank != 0:
            return 0
        self._weight_store = weight_group.listen(group.world_size, group.timeout_s, group.address)
        return self._weight_store.port

    def broadcast_weights(self, group_id: str) -> WeightChecksums:
        if self._weight_group is None or self._weight_group.group_id != group_id:
            known = self._weight_group.group_id if self._weight_group else None
            raise VersionConflict(f"the weight group must be the open one, {known}, got {group_id}; open it first")
        checksums: tuple[int, ...] = ()
        tensors = self._all_tensors()
        try:
            if self.groups.rank == 0:
                if self._joined is None:
                    self._joined = weight_group.BroadcastGroup(self._weight_group, self._weight_store)
                checksums = stream.send(self._joined, self.describe_weights(), tensors)
        except SpecrlError:
            self._close_weight_group()
            raise
        finally:
            self._exhaust(tensors)
        return WeightChecksums(self._step, checksums, self._drafter_version())

    def write_weights(self, folder: Path) -> WeightChecksums:
        checksums: tuple[int, ...] = ()
        tensors = self._all_tensors()
        try:
            if self.groups.rank == 0:
                checksums = files.write(folder, self.describe_weights(), tensors)
        finally:
            self._exhaust(tensors)
        return WeightChecksums(self._step, checksums, self._drafter_version())

    def _drafter_version(self) -> int:
        """The step that last trained the drafter: this one online, else 0, since it is initialised before step 1.

        Online a step without rollouts counts too: it moves the policy as little as the drafter.
        """
        if self.drafter is None:
            return NO_DRAFTER
        return self._step if self.spec.trainer.drafter.online else 0

    def _all_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.policy.tensors()
        yield from self._drafter_tensors()

    def _close_weight_group(self) -> None:
        if self._joined is not None:
            self._joined.close()
        self._joined = self._weight_store = self._weight_group = None

    def export(self, directory: Path) -> tuple[Path, Path | None]:
        policy, drafter = directory / "policy", directory / "drafter"
        tensors = self.policy.tensors()
        try:
            if self.groups.rank == 0:
                hf_folder.write_policy(policy, self.config.path, tensors)
                if self.drafter is not None:
                    shutil.rmtree(drafter, ignore_errors=True)
                    save_head(drafter, self.drafter.head, self.dtype)
        except (OSError, SafetensorError) as error:
            raise StoreFailed(
                f"the export must be written to {directory}, got {error}; make room on the disk"
            ) from error
        finally:
            self._exhaust(tensors)
        return policy, drafter if self.drafter is not None else None

    def _exhaust(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Ranks that share tensors with rank 0 gather to the end, whatever became of what rank 0 does with them."""
        if self.groups.gathers_with_rank_0:
            for _ in tensors:
                pass
