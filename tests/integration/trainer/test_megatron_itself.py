"""What the backend takes from the installed Megatron-Core: private names, and what it says in a trainer's log."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.trainer.runs import a_spec

PRIVATE = {
    # Replaced by `cpu_shim.py`.
    "tensor_parallel/random.py": {
        "_get_cuda_rng_state": ["device", "clone", "graph_safe"],
        "_set_cuda_rng_state": ["new_state", "device", "graph_safe"],
    },
    "transformer/moe/moe_utils.py": {"maybe_move_tensor_to_cpu": ["tensor", "as_numpy", "record_stream"]},
    # What `replay.py` stands in for.
    "transformer/moe/router_replay.py": {
        "get_replay_topk": ["self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk"]
    },
    # Called by `optimizer_state.py`.
    "optimizer/distrib_optimizer.py": {
        "_get_model_param_range_map": ["self", "param"],
        "_get_main_param_and_optimizer_states": ["self", "model_param"],
    },
}
"""Files of megatron.core, their functions, and these functions' parameters."""

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


def core() -> Path:
    """The folder of megatron.core, whose modules may have been patched: sources have not."""
    import specrl.trainer.megatron_backend  # noqa: F401 - which imports it

    return Path(inspect.getfile(sys.modules["megatron.core"])).parent


def parameters_of(file: Path) -> dict[str, list[str]]:
    """Parameters of every function and method in a file."""
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    return {node.name: [argument.arg for argument in node.args.args] for node in functions}


@pytest.mark.parametrize("file", PRIVATE)
def test_private_functions_have_the_parameters_that_were_read(file: str) -> None:
    found = parameters_of(core() / file)
    assert {name: found.get(name) for name in PRIVATE[file]} == PRIVATE[file]


def test_the_shims_functions_take_what_those_that_they_replace_take() -> None:
    from specrl.trainer.megatron_backend import cpu_shim

    cpu_shim.install()
    for module, name in (
        ("tensor_parallel.random", "_get_cuda_rng_state"),
        ("tensor_parallel.random", "_set_cuda_rng_state"),
        ("transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu"),
    ):
        (expected,) = (functions[name] for functions in PRIVATE.values() if name in functions)
        function = sys.modules[f"megatron.core.{module}"].__dict__[name]
        assert list(inspect.signature(function).parameters)[1:] == expected[1:], name  # the first goes by its place


def test_private_state_of_megatron_is_where_it_was(policy: Path) -> None:
    from specrl.trainer.megatron_backend import MegatronBackend, groups, optimizer_state

    backend = MegatronBackend(a_spec(policy, speculation={"none": {}}))
    backend.load(None)
    made = groups.parallel_state._global_process_group_list
    (optimizer,) = backend.policy.optimizer.chained_optimizers
    parameters = [parameter for buffer in optimizer.buffers for parameter in buffer.params]
    assert isinstance(optimizer, optimizer_state.DistributedOptimizer)
    assert set(optimizer.model_param_gbuf_map) == set(parameters) == set(backend.policy.chunks[0].parameters())
    backend.close()
    assert made
    assert groups.parallel_state._global_process_group_list is None


def test_megatron_says_nothing_in_the_log_of_a_trainer(policy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GPTModel's deprecation is filtered, and DistributedDataParallel is given the layout that it would warn about."""
    from specrl.trainer.megatron_backend import MegatronBackend

    backend = MegatronBackend(a_spec(policy, speculation={"none": {}}))
    backend.load(None)
    backend.close()
    assert [line.getMessage() for line in caplog.records if line.name.startswith("megatron")] == []


def test_first_start_after_an_install_prints_what_megatron_warns_of_and_nothing_of_itself() -> None:
    """Python compiled a docstring of Megatron's then, and printed a SyntaxWarning; as an error it ended the tests.

    Every other warning of Megatron's modules was ignored.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", UNCOMPILED + WARNED]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.splitlines() == ["file.py:1: UserWarning: another default", "another model"]
