"""The trainer process: one rank of the backend. Rank 0 also serves gRPC and stays registered with the coordinator.

    specrl-trainer --spec run.yaml --run-directory runs/demo --coordinator 127.0.0.1:7000
    specrl-trainer --ranks 4 --nnodes 2 --node-rank 0 ...     a node's ranks as processes of their own, as in a pod

With --ranks the process is no rank: it starts them (`rank_processes.py`). When a rank ends, and with which exit code:

    0      the coordinator dismissed it because the run is over, or, without --until-dismissed, a signal came
    143    SIGTERM or SIGINT before the run was over, with --until-dismissed
    1      a rank was lost, or another failure; restart all ranks, and they resume from the newest complete checkpoint
    2      the user must act first (run file, checkpoint, command line, refused by the coordinator)

Errors are one line on standard error. The local launcher or `rank_processes.py` starts a rank, and sets RANK and
WORLD_SIZE, as torchrun would.
"""

from __future__ import annotations

import specrl.exit_on_sigterm  # noqa: F401 - first: asyncio and structlog take ten times as long as the interpreter

# isort: split

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from specrl.errors import SpecrlError
from specrl.installation import require_engines
from specrl.machine import require_driver
from specrl.rank_processes import Node, run_ranks
from specrl.records import Peer, Role
from specrl.rpc import run_token, tls
from specrl.rpc.clients import CoordinatorClient
from specrl.rpc.lifetime import run_until_first_ends, wait_for_signal
from specrl.rpc.limits import message_limits
from specrl.rpc.membership import leave_without_drain, stay_registered
from specrl.rpc.run_token import RunToken
from specrl.rpc.server import ServerOptions, start_server
from specrl.spec import RunSpec, digest_spec, load_process_spec
from specrl.telemetry import logs, traces
from specrl.telemetry.exporter import serve_metrics
from specrl.telemetry.hosts import join_address
from specrl.telemetry.spans import TRAINER, Recorder
from specrl.termination import report_error

if TYPE_CHECKING:
    from specrl.trainer.backend import TrainerBackend
    from specrl.trainer.ranks import ControlGroup

GOODBYE_S = 5.0  # longest wait for the coordinator's answer to a goodbye; the process ends without it
STOP_GRACE_S = 2.0  # for calls in progress when the process has to end
STOPPED = 143  # the shell's code for SIGTERM, 128 + 15

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class TrainerOptions:
    """The parsed command line; see `parse_arguments` for the meaning of each field."""

    spec: Path
    run_directory: Path
    coordinator: str
    peer_id: str
    host: str
    port: int
    metrics_port: int | None = None
    until_dismissed: bool = False
    identity: tls.Identity | None = None
    token: RunToken | None = None
    checkpoint: Path | None = None
    node: Node | None = None
    """The node whose ranks this process starts; None: it is a rank itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `specrl-trainer`."""
    code = 0
    try:
        options = parse_arguments(arguments)
        if options.node is not None and "RANK" not in os.environ:
            sys.exit(run_ranks(options.node, sys.orig_argv))
        spec = load_process_spec(options.spec)
        rank = int(os.environ.get("RANK", "0"))
        process = options.peer_id if rank == 0 else f"trainer-{rank}"
        logs.configure_logging(spec.telemetry.log_level.value, process, spec.name)
        logs.log_process_start()
        was_dismissed = run_rank(spec, options)
        code = STOPPED if options.until_dismissed and not was_dismissed else 0
    except SpecrlError as error:
        report_error("specrl-trainer", error)
        code = error.exit_code
    # sys.exit would join worker threads. One may hang in a collective with a rank that is gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def parse_arguments(arguments: Sequence[str] | None) -> TrainerOptions:
    """Parse the command line. argparse exits with 2 and a usage line when it is wrong. Raises TlsInvalid."""
    parser = argparse.ArgumentParser(prog="specrl-trainer", description="One rank of a run's trainer.")
    parser.add_argument("--spec", type=Path, required=True, help="the run file")
    parser.add_argument("--run-directory", type=Path, required=True, help="the run's directory, with checkpoints")
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT", help="the coordinator's gRPC address")
    parser.add_argument("--peer-id", default="trainer", help="name of this trainer; the same at every restart")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on, for coordinator and replicas")
    parser.add_argument("--port", type=int, default=0, help="gRPC port; 0 picks a free one")
    parser.add_argument("--metrics-port", type=int, help="Prometheus port of rank 0; 0 picks a free one; default: none")
    parser.add_argument("--until-dismissed", action="store_true", help="exit with 143 at a signal before the run's end")
    parser.add_argument(
        "--checkpoint", type=Path, help="start from this run's folder or checkpoint if there is none yet"
    )
    parser.add_argument("--ranks", type=int, help="start so many ranks of this node; default: this process is a rank")
    parser.add_argument("--nnodes", type=int, default=1, help="with --ranks: nodes, each with as many ranks")
    parser.add_argument("--node-rank", type=int, default=0, help="with --ranks: this node's number, from 0")
    parser.add_argument("--master-addr", default="127.0.0.1", help="with --ranks: the host of rank 0")
    parser.add_argument("--master-port", type=int, default=0, help="with --ranks: rank 0's port; 0: a free one")
    tls.add_tls_arguments(parser)
    run_token.add_token_argument(parser)
    found = vars(parser.parse_args(arguments))
    place = [found.pop(name) for name in ("ranks", "nnodes", "node_rank", "master_addr", "master_port")]
    identity = tls.load_identity(found.pop("tls"), found.pop("tls_domain"))
    token = run_token.load_token(found.pop("token_file"))
    return TrainerOptions(**found, identity=identity, token=token, node=Node(*place) if place[0] else None)


def run_rank(spec: RunSpec, options: TrainerOptions) -> bool:
    """Run one rank until the trainer ends. Returns whether the coordinator dismissed it. Raises SpecrlError."""
    require_engines("torch", "megatron")
    require_driver()
    from specrl.trainer.calls import RankCalls
    from specrl.trainer.megatron_backend import MegatronBackend
    from specrl.trainer.ranks import ControlGroup, follow_rank_0

    backend = MegatronBackend(spec)
    control = ControlGroup()
    if control.rank == 0:
        with traces.open_recorder(spec, "trainer", options.peer_id) as recorder:
            return asyncio.run(run_rank_0(backend, control, spec, options, recorder))
    # A signal usually reaches all ranks at once. The others ignore it and wait for rank 0's Close, so that none leaves
    # in the middle of a collective.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    follow_rank_0(RankCalls(backend, spec, options.run_directory, options.host), control)
    return True  # only rank 0 knows the reason; its exit code decides


async def run_rank_0(
    backend: TrainerBackend, control: ControlGroup | None, spec: RunSpec, options: TrainerOptions, recorder: Recorder
) -> bool:
    """Run rank 0: load, serve gRPC and stay registered with the coordinator.

    Ends at a signal, when the coordinator dismisses or refuses the trainer, or when a rank is lost. Returns whether the
    coordinator dismissed it. Raises SpecrlError.

    control: the control group with the other ranks; None if there are none.
    """
    from specrl.trainer.service import TrainerService

    service = TrainerService(backend, spec, options.run_directory, options.host, control)
    await service.load_model(options.checkpoint)
    guard = tls.make_guard(options.identity, tls.COORDINATOR)
    border = ServerOptions(message_limits(spec).trainer, guard, options.token, recorder, TRAINER)
    server, port = await start_server(service.add_to, options.host, options.port, border)
    metrics_port = serve_metrics(options.host, options.metrics_port)
    address = join_address(options.host, port)
    stopped = wait_for_signal()
    log.info("trainer_served", address=address, ranks=backend.get_status().world_size)
    peer = Peer(options.peer_id, Role.TRAINER, address, digest_spec(spec), metrics_port=metrics_port)
    dismissed = asyncio.Event()
    async with CoordinatorClient(options.coordinator, options.identity, options.token) as coordinator:
        try:
            # The first of these to return or raise ends the trainer; the others are cancelled.
            await run_until_first_ends(
                stay_registered(coordinator, peer, leaving=dismissed),
                service.watch_ranks(),
                dismissed.wait(),
                stopped,
            )
        finally:
            # Say goodbye first, so that the coordinator sends no further calls.
            with suppress(TimeoutError):
                await asyncio.wait_for(leave_without_drain(coordinator, peer), GOODBYE_S)
            await server.stop(STOP_GRACE_S)
            await service.close()
    return dismissed.is_set()
