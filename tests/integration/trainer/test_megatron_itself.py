"""The installed Megatron-Core: private names that the backend uses, and warnings in a trainer's log."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.integration.trainer.conftest import VOCAB
from tests.integration.trainer.runs import a_batch, a_spec
from tests.tiny_models import Shape, make_mtp_policy, make_policy

from specrl.seams.versions import EXPECTED

UNCOMPILED = """
import importlib.machinery as machinery
real = machinery.SourceFileLoader.path_stats

def path_stats(loader, path):
    if "/megatron/" in path:
        raise OSError("its bytecode is not looked for, as on the first start after an install")
    return real(loader, path)

machinery.SourceFileLoader.path_stats = path_stats
from specrl.trainer.megatron_backend import MegatronBackend
"""
WARNED = """
import logging, warnings
warnings.warn_explicit("another default", UserWarning, "file.py", 1, module="megatron.core.model_parallel_config")
logging.getLogger("megatron.core.models.gpt.gpt_model").warning("another model")
"""


def test_the_shims_functions_take_what_those_that_they_replace_take() -> None:
    from specrl.trainer.megatron_backend import cpu_shim

    cpu_shim.install_shim()
    read = json.loads(EXPECTED.read_text(encoding="utf-8"))
    rows = {name: row for pin in read.values() for name, row in pin["seams"].items()}
    for module, name in (
        ("tensor_parallel.random", "_get_cuda_rng_state"),
        ("tensor_parallel.random", "_set_cuda_rng_state"),
        ("transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu"),
    ):
        parameters = rows[f"megatron.core.{module}.{name}"]["signature"].split(", ")
        expected = [parameter.partition("=")[0] for parameter in parameters]
        function = sys.modules[f"megatron.core.{module}"].__dict__[name]
        assert list(inspect.signature(function).parameters)[1:] == expected[1:], name  # the first is passed by position


def test_private_state_of_megatron_is_where_it_was(policy: Path) -> None:
    from specrl.trainer.megatron_backend import MegatronBackend
    from specrl.trainer.megatron_backend.parallel import groups
    from specrl.trainer.megatron_backend.policy import optimizer_state

    backend = MegatronBackend(a_spec(policy, speculation={"none": {}}))
    backend.load_model(None)
    made = groups.parallel_state._global_process_group_list
    (optimizer,) = backend.models.policy.optimizer.chained_optimizers
    parameters = [parameter for buffer in optimizer.buffers for parameter in buffer.params]
    assert isinstance(optimizer, optimizer_state.DistributedOptimizer)
    assert set(optimizer.model_param_gbuf_map) == set(parameters) == set(backend.models.policy.chunks[0].parameters())
    backend.close()
    assert made
    assert groups.parallel_state._global_process_group_list is None


@pytest.mark.parametrize("kind", ["dense", "mixture", "heads"])
def test_a_closed_backend_leaves_no_threads_of_its_groups(kind: str, tmp_path: Path) -> None:
    """The rotary embedding's cache kept a group of each, whose threads poll. Ranks that form many layouts were slow.

    So did a mixture's token dispatcher, and native heads, which kept the policy.
    """
    from specrl.trainer.megatron_backend import MegatronBackend

    family = "qwen3_moe" if kind == "mixture" else "qwen3"
    shape = Shape(heads=4, groups=2, head_dim=16, vocab=VOCAB, family=family)
    policy = (make_mtp_policy if kind == "heads" else make_policy)(tmp_path / "policy", shape=shape)
    speculation = {"mtp": {"numDraftTokens": 2}} if kind == "heads" else {"none": {}}

    def count_threads() -> int:
        """Train and close a backend. Returns how many threads of Gloo are left."""
        backend = MegatronBackend(a_spec(policy, speculation=speculation))
        backend.load_model(None)
        backend.train_step(a_batch(1, VOCAB))
        backend.close()
        return sum("gloo" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())

    first = count_threads()
    assert count_threads() <= first


def test_megatron_says_nothing_in_the_log_of_a_trainer(policy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GPTModel's deprecation is filtered, and DistributedDataParallel gets the layout that it would warn about."""
    from specrl.trainer.megatron_backend import MegatronBackend

    backend = MegatronBackend(a_spec(policy, speculation={"none": {}}))
    backend.load_model(None)
    backend.close()
    assert [line.getMessage() for line in caplog.records if line.name.startswith("megatron")] == []


def test_first_start_after_an_install_prints_what_megatron_warns_of_and_nothing_of_itself() -> None:
    """Compiling a docstring of Megatron printed a SyntaxWarning, which ended the tests as an error.

    Every other warning of Megatron's modules was ignored.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", UNCOMPILED + WARNED]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.splitlines() == ["file.py:1: UserWarning: another default", "another model"]


def test_dynamo_is_off_on_cpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was off on GPUs, too, where torch.compile then did nothing without a word."""
    from specrl.trainer.megatron_backend import cpu_shim

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(torch.cuda, "is_available", lambda: True)
        with cpu_shim.without_compilation():
            assert "TORCHDYNAMO_DISABLE" not in os.environ
    with cpu_shim.without_compilation():
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
