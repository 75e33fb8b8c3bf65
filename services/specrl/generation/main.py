"""The generation process: runs an engine, serves it by gRPC, exports metrics, and stays registered.

    specrl-generation --spec run.yaml --replica-id gen-0 --coordinator 127.0.0.1:7000

A replica that spans several nodes runs this process on each of them. Node 0 leads and serves; the others follow it
(`nodes.py`):

    ... --nnodes 2 --node-rank 0 --master-addr gen-0-0 --master-port 29500

Exit code 0:
- SIGTERM, or the coordinator dismisses the replica: it drains first (generation.drainS).
- SIGINT: it stops at once.
- A follower stops when its leader is gone. Until then it ignores SIGTERM, so that the leader can drain. A follower that
  has not found its leader yet stops at SIGTERM.

Exit code `SpecrlError.exit_code` and one line on standard error: the coordinator rejects the replica for good, or the
engine dies.
"""

from __future__ import annotations

import specrl.exit_on_sigterm  # noqa: F401 - first: asyncio and structlog take ten times as long as the interpreter

# isort: split

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
from specrl.forked_process import ReservedFork
from specrl.generation.engine import Engine
from specrl.generation.nodes import ONE_NODE, ReplicaNodes, until_leader_is_gone
from specrl.generation.service import GenerationService
from specrl.generation.vllm_backend.quiet import silence_known_lines
from specrl.installation import require_engines
from specrl.machine import require_driver
from specrl.records import Peer, Role
from specrl.rpc import run_token, tls
from specrl.rpc.clients import CoordinatorClient
from specrl.rpc.lifetime import run_until_first_ends, wait_for_signal
from specrl.rpc.limits import message_limits
from specrl.rpc.membership import drain_on_request, leave_without_drain, stay_registered
from specrl.rpc.run_token import RunToken
from specrl.rpc.server import ServerOptions, start_server
from specrl.rpc.shared_costs import CoordinatorCosts
from specrl.spec import RunSpec, digest_spec, load_process_spec
from specrl.telemetry import logs, traces
from specrl.telemetry.exporter import serve_metrics
from specrl.telemetry.hosts import join_address
from specrl.telemetry.spans import SILENT_RECORDER, Recorder
from specrl.termination import report_error

ENGINE_CHECK_S = 1.0  # a dead engine is noticed within this time, also without requests
GOODBYE_S = 5.0  # bounds the deregistration
STOP_GRACE_S = 2.0  # for calls in progress when the process stops

log = structlog.get_logger(__name__)

silence_known_lines()  # at import, since processes that vLLM spawns only import this module


@dataclass(frozen=True)
class ReplicaOptions:
    """The parsed command line."""

    spec: Path
    replica_id: str
    coordinator: str
    host: str
    port: int
    metrics_port: int | None
    identity: tls.Identity | None = None
    token: RunToken | None = None
    nodes: ReplicaNodes = ONE_NODE


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `specrl-generation`."""
    try:
        options = parse_arguments(arguments)
        spec = load_process_spec(options.spec)
        logs.configure_logging(spec.telemetry.log_level.value, options.replica_id, spec.name)
        logs.log_process_start()
        require_engines("torch", "vllm")
        require_driver()
        from specrl.generation.vllm_backend.launch import reserve_engine_core

        if not options.nodes.is_leader:
            asyncio.run(run_follower(spec, options.nodes))
            return
        with reserve_engine_core(spec, options.nodes) as core:  # before anything starts a thread
            asyncio.run(run_replica(spec, options, core))
    except SpecrlError as error:
        report_error("specrl-generation", error)
        sys.exit(error.exit_code)


def parse_arguments(arguments: Sequence[str] | None) -> ReplicaOptions:
    """Parse the command line. Raises TlsInvalid. A wrong command line exits with code 2 and a usage line."""
    parser = argparse.ArgumentParser(prog="specrl-generation", description="One generation replica of a run.")
    parser.add_argument("--spec", type=Path, required=True, help="the run file")
    parser.add_argument("--replica-id", required=True, help="name of this replica, stable over restarts")
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT", help="the coordinator's gRPC address")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on, which other processes connect to")
    parser.add_argument("--port", type=int, default=0, help="gRPC port; 0 for any free port")
    parser.add_argument(
        "--metrics-port", type=int, default=None, help="Prometheus port; 0 for any free port (default: no metrics)"
    )
    parser.add_argument("--nnodes", type=int, default=1, help="nodes that the replica spans; each runs one process")
    parser.add_argument("--node-rank", type=int, default=0, help="number of this node; node 0 serves")
    parser.add_argument("--master-addr", default="127.0.0.1", help="host of node 0, for the rendezvous of all ranks")
    parser.add_argument("--master-port", type=int, default=29500, help="free port on node 0, for the rendezvous")
    tls.add_tls_arguments(parser)
    run_token.add_token_argument(parser)
    found = vars(parser.parse_args(arguments))
    count = found.pop("nnodes")
    rank = found.pop("node_rank")
    if not 0 <= rank < count:
        parser.error(f"--node-rank must be >= 0 and < --nnodes, got {rank} of {count}; count nodes from 0")
    nodes = ReplicaNodes(count, rank, found.pop("master_addr"), found.pop("master_port"), found["host"])
    identity = tls.load_identity(found.pop("tls"), found.pop("tls_domain"))
    token = run_token.load_token(found.pop("token_file"))
    return ReplicaOptions(**found, identity=identity, token=token, nodes=nodes)


async def run_replica(spec: RunSpec, options: ReplicaOptions, core: ReservedFork | None) -> None:
    """Serve until asked to stop. core: where to run the engine core; None spawns it.

    Raises SpecrlError if the engine cannot start, if it dies, or if the coordinator rejects the replica.
    """
    from specrl.generation.vllm_backend.engine import VllmEngine

    with traces.open_recorder(spec, "generation", options.replica_id) as recorder:
        costs = CoordinatorCosts(options.coordinator, options.identity, options.token)
        engine = VllmEngine(spec, options.replica_id, recorder, options.nodes, costs)
        await engine.start(core)
        try:
            await run_engine(engine, spec, options, recorder)
        finally:
            await engine.close()


async def run_follower(spec: RunSpec, nodes: ReplicaNodes) -> None:
    """Compute one node's share of a replica until its leader is gone. Raises SpecrlError if a rank dies."""
    from specrl.generation.vllm_backend.follower import FollowerNode

    met = asyncio.Event()
    member = FollowerNode(spec, nodes)

    async def stop_without_leader() -> None:
        await wait_for_signal(signal.SIGTERM)
        if met.is_set():
            # All nodes of a replica get SIGTERM at the same time. The leader still needs this node's ranks to drain.
            log.info("stop_deferred_to_leader", node=nodes.rank)
            await asyncio.Event().wait()  # cancelled when `until_leader_is_gone` returns

    try:
        await run_until_first_ends(
            member.run(met), until_leader_is_gone(nodes, met), stop_without_leader(), wait_for_signal(signal.SIGINT)
        )
    finally:
        member.close()


async def run_engine(
    engine: Engine, spec: RunSpec, options: ReplicaOptions, recorder: Recorder = SILENT_RECORDER
) -> None:
    """Serve a started engine until a signal, a rejection by the coordinator, or the engine's death."""
    service = GenerationService(engine, spec.weights, float(spec.generation.reattach_s), recorder)
    guard = tls.make_guard(options.identity, tls.COORDINATOR)
    server_options = ServerOptions(message_limits(spec).generation, guard, options.token, recorder, options.replica_id)
    server, port = await start_server(service.add_to, options.host, options.port, server_options)
    metrics_port = serve_metrics(options.host, options.metrics_port)
    address = join_address(options.host, port)
    terminated = wait_for_signal(signal.SIGTERM)
    interrupted = wait_for_signal(signal.SIGINT)
    log.info("generation_served", replica=options.replica_id, address=address)
    peer = Peer(options.replica_id, Role.GENERATION, address, digest_spec(spec), metrics_port=metrics_port)
    async with CoordinatorClient(options.coordinator, options.identity, options.token) as coordinator:
        leaving = asyncio.Event()
        drained = drain_on_request(coordinator, peer, leaving, terminated, float(spec.generation.drain_s))
        try:
            await run_until_first_ends(
                stay_registered(coordinator, peer, engine.get_status, service.list_held, leaving),
                _watch_engine(engine),
                drained,
                interrupted,
            )
        finally:
            service.close()
            # If `leaving` is set, draining has deregistered the replica or is the call that was cancelled.
            if not leaving.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(leave_without_drain(coordinator, peer), GOODBYE_S)
            await server.stop(STOP_GRACE_S)


async def _watch_engine(engine: Engine) -> None:
    """Raise EngineFailed within ENGINE_CHECK_S of the engine's death. Never returns."""
    while True:
        await engine.get_status()
        await asyncio.sleep(ENGINE_CHECK_S)
