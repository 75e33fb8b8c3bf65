"""Peaks of live tensors in a trainer's step, for a policy with the vocabulary of Qwen3.

Each is a budget that the step exceeded when it held a copy of all gradients or all logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.trainer import whole_logits
from tests.integration.trainer.runs import a_batch, a_spec
from tests.live_tensors import LiveTensors
from tests.tiny_models import Shape, make_policy

from specrl.drafting import vocabulary
from specrl.errors import MemoryTooSmall
from specrl.trainer.megatron_backend import MegatronBackend
from specrl.trainer.megatron_backend.policy.distributions import SamplingDistributions
from specrl.trainer.megatron_backend.policy.lessons import KeptPass, LessonKeeper

VOCAB = 151_936


@pytest.fixture(scope="module")
def wide_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(hidden=32, layers=1, heads=1, groups=1, intermediate=32, vocab=VOCAB, is_tied=True)
    return make_policy(tmp_path_factory.mktemp("wide"), shape=shape)


@pytest.fixture(scope="module")
def wide_backend(wide_policy: Path) -> Iterator[MegatronBackend]:
    backend = MegatronBackend(a_spec(wide_policy, speculation={"eagle3": {"draftVocabSize": 4096}}))
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


@pytest.mark.parametrize("rows_per_chunk", [2, 4, 100])
def test_chunks_of_a_wide_vocabulary_give_the_bits_of_the_whole(
    wide_backend: MegatronBackend, rows_per_chunk: int
) -> None:
    found = whole_logits.compare_chunks(wide_backend.groups, wide_backend.config, rows_per_chunk)
    assert found == dict.fromkeys(found, True)


def test_no_float32_matrix_has_the_logits_of_all_tokens(
    wide_backend: MegatronBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, beside bf16 logits whose place the gradient takes."""
    rows, chunk = 96, 8
    monkeypatch.setattr(vocabulary, "CHUNK_BYTES", 4 * VOCAB * chunk)
    logits_LW = torch.randn(rows, VOCAB, dtype=torch.bfloat16).requires_grad_()
    target_L = torch.randint(VOCAB, (rows,))
    sampling = SamplingDistributions(0.7, VOCAB, None, wide_backend.groups.tensor)
    with LiveTensors() as live:
        live.ignore(logits_LW, target_L)
        logprob_L, _ = sampling.measure_tokens(logits_LW, target_L)
        (gradient_LW,) = torch.autograd.grad(logprob_L.sum(), logits_LW)
    assert gradient_LW.data_ptr() == logits_LW.data_ptr()
    assert live.most <= 2.1 * vocabulary.CHUNK_BYTES < 4 * rows * VOCAB


def test_a_reduced_draft_vocabulary_makes_no_float32_matrix_of_all_targets(
    wide_backend: MegatronBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = 4
    monkeypatch.setattr(vocabulary, "CHUNK_BYTES", 4 * VOCAB * chunk)
    keep_logits = LessonKeeper.keep_logits
    measured = []

    def measure(keeper: LessonKeeper, kept: KeptPass, logits_LW: torch.Tensor) -> None:
        with LiveTensors() as live:
            live.ignore(logits_LW)
            keep_logits(keeper, kept, logits_LW)
        assert kept.target_MK is not None
        measured.append((live.most - kept.target_MK.nbytes, len(kept.target_MK)))

    monkeypatch.setattr(LessonKeeper, "keep_logits", measure)
    wide_backend.train_step(a_batch(wide_backend.get_status().step + 1, VOCAB))
    most, targets = max(measured)
    assert most <= 3.1 * vocabulary.CHUNK_BYTES < 4 * targets * VOCAB


@pytest.mark.parametrize(
    ("place", "phase"),
    [
        ("run_micro_batches", "forward and backward passes: .*; lower trainer.microBatchTokens"),
        ("update_weights", "the optimizer's update: .*; use a smaller model"),
    ],
)
def test_a_step_says_in_which_phase_memory_ran_out(
    wide_backend: MegatronBackend, monkeypatch: pytest.MonkeyPatch, place: str, phase: str
) -> None:
    def allocate(*_: Any, **__: Any) -> None:
        torch.empty(10**15)

    monkeypatch.setattr(wide_backend.models.policy, place, allocate)
    with pytest.raises(MemoryTooSmall, match=f"ran out of memory in {phase}"):
        wide_backend.train_step(a_batch(wide_backend.get_status().step + 1, VOCAB))
