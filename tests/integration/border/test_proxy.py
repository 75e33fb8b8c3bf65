"""A run's processes reach each other directly, whatever proxy the user's environment names."""

from __future__ import annotations

import socket

import pytest
from tests.stand_ins.engine import TableEngine, TableShape

from specrl.generation.service import GenerationService
from specrl.rpc.clients import GenerationClient
from specrl.rpc.server import start_server
from specrl.spec.run import Weights


async def test_a_proxy_of_the_environment_is_not_used_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC called 127.0.0.1 through the proxy, so a run waited for its trainer until it was stopped."""
    with socket.socket() as proxy:  # listens, and never answers
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        engine = TableEngine("gen-0", seed=7, shape=TableShape(64, 128, 0.001))
        await engine.start()
        service = GenerationService(engine, Weights(), 1.0)
        server, port = await start_server(service.add_to, "127.0.0.1", 0)
        try:
            async with GenerationClient(f"127.0.0.1:{port}", "gen-0", 1 << 20) as client:
                assert (await client.probe_status(20.0)).policy_version == -1
        finally:
            service.close()
            await server.stop(None)
