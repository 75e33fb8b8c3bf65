"""Peaks of live tensors in a trainer's step, for a policy with the vocabulary of Qwen3.

Each is a budget that the step exceeded when it held a copy of all gradients or all logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.trainer.runs import a_spec
from tests.live_tensors import LiveTensors
from tests.tiny_models import Shape, make_policy

from specrl.trainer.megatron_backend import MegatronBackend

VOCAB = 151_936


@pytest.fixture(scope="module")
def wide_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(hidden=32, layers=1, heads=1, groups=1, intermediate=32, vocab=VOCAB, is_tied=True)
    return make_policy(tmp_path_factory.mktemp("wide"), shape=shape)


@pytest.fixture(scope="module")
def wide_backend(wide_policy: Path) -> Iterator[MegatronBackend]:
    backend = MegatronBackend(a_spec(wide_policy, speculation={"none": {}}))
    backend.load_model(None)
    yield backend
    backend.close()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradients_are_checked_without_a_copy_of_them(wide_backend: MegatronBackend, bad: float) -> None:
    policy = wide_backend.models.policy
    (gradients,) = (buffer.grad_data for chunk in policy.wrapped for buffer in chunk.buffers)
    gradients.uniform_(-1, 1)
    gradients[0], gradients[-1] = 3e38, -3e38  # finite, but their difference is not
    with LiveTensors() as live:
        live.ignore(gradients)
        assert policy._gradients_are_finite()
    assert live.most < 1024 < gradients.nbytes
    for place in (0, len(gradients) // 2, -1):
        gradients.zero_()
        gradients[place] = bad
        assert not policy._gradients_are_finite()
    gradients.zero_()
