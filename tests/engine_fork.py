"""Starts vLLM's processes as forks of a server that has imported vLLM.

Starting an engine core takes sixteen CPU seconds, most of them for imports. An engine that pytest starts would spawn
its core: pytest has threads. This server imports the same modules in the same environment, starts no thread and no
engine, and is forked for each core. A replica, program or fork, forks its own core (`reserve_engine_core` in
generation/vllm_backend/launch.py). Spawned ranks are tested in test_nodes.

`install_engine_context` replaces vLLM's multiprocessing context, in this process and in all forks. It also makes vLLM
inspect a model's class in this process, instead of in a new one.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Any

import psutil

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
    "compressed_tensors",
    "specrl.generation.vllm_backend.extensions.worker",
    "specrl.generation.vllm_backend.extensions.scheduler",
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
"""Variables that these modules or their libraries read once, at import. A process with other values is spawned."""

_server = forkserver.ForkServer()  # not multiprocessing's own instance, which forks sandboxes
_server.set_forkserver_preload(IMPORTED)
_imported_with: dict[str, str | None] = {}
STOP_S = 10.0


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: Any) -> None:
        usual = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = _server.connect_to_new_process
        try:
            super()._launch(process_obj)
        finally:
            forkserver.connect_to_new_process = usual


class EngineProcess(ForkServerProcess):
    """A fork of the server. environment: its variables; with None, it has those of the process that starts it."""

    environment: Mapping[str, str] | None = None

    def start(self) -> None:
        """Start the process. The first call also starts the server."""
        self.environment = dict(self.environment or os.environ)
        if not _imported_with:
            _start_server(self.environment)
        super().start()

    def run(self) -> None:
        """Run the target function. Called in the fork."""
        assert self.environment is not None
        gc.freeze()  # vLLM collects garbage at each start; without the imported modules' objects that takes no time
        os.environ.clear()
        os.environ.update(self.environment)
        # The child knows the address of multiprocessing's own instance, and would start another server for this one.
        told: Any = forkserver._forkserver
        _server._forkserver_address = told._forkserver_address
        _server._forkserver_alive_fd = told._forkserver_alive_fd
        _server.ensure_running = lambda: None  # type: ignore[method-assign]  # the server must not start again
        _imported_with.update(_read_import_variables(self.environment))
        install_engine_context()
        super().run()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)


class EngineContext(ForkServerContext):
    """A multiprocessing context whose processes are forks of the server."""

    Process = EngineProcess


def install_engine_context() -> None:
    """Make vLLM start its processes with `EngineContext`."""
    with warnings.catch_warnings():  # warnings of dependencies would be errors here
        warnings.simplefilter("ignore")
        from vllm.model_executor.models import registry
        from vllm.utils import system_utils
        from vllm.v1.engine import utils
        from vllm.v1.executor import multiproc_executor

    for module in (system_utils, utils, multiproc_executor):
        module.get_mp_context = _context  # type: ignore[attr-defined]  # a module attribute that mypy does not know
    registry._run_in_subprocess = _run_in_process


def _run_in_process[T](function: Callable[[], T]) -> T:
    """Call a function in this process. vLLM calls it in a new process, so that it does not initialise CUDA here.

    A new process costs ten CPU seconds. vLLM caches the results, but the cache may be empty.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()


def start_fork(target: Callable[..., Any], *args: Any, environment: Mapping[str, str]) -> EngineProcess:
    """Run a function in a fork."""
    process = EngineProcess(target=target, args=args)
    process.environment = environment
    process.start()
    return process


def _context() -> BaseContext:
    is_alike = not _imported_with or _imported_with == _read_import_variables(os.environ)
    return EngineContext() if is_alike else multiprocessing.get_context("spawn")


def _read_import_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    return {name: environment.get(name) for name in AT_IMPORT}


def _start_server(environment: Mapping[str, str]) -> None:
    before = dict(os.environ)
    _imported_with.update(_read_import_variables(environment))
    os.environ.update(environment)
    try:
        _server.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    atexit.register(_stop_server)


def _stop_server() -> None:
    """End the server, and wait for it. Otherwise a shell's `time` of this process would lack all engines."""
    server: Any = _server
    os.close(server._forkserver_alive_fd)
    with suppress(psutil.Error):  # it is gone, or a fork still runs and keeps it alive
        psutil.Process(server._forkserver_pid).wait(STOP_S)
