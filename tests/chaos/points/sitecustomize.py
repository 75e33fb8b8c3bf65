"""Kills or stops real processes of a run at named points. Python imports it if its folder is on the path.

Product code does not know about it: the methods in `POINTS` are wrapped when their module is loaded. A wrapper looks
for the file `$SPECRL_CHAOS/armed/POINT.MOMENT`. The process that finds it counts the calls down. At the last one it
moves the file to `struck/` and sends itself the signal. So each armed strike happens once, however often processes
restart.

It also keeps a ledger: every batch that rank 0 of a trainer starts to train, in `$SPECRL_CHAOS/ledger/STEP-TIME.pb`.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

MOMENTS = ("before", "after")
"""Before and after a call. Of a stream: before and after its first element."""


class Point(NamedTuple):
    """A method at which a process can be struck. process: which one. meaning: what is in progress there."""

    module: str
    method: str
    process: str
    meaning: str


_SQLITE = "specrl.coordinator.ledger.sqlite_store"
_REDIS = "specrl.coordinator.ledger.redis_store"
_BACKEND = "specrl.trainer.megatron_backend.backend"
_CHECKPOINT = "specrl.trainer.megatron_backend.checkpoint"

POINTS: dict[str, tuple[Point, ...]] = {
    f"store.{name}": tuple(
        Point(module, f"{kind}.{name}", "coordinator", meaning)
        for module, kind in ((_SQLITE, "SqliteStore"), (_REDIS, "RedisStore"))
    )
    for name, meaning in {
        "put_rollouts": "graded rollouts are written",
        "put_batch": "a step's batch is stored",
        "finish_step": "a step is recorded as trained",
        "set_report": "a report is completed",
        "set_fact": "a fact of the run is written: a failed prompt, a checked version, its first step",
        "forget_batches": "batches that a checkpoint covers are deleted",
    }.items()
} | {
    "call.train_step": (
        Point("specrl.rpc.clients", "TrainerClient.train_step", "coordinator", "the trainer trains a step"),
    ),
    "stream.generate": (
        Point(
            "specrl.generation.detached_rollouts",
            "DetachedRollouts.stream_finished",
            "replica",
            "rollouts are streamed",
        ),
    ),
    "weights.join": (
        Point("specrl.weights.group", "BroadcastGroup.__init__", "trainer or engine", "members join a weight group"),
    ),
    "weights.send": (Point("specrl.weights.stream", "send_version", "trainer", "weights are broadcast"),),
    "weights.receive": (
        Point(
            "specrl.weights.stream",
            "receive_version",
            "engine",
            "weights are received, concurrently with other members",
        ),
    ),
    "engine.load": (
        Point(
            "specrl.generation.vllm_backend.engine",
            "VllmEngine.load_weights",
            "replica",
            "weights are loaded in the commit",
        ),
    ),
    "ranks.gather": (
        Point("specrl.trainer.ranks", "ControlGroup.gather_outcomes", "trainer rank", "ranks agree on an outcome"),
    ),
    "ranks.reduce": (
        Point("torch.distributed.distributed_c10d", "all_reduce", "trainer rank", "gradients are summed"),
    ),
    "trainer.step": (Point(_BACKEND, "MegatronBackend.train_step", "trainer rank", "an optimizer step"),),
    "checkpoint.save": (Point(_BACKEND, "MegatronBackend.save_checkpoint", "trainer rank", "a checkpoint's snapshot"),),
    "checkpoint.write": (
        Point(_CHECKPOINT, "write_checkpoint", "trainer rank", "a checkpoint is written, while steps are trained"),
    ),
    "checkpoint.prune": (
        Point("specrl.trainer.checkpointing.checkpoints", "prune_superseded", "trainer", "old checkpoints are deleted"),
    ),
}
"""Where a process can be struck. The table in docs/chaos.md is made from this."""

_FOLDER = Path(os.environ.get("SPECRL_CHAOS", "/nonexistent"))


def strike(name: str) -> None:
    """Send this process the armed signal, if `name` (POINT.MOMENT) is armed and this is the call that it is for."""
    armed = _FOLDER / "armed" / name
    try:
        wanted = json.loads(armed.read_text())
        if wanted["calls"] > 1:
            _replace(armed, json.dumps({**wanted, "calls": wanted["calls"] - 1}).encode())
            return
        claimed = _FOLDER / "struck" / f".{name}-{os.getpid()}"
        armed.rename(claimed)  # one process only succeeds
    except (FileNotFoundError, ValueError):
        return
    claimed.write_text(str(os.getpid()))
    claimed.rename(_FOLDER / "struck" / name)
    os.kill(os.getpid(), wanted["signal"])


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}-{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with a strike before and after."""
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def stream(*arguments: Any, **named: Any) -> AsyncIterator[Any]:
            strike(f"{name}.before")
            async with aclosing(function(*arguments, **named)) as items:
                async for item in items:
                    yield item
                    strike(f"{name}.after")

        return stream
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call(*arguments: Any, **named: Any) -> Any:
            strike(f"{name}.before")
            found = await function(*arguments, **named)
            strike(f"{name}.after")
            return found

        return call

    @functools.wraps(function)
    def plain(*arguments: Any, **named: Any) -> Any:
        strike(f"{name}.before")
        found = function(*arguments, **named)
        strike(f"{name}.after")
        return found

    return plain


def _recorded(train_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train_step)
    def plain(backend: Any, batch: Any) -> Any:
        if os.environ.get("RANK", "0") == "0":
            from specrl.records import wire

            entry = _FOLDER / "ledger" / f"{batch.step:06d}-{time.time_ns()}.pb"
            _replace(entry, wire.batch_to_bytes(batch))
        return train_step(backend, batch)

    return plain


def wrap(module: ModuleType) -> None:
    """Wrap every point of a module that has just been loaded. A method that is gone is an error: the table is stale."""
    for name, points in POINTS.items():
        for point in points:
            if point.module != module.__name__ or (name == "ranks.reduce" and "RANK" not in os.environ):
                continue
            *path, method = point.method.split(".")
            owner: Any = functools.reduce(getattr, path, module)
            setattr(owner, method, wrapped(name, getattr(owner, method)))
    if module.__name__ == _BACKEND:
        owner = module.MegatronBackend
        owner.train_step = _recorded(owner.train_step)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets Python find a module as ever, and wraps it once it is loaded."""

    modules = frozenset(point.module for points in POINTS.values() for point in points)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_wrap(module: ModuleType) -> None:
            load(module)
            wrap(module)

        spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


if "SPECRL_CHAOS" in os.environ:
    sys.meta_path.insert(0, _Finder())
