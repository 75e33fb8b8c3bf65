"""The process that `coordinator_scale.py` measures: `specrl-coordinator` less web page and verifiers.

    python -m benchmarks.scale_coordinator RUN-DIRECTORY

Prints its gRPC port and the number of the thread that calls the store, and serves until it is killed.

Prompts are made up and verdicts take no time, so that what is measured is the coordinator alone.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import sys
import threading
import time
from pathlib import Path

import structlog

from specrl.coordinator.board import Board
from specrl.coordinator.controls import Controls
from specrl.coordinator.loop import Loop
from specrl.coordinator.main import GARBAGE_THRESHOLDS
from specrl.coordinator.parts import Parts
from specrl.coordinator.registry import Registry
from specrl.coordinator.service import CoordinatorService
from specrl.coordinator.store import claim_for, open_store
from specrl.coordinator.store_link import StoreLink
from specrl.records import Prompt, Reward
from specrl.rpc.server import serve
from specrl.spec import digest, load_spec


class Prompts:
    """A stream of prompts as long as the run file allows."""

    def __init__(self, tokens: int) -> None:
        self._token_ids = tuple(range(2, 2 + tokens))

    def prompt(self, position: int) -> Prompt:
        return Prompt(f"p{position}", position, self._token_ids, "a prompt", "3")

    def __len__(self) -> int:
        return 1

    def identity(self) -> str:
        return hashlib.sha256(b"a prompt").hexdigest()


class Grader:
    """A verdict that takes no time."""

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        return Reward(float(len(text) % 2))


async def coordinate(folder: Path) -> None:
    """Serve the run in `folder` to its end."""
    spec, claim = load_spec(folder / "run.yaml"), claim_for(folder)
    store = await StoreLink.open(spec.name, lambda: open_store(spec, folder, claim))
    await store.rollouts()  # its thread exists from now on
    registry = Registry(digest(spec), spec.telemetry.heartbeat_s, time.monotonic)
    board = Board(spec, folder, registry, store)
    service = CoordinatorService(registry, spec.name, spec.telemetry.heartbeat_s)
    _, port = await serve(service.add_to, "127.0.0.1", 0)
    writer = next(thread for thread in threading.enumerate() if thread.name.startswith("store"))
    sys.stdout.write(f"{port} {writer.native_id}\n")
    sys.stdout.flush()
    controls = Controls(spec, folder, store, board)
    parts = Parts(spec, folder, registry, store, board, controls, Prompts(spec.prompts.max_tokens), (), Grader())
    await Loop(parts).run()


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    asyncio.run(coordinate(Path(sys.argv[1])))
