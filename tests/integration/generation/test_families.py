"""Every family that is trained is served: log-probabilities of the weights that were sent last are transformers'.

Both output layers are tied, and change with the embedding. Others are in test_weight_updates.py, mixtures in
test_routed_experts.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny_models import Shape, make_policy, perturb
from tests.vllm_cases import Judge, a_spec, collect, errors_of, running, some_requests
from tests.weight_sender import WeightSender, folder_tensors, update

from specrl.records import WeightOwner

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHAPES = {
    "llama, tied, stretched": Shape(
        groups=1, family="llama", is_tied=True, rope={**LLAMA3, "original_max_position_embeddings": 32}
    ),
    "qwen3, tied, YaRN": Shape(
        is_tied=True, rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32}
    ),
}


@pytest.mark.parametrize("name", SHAPES)
async def test_updated_engine_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    first = make_policy(tmp_path / "first", seed=1, shape=SHAPES[name], bigram=10)
    second = perturb(tmp_path / "second", first, scale=0.5, seed=2)
    requests, sender = some_requests(4, max_tokens=64), WeightSender()
    async with running(a_spec(first, {"none": {}})) as engine:
        for version, folder in enumerate((first, second)):
            await update(engine, sender, folder_tensors(folder, WeightOwner.POLICY), version)
            judge = Judge(folder)
            for request, rollout in zip(requests, await collect(engine, requests), strict=True):
                assert errors_of(judge, request, rollout).max() < 1e-4
    sender.close()
