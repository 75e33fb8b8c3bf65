"""The process group over which trainer rank 0 broadcasts weights to all replicas of one membership epoch.

    trainer   LISTENING (store open, port known) -> JOINED -> CLOSED
    replica                                         JOINED -> CLOSED

The group is private. It never touches torch.distributed's default group, which belongs to the trainer's own
parallelism or to vLLM.

Joining blocks until every member has come to the rendezvous store. There they compare their GPUs: NCCL needs one for
each member, so `auto` takes Gloo if any two share one, or if one has none. Gloo moves the bytes through main memory.
`timeout_s` bounds joining and each broadcast. When a member dies, all others get CollectiveFailed or DeadlineExceeded,
and the coordinator forms a new group. No process ends for it: of NCCL's groups in a process, only this one has no
watchdog.

NCCL may fall back from NVLink or RDMA to TCP. `nccl_transport` tells what it took, where NCCL writes a log.

Written against torch 2.13 (`ProcessGroupGloo`, `ProcessGroupNCCL`, `TCPStore`). Called by the trainer's weight sender
and by the engines of the replicas.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import structlog
import torch

# The public names of torch.distributed are re-exports without types; these are the same classes.
from torch._C._distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)
from torch.distributed import DistError

from specrl.errors import CollectiveFailed, DeadlineExceeded, EngineFailed, RunInvalid, SpecrlError, first_line
from specrl.machine import has_rdma_devices, locked_memory_limit
from specrl.records import WeightGroup
from specrl.weights.nccl_log import NcclLog, find_transports, find_warnings, locate_log

log = structlog.get_logger(__name__)


def _unbracket(host: str) -> str:
    """Return the host of an address as torch takes it: an IPv6 address without brackets."""
    return host.removeprefix("[").removesuffix("]")


def open_rendezvous_store(world_size: int, timeout_s: float, host: str) -> TCPStore:
    """Open the rendezvous store of a new group on a free port (`store.port`), at rank 0. Does not wait for members.

    Raises CollectiveFailed when the store cannot be opened within `timeout_s` seconds.
    """
    try:
        return TCPStore(
            host_name=_unbracket(host),
            port=0,
            world_size=world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (RuntimeError, DistError) as error:
        reason = first_line(error)
        raise CollectiveFailed(
            f"could not open a weight group's store within {timeout_s:g} s: {reason}; retrying with a new group"
        ) from error


class BroadcastGroup:
    """This process's membership in a weight group. Rank 0 sends and all others receive, in the same order."""

    def __init__(self, group: WeightGroup, store: TCPStore | None = None) -> None:
        """Join the group. Blocks until all members have joined, at most `group.timeout_s` seconds.

        store: the rendezvous store that rank 0 has opened; None at the other ranks, which connect to it.

        Afterwards `group.transport` is the chosen one, gloo or nccl. Raises CollectiveFailed when a member is lost,
        DeadlineExceeded when one is late, and EngineFailed or RunInvalid for a transport that the members cannot use.
        """
        self.group = group
        self.weight_transport = ""
        """The chosen transport, and why."""
        self.nccl_transport = ""
        """Transports of NCCL's channels at this member, such as `NET/IB`. Empty before the first broadcast, with Gloo,
        and where NCCL writes no log."""
        self._nccl_log = NcclLog(locate_log())
        self._nccl_log.read_new_lines()  # those of other groups of this process
        timeout = timedelta(seconds=group.timeout_s)
        if group.transport == "nccl" and not torch.cuda.is_available():
            raise EngineFailed(
                "weights.transport must be Auto or Gloo on a machine without CUDA, got nccl; change the run file"
            )
        try:
            self._store = store or TCPStore(
                _unbracket(group.address), group.port, group.world_size, False, timeout, wait_for_workers=False
            )
            # The prefix keeps keys of different groups apart in one store.
            scoped = PrefixStore(f"specrl/{group.group_id}", self._store)
            gpus = _wait_for_members(scoped, group, timeout)
            chosen = choose_transport(group.transport, group.world_size, gpus)
            self.weight_transport = describe_choice(group.transport, chosen, group.world_size, gpus)
            self.group = group = replace(group, transport=chosen)
            self._backend = _create_process_group(scoped, group, timeout)
        except (RuntimeError, DistError) as error:
            raise _translate_error(error, group, "join") from error
        self.device = torch.device("cuda" if group.transport == "nccl" else "cpu")
        log.info("weight_group_joined", group=group.group_id, transport=group.transport, gpus=gpus)

    def start_broadcast(self, buffer: torch.Tensor) -> Callable[[], None]:
        """Start broadcasting rank 0's `buffer` to all members. Returns a function that waits until it is done.

        `buffer` must be contiguous and have the same size at every member. Do not touch it before the wait returns.
        Only one broadcast may run at a time. `group.timeout_s` bounds the wait. Both this call and the wait raise
        CollectiveFailed or DeadlineExceeded.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        try:
            work = self._backend.broadcast([buffer], options)
        except (RuntimeError, DistError) as error:
            raise _translate_error(error, self.group, "broadcast") from error

        def wait_for_broadcast() -> None:
            try:
                # Blocks this thread until the buffer is complete, with NCCL, too (`_block_waits`). It does not wait for
                # the whole device: a decoding step there may itself wait for a rank that has to receive first.
                work.wait(timedelta(seconds=self.group.timeout_s))
            except (RuntimeError, DistError) as error:
                raise _translate_error(error, self.group, "broadcast") from error
            finally:
                self._read_nccl_log()

        return wait_for_broadcast

    def _read_nccl_log(self) -> None:
        """Learn the transport from NCCL's log, and repeat its warnings. NCCL connects in the first broadcast."""
        lines = self._nccl_log.read_new_lines()
        for warning in find_warnings(lines):
            log.warning("nccl_warned", group=self.group.group_id, warning=warning)
        transport = find_transports(lines)
        if transport and not self.nccl_transport:
            self.nccl_transport = transport
            log.info("nccl_connected", group=self.group.group_id, nccl_transport=transport)

    def close(self) -> None:
        """Leave the group and free its sockets or communicators."""
        # abort: an orderly shutdown of NCCL would wait for members that may be gone.
        if self.group.transport == "nccl":
            self._backend.abort()
        del self._backend, self._store


def choose_transport(wanted: str, ranks: int, gpus: int) -> str:
    """Return the transport of a group, gloo or nccl. gpus: different GPUs of its ranks.

    Raises RunInvalid if NCCL is wanted and two ranks share a GPU: it would end their processes ("Duplicate GPU").
    """
    if wanted == "nccl" and gpus < ranks:
        raise RunInvalid(
            "weights.transport must be Auto or Gloo unless trainer and replicas have a GPU for each rank, got Nccl for "
            f"{ranks} ranks on {gpus} GPUs; use Auto, which takes Gloo there"
        )
    if wanted == "auto":
        return "nccl" if gpus == ranks else "gloo"
    return wanted


def describe_choice(wanted: str, chosen: str, ranks: int, gpus: int) -> str:
    """Name the chosen transport and say why. gpus: different GPUs of its ranks."""
    if wanted != "auto":
        return f"{chosen.capitalize()}: the run file's weights.transport"
    if chosen == "nccl":
        return f"Nccl: a GPU for each of {ranks} ranks"
    return f"Gloo: {ranks} ranks on {gpus} GPUs" if gpus else f"Gloo: {ranks} ranks without GPUs"


def read_gpu_id() -> str:
    """Return the UUID of this thread's GPU; empty without CUDA."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _wait_for_members(store: Store, group: WeightGroup, timeout: timedelta) -> int:
    """Wait until all members have come, and return how many different GPUs they have.

    The last one counts the GPUs and wakes the others; `timeout` bounds the wait.

    Gloo connects in its constructor and would wait there. NCCL connects in the first broadcast, in a function without a
    deadline, and a member that never came would keep the others in it for ever.
    """
    store.set(f"gpu/{group.rank}", read_gpu_id())
    if store.add("members", 1) == group.world_size:
        gpus = {store.get(f"gpu/{rank}") for rank in range(group.world_size)} - {b""}
        store.set("complete", str(len(gpus)))
    store.wait(["complete"], timeout)
    return int(store.get("complete"))


@contextmanager
def _block_waits() -> Iterator[None]:
    """Let a group of NCCL that is made here wait in the calling thread, and raise there.

    Otherwise a watchdog thread ends the whole process after a time-out or the loss of a peer
    (TORCH_NCCL_ASYNC_ERROR_HANDLING=3), so one lost replica would end the trainer and all others. ProcessGroupNCCL
    reads the variable in its constructor (torch 2.13: "NO watchdog thread is created"). Other groups keep theirs.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _create_process_group(store: Store, group: WeightGroup, timeout: timedelta) -> Any:
    # Any: both classes have `broadcast`, but torch's type stubs do not declare it.
    if group.transport == "nccl":
        from torch._C._distributed_c10d import ProcessGroupNCCL  # not in CPU builds

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        warn_about_locked_memory()
        with _block_waits():
            return ProcessGroupNCCL(store, group.rank, group.world_size, options)
    return ProcessGroupGloo(store, group.rank, group.world_size, timeout)


def warn_about_locked_memory() -> None:
    """Log a limit of locked memory beside RDMA devices: NCCL could then not register its buffers with them."""
    limit = locked_memory_limit()
    if limit is not None and has_rdma_devices():
        remedy = "NCCL over RDMA may fail or use TCP; set LimitMEMLOCK=infinity for the container runtime"
        log.warning("locked_memory_limited", limit_bytes=limit, remedy=remedy)


def _translate_error(error: Exception, group: WeightGroup, what: str) -> SpecrlError:
    """Translate torch's error. It uses RuntimeError for time-outs and for lost peers; only the text tells which."""
    reason = first_line(error)
    where = f"rank {group.rank} of weight group {group.group_id}"
    if "imed out" in reason or "imeout" in reason:
        return DeadlineExceeded(
            f"{where} could not {what} within {group.timeout_s:g} s; ejecting the members that hang"
        )
    return CollectiveFailed(f"{where} could not {what}: {reason}; forming a new group")
