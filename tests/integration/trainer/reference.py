"""The same training with transformers and torch alone, written from the formulas: what the backend is compared with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.integration.trainer.runs import (
    CAP,
    EPSILON,
    GSPO_CLIP,
    KL_COEFFICIENT,
    LEARNING_RATE,
    TEMPERATURE,
    WEIGHT_DECAY,
)
from transformers import AutoModelForCausalLM, PreTrainedModel

from specrl.records import Batch, TrainRollout


def load(policy: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()


def as_stored(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Tensors by the names of a folder; in memory transformers 5 has other names, and holds experts in one tensor."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


class Adapted(torch.nn.Module):
    """A linear layer as peft computes it: y = W x + s B (A x)."""

    def __init__(self, linear: torch.nn.Linear, down_RI: torch.Tensor, up_OR: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), scale
        self.down, self.up = torch.nn.Parameter(down_RI.clone()), torch.nn.Parameter(up_OR.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x) + self.scale * (x @ self.down.T) @ self.up.T
        return found


def adapted(policy: Path, factors: dict[str, torch.Tensor], scale: float) -> tuple[PreTrainedModel, dict[str, Adapted]]:
    """The reference with these updates, and its layers by the beginning of their factors' names."""
    model, layers = load(policy).requires_grad_(False), {}
    for name, module in list(model.named_modules()):
        stem = f"base_model.model.{name}"
        if f"{stem}.lora_A.weight" in factors:
            pair = (factors[f"{stem}.lora_{part}.weight"] for part in "AB")
            layers[stem] = Adapted(module, *pair, scale)
            model.set_submodule(name, layers[stem])
    return model, layers


def replay(model: PreTrainedModel, rollouts: Sequence[TrainRollout]) -> None:
    """Have a mixture's routers send the tokens of these rollouts where they say, by weights that are the router's own.

    Of two experts for each token; where both are the same, to those that the router chooses. Which rollout it is, is
    seen from the tokens that are embedded.
    """
    by_tokens = {(*i.prompt_token_ids, *i.rollout.token_ids_T.tolist()): i.rollout.experts_SLK for i in rollouts}
    now: list[torch.Tensor] = []

    def see(_module: torch.nn.Module, arguments: tuple[torch.Tensor]) -> None:
        now[:] = [torch.from_numpy(by_tokens[tuple(arguments[0][0].tolist())]).long()]

    def routed(number: int) -> Any:
        def chosen(
            _gate: torch.nn.Module, _arguments: Any, found: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            logits_SE, _, own_SK = found
            told_SK = torch.cat([now[0][:, number], own_SK[len(now[0]) :]])
            experts_SK = torch.where(told_SK[:, :1] == told_SK[:, 1:], own_SK, told_SK)
            return logits_SE, logits_SE.gather(1, experts_SK).softmax(-1), experts_SK

        return chosen

    model.model.embed_tokens.register_forward_pre_hook(see)
    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(routed(number))


def logprobs(model: PreTrainedModel, item: TrainRollout) -> torch.Tensor:
    """Log-probabilities [T] of one rollout's tokens at the sampling temperature, without any padding."""
    prompt = len(item.prompt_token_ids)
    ids_S = torch.tensor([*item.prompt_token_ids, *item.rollout.token_ids_T.tolist()])
    logits_TV = model(ids_S[None]).logits[0, prompt - 1 : -1] / TEMPERATURE
    return logits_TV.log_softmax(-1).gather(1, ids_S[prompt:, None])[:, 0]


def an_optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    matrices = [weight for weight in trained if weight.ndim > 1]
    norms = [weight for weight in trained if weight.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
        eps=EPSILON,
    )


def train_gspo(model: PreTrainedModel, batches: Sequence[Batch]) -> list[tuple[float, float]]:
    """Two AdamW updates a step on GSPO's loss, rewards less the divergence from where it began, RLOO's advantages.

    Returns (loss over both updates, gradient norm of the first) of each step.
    """
    beginning, optimizer, seen = copy.deepcopy(model), an_optimizer(model), []
    for batch in batches:
        with torch.no_grad():
            starts = [logprobs(model, item) for item in batch.rollouts]
            costs = [float((a - logprobs(beginning, i)).sum()) for a, i in zip(starts, batch.rollouts, strict=True)]
        rewards = [item.reward - KL_COEFFICIENT * cost for item, cost in zip(batch.rollouts, costs, strict=True)]
        losses, norms = [], []
        for _ in range(2):
            total = torch.zeros(())
            for number, (item, start_T) in enumerate(zip(batch.rollouts, starts, strict=True)):
                others = [r for i, r in enumerate(rewards) if i // 4 == number // 4 and i != number]
                advantage = rewards[number] - sum(others) / len(others)
                found_T = logprobs(model, item)
                weight_T = (start_T - torch.from_numpy(item.rollout.sampler_logprobs_T)).exp().clamp(max=CAP)
                ratio = (found_T - start_T).mean().exp()
                held = ratio.clamp(1 - GSPO_CLIP, 1 + GSPO_CLIP)
                objective = torch.minimum(ratio * advantage, held * advantage)
                total = total - weight_T.mean() * objective / len(batch.rollouts)
            optimizer.zero_grad()
            total.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            for group in optimizer.param_groups:
                group["lr"] = {1: LEARNING_RATE / 2, 2: LEARNING_RATE}[batch.step]
            optimizer.step()
            losses.append(float(total.detach()))
        seen.append((sum(losses) / 2, norms[0]))
    return seen


def train(model: PreTrainedModel, batches: Sequence[Batch]) -> list[tuple[float, float]]:
    """AdamW steps on the truncated, importance-weighted policy gradient. Returns (loss, gradient norm) of each."""
    optimizer, seen = an_optimizer(model), []
    for batch in batches:
        tokens = sum(item.rollout.length for item in batch.rollouts)
        total = torch.zeros(())
        for item in batch.rollouts:
            found_T = logprobs(model, item)
            weight_T = (found_T.detach() - torch.from_numpy(item.rollout.sampler_logprobs_T)).exp().clamp(max=CAP)
            ratio_T = (found_T - found_T.detach()).exp()  # 1, with the gradient of the log-probability
            total = total - (weight_T * ratio_T * item.advantage).sum() / tokens
        optimizer.zero_grad()
        total.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, batch.step / 2)  # two steps of warm-up
        optimizer.step()
        seen.append((float(total.detach()), norm))
    return seen
