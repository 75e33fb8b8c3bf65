"""The generation process: an engine, its gRPC service, its metrics, and a registration that is kept up.

    specrl-generation --spec run.yaml --replica-id gen-0 --coordinator 127.0.0.1:7000

It ends when it is told to, with exit code 0: at SIGTERM, or when the coordinator dismisses it, after it has drained
(generation.drainS); at SIGINT at once. It ends with one line on standard error and `SpecrlError.exit_code` when the
coordinator refuses it for good, or when its engine dies.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from specrl.errors import SpecrlError
from specrl.generation.engine import Engine
from specrl.generation.service import GenerationService
from specrl.records import Peer, Role
from specrl.rpc import tls
from specrl.rpc.clients import CoordinatorClient
from specrl.rpc.lifetime import first_to_end, told_to_stop
from specrl.rpc.limits import message_limits
from specrl.rpc.membership import drain_when_told, say_goodbye, stay_registered
from specrl.rpc.server import Border, serve
from specrl.spec import RunSpec, digest, load_spec
from specrl.telemetry import logs, traces
from specrl.telemetry.exporter import serve_metrics
from specrl.telemetry.spans import SILENT, Recorder

ENGINE_CHECK_S = 1.0  # how soon a dead engine is noticed when nobody asks it for anything
GOODBYE_S = 5.0
STOP_GRACE_S = 2.0  # for calls under way when the process is told to end

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Options:
    """The command line."""

    spec: Path
    replica_id: str
    coordinator: str
    host: str
    port: int
    metrics_port: int | None
    identity: tls.Identity | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `specrl-generation`."""
    try:
        options = parse(arguments)
        spec = load_spec(options.spec)
        logs.configure(spec.telemetry.log_level.value, options.replica_id, spec.name)
        asyncio.run(run(spec, options))
    except SpecrlError as error:
        print(f"specrl-generation: {error}", file=sys.stderr)  # noqa: T201 - one message for whoever started it
        sys.exit(error.exit_code)


def parse(arguments: Sequence[str] | None) -> Options:
    """Read the command line; argparse exits with 2 and a usage line when it is wrong. Raises TlsInvalid."""
    parser = argparse.ArgumentParser(prog="specrl-generation", description="One generation replica of a run.")
    parser.add_argument("--spec", type=Path, required=True, help="the run file")
    parser.add_argument("--replica-id", required=True, help="name of this replica, stable over restarts")
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT", help="the coordinator's gRPC address")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on, and to be reached at")
    parser.add_argument("--port", type=int, default=0, help="gRPC port; 0 takes any free one")
    parser.add_argument(
        "--metrics-port", type=int, default=None, help="Prometheus port; 0 any free one; left out: none"
    )
    tls.add_arguments(parser)
    found = vars(parser.parse_args(arguments))
    identity = tls.identity_of(found.pop("tls"), found.pop("tls_domain"))
    return Options(**found, identity=identity)


async def run(spec: RunSpec, options: Options) -> None:
    """Serve until told to stop. Raises SpecrlError when the engine cannot start or dies, or the run is another one."""
    from specrl.generation.vllm_backend.engine import VllmEngine

    with traces.recorder(spec, "generation", options.replica_id) as recorder:
        engine = VllmEngine(spec, options.replica_id, recorder)
        await engine.start()
        try:
            await run_engine(engine, spec, options, recorder)
        finally:
            await engine.close()


async def run_engine(engine: Engine, spec: RunSpec, options: Options, recorder: Recorder = SILENT) -> None:
    """Serve a started engine until a signal, a refusal or the engine's death."""
    service = GenerationService(engine, spec.weights, float(spec.generation.reattach_s), recorder)
    guard = tls.guard_of(options.identity, tls.COORDINATOR)
    border = Border(message_limits(spec).generation, guard, recorder, options.replica_id)
    server, port = await serve(service.add_to, options.host, options.port, border)
    metrics_port = serve_metrics(options.host, options.metrics_port)
    address = f"{options.host}:{port}"
    log.info("generation_served", replica=options.replica_id, address=address)
    peer = Peer(options.replica_id, Role.GENERATION, address, digest(spec), metrics_port=metrics_port)
    async with CoordinatorClient(options.coordinator, options.identity) as coordinator:
        leaving = asyncio.Event()
        drained = drain_when_told(
            coordinator, peer, leaving, told_to_stop(signal.SIGTERM), float(spec.generation.drain_s)
        )
        try:
            await first_to_end(
                stay_registered(coordinator, peer, engine.status, service.held, leaving),
                _watch(engine),
                drained,
                told_to_stop(signal.SIGINT),
            )
        finally:
            service.close()
            if not leaving.is_set():  # else it has left, or broken off a call that says the same
                with suppress(TimeoutError):
                    await asyncio.wait_for(say_goodbye(coordinator, peer), GOODBYE_S)
            await server.stop(STOP_GRACE_S)


async def _watch(engine: Engine) -> None:
    """Raise EngineFailed soon after the engine has died; never returns."""
    while True:
        await engine.status()
        await asyncio.sleep(ENGINE_CHECK_S)
