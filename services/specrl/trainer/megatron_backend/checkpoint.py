"""Writes and reads checkpoints: float32 weights and moments by Hugging Face names, the drafter, random state, step.

    SNAPSHOT   each rank copies the tensors that it writes to the host; then training goes on
    WRITING    in a thread, every rank writes its share into `.step-000010.tmp`   -- all ranks are done -->
               rank 0 writes index and checksums and renames the folder
    COMPLETE, or FAILED if a disk or a rank failed; then the folder is deleted

    reading    every rank cuts its shards out of whole tensors, so a checkpoint of any layout loads into any other

Invariant: a folder with the final name is complete. A process that dies leaves only a temporary folder.

The ranks' threads synchronise over their own Gloo group. When a rank dies, the group breaks, and WRITE_TIMEOUT bounds
every wait. Only one save runs at a time. Megatron's dist_checkpointing was tried and rejected (docs/decisions/0003).
Called by `backend.py`.
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

from specrl.errors import CheckpointInvalid, CollectiveFailed, SpecrlError, StoreFailed
from specrl.files import SMALL_BYTES, read_object, sync_to_disk
from specrl.tensor_files import load_tensors, save_tensors
from specrl.trainer.checkpointing import checksums
from specrl.trainer.checkpointing.checkpoints import DRAFTER, POLICY, STATE, parse_stream_place, scratch_directory
from specrl.trainer.checkpointing.hf_folder import SHARD_BYTES, WrittenShards, write_index, write_shards
from specrl.trainer.megatron_backend.parallel.exchange import exchange_objects
from specrl.trainer.megatron_backend.parallel.groups import RankGroups
from specrl.trainer.megatron_backend.training.models import CheckpointState, RankModels

RANDOM = "random.safetensors"  # the state of torch's CPU generator
WRITE_TIMEOUT = timedelta(hours=1)  # the longest that one rank may take for its share more than another


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class CheckpointSnapshot:
    """The data that one rank writes, copied to the host.

    policy: this rank's share of the weights and moments, by kind. others: contents of further files by name; only at
    rank 0.
    """

    state: CheckpointState
    policy: Mapping[str, Tensors]
    others: Mapping[str, Tensors]


class CheckpointSaver:
    """Saves checkpoints in a thread, one at a time. Constructing one is a collective of all ranks."""

    def __init__(self, groups: RankGroups) -> None:
        self._groups = groups
        self._meeting = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT) if groups.world_size > 1 else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def start_save(self, target: Path, models: RankModels, state: CheckpointState) -> Future[None]:
        """Take a snapshot, then write `target` in a thread, atomically. A collective.

        Waits for the previous save first. The future completes when the checkpoint is durable. It raises StoreFailed
        when a rank cannot write, CollectiveFailed when a rank is lost.
        """
        if self._writing is not None:
            wait([self._writing])
        taken = take_snapshot(models, state)
        self._writing = self._thread.submit(write_checkpoint, target, taken, self._groups.rank, self._meeting)
        return self._writing

    def close(self) -> None:
        """Wait for the current save, end the thread, and leave the group."""
        self._thread.shutdown()
        self._writing = None  # its callbacks refer to the backend
        if self._meeting is not None:
            dist.destroy_process_group(self._meeting)
            self._meeting = None


def take_snapshot(models: RankModels, state: CheckpointState) -> CheckpointSnapshot:
    """Copy what the next step changes to the host. A collective.

    A rank that has most of a tensor writes it, and gets the rest of it from other ranks. Until they are written, a
    rank's host holds 12 bytes for each parameter that it writes.
    """
    drafter = models.drafter
    found = {
        kind: {name: _copy_to_host(tensor) for name, tensor in tensors}
        for kind, tensors in models.policy.gather_state().items()
    }
    others: dict[str, Tensors] = {}
    if models.groups.rank == 0:
        others[RANDOM] = {"cpu": torch.get_rng_state()}
        if drafter is not None:
            others[DRAFTER] = {name: _copy_to_host(tensor) for name, tensor in drafter.collect_state().items()}
    return CheckpointSnapshot(state, found, others)


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def write_checkpoint(target: Path, taken: CheckpointSnapshot, rank: int, meeting: dist.ProcessGroup | None) -> None:
    """Do one rank's part in writing `target`.

    Raises StoreFailed or CollectiveFailed, and deletes the files that were written.
    """
    scratch = scratch_directory(target)

    def make_scratch() -> None:
        if rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)

    def finish_folder() -> None:
        if rank == 0:
            _finish_folder(target, scratch, taken.state, parts)

    # Each phase begins when every rank has finished the one before.
    try:
        _run_on_all_ranks(make_scratch, target, meeting)
        parts = _run_on_all_ranks(lambda: _write_share(scratch, taken, rank), target, meeting)
        _run_on_all_ranks(finish_folder, target, meeting)
    except SpecrlError:
        if rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)  # it may be what filled the disk
        raise


def _run_on_all_ranks(
    work: Callable[[], dict[str, Any] | None], target: Path, meeting: dist.ProcessGroup | None
) -> list[dict[str, Any]]:
    """Run `work` on this rank and wait for the other ranks. Returns every rank's result, in rank order.

    work: returns what JSON can hold. Raises StoreFailed on all ranks if it failed on one, CollectiveFailed when a rank
    is lost. WRITE_TIMEOUT bounds the wait.
    """
    try:
        mine = work() or {}
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        mine = {"error": str(error)}
    found = [mine]
    if meeting is not None:
        try:
            found = exchange_objects(mine, meeting, torch.device("cpu"))
        except (RuntimeError, dist.DistError) as error:
            raise CollectiveFailed(
                f"lost a trainer rank while writing a checkpoint: {error}; restart all ranks"
            ) from error
    errors = [part["error"] for part in found if "error" in part]
    if errors:
        raise StoreFailed(f"could not write checkpoint {target}: {errors[0]}; free space on its disk")
    return found


def _write_share(scratch: Path, taken: CheckpointSnapshot, rank: int) -> dict[str, Any]:
    """Write this rank's share. Returns which file each tensor is in, by kind, and the files' checksums."""
    shards: dict[str, WrittenShards] = {}
    for kind, tensors in taken.policy.items():
        folder = scratch / POLICY / kind
        folder.mkdir(parents=True, exist_ok=True)
        shards[kind] = write_shards(folder, f"model-{rank:04d}", tensors.items(), SHARD_BYTES)
    for name, tensors in taken.others.items():
        save_tensors(tensors, scratch / name)
    files = [Path(POLICY, kind, file) for kind, item in shards.items() for file in set(item.places.values())]
    files += [Path(name) for name in taken.others]
    for file in files:  # before the checksums, and long before the rename that makes the checkpoint visible
        sync_to_disk(scratch / file)
    return {
        "shards": {kind: asdict(item) for kind, item in shards.items()},
        "checksums": {str(file): asdict(checksums.checksum_file(scratch / file)) for file in files},
    }


def _finish_folder(target: Path, scratch: Path, state: CheckpointState, parts: list[dict[str, Any]]) -> None:
    """Write indices, state and checksums, and rename the folder. At rank 0, after all ranks have written."""
    found = {name: checksums.FileChecksum(**item) for part in parts for name, item in part["checksums"].items()}
    for kind in sorted({kind for part in parts for kind in part["shards"]}):
        own = [part["shards"][kind] for part in parts if kind in part["shards"]]
        places = {name: file for item in own for name, file in item["places"].items()}
        write_index(scratch / POLICY / kind, places, sum(item["size_bytes"] for item in own))
    (scratch / STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
    small = [path for path in scratch.rglob("*.json") if path.is_file()]
    checksums.write_checksums(
        scratch, found | {str(path.relative_to(scratch)): checksums.checksum_file(path) for path in small}
    )
    for path in (*scratch.rglob("*"), scratch):
        sync_to_disk(path)
    # An older checkpoint of this step exists if the step is trained again. `prune_superseded` deletes its new name,
    # should this process die in between.
    before = target.with_name(f".{target.name}.before.tmp")
    if target.exists():
        target.rename(before)
    scratch.rename(target)
    sync_to_disk(target.parent)  # makes the rename durable
    shutil.rmtree(before, ignore_errors=True)


def read_state(source: Path) -> CheckpointState:
    """Read and check state.json. Raises CheckpointInvalid for a folder that is not a complete checkpoint."""
    try:
        found = read_object(source / STATE, SMALL_BYTES)
        state = CheckpointState(**found | {"stream": parse_stream_place(found.get("stream"))})
        # JSON does not check types, and a bool is an int to isinstance.
        is_whole = [type(value) for value in astuple(state)[:5]] == [int, bool, bool, int, int]
        if not is_whole or min(state.step, state.updates, state.skipped_in_a_row) < 0:
            raise ValueError(f"got {state}")
        return state
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointInvalid(
            f"could not read checkpoint {source}: {error}; delete it to use the one before it"
        ) from error


def verify_checkpoint(source: Path, groups: RankGroups) -> None:
    """Verify that a checkpoint is complete, and every file's checksum, each rank a share of the files. A collective.

    Raises CheckpointInvalid on all ranks alike.
    """
    read_state(source)
    expected = sorted(checksums.read_checksums(source).items())
    mine = range(groups.rank, len(expected), groups.world_size)
    damaged = next((place for place in mine if checksums.describe_damage(source, *expected[place])), len(expected))
    # All ranks agree on the first damaged file, so that all raise the same error.
    first = torch.tensor(damaged, device=groups.device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if first < len(expected):
        name, item = expected[int(first)]
        reason = checksums.describe_damage(source, name, item) or f"another rank reads {name} differently"
        raise CheckpointInvalid(f"checkpoint {source} is damaged: {reason}; delete it to use the one before it")


def load_checkpoint(source: Path, models: RankModels) -> None:
    """Load a checkpoint into the models, and restore the random state. A collective, after `verify_checkpoint`.

    Raises CheckpointInvalid when it does not fit the model.
    """
    state = read_state(source)
    drafter = models.drafter
    if state.has_drafter != (drafter is not None):
        raise CheckpointInvalid(
            "checkpoint and run file must both have a drafter or both have none, got "
            f"{'a' if state.has_drafter else 'no'} drafter in {source}; restore generation.speculation, "
            "or start another run"
        )
    try:
        models.policy.load_state(source / POLICY, state.updates)
        if drafter is not None:
            drafter.load_state(load_tensors(source / DRAFTER))
        torch.set_rng_state(load_tensors(source / RANDOM)["cpu"])
    except (OSError, KeyError, ValueError, RuntimeError, TypeError, SafetensorError) as error:
        raise CheckpointInvalid(
            f"checkpoint must fit the model of model.path, got {source}: {error}; resume with the model of its run"
        ) from error
    models.state = state
