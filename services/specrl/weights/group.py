"""The process group over which one membership epoch broadcasts weights: trainer rank 0 to all replicas.

    trainer   LISTENING (store open, port known) -> JOINED -> CLOSED
    replica                                         JOINED -> CLOSED

The group is private: it never touches torch.distributed's default group, which belongs to the trainer's own
parallelism or to vLLM. Joining blocks until every member has come, and `timeout_s` bounds it, as it bounds each
broadcast; a member that dies in between turns into CollectiveFailed or DeadlineExceeded at all others.
Written against torch 2.13 (`ProcessGroupGloo`, `ProcessGroupNCCL`, `TCPStore`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

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

from specrl.errors import CollectiveFailed, DeadlineExceeded, EngineFailed, SpecrlError
from specrl.records import WeightGroup


def listen(world_size: int, timeout_s: float, host: str) -> TCPStore:
    """Open the rendezvous store of a new group on a free port (`store.port`). Rank 0 only; does not wait for anyone.

    Raises CollectiveFailed when it cannot be opened in that time.
    """
    try:
        return TCPStore(
            host_name=host,
            port=0,
            world_size=world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (RuntimeError, DistError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CollectiveFailed(
            f"a weight group's store must open within {timeout_s:g} s, got {reason!r}; it is tried again"
        ) from error


class BroadcastGroup:
    """A joined group. Rank 0 sends, all others receive, in the same order."""

    def __init__(self, group: WeightGroup, store: TCPStore | None = None) -> None:
        """Join; rank 0 passes the store it listens on. Blocks until all have joined or `group.timeout_s` has passed.

        Raises CollectiveFailed or DeadlineExceeded, EngineFailed for a transport that this machine cannot run.
        """
        if group.transport == "auto":
            group = replace(group, transport="nccl" if torch.cuda.is_available() else "gloo")
        self.group = group
        timeout = timedelta(seconds=group.timeout_s)
        if group.transport == "nccl" and not torch.cuda.is_available():
            raise EngineFailed("weights.transport must be Gloo on a machine without CUDA, got nccl; use Auto or Gloo")
        try:
            self._store = store or TCPStore(
                group.address, group.port, group.world_size, False, timeout, wait_for_workers=False
            )
            scoped = PrefixStore(f"specrl/{group.group_id}", self._store)
            self._backend = _backend(scoped, group, timeout)
        except (RuntimeError, DistError) as error:
            raise _translate(error, group, "join") from error
        self.device = torch.device("cuda" if group.transport == "nccl" else "cpu")

    def start(self, buffer: torch.Tensor) -> Callable[[], None]:
        """Begin to replace everybody's bytes by rank 0's; returns the wait for the end of it.

        `buffer` is contiguous and of the same size at every member; nobody touches it before the wait is over. One
        broadcast is under way at a time. Both raise CollectiveFailed or DeadlineExceeded.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        try:
            work = self._backend.broadcast([buffer], options)
        except (RuntimeError, DistError) as error:
            raise _translate(error, self.group, "broadcast") from error

        def wait() -> None:
            try:
                work.wait(timedelta(seconds=self.group.timeout_s))
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
            except (RuntimeError, DistError) as error:
                raise _translate(error, self.group, "broadcast") from error

        return wait

    def close(self) -> None:
        """Leave the group; frees its sockets or communicators."""
        if self.group.transport == "nccl":
            self._backend.abort()
        del self._backend, self._store


def _backend(store: Store, group: WeightGroup, timeout: timedelta) -> Any:
    """The transport's process group; both kinds have `broadcast`, which the published types leave out."""
    if group.transport == "nccl":
        from torch._C._distributed_c10d import ProcessGroupNCCL  # not in CPU builds

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, group.rank, group.world_size, options)
    return ProcessGroupGloo(store, group.rank, group.world_size, timeout)


def _translate(error: Exception, group: WeightGroup, what: str) -> SpecrlError:
    """torch reports time-outs and lost peers as RuntimeErrors; their text is all there is to tell them apart."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    where = f"weight group {group.group_id} must {what} within {group.timeout_s:g} s"
    if "imed out" in reason or "imeout" in reason:
        return DeadlineExceeded(f"{where}, got a time-out at rank {group.rank}; members that hang are ejected")
    return CollectiveFailed(f"{where}, got {reason!r} at rank {group.rank}; the group is formed again")
