"""The sharded policy with its optimizer: forward passes, and one AdamW step at a time. Called by `backend.py` alone.

Shapes: T sampled tokens, L of them on this context parallel rank, W columns of the vocabulary on this tensor parallel
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

from specrl.drafting.online import PolicyEnds
from specrl.drafting.packing import HeadBatch
from specrl.drafting.policy_config import PolicyConfig
from specrl.spec.trainer import Trainer
from specrl.trainer.megatron_backend import adapters
from specrl.trainer.megatron_backend.groups import Groups
from specrl.trainer.megatron_backend.hf_weights import WeightMap, fill
from specrl.trainer.megatron_backend.model import build_model, mask_padding
from specrl.trainer.megatron_backend.optimizer_state import MASTER, MOMENTS, OptimizerState
from specrl.trainer.megatron_backend.schedule import OnLogits, Schedule
from specrl.trainer.megatron_backend.tensors import MicroBatch


class Policy:
    """Weights in Megatron's layout on this rank."""

    def __init__(self, config: PolicyConfig, trainer: Trainer, dtype: torch.dtype, groups: Groups, seed: int) -> None:
        """seed: of what a low-rank update starts from."""
        self.config, self.groups, self.settings, self.dtype = config, groups, trainer.optimizer, dtype
        self.chunks = build_model(config, trainer, dtype)
        if trainer.lora is not None:
            for chunk in self.chunks:
                adapters.adapt(chunk, config, groups.tensor, trainer.lora, seed)
        self.map = WeightMap(self.chunks, config, groups)
        self.trained = self.map
        if trainer.lora is not None:
            self.trained = WeightMap(self.chunks, config, groups, is_adapters=True)
        self.schedule = Schedule(self.chunks, groups)
        self._is_wrapped = False

    def load_folder(self) -> None:
        """Weights from the Hugging Face folder; then the optimizer around them."""
        self.map.load(self.config.path)
        self.wrap()

    def freeze_folder(self) -> None:
        """Weights from the Hugging Face folder, for forward passes alone: no optimizer, and no room for gradients."""
        self.map.load(self.config.path)
        self.wrapped = [chunk.requires_grad_(False) for chunk in self.chunks]

    def wrap(self) -> None:
        """Build gradient buffers and optimizer around the present weights (bf16 keeps float32 masters of them)."""
        assert not self._is_wrapped
        self._is_wrapped = True
        is_bf16 = self.dtype == torch.bfloat16
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True
        )
        self.wrapped = [
            DistributedDataParallel(
                chunk.config, ddp, chunk, disable_bucketing=number > 0, full_param_layout=_buffer_layout(chunk, ddp)
            )
            for number, chunk in enumerate(self.chunks)
        ]
        settings = self.settings
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=float(settings.learning_rate),
                weight_decay=float(settings.weight_decay),
                adam_beta1=float(settings.beta1),
                adam_beta2=float(settings.beta2),
                adam_eps=float(settings.epsilon),
                clip_grad=float(settings.clip_norm),
                bf16=is_bf16,
                params_dtype=self.dtype,
                use_distributed_optimizer=True,
            ),
            self.wrapped,
            use_gloo_process_groups=False,
        )
        self.optimizer_state = OptimizerState(self.optimizer)

    # -- forward ------------------------------------------------------------------------------------------------------

    def passes(
        self,
        batches: Sequence[MicroBatch],
        on_logits: OnLogits,
        temperature: float,
        *,
        is_training: bool = False,
        rows: Sequence[Sequence[int]] = (),
    ) -> list[HeadBatch | None]:
        """Run micro-batches forward, and backward when training; see `Schedule.run`.

        on_logits gets this rank's columns [L, W], float32, of the sampled tokens' distributions, over temperature.
        """

        def scaled(number: int, logits_LW: torch.Tensor) -> torch.Tensor | None:
            return on_logits(number, mask_padding(logits_LW.float() / temperature, self.config.vocab_size))

        return self.schedule.run(self.wrapped, batches, scaled, is_training=is_training, rows=rows)

    def logprobs(self, logits_LW: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities [T] of the sampled tokens, at all ranks that have some, differentiable.

        Overwrites logits_LW (Megatron works in place).
        """
        target_L = batch.target_T[batch.sampled_L]
        nll_L1: torch.Tensor = vocab_parallel_cross_entropy(logits_LW[:, None], target_L[:, None])
        return self._of_context_ranks(-nll_L1[:, 0], batch)

    @torch.no_grad()
    def entropies(self, logits_LW: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Entropy [T], in nats, of each sampled token's distribution: log Z - E[logit]."""
        group, size = self.groups.tensor.group, self.groups.tensor.size
        top_L = logits_LW.max(-1).values
        if size > 1:
            dist.all_reduce(top_L, dist.ReduceOp.MAX, group=group)
        shifted_LW = logits_LW - top_L[:, None]
        mass_LW = shifted_LW.exp()
        # A masked column has mass 0 and logit -inf; its product is 0.
        sums_2L = torch.stack(
            [mass_LW.sum(-1), (mass_LW * shifted_LW.clamp(min=torch.finfo(torch.float32).min)).sum(-1)]
        )
        if size > 1:
            dist.all_reduce(sums_2L, group=group)
        return self._of_context_ranks(sums_2L[0].log() - sums_2L[1] / sums_2L[0], batch)

    def _of_context_ranks(self, x_L: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Every rank's [L] in their places among all [T]; each rank's gradient is that of its own."""
        if self.groups.context.size == 1:
            return x_L
        own_T = x_L.new_zeros(len(batch.target_T)).index_copy(0, batch.sampled_L, x_L)
        whole_T: torch.Tensor = reduce_from_tensor_model_parallel_region(own_T, group=self.groups.context.group)
        return whole_T

    # -- step ---------------------------------------------------------------------------------------------------------

    def zero_gradients(self) -> None:
        """Start a step."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, learning_rate: float) -> float | None:
        """Sum gradients over the ranks, clip, update. Returns the global gradient norm before the clip.

        None, at all ranks and with weights and optimizer untouched, when a gradient is not finite.
        """
        finalize_model_grads(self.wrapped)
        if not self._gradients_are_finite():
            return None
        for settings in self.optimizer.param_groups:
            settings["lr"] = learning_rate
            settings["weight_decay"] = float(self.settings.weight_decay) * settings.get("wd_mult", 1.0)
        is_done, norm, _ = self.optimizer.step()
        assert is_done
        return float(norm)

    def _gradients_are_finite(self) -> bool:
        """The same at all ranks: what one rank finds, all find."""
        buffers = [buffer for chunk in self.wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        is_finite = all(bool(buffer.grad_data.isfinite().all()) for buffer in buffers)
        bad = torch.tensor(0.0 if is_finite else 1.0, device=self.groups.device)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        return bad.item() == 0

    # -- weights ------------------------------------------------------------------------------------------------------

    def tensors(self, wanted: AbstractSet[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor), gathered one at a time. A collective, see `WeightMap.export`."""
        return self.map.export(wanted, adapters.merged(self.chunks))

    def state(self) -> dict[str, Iterator[tuple[str, torch.Tensor]]]:
        """Float32 weights and both moments of what is trained, by Hugging Face names (of low-rank updates peft's).

        Each is like `tensors`, but a collective of all ranks.
        """
        kinds = (MASTER, *(MOMENTS if self.optimizer_state.has_moments else ()))

        read = self.optimizer_state.read
        return {kind: self.trained.export(of=partial(read, kind), dtype=torch.float32) for kind in kinds}

    def load_state(self, folder: Path, updates: int) -> None:
        """Take what `state` gave, from sub-folders by kind; the optimizer has made so many updates."""

        def put(parameter: torch.Tensor, values: torch.Tensor) -> None:
            fill(parameter, values)
            self.optimizer_state.write(MASTER, parameter, values)

        self.trained.load(folder / MASTER, put)
        if updates == 0:
            return
        self.optimizer_state.start_moments(updates)
        for kind in MOMENTS:
            self.trained.load(folder / kind, partial(self.optimizer_state.write, kind))

    @torch.no_grad()
    def ends(self) -> PolicyEnds:
        """Full copies of embedding, final norm and output layer. A collective, as `tensors`."""
        wanted = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
        found = {name: tensor.clone() for name, tensor in self.tensors(wanted)}
        embedding = found["model.embed_tokens.weight"]
        return PolicyEnds(embedding, found["model.norm.weight"], found.get("lm_head.weight", embedding))


def _buffer_layout(chunk: torch.nn.Module, ddp: DistributedDataParallelConfig) -> Any:
    """Where each trained parameter of a chunk is in the gradient buffers: one bucket, since nothing overlaps.

    Megatron warns where the caller leaves this to DistributedDataParallel (distributed_data_parallel.py:132).
    """
    return DistributedOptimizer.compute_full_param_layout(
        [parameter for parameter in chunk.parameters() if parameter.requires_grad],
        bucket_size=None,
        data_parallel_world_size=parallel_state.get_data_parallel_group(with_context_parallel=True).size(),
        ddp_config=ddp,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_group().size(),
    )
