"""How rank 0, which serves, makes all ranks run the same backend method, and how a dead rank ends the others.

    rank 0      IDLE --call--> send command -> run -> compare outcomes -> answer
                IDLE --IDLE_CHECK_S without a call--> ping: finds out that a rank is gone
    rank 1..    WAITING --command--> run -> compare outcomes -> WAITING; command `close` ends it

Who wakes whom: rank 0's broadcast wakes the others; a rank that dies closes its sockets, which wakes all that wait for
it with an error, at the latest at the next ping. Every wait is bounded by CONTROL_TIMEOUT. Commands travel as JSON and
protobuf bytes over a Gloo group of their own, never pickled.

A SpecrlError is an answer: the method promises that the ranks still agree. Anything else means that they do not, and
ends the process (`RankLost`); whoever started the ranks starts all of them again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from specrl.errors import SpecrlError, TrainerFailed
from specrl.records import (
    Batch,
    DrafterMetrics,
    StreamPlace,
    TrainerStatus,
    TrainMetrics,
    TrainRollout,
    WeightChecksums,
    WeightGroup,
    WeightManifest,
    wire,
)
from specrl.trainer import checkpoints
from specrl.trainer.backend import SupervisedMetrics, TrainerBackend

IDLE_CHECK_S = 5.0
CONTROL_TIMEOUT = timedelta(hours=1)  # longest difference between two ranks in one method; idle ranks get pings

_DONE, _REFUSED = 0, 1
_PING = "ping"
# Rank 0 alone talks to disks and to the weight group, so it alone may be refused there.
_RANK_0_MAY_REFUSE = frozenset({"open_weight_group", "broadcast_weights", "write_weights", "export"})


class RankLost(TrainerFailed):
    """The ranks no longer agree, or one is gone. The process must end."""


class ControlGroup:
    """The Gloo group over which commands travel. Joining is a collective of all ranks; torch.distributed is up."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT) if self.world_size > 1 else None

    def send(self, message: bytes) -> None:
        """Rank 0: give `message` to all other ranks."""
        if self._group is None:
            return
        size = torch.tensor([len(message)], dtype=torch.int64)
        dist.broadcast(size, 0, group=self._group)
        dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, group=self._group)

    def receive(self) -> bytes:
        """Other ranks: wait for the next message."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._group)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(buffer, 0, group=self._group)
        return buffer.numpy().tobytes()

    def gather(self, outcome: int) -> list[int]:
        """Every rank's outcome, at every rank."""
        if self._group is None:
            return [outcome]
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(found, torch.tensor([outcome]), group=self._group)
        return [int(item) for item in found]


def encode(method: str, arguments: dict[str, Any], rollouts: Batch | None = None) -> bytes:
    """A command: length of the JSON part, JSON, then the batch in protobuf where there is one."""
    header = json.dumps({"method": method, "arguments": arguments, "has_batch": rollouts is not None}).encode()
    return struct.pack("<q", len(header)) + header + (wire.batch_to_bytes(rollouts) if rollouts is not None else b"")


def decode(message: bytes) -> tuple[str, dict[str, Any], Batch | None]:
    """The inverse of `encode`."""
    end = 8 + struct.unpack_from("<q", message)[0]
    header = json.loads(message[8:end])
    return header["method"], header["arguments"], wire.batch_from_bytes(message[end:]) if header["has_batch"] else None


class RankedBackend:
    """A TrainerBackend at rank 0 that runs every method on all ranks. With one rank it only forwards."""

    def __init__(self, backend: TrainerBackend, control: ControlGroup) -> None:
        self._backend, self._control = backend, control

    def load(self, checkpoint: Path | None) -> None:
        self._run("load", {"checkpoint": str(checkpoint) if checkpoint else None})

    def status(self) -> TrainerStatus:
        return self._backend.status()

    def train_step(self, batch: Batch) -> TrainMetrics:
        found: TrainMetrics = self._run("train_step", {}, batch)
        return found

    def train_supervised(self, batch: Batch) -> SupervisedMetrics:
        found: SupervisedMetrics = self._run("train_supervised", {}, batch)
        return found

    def train_drafter(
        self, rollouts: Sequence[TrainRollout], epochs: int, progress: Path | None = None
    ) -> list[DrafterMetrics]:
        arguments = {"epochs": epochs, "progress": str(progress) if progress else None}
        found: list[DrafterMetrics] = self._run("train_drafter", arguments, Batch(0, tuple(rollouts)))
        return found

    def evaluate_drafter(self, rollouts: Sequence[TrainRollout]) -> DrafterMetrics:
        found: DrafterMetrics = self._run("evaluate_drafter", {}, Batch(0, tuple(rollouts)))
        return found

    def score(self, rollouts: Sequence[TrainRollout]) -> list[npt.NDArray[np.float32]]:
        found: list[npt.NDArray[np.float32]] = self._run("score", {}, Batch(0, tuple(rollouts)))
        return found

    def describe_weights(self) -> WeightManifest:
        found: WeightManifest = self._run("describe_weights", {})
        return found

    def open_weight_group(self, group: WeightGroup) -> int:
        found: int = self._run("open_weight_group", asdict(group))
        return found

    def broadcast_weights(self, group_id: str) -> WeightChecksums:
        found: WeightChecksums = self._run("broadcast_weights", {"group_id": group_id})
        return found

    def write_weights(self, folder: Path) -> WeightChecksums:
        found: WeightChecksums = self._run("write_weights", {"directory": str(folder)})
        return found

    def save(self, directory: Path, stream: StreamPlace | None = None) -> Future[None]:
        place = asdict(stream) if stream is not None else None
        found: Future[None] = self._run("save", {"directory": str(directory), "stream": place})
        return found

    def export(self, directory: Path) -> tuple[Path, Path | None]:
        found: tuple[Path, Path | None] = self._run("export", {"directory": str(directory)})
        return found

    def close(self) -> None:
        self._run("close", {})

    def check_alive(self) -> None:
        """Raise RankLost when a rank is gone. Called while nothing else is asked for."""
        self._run(_PING, {})

    def _run(self, method: str, arguments: dict[str, Any], batch: Batch | None = None) -> Any:
        if self._control.world_size == 1:
            return None if method == _PING else dispatch(self._backend, method, arguments, batch)
        return _together(
            self._control,
            method,
            lambda: self._control.send(encode(method, arguments, batch)),
            lambda: dispatch(self._backend, method, arguments, batch),
        )


def follow(backend: TrainerBackend, control: ControlGroup) -> None:
    """Ranks other than 0: run what rank 0 says until it says `close`. Raises RankLost."""
    while True:
        command: list[bytes] = []
        try:
            command.append(control.receive())
        except RuntimeError as error:
            raise _lost(error) from error
        method, arguments, batch = decode(command[0])
        try:
            _together(control, method, lambda: None, lambda: dispatch(backend, method, arguments, batch))  # noqa: B023
        except RankLost:
            raise
        except SpecrlError:
            pass  # rank 0 has the same error, and answers it
        if method == "close":
            return


def dispatch(backend: TrainerBackend, method: str, arguments: dict[str, Any], batch: Batch | None) -> Any:
    """Run one command on this rank's backend."""
    if method == _PING:
        return None
    if method in ("train_step", "train_supervised"):
        assert batch is not None
        return getattr(backend, method)(batch)
    if method == "train_drafter":
        assert batch is not None
        progress = Path(arguments["progress"]) if arguments["progress"] else None
        return backend.train_drafter(batch.rollouts, arguments["epochs"], progress)
    if method in ("score", "evaluate_drafter"):
        assert batch is not None
        return getattr(backend, method)(batch.rollouts)
    if method == "load":
        return backend.load(Path(arguments["checkpoint"]) if arguments["checkpoint"] else None)
    if method == "open_weight_group":
        return backend.open_weight_group(WeightGroup(**arguments))
    if method == "save":
        return backend.save(Path(arguments["directory"]), checkpoints.stream_of(arguments["stream"]))
    if method in ("write_weights", "export"):
        return getattr(backend, method)(Path(arguments["directory"]))
    assert method in ("describe_weights", "broadcast_weights", "close"), method
    return getattr(backend, method)(**arguments)


def _together[T](control: ControlGroup, method: str, announce: Callable[[], None], run: Callable[[], T]) -> T:
    """Run here what all ranks run, and compare how it ended. Raises RankLost, or this rank's own SpecrlError."""
    refusal: SpecrlError | None = None
    try:
        announce()
        try:
            result = run()
        except SpecrlError as error:
            refusal = error
        outcomes = control.gather(_DONE if refusal is None else _REFUSED)
    except Exception as error:  # the edge of a rank: whatever it is, the ranks no longer agree
        raise _lost(error) from error
    only_rank_0 = outcomes[0] == _REFUSED and _REFUSED not in outcomes[1:] and method in _RANK_0_MAY_REFUSE
    if len(set(outcomes)) > 1 and not only_rank_0:
        raise RankLost(
            f"all trainer ranks must end {method} alike, got outcomes {outcomes} ({refusal}); start them again"
        )
    if refusal is not None:
        raise refusal
    return result


def _lost(error: Exception) -> RankLost:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return RankLost(f"all trainer ranks must live, got {type(error).__name__}: {reason}; start all of them again")
