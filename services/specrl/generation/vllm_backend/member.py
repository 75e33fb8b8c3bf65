"""A node of a replica that is larger than one: vLLM's ranks of this node, and nothing beside them.

    WAITING (for the leader's ranks, whatever time its image or weights take) -> COMPUTING -> a rank has died

What they compute, the leader's engine core decides (`engine.py`), over vLLM's own message queues; weights come to them
as to every rank (`worker.py`). Read from vLLM 0.32, `entrypoints.cli.serve.run_headless`.
"""

from __future__ import annotations

import asyncio
import multiprocessing.connection
import threading
from contextlib import ExitStack
from typing import Any

from specrl.errors import EngineFailed
from specrl.generation.nodes import Nodes
from specrl.generation.vllm_backend import launch
from specrl.spec import RunSpec


class Member:
    """The ranks of one node. Built cheaply; `run` loads."""

    def __init__(self, spec: RunSpec, nodes: Nodes) -> None:
        self._spec, self._nodes = spec, nodes
        self._executor: Any = None
        self._cleanup = ExitStack()

    async def run(self, met: asyncio.Event) -> None:
        """Compute with the leader, once it is met. Never returns: raises EngineFailed when a rank has died.

        Raises SpecInvalid, CheckpointInvalid or MemoryTooSmall for what this node lacks; blocks the event loop until
        then. Later it blocks a thread that nobody waits for: what hangs in a rendezvous ends with the process.
        """
        folders = launch.read_folders(self._spec)
        self._cleanup.callback(folders.clear)
        config = launch.configure(self._spec, folders, self._nodes)
        await met.wait()
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def compute() -> None:
            try:
                self._compute(config)
            finally:
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=compute, name="vllm-member", daemon=True).start()
        await ended.wait()
        raise EngineFailed(
            f"ranks of node {self._nodes.rank} must live as long as their replica, got one that died or did not start; "
            "see the log above, the whole replica is started again"
        )

    def _compute(self, config: Any) -> None:
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        self._executor = executor = MultiprocExecutor(config, monitor_workers=False)
        multiprocessing.connection.wait([worker.proc.sentinel for worker in executor.workers])

    def close(self) -> None:
        """End the ranks. Idempotent."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
        self._cleanup.close()
