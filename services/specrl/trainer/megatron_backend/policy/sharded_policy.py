"""The sharded policy with its optimizer: forward and backward passes, updates, weights by Hugging Face names.

`training` trains with it; `checkpoint.py` and `weight_sender.py` read its weights. Almost every method is a collective.

Shapes: T sampled tokens of a micro-batch, L of them on this context parallel rank, W columns of the vocabulary on this
tensor parallel rank.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

from specrl.drafting.drafter import Drafter
from specrl.drafting.vocabulary import PolicyOutput, VocabularyShard
from specrl.errors import CheckpointInvalid
from specrl.models.policy_config import PolicyConfig
from specrl.spec.trainer import Trainer
from specrl.trainer.megatron_backend.model import adapters
from specrl.trainer.megatron_backend.model.gpt_model import build_model, compute_padded_vocabulary
from specrl.trainer.megatron_backend.model.hf_weights import WeightMap, fill_parameter
from specrl.trainer.megatron_backend.parallel.groups import RankGroups
from specrl.trainer.megatron_backend.policy.distributions import SamplingDistributions
from specrl.trainer.megatron_backend.policy.lesson_exchange import exchange_lessons
from specrl.trainer.megatron_backend.policy.lessons import Lesson, LessonKeeper, TaughtLessons
from specrl.trainer.megatron_backend.policy.optimizer import build_optimizer, set_learning_rate, wrap_chunks
from specrl.trainer.megatron_backend.policy.optimizer_state import MASTER, OptimizerState, find_moment_kinds
from specrl.trainer.megatron_backend.policy.schedule import PipelineSchedule
from specrl.trainer.megatron_backend.policy.state_parts import PartGatherer
from specrl.trainer.megatron_backend.policy.tensors import MicroBatch

# Gets a micro-batch's number, and the log-probabilities [T] and entropies [T] of its sampled tokens.
OnTokens = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor | None]


class ShardedPolicy:
    """This rank's shard of the policy, its optimizer, and its name maps."""

    def __init__(
        self, config: PolicyConfig, trainer: Trainer, dtype: torch.dtype, groups: RankGroups, seed: int
    ) -> None:
        """Build the model with arbitrary weights. seed: for the initial factors of low-rank updates."""
        self.config = config
        self.groups = groups
        self.settings = trainer.optimizer
        self.dtype = dtype
        self.chunks = build_model(config, trainer, dtype)
        if trainer.lora is not None:
            for chunk in self.chunks:
                adapters.add_adapters(chunk, config, groups.tensor, trainer.lora, seed)
        self.weight_map = WeightMap(self.chunks, config, groups)
        # The parameters that the optimizer updates: with low-rank updates, their factors.
        self.trained_map = self.weight_map
        if trainer.lora is not None:
            self.trained_map = WeightMap(self.chunks, config, groups, is_adapters=True)
        self.schedule = PipelineSchedule(self.chunks, groups)
        self._keeper: LessonKeeper | None = None
        self._is_wrapped = False

    def load_folder(self) -> None:
        """Load the weights of the Hugging Face folder, then build the optimizer. Raises CheckpointInvalid."""
        self.weight_map.load_parameters(self.config.path)
        self.build_optimizer()

    def freeze_folder(self) -> None:
        """Load the weights of the Hugging Face folder for forward passes only, without optimizer and gradients."""
        self.weight_map.load_parameters(self.config.path)
        self.wrapped = [chunk.requires_grad_(False) for chunk in self.chunks]

    def build_optimizer(self) -> None:
        """Build gradient buffers and the optimizer. In bf16 it copies float32 masters from the current weights."""
        assert not self._is_wrapped
        self._is_wrapped = True
        self.wrapped = wrap_chunks(self.chunks, self.settings.kind)
        self.optimizer = build_optimizer(self.wrapped, self.settings, self.dtype)
        self.optimizer_state = OptimizerState(self.optimizer)

    # -- forward ------------------------------------------------------------------------------------------------------

    def run_micro_batches(
        self,
        batches: Sequence[MicroBatch],
        on_tokens: OnTokens | None,
        temperature: float,
        *,
        is_training: bool = False,
        lessons: Sequence[Sequence[Lesson]] = (),
    ) -> TaughtLessons:
        """Run micro-batches forward, and backward if training; see `PipelineSchedule.run_passes`.

        on_tokens: gets the number of a micro-batch, at the last stage, and of its sampled tokens the log-probabilities
            [T], differentiable, and the entropies [T] of their distributions, in nats. Both are of the distributions
            that were sampled from: at the temperature, and over the sampling sets. Returns the loss to differentiate;
            None without training. None if only the lessons are wanted.
        """

        def measure_tokens(number: int, logits_LW: torch.Tensor) -> torch.Tensor | None:
            if on_tokens is None:
                return None
            batch = batches[number]
            sampling = SamplingDistributions(temperature, self.config.vocab_size, batch.sets, self.groups.tensor)
            logprob_L, entropy_L = sampling.measure_tokens(logits_LW, batch.target_T[batch.sampled_L])
            return on_tokens(
                number, self._gather_context_ranks(logprob_L, batch), self._gather_context_ranks(entropy_L, batch)
            )

        return self.schedule.run_passes(self.wrapped, batches, measure_tokens, is_training=is_training, lessons=lessons)

    def _gather_context_ranks(self, x_L: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Gather every context parallel rank's values [L] into [T]. Each rank gets the gradient of its own values."""
        if self.groups.context.size == 1:
            return x_L
        own_T = x_L.new_zeros(len(batch.target_T)).index_copy(0, batch.sampled_L, x_L)
        whole_T: torch.Tensor = reduce_from_tensor_model_parallel_region(own_T, group=self.groups.context.group)
        return whole_T

    # -- step ---------------------------------------------------------------------------------------------------------

    def zero_gradients(self) -> None:
        """Zero all gradients, before the passes of an update."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def update_weights(self, learning_rate: float) -> float | None:
        """Sum gradients over the ranks, clip them and update the weights. Returns the global norm before the clip.

        If a gradient is not finite at any rank, nothing is updated, and all ranks return None.
        """
        finalize_model_grads(self.wrapped)
        if not self._gradients_are_finite():
            return None
        set_learning_rate(self.optimizer, self.settings, learning_rate)
        is_done, norm, _ = self.optimizer.step()
        assert is_done
        return float(norm)

    def _gradients_are_finite(self) -> bool:
        """Check the gradients of all ranks. Returns the same at all ranks."""
        buffers = [buffer for chunk in self.wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        # isfinite() would make a float32 copy of all gradients. Least and largest need no memory, and NaN is both.
        ends = [end for buffer in buffers for end in torch.aminmax(buffer.grad_data)]
        is_finite = all(math.isfinite(end) for end in ends)
        bad = torch.tensor(0.0 if is_finite else 1.0, device=self.groups.device)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        return bad.item() == 0

    # -- weights ------------------------------------------------------------------------------------------------------

    def gather_tensors(self, wanted: AbstractSet[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor), gathered one at a time, with low-rank updates added.

        wanted: names to yield; None: all. A collective, see `WeightMap.export_tensors`.
        """
        return self.weight_map.export_tensors(wanted, adapters.make_weight_reader(self.chunks))

    def gather_state(self) -> dict[str, Iterator[tuple[str, torch.Tensor]]]:
        """Return iterators over float32 weights and moments of the trained parameters, by kind, for a checkpoint.

        Each tensor is yielded at one rank, which writes it. Names are Hugging Face's, or peft's for low-rank updates.
        Each iterator is a collective of all ranks.
        """
        names = {MASTER: None, **(self._names_by_moment() if self.optimizer_state.has_moments else {})}
        read = self.optimizer_state.read_range
        return {kind: self._state_parts.gather_tensors(wanted, partial(read, kind)) for kind, wanted in names.items()}

    @cached_property
    def _state_parts(self) -> PartGatherer:
        """The ranks' parts of the trained parameters. A collective when it is first read."""
        return PartGatherer(self.trained_map, self.config, self.groups, self.optimizer_state.find_range)

    def _names_by_moment(self) -> dict[str, set[str]]:
        """Return the names of the trained tensors that have each kind of moment."""
        found: dict[str, set[str]] = {}
        for item in self.trained_map.items:
            for kind in find_moment_kinds(self.settings.kind, item):
                found.setdefault(kind, set()).update(item.names)
        return found

    def load_state(self, folder: Path, updates: int) -> None:
        """Load the tensors of `gather_state` from one sub-folder per kind.

        updates: how many the optimizer had made. Raises CheckpointInvalid when a tensor is missing or does not fit.
        """

        # The parameter is rounded to its dtype; the master keeps float32.
        def write_weight_and_master(parameter: torch.Tensor, values: torch.Tensor) -> None:
            fill_parameter(parameter, values)
            self.optimizer_state.write_state_tensor(MASTER, parameter, values)

        self.trained_map.load_parameters(folder / MASTER, write_weight_and_master)
        # Before the first update there are no moments to load.
        if updates == 0:
            return
        self.optimizer_state.start_moments(updates)
        kinds = self._names_by_moment()
        saved = {path.name for path in folder.iterdir()} - {MASTER}
        if saved != set(kinds):
            raise CheckpointInvalid(
                f"checkpoint must have the moments of trainer.optimizer.kind={self.settings.kind.value} "
                f"({', '.join(sorted(kinds))}), got {', '.join(sorted(saved))}; resume with the run's own kind"
            )
        for kind, names in kinds.items():
            write = partial(self.optimizer_state.write_state_tensor, kind)
            self.trained_map.load_parameters(folder / kind, write, names)

    # -- drafter ------------------------------------------------------------------------------------------------------

    def connect_drafter(self, drafter: Drafter, temperature: float) -> None:
        """Make passes keep what the drafter learns from, and let it read the output layer. A collective."""
        keeper = LessonKeeper(drafter, temperature, self.config, self.groups)
        if drafter.is_vocabulary_sharded:
            drafter.connect_output(_read_weakly(self))
        self.schedule.keep_lessons(keeper)
        self._keeper = keeper

    def exchange_lessons(self, taught: TaughtLessons, dealt: Sequence[Lesson]) -> TaughtLessons:
        """Return what this rank learns from; see `lesson_exchange.py`. A collective of all ranks."""
        assert self._keeper is not None
        learner = self._keeper.learner
        if learner is None:
            return taught
        rows = self._keeper.describe_rows(self.config.hidden_size, self.dtype)
        return exchange_lessons(taught, dealt, learner, rows, self.groups)

    def read_output(self) -> PolicyOutput:
        """Return this rank's columns of the output layer, without copying them."""
        tensor = self.groups.tensor
        width = compute_padded_vocabulary(self.config, tensor.size) // tensor.size
        shard = VocabularyShard(tensor.rank * width, self.config.vocab_size, tensor.group if tensor.size > 1 else None)
        chunk = next((chunk for chunk in self.chunks if chunk.post_process), None)
        if chunk is None:
            return PolicyOutput(shard, None)
        weight = chunk.shared_embedding_or_output_weight() if self.config.is_tied else chunk.output_layer.weight
        return PolicyOutput(shard, weight.detach())


def _read_weakly(policy: ShardedPolicy) -> Callable[[], PolicyOutput]:
    """Read the output layer without keeping the policy.

    Autograd's hooks and the drafter refer to each other in a way that Python's collector cannot see. Through the
    drafter, a policy that was dropped would stay with all of its groups, whose threads poll.
    """
    reference = weakref.ref(policy)

    def read_output() -> PolicyOutput:
        found = reference()
        assert found is not None  # a drafter drafts only while its policy is trained
        return found.read_output()

    return read_output
