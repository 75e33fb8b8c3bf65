"""What the backend refuses before it computes anything, with the number that is wrong and what to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.integration.trainer.runs import a_spec

from specrl.errors import CheckpointInvalid, MemoryTooSmall, TrainerFailed

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron warns about itself


def test_model_that_does_not_fit_into_memory(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specrl.trainer.megatron_backend import MegatronBackend, backend

    one = MegatronBackend(a_spec(policy))
    monkeypatch.setattr(backend.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    with pytest.raises(MemoryTooSmall, match="GiB"):
        one.load(None)
    one.close()


def test_tensor_parallel_size_that_does_not_divide_the_heads(policy: Path) -> None:
    from specrl.trainer.megatron_backend import MegatronBackend

    with pytest.raises(CheckpointInvalid, match="num_attention_heads=4"):
        MegatronBackend(a_spec(policy, tensor=3))


def test_number_of_processes_that_is_not_the_run_files(policy: Path) -> None:
    from specrl.trainer.megatron_backend import MegatronBackend

    with pytest.raises(TrainerFailed, match="2 ranks"):
        MegatronBackend(a_spec(policy, data=2))
