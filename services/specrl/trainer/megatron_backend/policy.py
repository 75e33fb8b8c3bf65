"""The sharded policy with its optimizer: forward passes, and one AdamW step at a time. Called by `backend.py` alone.

Shapes: T sampled tokens, W columns of the vocabulary on this tensor parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from specrl.drafting.online import PolicyEnds
from specrl.drafting.packing import HeadBatch
from specrl.drafting.policy_config import PolicyConfig
from specrl.spec.trainer import Trainer
from specrl.trainer.megatron_backend import adapters, hf_weights
from specrl.trainer.megatron_backend.groups import Groups
from specrl.trainer.megatron_backend.model import build_model, mask_padding
from specrl.trainer.megatron_backend.schedule import OnLogits, Schedule
from specrl.trainer.megatron_backend.tensors import MicroBatch

MOMENTS = ("exp_avg", "exp_avg_sq")  # as AdamW calls them, torch's and Transformer Engine's


class Policy:
    """Weights in Megatron's layout on this rank."""

    def __init__(self, config: PolicyConfig, trainer: Trainer, dtype: torch.dtype, groups: Groups, seed: int) -> None:
        """seed: of what a low-rank update starts from."""
        self.config, self.groups, self.settings, self.dtype = config, groups, trainer.optimizer, dtype
        self.model = build_model(config, trainer.parallelism, dtype)
        if trainer.lora is not None:
            adapters.adapt(self.model, config, groups.tensor, trainer.lora, seed)
        self.map = hf_weights.weight_map(self.model)
        self.trained = hf_weights.weight_map(self.model, is_adapters=True) if trainer.lora is not None else self.map
        self.schedule = Schedule([self.model])
        self._is_wrapped = False

    def load_folder(self) -> None:
        """Weights from the Hugging Face folder; then the optimizer around them."""
        hf_weights.load(self.map, self.config, self.groups.tensor, self.config.path)
        self.wrap()

    def freeze_folder(self) -> None:
        """Weights from the Hugging Face folder, for forward passes alone: no optimizer, and no room for gradients."""
        hf_weights.load(self.map, self.config, self.groups.tensor, self.config.path)
        self.wrapped = self.model.requires_grad_(False)

    def wrap(self) -> None:
        """Build gradient buffers and optimizer around the present weights (bf16 keeps float32 masters of them)."""
        assert not self._is_wrapped
        self._is_wrapped = True
        is_bf16 = self.dtype == torch.bfloat16
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        self.wrapped = DistributedDataParallel(self.model.config, ddp, self.model)
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
            ),
            [self.wrapped],
        )

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

        on_logits gets this rank's columns [T, W], float32, of the sampled tokens' distributions, over temperature.
        """

        def scaled(number: int, logits_TW: torch.Tensor) -> torch.Tensor | None:
            return on_logits(number, mask_padding(logits_TW.float() / temperature, self.config.vocab_size))

        return self.schedule.run([self.wrapped], batches, scaled, is_training=is_training, rows=rows)

    def logprobs(self, logits_TW: torch.Tensor, target_T: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [T] of the targets, differentiable. Overwrites logits_TW (Megatron works in place)."""
        nll_T1: torch.Tensor = vocab_parallel_cross_entropy(logits_TW[:, None], target_T[:, None])
        return -nll_T1[:, 0]

    @torch.no_grad()
    def entropies(self, logits_TW: torch.Tensor) -> torch.Tensor:
        """Entropy [T], in nats, of each distribution: log Z - E[logit]."""
        group, size = self.groups.tensor.group, self.groups.tensor.size
        top_T = logits_TW.max(-1).values
        if size > 1:
            dist.all_reduce(top_T, dist.ReduceOp.MAX, group=group)
        shifted_TW = logits_TW - top_T[:, None]
        mass_TW = shifted_TW.exp()
        # A masked column has mass 0 and logit -inf; its product is 0.
        sums_2T = torch.stack(
            [mass_TW.sum(-1), (mass_TW * shifted_TW.clamp(min=torch.finfo(torch.float32).min)).sum(-1)]
        )
        if size > 1:
            dist.all_reduce(sums_2T, group=group)
        return sums_2T[0].log() - sums_2T[1] / sums_2T[0]

    # -- step ---------------------------------------------------------------------------------------------------------

    def zero_gradients(self) -> None:
        """Start a step."""
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, learning_rate: float) -> float | None:
        """Sum gradients over the ranks, clip, update. Returns the global gradient norm before the clip.

        None, at all ranks and with weights and optimizer untouched, when a gradient is not finite.
        """
        finalize_model_grads([self.wrapped])
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
        buffers = [*self.wrapped.buffers, *self.wrapped.expert_parallel_buffers]
        is_finite = all(bool(buffer.grad_data.isfinite().all()) for buffer in buffers)
        bad = torch.tensor(0.0 if is_finite else 1.0, device=self.groups.device)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        return bad.item() == 0

    # -- weights ------------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor), gathered one at a time. A collective of the tensor parallel ranks."""
        return hf_weights.export(self.map, self.config, self.groups.tensor, of=adapters.merged(self.model))

    def state(self) -> dict[str, Iterator[tuple[str, torch.Tensor]]]:
        """Float32 weights and both moments of what is trained, by Hugging Face names (of low-rank updates peft's).

        Each is a collective like `tensors`.
        """
        kinds: dict[str, hf_weights.Of] = {"weights": _master}
        if self._moments():
            kinds |= {kind: partial(self._moment, kind) for kind in MOMENTS}
        export = partial(hf_weights.export, self.trained, self.config, self.groups.tensor)
        return {kind: export(of=of) for kind, of in kinds.items()}

    @torch.no_grad()
    def load_state(self, folder: Path, updates: int) -> None:
        """Take what `state` gave, from sub-folders by kind; the optimizer has made so many updates."""
        load = partial(hf_weights.load, self.trained, self.config, self.groups.tensor)
        load(folder / "weights", _master)
        for item in self.trained:
            item.parameter.copy_(_master(item.parameter))
        if updates == 0:
            return
        for item in self.trained:
            master = _master(item.parameter)
            self._moments()[master] = {
                "step": torch.tensor(float(updates)),
                "exp_avg": torch.zeros_like(master, dtype=torch.float32),
                "exp_avg_sq": torch.zeros_like(master, dtype=torch.float32),
            }
        for settings in self.optimizer.param_groups:
            if "step" in settings:  # Transformer Engine's AdamW counts here
                settings["step"] = updates
        for kind in MOMENTS:
            load(folder / kind, partial(self._moment, kind))

    def _moments(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """The inner optimizer's state, by master parameter; empty before the first step."""
        found: dict[torch.Tensor, dict[str, torch.Tensor]] = self.optimizer.optimizer.state
        return found

    def _moment(self, kind: str, parameter: torch.Tensor) -> torch.Tensor:
        return self._moments()[_master(parameter)][kind]

    @torch.no_grad()
    def ends(self) -> PolicyEnds:
        """Full copies of embedding, final norm and output layer. A collective of the tensor parallel ranks."""
        found: dict[str, torch.Tensor] = {}
        wanted = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
        for name, tensor in hf_weights.export(self.map, self.config, self.groups.tensor, wanted):
            found[name] = tensor.clone()
        embedding = found["model.embed_tokens.weight"]
        return PolicyEnds(embedding, found["model.norm.weight"], found.get("lm_head.weight", embedding))


def _master(parameter: torch.Tensor) -> torch.Tensor:
    """What the optimizer steps: the float32 copy of a bf16 parameter, or the parameter itself."""
    found: torch.Tensor = getattr(parameter, "main_param", parameter)
    return found
