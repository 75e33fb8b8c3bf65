"""A mixture of experts is served, and with trainer.routing Replay its rollouts include their routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tiny_models import Shape, make_policy, perturb
from tests.vllm_cases import Judge, a_prompt, a_spec, collect_rollouts, errors_of, running_engine
from tests.weight_sender import WeightSender, folder_tensors, update_weights

from specrl.records import RolloutRequest, Sampling, WeightOwner

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

NEAR = 1e-3  # closer router logits may be ordered either way, by rounding


class Routers:
    """The routers of a mixture, computed by transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._found: list[torch.Tensor] = []
        for layer in self._model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, output: self._found.append(output[0]))

    def logits_SLE(self, token_ids: Sequence[int]) -> np.ndarray:
        """Router logits [S, L, E] of every token but the last."""
        self._found.clear()
        with torch.no_grad():
            self._model(torch.tensor([token_ids]))
        return torch.stack(self._found, 1)[:-1].numpy()


async def test_rollouts_of_a_mixture_match_transformers_and_include_their_experts(tmp_path: Path) -> None:
    """With rejected and accepted drafts, with prompts from the prefix cache, and after an update."""
    first = make_policy(tmp_path / "first", seed=1, shape=Shape(family="qwen3_moe"), sharpness=30, bigram=20)
    second = perturb(tmp_path / "second", first, scale=0.5, seed=2)
    shared = a_prompt(3) * 12  # longer than a block of the cache
    prompts = [shared, shared, a_prompt(5), a_prompt(6), shared]
    requests = [
        RolloutRequest(f"r{i}", f"g{i}", 0, prompt, Sampling(24 + i, 1.0, seed=i)) for i, prompt in enumerate(prompts)
    ]
    speculation = {"ngram": {"numDraftTokens": 3}}
    trainer = {"optimizer": {"learningRate": "1e-4"}, "routing": "Replay"}
    spec = a_spec(first, speculation, trainer=trainer, generation={"maxLiveRollouts": 2})
    sender = WeightSender()
    async with running_engine(spec) as engine:
        for version, folder in enumerate((first, second)):
            await update_weights(engine, sender, folder_tensors(folder, WeightOwner.POLICY), version)
            routers = Routers(folder)
            judge = Judge(folder)
            for request, rollout in zip(requests, await collect_rollouts(engine, requests), strict=True):
                assert errors_of(judge, request, rollout).max() < 1e-4
                logits_SLE = routers.logits_SLE((*request.prompt_token_ids, *rollout.token_ids_T.tolist()))
                found = rollout.experts_SLK
                assert found is not None
                assert found.shape == (*logits_SLE.shape[:2], 2)
                order = (-logits_SLE).argsort(-1)
                ranked = np.take_along_axis(logits_SLE, order, -1)
                is_clear = ranked[..., 1] - ranked[..., 2] > NEAR
                assert is_clear.mean() > 0.95
                assert (np.sort(found)[is_clear] == np.sort(order[..., :2])[is_clear]).all()
        drafting = (await engine.get_status()).speculation
        assert 0 < drafting.accepted_tokens < drafting.draft_tokens
    sender.close()
