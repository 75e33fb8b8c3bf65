"""A checkpoint on disk: float32 weights and moments by Hugging Face names, the drafter, random state, step.

    begin     SNAPSHOT: ranks gather one tensor at a time, and copy their share of them to the host; training goes on
    thread    WRITING: every rank writes what it has into `.step-000010.tmp`  -- all ranks are done -->
              rank 0: index, checksums, one rename -> COMPLETE; or, a disk having refused, nothing -> FAILED
    reading   every rank cuts its own shards out of whole tensors, so any layout reads what any other wrote

A process that dies at any point leaves a name that is never looked at. The ranks' threads meet in a Gloo group of their
own: at a rank's death it breaks, and its timeout bounds every wait. The thread of one save ends before the next begins.
Megatron's dist_checkpointing was tried and left (docs/decisions/0003).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specrl.drafting.online import DrafterTrainer
from specrl.errors import CheckpointInvalid, CollectiveFailed, SpecrlError, StoreFailed
from specrl.files import SMALL_BYTES, read_object, sync
from specrl.records import StreamPlace
from specrl.trainer import checksums
from specrl.trainer.checkpoints import DRAFTER, POLICY, STATE, stream_of, temporary
from specrl.trainer.hf_folder import SHARD_BYTES, Shards, write_index, write_shards
from specrl.trainer.megatron_backend.exchange import exchange
from specrl.trainer.megatron_backend.groups import Groups
from specrl.trainer.megatron_backend.policy import Policy

RANDOM = "random.safetensors"
WRITE_TIMEOUT = timedelta(hours=1)  # longest difference between two ranks in writing their shares


@dataclass(frozen=True)
class State:
    """What is not a tensor."""

    step: int
    is_drafter_initialised: bool
    has_drafter: bool
    updates: int
    """That the policy's optimizer has made: not one for each step, since steps are skipped, and some make several."""
    skipped_in_a_row: int
    """Steps up to this one that were skipped, one after another."""
    stream: StreamPlace | None = None
    """Where the data stand; checkpoints of a supervised warm-up, and old ones, do not say."""


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes, on the host. policy: by kind, this rank's share; others: at rank 0 alone.

    others: files of their own, by name.
    """

    state: State
    policy: Mapping[str, Tensors]
    others: Mapping[str, Tensors]


class Saver:
    """Writes checkpoints, one at a time, in a thread. Making one is a collective of all ranks."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._meeting = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT) if groups.world_size > 1 else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, target: Path, policy: Policy, drafter: DrafterTrainer | None, state: State) -> Future[None]:
        """Take a snapshot, and write `target` in a thread, whole or not at all. A collective.

        Waits for the save before. The future is done when the checkpoint is durable; it raises StoreFailed when a
        rank's disk refuses, CollectiveFailed when a rank is lost.
        """
        self.wait()
        taken = snapshot(policy, drafter, state, self._groups)
        self._writing = self._thread.submit(write, target, taken, self._groups.rank, self._meeting)
        return self._writing

    def wait(self) -> None:
        """Until the save under way has ended, however it ends."""
        if self._writing is not None:
            wait([self._writing])

    def close(self) -> None:
        """Let the save under way end."""
        self._thread.shutdown()


def snapshot(policy: Policy, drafter: DrafterTrainer | None, state: State, groups: Groups) -> Snapshot:
    """Copies of what the next step changes. A collective; the tensors of a kind are dealt to all ranks.

    On a rank's host that is 12 bytes for each of its parameters, while they are written.
    """
    found = {
        kind: {
            name: _copy(tensor)
            for place, (name, tensor) in enumerate(tensors)
            if place % groups.world_size == groups.rank
        }
        for kind, tensors in policy.state().items()
    }
    others: dict[str, Tensors] = {}
    if groups.rank == 0:
        others[RANDOM] = {"cpu": torch.get_rng_state()}
        if drafter is not None:
            others[DRAFTER] = {name: _copy(tensor) for name, tensor in drafter.state().items()}
    return Snapshot(state, found, others)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def write(target: Path, taken: Snapshot, rank: int, meeting: dist.ProcessGroup | None) -> None:
    """One rank's part in writing `target`. Raises StoreFailed or CollectiveFailed, with nothing left of it."""
    scratch = temporary(target)

    def begin() -> dict[str, Any]:
        if rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        return {}

    try:
        _agree(begin, target, meeting)
        parts = _agree(lambda: _write_share(scratch, taken, rank), target, meeting)
        _agree(lambda: _complete(target, scratch, taken.state, parts) if rank == 0 else {}, target, meeting)
    except SpecrlError:
        if rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)  # a full disk is full of it, too
        raise


def _agree(work: Callable[[], dict[str, Any]], target: Path, meeting: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """Do one rank's part, and wait for the others'; what each returned, as JSON. Raises StoreFailed if any failed."""
    try:
        mine = work()
    except (OSError, SafetensorError) as error:  # what safetensors writes fails with its own error
        mine = {"error": str(error)}
    found = _of_all_ranks(mine, meeting)
    errors = [part["error"] for part in found if "error" in part]
    if errors:
        raise StoreFailed(f"a checkpoint must be written to {target}, got {errors[0]}; make room on the disk")
    return found


def _of_all_ranks(mine: dict[str, Any], meeting: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """Every rank's answer, at every rank."""
    if meeting is None:
        return [mine]
    try:
        return exchange(mine, meeting, torch.device("cpu"))
    except (RuntimeError, dist.DistError) as error:
        raise CollectiveFailed(
            f"all trainer ranks must live until a checkpoint is complete, got {error}; start them again"
        ) from error


def _write_share(scratch: Path, taken: Snapshot, rank: int) -> dict[str, Any]:
    """Write what this rank holds. Returns the places of its tensors, by kind, and its files' checksums."""
    shards: dict[str, Shards] = {}
    for kind, tensors in taken.policy.items():
        folder = scratch / POLICY / kind
        folder.mkdir(parents=True, exist_ok=True)
        shards[kind] = write_shards(folder, f"model-{rank:04d}", tensors.items(), SHARD_BYTES)
    for name, tensors in taken.others.items():
        save_file(tensors, scratch / name)
    files = [Path(POLICY, kind, file) for kind, item in shards.items() for file in set(item.places.values())]
    files += [Path(name) for name in taken.others]
    for file in files:
        sync(scratch / file)
    return {
        "shards": {kind: asdict(item) for kind, item in shards.items()},
        "checksums": {str(file): asdict(checksums.checksum(scratch / file)) for file in files},
    }


def _complete(target: Path, scratch: Path, state: State, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0, when all shares are written: what binds them together, and the rename."""
    found = {name: checksums.Checksum(**item) for part in parts for name, item in part["checksums"].items()}
    for kind in sorted({kind for part in parts for kind in part["shards"]}):
        own = [part["shards"][kind] for part in parts if kind in part["shards"]]
        places = {name: file for item in own for name, file in item["places"].items()}
        write_index(scratch / POLICY / kind, places, sum(item["size_bytes"] for item in own))
    (scratch / STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
    small = [path for path in scratch.rglob("*.json") if path.is_file()]
    checksums.write(scratch, found | {str(path.relative_to(scratch)): checksums.checksum(path) for path in small})
    for path in (*scratch.rglob("*"), scratch):
        sync(path)
    before = target.with_name(f".{target.name}.before.tmp")  # a name that `prune` clears away
    if target.exists():  # written before, by a step that is now replayed
        target.rename(before)
    scratch.rename(target)
    sync(target.parent)
    shutil.rmtree(before, ignore_errors=True)
    return {}


def read_state(source: Path) -> State:
    """Raises CheckpointInvalid for a folder that is no complete checkpoint."""
    try:
        found = read_object(source / STATE, SMALL_BYTES)
        state = State(**found | {"stream": stream_of(found.get("stream"))})
        is_whole = [type(value) for value in astuple(state)[:5]] == [int, bool, bool, int, int]
        if not is_whole or min(state.step, state.updates, state.skipped_in_a_row) < 0:
            raise ValueError(f"got {state}")
        return state
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointInvalid(
            f"a checkpoint must be complete, got {source}: {error}; delete it and the one before it is used"
        ) from error


def _check_files(source: Path, groups: Groups) -> None:
    """Compare every file with its checksum, each rank a share. Raises CheckpointInvalid at all ranks alike."""
    expected = sorted(checksums.read(source).items())
    mine = range(groups.rank, len(expected), groups.world_size)
    damaged = next((place for place in mine if checksums.damage(source, *expected[place])), len(expected))
    first = torch.tensor(damaged, device=groups.device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if first < len(expected):
        name, item = expected[int(first)]
        reason = checksums.damage(source, name, item) or f"{name} cannot be read by another rank as it was written"
        raise CheckpointInvalid(
            f"a checkpoint must be as it was written, got {source}: {reason}; delete it and the one before it is used"
        )


def load(source: Path, policy: Policy, drafter: DrafterTrainer | None, groups: Groups) -> State:
    """Fill policy, optimizer and drafter. A collective.

    Raises CheckpointInvalid when a file is not as it was written, or does not fit.
    """
    state = read_state(source)
    _check_files(source, groups)
    if state.has_drafter != (drafter is not None):
        raise CheckpointInvalid(
            f"a checkpoint must be of the same run, got {'a' if state.has_drafter else 'no'} drafter in {source}; "
            "keep generation.speculation as it was, or start another run"
        )
    try:
        policy.load_state(source / POLICY, state.updates)
        if drafter is not None:
            drafter.load_state(load_file(source / DRAFTER))
        torch.set_rng_state(load_file(source / RANDOM)["cpu"])
    except (OSError, KeyError, ValueError, RuntimeError, TypeError, SafetensorError) as error:
        raise CheckpointInvalid(
            f"the checkpoint must fit model.path, got {source}: {error}; resume with the model it was made of"
        ) from error
    return state
