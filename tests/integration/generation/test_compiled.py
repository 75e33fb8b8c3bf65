"""Compiled engines on CPUs (`generation.eager: false`) serve the weights that they were given.

vLLM keeps compiled code in VLLM_CACHE_ROOT, without weights. On CPUs each layer has a packed copy of its weights, which
an update replaces. The code must read the copy of its own process, and the newest one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.vllm_cases import (
    EAGLE3,
    Judge,
    Models,
    ModelVersion,
    Served,
    a_spec,
    collect_rollouts,
    errors_of,
    margins_of,
    running_engine,
    some_requests,
    speculation,
    z_scores,
)

from specrl.generation.draft_lengths.decoding_step import OFF
from specrl.generation.vllm_backend import draft_length_client
from specrl.spec import RunSpec

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.deep]

Z_LIMIT = 4.5  # as in test_losslessness
NEAR_TIE = 1e-3  # nats


def a_compiled_spec(version: ModelVersion, folder: Path) -> RunSpec:
    """A run whose engine compiles, and whose drafter may be left out of a step. The models are copied into `folder`.

    vLLM looks for compiled code by the models' paths, among others.
    """
    policy = shutil.copytree(version.policy, folder / "policy", dirs_exist_ok=True)
    drafter = shutil.copytree(version.drafter, folder / "drafter", dirs_exist_ok=True)
    drafts = speculation(EAGLE3, ModelVersion(policy, drafter))
    return a_spec(policy, drafts, generation={"eager": False, "draftLength": "Adaptive"})


@pytest.fixture(scope="module")
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache of compiled code."""
    import torch._dynamo.config

    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.config, "disable", False)  # engines of earlier tests have set it in this process
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # as a test with Megatron's shim has left it
        patch.setenv("VLLM_CACHE_ROOT", str(folder))
        patch.setenv("SPECRL_CACHE_DIR", str(folder / "specrl"))
        yield folder


def list_libraries(folder: Path) -> list[str]:
    """List the compiled libraries in a folder."""
    return sorted(path.name for path in folder.rglob("*.so"))


async def check_rollouts(served: Served, version: ModelVersion) -> None:
    """Check that rollouts follow a version's distribution, that their log-probabilities are its, and that it drafts."""
    judge = Judge(version.policy)
    before = (await served.engine.get_status()).speculation
    requests = some_requests(96, 48)
    rollouts = await collect_rollouts(served.engine, requests)
    since = (await served.engine.get_status()).speculation.minus(before)
    assert np.abs(z_scores(judge, requests, [one.token_ids_T.tolist() for one in rollouts])).max() < Z_LIMIT
    assert max(errors_of(judge, request, one).max() for request, one in zip(requests, rollouts, strict=True)) < 1e-2
    assert since.accepted_tokens > 0.05 * since.draft_tokens > 0
    greedy = some_requests(32, 24, temperature=0)
    for request, rollout in zip(greedy, await collect_rollouts(served.engine, greedy), strict=True):
        assert margins_of(judge, request, rollout.token_ids_T.tolist()).max() < NEAR_TIE


async def test_a_compiled_engine_serves_its_own_weights_and_each_update(compiled_code: Path, models: Models) -> None:
    """The second engine has other weights, and finds the code that the first one compiled."""
    versions = (models.first, models.second)
    for number in (0, 1):
        own = versions[number]
        other = versions[1 - number]
        async with running_engine(a_compiled_spec(own, compiled_code / "models")) as engine:
            served = Served(EAGLE3, engine, versions)
            await served.use_full_drafts()
            await check_rollouts(served, own)
            await served.publish(1 - number)
            await check_rollouts(served, other)
            await draft_length_client.fix_length(engine._llm, OFF)  # the compiled code computes hidden states as before
            await collect_rollouts(engine, some_requests(4))
            await served.use_full_drafts()
            await served.publish(number)
            await check_rollouts(served, own)
        code = list_libraries(compiled_code)
        assert code, "nothing was compiled"
        if number == 0:
            compiled = code
    assert code == compiled, "the second engine compiled again"
