"""The reference for the backend: the same training with transformers and torch alone, written from the formulas."""

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
    MUON_RATIO,
    TEMPERATURE,
    WEIGHT_DECAY,
)
from transformers import AutoModelForCausalLM, PreTrainedModel

from specrl.records import Batch, TrainRollout


def load(policy: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()


def as_stored(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors by their names in a folder. In memory transformers 5 uses other names, and stacks experts."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


class Adapted(torch.nn.Module):
    """A linear layer as peft computes it: y = W x + s B (A x)."""

    def __init__(self, linear: torch.nn.Linear, down_RI: torch.Tensor, up_OR: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.scale = scale
        self.down = torch.nn.Parameter(down_RI.clone())
        self.up = torch.nn.Parameter(up_OR.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x) + self.scale * (x @ self.down.T) @ self.up.T
        return found


def adapted(policy: Path, factors: dict[str, torch.Tensor], scale: float) -> tuple[PreTrainedModel, dict[str, Adapted]]:
    """Load the policy with these updates. Returns it, and its updated layers by the prefix of their factors' names."""
    model = load(policy).requires_grad_(False)
    layers = {}
    for name, module in list(model.named_modules()):
        stem = f"base_model.model.{name}"
        if f"{stem}.lora_A.weight" in factors:
            pair = (factors[f"{stem}.lora_{part}.weight"] for part in "AB")
            layers[stem] = Adapted(module, *pair, scale)
            model.set_submodule(name, layers[stem])
    return model, layers


def replay(model: PreTrainedModel, rollouts: Sequence[TrainRollout]) -> None:
    """Make a mixture's routers send tokens to the experts that the rollouts name, with the router's own weights.

    Each token has two experts. If both are the same, the router chooses. The rollout of a pass is recognised by its
    embedded tokens.
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
    """Compute log-probabilities [T] of one rollout's tokens at the sampling temperature, without padding.

    They are over the tokens' sampling sets, if the rollout has them.
    """
    prompt = len(item.prompt_token_ids)
    ids_S = torch.tensor([*item.prompt_token_ids, *item.rollout.token_ids_T.tolist()])
    logits_TV = model(ids_S[None]).logits[0, prompt - 1 : -1] / TEMPERATURE
    sets = item.rollout.sets
    if sets is not None:
        outside_TV = torch.ones(logits_TV.shape, dtype=torch.bool)
        outside_TV[torch.from_numpy(sets.owner_M), torch.from_numpy(sets.ids_M).long()] = False
        logits_TV = logits_TV.masked_fill(outside_TV, -torch.inf)
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


class MuonAndAdamW:
    """Muon for the matrices of layers, AdamW for all else, on whole float64 matrices.

    Query, key and value matrices are orthogonalised apart, gate and up matrices as one. An expert has matrices of its
    own. Formulas: https://kellerjordan.github.io/posts/muon; arXiv:2502.16982, equation 4, for the size of an update.
    """

    # Of the five iterations of X <- a X + b (X X^T) X + c (X X^T)^2 X, as emerging-optimizers has them.
    COEFFICIENTS = (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    )

    def __init__(self, model: PreTrainedModel) -> None:
        named = dict(model.named_parameters())
        layers = {name: weight for name, weight in named.items() if ".layers." in name and weight.ndim > 1}
        others = [weight for name, weight in named.items() if name not in layers]
        self.adamw = torch.optim.AdamW(
            [
                {"params": [weight for weight in others if weight.ndim > 1], "weight_decay": WEIGHT_DECAY},
                {"params": [weight for weight in others if weight.ndim == 1], "weight_decay": 0.0},
            ],
            lr=LEARNING_RATE,
            betas=(0.9, 0.95),
            eps=EPSILON,
        )
        self.blocks = [
            [weight, layers[name.replace("gate_proj", "up_proj")]] if "gate_proj" in name else [weight]
            for name, weight in layers.items()
            if "up_proj" not in name or "gate_up" in name
        ]
        self.momenta = [torch.zeros_like(torch.cat(block, -2), dtype=torch.float64) for block in self.blocks]
        self.muon: dict[str, float] = {"lr": LEARNING_RATE}
        self.param_groups = [*self.adamw.param_groups, self.muon]

    def zero_grad(self) -> None:
        for block in self.blocks:
            for weight in block:
                weight.grad = None
        self.adamw.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        rate = MUON_RATIO * self.muon["lr"]
        for block, momentum in zip(self.blocks, self.momenta, strict=True):
            momentum.lerp_(torch.cat([weight.grad for weight in block], -2).double(), 1 - 0.95)
            x = momentum / momentum.norm(dim=(-2, -1), keepdim=True)
            for a, b, c in self.COEFFICIENTS:
                square = x @ x.mT
                x = a * x + (b * square + c * square @ square) @ x
            size = 0.2 * max(x.shape[-2:]) ** 0.5
            for weight, update in zip(block, (size * x).split([weight.shape[-2] for weight in block], -2), strict=True):
                weight.mul_(1 - rate * WEIGHT_DECAY).sub_(rate * update)


def train_gspo(model: PreTrainedModel, batches: Sequence[Batch]) -> list[tuple[float, float]]:
    """Make two AdamW updates per step: GSPO's loss, rewards minus the divergence from the start, RLOO's advantages.

    Returns (loss over both updates, gradient norm of the first) of each step.
    """
    beginning = copy.deepcopy(model)
    optimizer = an_optimizer(model)
    seen = []
    for batch in batches:
        with torch.no_grad():
            starts = [logprobs(model, item) for item in batch.rollouts]
            costs = [float((a - logprobs(beginning, i)).sum()) for a, i in zip(starts, batch.rollouts, strict=True)]
        rewards = [item.reward - KL_COEFFICIENT * cost for item, cost in zip(batch.rollouts, costs, strict=True)]
        losses = []
        norms = []
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


def train(model: PreTrainedModel, batches: Sequence[Batch], *, is_muon: bool = False) -> list[tuple[float, float]]:
    """Make steps on the truncated importance-weighted policy gradient. Returns (loss, gradient norm) of each."""
    optimizer = MuonAndAdamW(model) if is_muon else an_optimizer(model)
    seen = []
    for batch in batches:
        tokens = sum(item.rollout.total_length for item in batch.rollouts)
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
