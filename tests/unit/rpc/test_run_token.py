"""The token of a local run over gRPC. Real servers on loopback, and every client that our processes use."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from specrl.api.v1 import coordinator_pb2, coordinator_pb2_grpc
from specrl.errors import TokenRefused
from specrl.rpc import run_token
from specrl.rpc.clients import CoordinatorClient
from specrl.rpc.run_token import PROOF_VALID_S, RunToken
from specrl.rpc.server import ServerOptions, start_server
from specrl.telemetry import metrics
from specrl.telemetry.pace import Pace

DISMISS = "/specrl.api.v1.CoordinatorService/Dismiss"


class Dismissals(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Takes note of the replicas that were dismissed."""

    def __init__(self) -> None:
        self.dismissed: list[str] = []

    async def Dismiss(self, request: coordinator_pb2.DismissRequest, context: Any) -> coordinator_pb2.DismissReply:
        self.dismissed.append(request.replica_id)
        return coordinator_pb2.DismissReply()


class Local:
    """A server that asks for the token in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.service = Dismissals()
        self.port = 0

    @property
    def token(self) -> RunToken:
        return RunToken(self.folder / run_token.TOKEN_FILE)

    async def call_raw(self, method: str, data: bytes = b"", metadata: Any = ()) -> tuple[grpc.StatusCode, str]:
        """Call with any bytes and metadata. Returns (status, details)."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            try:
                await channel.unary_unary(method)(data, metadata=metadata, timeout=20.0)
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""


@pytest.fixture
async def local(tmp_path: Path) -> AsyncGenerator[Local]:
    run_token.write_token(tmp_path)
    made = Local(tmp_path)
    add = coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server
    server, made.port = await start_server(
        lambda it: add(made.service, it), "127.0.0.1", 0, ServerOptions(token=made.token)
    )
    yield made
    await server.stop(None)


async def test_only_a_caller_with_the_token_is_answered(local: Local, tmp_path: Path) -> None:
    """Another user of the machine could dismiss a replica and register a trainer of its own."""
    other = tmp_path / "other"
    other.mkdir()
    run_token.write_token(other)
    address = f"127.0.0.1:{local.port}"
    for wrong in (None, RunToken(other / run_token.TOKEN_FILE), RunToken(tmp_path / "nothing")):
        async with CoordinatorClient(address, token=wrong) as client:
            with pytest.raises(TokenRefused, match=r"--token-file RUN/token") as refused:
                await client.dismiss_replica("gen-0")
        assert "\n" not in str(refused.value)
    assert local.service.dismissed == []
    async with CoordinatorClient(address, token=local.token) as client:
        await client.dismiss_replica("gen-0")
        run_token.write_token(tmp_path)  # another launch: both sides read the file again
        await client.dismiss_replica("gen-1")
    assert local.service.dismissed == ["gen-0", "gen-1"]


@pytest.mark.parametrize(
    "proof", ["", "1", "0 0", "x " + "0" * 64, "9" * 99, "9" * 9999, "\x7f", "1 \udcff", b"1 \xe9"]
)
def test_malformed_proofs_are_refused(tmp_path: Path, proof: str | bytes) -> None:
    run_token.write_token(tmp_path)
    with pytest.raises(TokenRefused):
        RunToken(tmp_path / run_token.TOKEN_FILE).check_proof(7000, proof)


@pytest.mark.parametrize("content", ["", "short", " " * 50])
def test_a_file_without_a_token_admits_nobody(tmp_path: Path, content: str) -> None:
    """A proof of an empty token can be made by anybody."""
    (tmp_path / run_token.TOKEN_FILE).write_text(content)
    token = RunToken(tmp_path / run_token.TOKEN_FILE)
    with pytest.raises(TokenRefused):
        token.check_proof(7000, token.make_proof(7000))


def test_a_proof_is_for_one_port_and_expires(tmp_path: Path) -> None:
    """A process that takes the port of one that has crashed learns a proof for that port alone, and no token."""
    token = run_token.write_token(tmp_path)
    now = 1000.0
    checker = RunToken(tmp_path / run_token.TOKEN_FILE, lambda: now)
    proof = checker.make_proof(7000)
    assert token not in proof
    checker.check_proof(7000, proof)
    for port, wrong in ((7001, proof), (7000, proof.replace("1000", "1001")), (7000, None), (7000, proof.encode())):
        with pytest.raises(TokenRefused):
            checker.check_proof(port, wrong)
    now += PROOF_VALID_S + 1
    with pytest.raises(TokenRefused, match="of another time"):
        checker.check_proof(7000, proof)


async def test_refusals_are_counted_under_known_methods(local: Local) -> None:
    """A caller chooses the names of methods that do not exist. They must not become label values."""

    def count(method: str) -> float:
        return metrics.CALLS_REFUSED.labels(method, "TokenRefused")._value.get()

    before = count(DISMISS), count("unknown")
    assert (await local.call_raw(DISMISS))[0] is grpc.StatusCode.UNAUTHENTICATED
    for method in ("/made/Up", "/specrl.api.v1.CoordinatorService/Other"):
        assert (await local.call_raw(method))[0] is grpc.StatusCode.UNAUTHENTICATED
    assert (count(DISMISS), count("unknown")) == (before[0] + 1, before[1] + 2)
    assert not any("made" in sample.labels["method"] for sample in next(iter(metrics.CALLS_REFUSED.collect())).samples)


async def test_a_request_without_the_token_is_not_read(local: Local) -> None:
    """A message may have twice the run's limit. The call is refused although none of it has been sent yet."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{local.port}") as channel:
        call = channel.stream_unary(DISMISS)(timeout=20.0)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


def test_refusals_are_paced() -> None:
    """A flood of refused calls would take the event loop from the run."""
    now = 0.0
    pace = Pace(per_s=10, burst=5, clock=lambda: now)
    assert [pace.take_turn() for _ in range(5)] == [0.0] * 5
    assert [round(pace.take_turn(), 3) for _ in range(3)] == [0.1, 0.2, 0.3]
    now = 100.0
    assert [pace.take_turn() for _ in range(5)] == [0.0] * 5
