"""The generation process: an engine, its gRPC service, its metrics, and a registration that is kept up.

    specrl-generation --spec run.yaml --replica-id gen-0 --coordinator 127.0.0.1:7000

A replica that is larger than a node is one such process on each of its nodes, of which the first serves and the others
follow it (`nodes.py`):

    ... --nnodes 2 --node-rank 0 --master-addr gen-0-0 --master-port 29500

It ends when it is told to, with exit code 0: at SIGTERM, or when the coordinator dismisses it, after it has drained
(generation.drainS); at SIGINT at once. It ends with one line on standard error and `SpecrlError.exit_code` when the
coordinator refuses it for good, or when its engine dies. A process that follows ends with exit code 0 when its leader
is gone, SIGTERM or not, so that the leader can drain; before it has met one, SIGTERM ends it at once.
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
from specrl.generation.nodes import ONE_NODE, Nodes, until_leader_is_gone
from specrl.generation.service import GenerationService
from specrl.installation import require_engines
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
    nodes: Nodes = ONE_NODE


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
    parser.add_argument("--nnodes", type=int, default=1, help="nodes that the replica spans, a process on each")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is; 0 serves")
    parser.add_argument("--master-addr", default="127.0.0.1", help="host of node 0, where the ranks of all nodes meet")
    parser.add_argument("--master-port", type=int, default=29500, help="port on it, free on node 0")
    tls.add_arguments(parser)
    found = vars(parser.parse_args(arguments))
    count, rank = found.pop("nnodes"), found.pop("node_rank")
    if not 0 <= rank < count:
        parser.error(f"--node-rank must be >= 0 and < --nnodes, got {rank} of {count}; count nodes from 0")
    nodes = Nodes(count, rank, found.pop("master_addr"), found.pop("master_port"), found["host"])
    identity = tls.identity_of(found.pop("tls"), found.pop("tls_domain"))
    return Options(**found, identity=identity, nodes=nodes)


async def run(spec: RunSpec, options: Options) -> None:
    """Serve until told to stop. Raises SpecrlError when the engine cannot start or dies, or the run is another one."""
    require_engines("torch", "vllm")
    if not options.nodes.is_leader:
        await follow(spec, options.nodes)
        return
    from specrl.generation.vllm_backend.engine import VllmEngine

    with traces.recorder(spec, "generation", options.replica_id) as recorder:
        engine = VllmEngine(spec, options.replica_id, recorder, options.nodes)
        await engine.start()
        try:
            await run_engine(engine, spec, options, recorder)
        finally:
            await engine.close()


async def follow(spec: RunSpec, nodes: Nodes) -> None:
    """Compute one node's share of a replica for as long as it has a leader. Raises SpecrlError when a rank is lost."""
    from specrl.generation.vllm_backend.member import Member

    met, member = asyncio.Event(), Member(spec, nodes)

    async def stopped_alone() -> None:
        await told_to_stop(signal.SIGTERM)
        if met.is_set():
            log.info("stop_left_to_leader", node=nodes.rank)
            await asyncio.Event().wait()

    try:
        await first_to_end(
            member.run(met), until_leader_is_gone(nodes, met), stopped_alone(), told_to_stop(signal.SIGINT)
        )
    finally:
        member.close()


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
