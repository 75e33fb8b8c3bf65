"""NCCL's transport is read from its log. The lines were logged on clusters by NCCL 2.18 to 2.30, and published.

Sources: a fine-tuning job of two nodes on EFA hosts without its plugin, nccl-tests on ConnectX-3, vLLM on a network of
10 Gbit/s, and nccl-tests on two nodes of GB200 and on NVIDIA's plugin for AWS.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specrl.weights.nccl_log import NcclLog, find_transports, find_warnings, locate_log

SOCKETS = """\
llama-3-8b-node-0-0:195:1185 [3] NCCL INFO Channel 00 : 3[3] -> 2[2] via SHM/direct/direct
llama-3-8b-node-0-0:192:1188 [0] NCCL INFO Channel 01/0 : 0[0] -> 4[0] [send] via NET/Socket/0
llama-3-8b-node-0-0:192:1188 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Socket/0
llama-3-8b-node-0-0:195:1185 [3] NCCL INFO Connected all trees
"""
ROCE = """\
gpuserver1:15326 [0] NCCL INFO NET/IB : Using [0]={[0] rocep130s0:1/RoCE, [1] rocep130s0:2/RoCE}
gpuserver1:15326 [0] NCCL INFO Using network IB
gpuserver1:15327 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0
"""
NVLINK = """\
MNNVL 1 cliqueId 7ffe cliqueSize 8 cliqueRank 2
NCCL INFO Channel 00/0 : 4[0] -> 3[3] via P2P/MNNVL
NCCL INFO Using network Socket
"""
ONE_NODE = "host:1:1 [0] NCCL INFO Channel 30/0 : 0[0] -> 1[6] via P2P/CUMEM/read\n"
NEW_FORM = (
    "corona:927:927 [0] NCCL INFO Channel 01/0 : 1[0] -> 0[0] [receive] via NET/Socket/0 comm 0x2083dd50 nRanks 02\n"
)
OLD_FORM = "node03:34537:34681 [0] NCCL INFO Channel 01/0 : 0[3b000] -> 1[3b000] [receive] via NET/IB/1\n"
RDMA = "NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0(0)/GDRDMA\n"
PLUGIN = "NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SOCKETS, "NET/Socket, SHM"),
        (ROCE, "NET/IB"),
        (NVLINK, "P2P/MNNVL"),
        (ONE_NODE, "P2P/CUMEM"),
        (NEW_FORM, "NET/Socket"),
        (OLD_FORM, "NET/IB"),
        (RDMA, "NET/IB"),
        (PLUGIN, "NET/AWS Libfabric"),
        ("", ""),
        ("host:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.7<0>\n", ""),
    ],
)
def test_the_transport_is_that_of_the_channels_and_not_of_what_nccl_found(text: str, expected: str) -> None:
    assert find_transports(text.splitlines()) == expected


def test_only_whole_lines_since_the_last_look_are_read(tmp_path: Path) -> None:
    """The trainer's own communicators are in the same log, and NCCL writes while it is read."""
    path = tmp_path / "nccl.log"
    log = NcclLog(path)
    assert log.read_new_lines() == []  # NCCL has not begun
    path.write_text(ONE_NODE)
    assert find_transports(log.read_new_lines()) == "P2P/CUMEM"
    half, rest = RDMA[:40], RDMA[40:]
    with path.open("a") as file:
        file.write(half)
        file.flush()
        assert log.read_new_lines() == []
        file.write(rest)
    assert find_transports(log.read_new_lines()) == "NET/IB"
    assert log.read_new_lines() == []


def test_the_log_is_where_nccl_writes_it() -> None:
    assert locate_log({}) is None
    assert locate_log({"NCCL_DEBUG_FILE": ""}) is None
    assert locate_log({"NCCL_DEBUG_FILE": "/tmp/nccl-%p.log"}) == Path(f"/tmp/nccl-{os.getpid()}.log")  # noqa: S108
    assert NcclLog(None).read_new_lines() == []


def test_warnings_are_found_without_time_and_place() -> None:
    line = "transport/nvls.cc:91  NCCL WARN Cuda failure 801 'operation not supported'"
    assert find_warnings([line, *SOCKETS.splitlines()]) == ["Cuda failure 801 'operation not supported'"]


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    os.mkfifo(path)  # opening it would wait for a writer
    assert NcclLog(path).read_new_lines() == []
