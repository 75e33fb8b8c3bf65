"""Runs vLLM's ranks on a follower node of a replica that spans several nodes.

    WAITING (for the leader, without a bound) -> COMPUTING -> a rank has died

The leader's engine core (`engine.py`) drives these ranks over vLLM's message queues. They receive weights like all
other ranks (`extensions/worker.py`). Modelled on vLLM 0.32, `entrypoints.cli.serve.run_headless`.

Called by `generation.main`.
"""

from __future__ import annotations

import asyncio
import multiprocessing.connection
import threading
from contextlib import ExitStack
from typing import Any

from specrl.errors import EngineFailed
from specrl.generation.compilation import resolve_eager
from specrl.generation.nodes import ReplicaNodes
from specrl.generation.vllm_backend import launch
from specrl.spec import RunSpec


class FollowerNode:
    """The ranks of one follower node. The constructor loads nothing; `run` does."""

    def __init__(self, spec: RunSpec, nodes: ReplicaNodes) -> None:
        self._spec = spec
        self._nodes = nodes
        self._executor: Any = None
        self._cleanup = ExitStack()

    async def run(self, met: asyncio.Event) -> None:
        """Wait until `met` is set, then compute with the leader. Never returns: raises EngineFailed if a rank dies.

        Raises SpecInvalid, CheckpointInvalid or MemoryTooSmall if this node cannot run the models. These checks block
        the event loop.
        """
        folders = launch.read_folders(self._spec, self._cleanup)
        spec = resolve_eager(self._spec, folders.policy)
        config = launch.build_vllm_config(spec, folders, self._nodes)
        await met.wait()
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def compute_in_thread() -> None:
            try:
                self._run_ranks(config)
            finally:
                loop.call_soon_threadsafe(ended.set)

        # A daemon thread, because the rendezvous can hang and cannot be cancelled: it then ends with the process.
        threading.Thread(target=compute_in_thread, name="vllm-member", daemon=True).start()
        await ended.wait()
        raise EngineFailed(
            f"a rank of node {self._nodes.rank} died or did not start, see the log above; the whole replica is "
            "restarted"
        )

    def _run_ranks(self, config: Any) -> None:
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        self._executor = executor = MultiprocExecutor(config, monitor_workers=False)
        # Blocks until the first worker process ends.
        multiprocessing.connection.wait([worker.proc.sentinel for worker in executor.workers])

    def close(self) -> None:
        """Stop the ranks. Idempotent."""
        executor = self._executor
        self._executor = None
        if executor is not None:
            executor.shutdown()
        self._cleanup.close()
