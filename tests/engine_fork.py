"""Starts vLLM's processes as forks of a server that has imported vLLM.

The start of an engine core takes sixteen CPU seconds, and imports are ten of them. The product spawns each core: a
fresh interpreter imports vLLM. The server here is such an interpreter. It imports the same modules in the same
environment, starts no thread and no engine, and is forked for each core. Spawned cores are tested where the product's
programs run: test_process, the second node of test_nodes, tests/integration/elastic, test_demo.

`install` changes where vLLM takes processes from, in this process and in all forks. vLLM also starts a process to look
at a model's class; it looks in this process instead.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Any

IMPORTED = [
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.llama_eagle3",
    "vllm.model_executor.models.mimo_mtp",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "specrl.generation.vllm_backend.worker",
    "specrl.generation.vllm_backend.scheduler",
    "tests.sampling_lab",
]
AT_IMPORT = (
    "HF_HUB_OFFLINE",
    "NUMBA_NUM_THREADS",
    "NUMBA_THREADING_LAYER",
    "OMP_NUM_THREADS",
    "TORCH_COMPILE_DISABLE",
    "VLLM_LOGGING_LEVEL",
)
"""Variables that these modules, or libraries below them, read once. A process that needs other values is spawned."""

_server = forkserver.ForkServer()  # not the module's own, which forks sandboxes
_server.set_forkserver_preload(IMPORTED)
_imported_with: dict[str, str | None] = {}


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: Any) -> None:
        usual = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = _server.connect_to_new_process
        try:
            super()._launch(process_obj)
        finally:
            forkserver.connect_to_new_process = usual


class EngineProcess(ForkServerProcess):
    """A fork of the server, with the environment of whoever starts it, or another."""

    environment: Mapping[str, str] | None = None

    def start(self) -> None:
        """Start the server too, if this is the first one."""
        self.environment = dict(self.environment or os.environ)
        if not _imported_with:
            _start_server(self.environment)
        super().start()

    def run(self) -> None:
        """In the fork."""
        assert self.environment is not None
        os.environ.clear()
        os.environ.update(self.environment)
        # The interpreter has told its own instance where the server is, and would start another one all the same.
        told: Any = forkserver._forkserver
        _server._forkserver_address = told._forkserver_address
        _server._forkserver_alive_fd = told._forkserver_alive_fd
        _server.ensure_running = lambda: None  # type: ignore[method-assign]  # that is the point
        _imported_with.update(_of_imports(self.environment))
        install()
        super().run()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)


class EngineContext(ForkServerContext):
    """A multiprocessing context whose processes are forks of the server."""

    Process = EngineProcess


def install() -> None:
    """From now on vLLM starts its processes here."""
    with warnings.catch_warnings():  # of its dependencies, which would be errors here
        warnings.simplefilter("ignore")
        from vllm.model_executor.models import registry
        from vllm.utils import system_utils
        from vllm.v1.engine import utils
        from vllm.v1.executor import multiproc_executor

    for module in (system_utils, utils, multiproc_executor):
        module.get_mp_context = _context  # type: ignore[attr-defined]  # that is the point
    registry._run_in_subprocess = _run_here


def _run_here[T](function: Callable[[], T]) -> T:
    """vLLM asks a model's class for its abilities in another process, of ten CPU seconds, so as not to initialise CUDA.

    It keeps the answers in a cache, which may be empty.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()


def start(target: Callable[..., Any], *args: Any, environment: Mapping[str, str]) -> EngineProcess:
    """Run a function in a fork of its own."""
    process = EngineProcess(target=target, args=args)
    process.environment = environment
    process.start()
    return process


def _context() -> BaseContext:
    is_alike = not _imported_with or _imported_with == _of_imports(os.environ)
    return EngineContext() if is_alike else multiprocessing.get_context("spawn")


def _of_imports(environment: Mapping[str, str]) -> dict[str, str | None]:
    return {name: environment.get(name) for name in AT_IMPORT}


def _start_server(environment: Mapping[str, str]) -> None:
    before = dict(os.environ)
    _imported_with.update(_of_imports(environment))
    os.environ.update(environment)
    try:
        _server.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
