"""Every trainable model family is served correctly: log-probabilities after an update are those of transformers.

The same engines show that the run file's end tokens end a completion.

With tied embeddings, the output layer changes with the embedding. test_weight_updates.py has an untied Qwen3 and a
MiMo, test_routed_experts.py a mixture.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiny_models import SPECIAL, Shape, make_policy, perturb
from tests.vllm_cases import Judge, a_spec, collect_rollouts, errors_of, running_engine, some_requests
from tests.weight_sender import WeightSender, folder_tensors, update_weights

from specrl.records import FinishReason, WeightOwner

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

END_TOKEN = "<|im_end|>"
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHAPES = {
    "llama, tied, stretched": Shape(
        groups=1, family="llama", is_tied=True, rope={**LLAMA3, "original_max_position_embeddings": 32}
    ),
    "qwen2": Shape(groups=1, family="qwen2"),
    "qwen3, tied, YaRN": Shape(
        is_tied=True, rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32}
    ),
}


@pytest.mark.parametrize("name", SHAPES)
async def test_an_updated_engine_matches_transformers(name: str, tmp_path: Path) -> None:
    first = make_policy(tmp_path / "first", seed=1, shape=SHAPES[name], bigram=10)
    second = perturb(tmp_path / "second", first, scale=0.5, seed=2)
    requests = some_requests(4, max_tokens=64)
    uniform = [replace(it, sampling=replace(it.sampling, temperature=2.0)) for it in some_requests(32, 64)]
    sampling = {"maxTokens": 64, "endTokens": [END_TOKEN]}
    sender = WeightSender()
    async with running_engine(a_spec(first, {"none": {}}, generation={"sampling": sampling})) as engine:
        for version, folder in enumerate((first, second)):
            await update_weights(engine, sender, folder_tensors(folder, WeightOwner.POLICY), version)
            judge = Judge(folder)
            for request, rollout in zip(requests, await collect_rollouts(engine, requests), strict=True):
                assert errors_of(judge, request, rollout).max() < 1e-4
        # The run file's end token ends a completion and is part of it. All tokens are about equally likely here.
        number = SPECIAL.index(END_TOKEN)
        ended = [it for it in await collect_rollouts(engine, uniform) if number in it.token_ids_T]
        assert ended
        for rollout in ended:
            assert rollout.token_ids_T.tolist().index(number) == rollout.total_length - 1
            assert rollout.finish_reason is FinishReason.STOP
    sender.close()
