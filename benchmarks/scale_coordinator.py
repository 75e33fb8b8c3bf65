"""The process that `coordinator_scale.py` measures: `specrl-coordinator` without web page and verifiers.

    python -m benchmarks.scale_coordinator RUN-DIRECTORY

Prints its gRPC port and the id of the thread that calls the store, and serves until it is killed. Prompts are made up
and grading takes no time, so that only the coordinator is measured.
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

from specrl.coordinator.ledger import make_claim, open_store
from specrl.coordinator.ledger.store_link import StoreLink
from specrl.coordinator.main import GARBAGE_THRESHOLDS
from specrl.coordinator.members.registry import Registry
from specrl.coordinator.members.service import CoordinatorService
from specrl.coordinator.observe.observer import RunObserver
from specrl.coordinator.wiring import wire_coordinator
from specrl.records import Prompt, Reward
from specrl.rpc.server import start_server
from specrl.spec import digest_spec, load_spec


class Prompts:
    """A stream with as many prompts as the run file allows."""

    def __init__(self, tokens: int) -> None:
        self._token_ids = tuple(range(2, 2 + tokens))

    def prompt(self, position: int) -> Prompt:
        return Prompt(f"p{position}", position, self._token_ids, "a prompt", "3")

    def __len__(self) -> int:
        return 1

    def identity(self) -> str:
        return hashlib.sha256(b"a prompt").hexdigest()


class Grader:
    """Grades at once."""

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        return Reward(float(len(text) % 2))


async def coordinate(folder: Path) -> None:
    """Serve the run in `folder` to its end."""
    spec = load_spec(folder / "run.yaml")
    claim = make_claim(folder)
    store = await StoreLink.open(spec.name, lambda: open_store(spec, folder, claim))
    await store.read_rollouts()  # the thread exists from now on
    registry = Registry(digest_spec(spec), spec.telemetry.heartbeat_s, time.monotonic)
    service = CoordinatorService(registry, spec.name, spec.telemetry.heartbeat_s)
    _, port = await start_server(service.add_to, "127.0.0.1", 0)
    writer = next(thread for thread in threading.enumerate() if thread.name.startswith("store"))
    sys.stdout.write(f"{port} {writer.native_id}\n")
    sys.stdout.flush()
    loop = wire_coordinator(spec, folder, store, registry, Prompts(spec.prompts.max_tokens), Grader())
    RunObserver(loop.context, loop)
    await loop.run()


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    asyncio.run(coordinate(Path(sys.argv[1])))
