"""Three lines of libraries are silenced, and no others."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings

import pytest

from specrl.generation.vllm_backend import quiet

TRITON = logging.getLogger("vllm.triton_utils.importing")


@pytest.fixture
def silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRITON, "filters", [])
    monkeypatch.setattr(quiet, "visible_gpus", lambda: ())


def test_what_vllm_says_of_triton_is_silenced_without_gpus_alone(
    silenced: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every replica's log began with three lines of it."""
    quiet.silence_known_lines()
    TRITON.warning("Triton is installed, but doesn't include CPU backend. Disabling Triton.")
    TRITON.warning("another line")
    assert caplog.messages == ["another line"]
    monkeypatch.setattr(TRITON, "filters", [])
    monkeypatch.setattr(quiet, "visible_gpus", lambda: ("0",))
    quiet.silence_known_lines()
    TRITON.warning("Triton is installed but %d active driver(s) found", 2)
    assert caplog.messages[-1] == "Triton is installed but 2 active driver(s) found"


def test_one_deprecation_of_torch_is_silenced_and_others_are_not(silenced: None) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        quiet.silence_known_lines()
        warnings.warn("`torch.distributed.reduce_op` is deprecated, please use `ReduceOp`", FutureWarning, stacklevel=1)
        warnings.warn("`torch.other` is deprecated", FutureWarning, stacklevel=1)
    assert [str(it.message) for it in found] == ["`torch.other` is deprecated"]


def test_a_process_that_vllm_spawns_silences_them_before_it_imports_vllm() -> None:
    """A spawned process imports the main module, and nothing else, before it unpickles what it runs."""
    code = (
        "import logging, sys, warnings; import specrl.generation.main; "
        "assert 'vllm' not in sys.modules; assert logging.getLogger('vllm.triton_utils.importing').filters; "
        "assert any('reduce_op' in str(it[1]) for it in warnings.filters)"
    )
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | environment)
