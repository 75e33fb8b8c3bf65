"""The same training with transformers and torch alone, written from the formulas: what the backend is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tests.integration.trainer.runs import CAP, EPSILON, LEARNING_RATE, TEMPERATURE, WEIGHT_DECAY
from transformers import AutoModelForCausalLM, PreTrainedModel

from specrl.records import Batch, TrainRollout


def load(policy: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()


def logprobs(model: PreTrainedModel, item: TrainRollout) -> torch.Tensor:
    """Log-probabilities [T] of one rollout's tokens at the sampling temperature, without any padding."""
    prompt = len(item.prompt_token_ids)
    ids_S = torch.tensor([*item.prompt_token_ids, *item.rollout.token_ids_T.tolist()])
    logits_TV = model(ids_S[None]).logits[0, prompt - 1 : -1] / TEMPERATURE
    return logits_TV.log_softmax(-1).gather(1, ids_S[prompt:, None])[:, 0]


def train(model: PreTrainedModel, batches: Sequence[Batch]) -> list[tuple[float, float]]:
    """AdamW steps on the truncated, importance-weighted policy gradient. Returns (loss, gradient norm) of each."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
        eps=EPSILON,
    )
    seen = []
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
