"""Members meet in the store before they connect, and choose a transport that their GPUs allow.

A lost one raises in the others. NCCL's group is a stand-in.

`tests/contract` has a member that never comes on Gloo, and `tests/chaos` members that are killed.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch
from torch._C import _distributed_c10d as c10d

from specrl.errors import CollectiveFailed, DeadlineExceeded, RunInvalid
from specrl.records import WeightGroup
from specrl.weights import group as weight_group
from specrl.weights.group import BroadcastGroup

NEVER_S = 60.0
SOON_S = 0.05


class LazyGroup:
    """Connects in its first broadcast, as NCCL's group does."""

    made: list[dict[str, Any]] = []  # noqa: RUF012 - one list for all

    class Options:
        """The option that the product sets."""

        def __init__(self) -> None:
            self._timeout = timedelta()

    def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
        variables = {name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL")}
        self.made.append({"rank": rank, "variables": variables, "options": options})
        self.fault: Exception | None = None
        self.is_aborted = False

    def broadcast(self, buffers: list[torch.Tensor], options: object) -> SimpleNamespace:
        def wait(timeout: timedelta) -> None:
            if self.fault is not None:
                raise self.fault

        return SimpleNamespace(wait=wait)

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Callable[..., BroadcastGroup]:
    """Join a group of NCCL; all that are joined in a test meet in one store."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", LazyGroup, raising=False)
    monkeypatch.setattr(LazyGroup, "made", [])
    store = c10d.HashStore()
    mine = threading.local()  # the GPU of a member, each of which is a thread here
    monkeypatch.setattr(weight_group, "read_gpu_id", lambda: mine.gpu)

    def join_group(
        rank: int, timeout_s: float = NEVER_S, world_size: int = 2, transport: str = "nccl", gpu: str | None = None
    ) -> BroadcastGroup:
        mine.gpu = f"GPU-{rank}" if gpu is None else gpu
        group = WeightGroup("1-abc", "127.0.0.1", 1, rank, world_size, timeout_s, transport)
        return BroadcastGroup(group, store)  # type: ignore[arg-type]  # a store without a network

    return join_group


def test_member_that_never_comes_is_waited_for_until_the_deadline(join: Callable[..., BroadcastGroup]) -> None:
    """NCCL's own start has no deadline: the trainer would have waited in it for ever."""
    with pytest.raises(DeadlineExceeded, match=r"rank 0 of weight group 1-abc could not join within 0\.05 s"):
        join(0, SOON_S)
    assert not LazyGroup.made, "it connected before all had come"


def test_all_members_join_when_the_last_has_come(join: Callable[..., BroadcastGroup]) -> None:
    with ThreadPoolExecutor(3) as threads:
        groups = list(threads.map(lambda rank: join(rank, world_size=3), range(3)))
    assert sorted(made["rank"] for made in LazyGroup.made) == [0, 1, 2]
    assert [group.group.rank for group in groups] == [0, 1, 2]


@pytest.mark.parametrize(
    ("gpus", "expected", "choice"),
    [
        (("GPU-a", "GPU-b"), "nccl", "Nccl: a GPU for each of 2 ranks"),
        (("GPU-a", "GPU-a"), "gloo", "Gloo: 2 ranks on 1 GPUs"),
        (("GPU-a", ""), "gloo", "Gloo: 2 ranks on 1 GPUs"),
        (("", ""), "gloo", "Gloo: 2 ranks without GPUs"),
    ],
)
def test_auto_takes_nccl_only_if_each_member_has_a_gpu_of_its_own(
    join: Callable[..., BroadcastGroup], gpus: tuple[str, str], expected: str, choice: str
) -> None:
    """Trainer and replica on one card took NCCL, which ended both at the first version ("Duplicate GPU")."""
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(lambda rank: join(rank, transport="auto", gpu=gpus[rank]), range(2)))
        assert [group.group.transport for group in groups] == [expected] * 2
        assert [group.weight_transport for group in groups] == [choice] * 2
        assert [group.device.type for group in groups] == ["cuda" if expected == "nccl" else "cpu"] * 2
        if expected == "gloo":  # and the bytes arrive
            buffers = [torch.full((4,), float(rank == 0)) for rank in range(2)]
            list(threads.map(lambda rank: groups[rank].start_broadcast(buffers[rank])(), range(2)))
            assert torch.equal(buffers[1], torch.ones(4))
    for group in groups:
        group.close()


def test_nccl_is_refused_for_ranks_that_share_a_gpu(join: Callable[..., BroadcastGroup]) -> None:
    def refuse(rank: int) -> str:
        with pytest.raises(RunInvalid) as caught:
            join(rank, world_size=3, gpu=f"GPU-{min(rank, 1)}")
        return str(caught.value)

    with ThreadPoolExecutor(3) as threads:
        (said,) = set(threads.map(refuse, range(3)))
    assert "got Nccl for 3 ranks on 2 GPUs; use Auto" in said
    assert not LazyGroup.made


@pytest.mark.parametrize("before", [None, "0"])
def test_only_this_group_has_no_watchdog(
    join: Callable[..., BroadcastGroup], monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """torch's watchdog ends the process when a peer is lost. The trainer's own groups keep theirs."""
    if before is None:
        monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    else:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
    join(0, world_size=1)
    (made,) = LazyGroup.made
    assert made["variables"]["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    assert made["options"]._timeout == timedelta(seconds=NEVER_S)


@pytest.mark.parametrize(("limit", "has_devices"), [(8 << 20, True), (8 << 20, False), (resource.RLIM_INFINITY, True)])
def test_a_limit_of_locked_memory_is_logged_if_nccl_may_use_rdma(
    join: Callable[..., BroadcastGroup], monkeypatch: pytest.MonkeyPatch, limit: int, has_devices: bool
) -> None:
    """Pods asked for IPC_LOCK, which a user other than root does not get, so nothing told of the limit."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(weight_group, "has_rdma_devices", lambda: has_devices)
    with structlog.testing.capture_logs() as logs:
        join(0, world_size=1)
    found = [entry["limit_bytes"] for entry in logs if entry["event"] == "locked_memory_limited"]
    assert found == ([limit] if has_devices and limit == 8 << 20 else [])


def test_a_member_tells_which_transport_nccl_took_in_its_first_broadcast(
    join: Callable[..., BroadcastGroup], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NCCL fell back to TCP without a word in any log, since its own level was WARN."""
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "nccl.log"))
    written = tmp_path / "nccl.log"
    written.write_text("NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n")  # of another group
    group = join(0, world_size=1)
    assert group.nccl_transport == ""
    wait = group.start_broadcast(torch.zeros(4))
    with written.open("a") as file:
        file.write("NCCL WARN Could not find: ibverbs\n")
        file.write("NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n")
    with structlog.testing.capture_logs() as logs:
        wait()
    assert group.nccl_transport == "NET/Socket"
    assert [entry["event"] for entry in logs] == ["nccl_warned", "nccl_connected"]
    group.start_broadcast(torch.zeros(4))()
    assert group.nccl_transport == "NET/Socket"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (RuntimeError("NCCL communicator was aborted on rank 1"), CollectiveFailed),
        (torch.distributed.DistBackendError("Watchdog caught collective operation timeout"), DeadlineExceeded),
    ],
)
def test_lost_member_raises_and_the_group_is_aborted_when_it_is_left(
    join: Callable[..., BroadcastGroup], fault: Exception, expected: type[Exception]
) -> None:
    group = join(0, world_size=1)
    backend = group._backend
    backend.fault = fault
    wait = group.start_broadcast(torch.zeros(4))
    with pytest.raises(expected):
        wait()
    group.close()
    assert backend.is_aborted
