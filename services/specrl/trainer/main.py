"""The trainer process: one rank of the backend; rank 0 also serves gRPC and stays registered with the coordinator.

    specrl-trainer --spec run.yaml --run-directory runs/demo --coordinator 127.0.0.1:7000
    torchrun --nproc-per-node 4 --no-python specrl-trainer --spec ...       (RANK and WORLD_SIZE come from torchrun)

It ends when it is told to (SIGTERM, SIGINT, or by the coordinator once the run is over: exit code 0 after a goodbye),
when the coordinator refuses it for good, or when a rank is lost; the last two with one line on standard error and the
error's exit code. With --until-dismissed exit code 0 says that the run is over, and a signal ends it with 143. After 1,
whoever started it starts all ranks again, and they go on from the newest complete checkpoint; after 2 that would change
nothing.
"""

from __future__ import annotations

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
from specrl.records import Peer, Role
from specrl.rpc import tls
from specrl.rpc.clients import CoordinatorClient
from specrl.rpc.lifetime import first_to_end, told_to_stop
from specrl.rpc.limits import message_limits
from specrl.rpc.membership import say_goodbye, stay_registered
from specrl.rpc.server import Border, serve
from specrl.spec import RunSpec, digest, load_spec
from specrl.telemetry import logs, traces
from specrl.telemetry.exporter import serve_metrics
from specrl.telemetry.spans import TRAINER, Recorder

if TYPE_CHECKING:
    from specrl.trainer.ranks import RankedBackend

GOODBYE_S = 5.0
STOPPED = 143  # 128 + SIGTERM, as shells say it
STOP_GRACE_S = 2.0  # for calls under way when the process is told to end

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Options:
    """The command line."""

    spec: Path
    run_directory: Path
    coordinator: str
    peer_id: str
    host: str
    port: int
    metrics_port: int | None = None
    until_dismissed: bool = False
    identity: tls.Identity | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `specrl-trainer`."""
    code = 0
    try:
        options = parse(arguments)
        spec = load_spec(options.spec)
        rank = int(os.environ.get("RANK", "0"))
        logs.configure(spec.telemetry.log_level.value, options.peer_id if rank == 0 else f"trainer-{rank}", spec.name)
        was_dismissed = run(spec, options)
        code = STOPPED if options.until_dismissed and not was_dismissed else 0
    except SpecrlError as error:
        print(f"specrl-trainer: {error}", file=sys.stderr)  # noqa: T201 - one message for whoever started it
        code = error.exit_code
    # Not sys.exit: a worker thread may hang in a collective with a rank that is gone, and must not keep this one alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def parse(arguments: Sequence[str] | None) -> Options:
    """Read the command line; argparse exits with 2 and a usage line when it is wrong. Raises TlsInvalid."""
    parser = argparse.ArgumentParser(prog="specrl-trainer", description="One rank of a run's trainer.")
    parser.add_argument("--spec", type=Path, required=True, help="the run file")
    parser.add_argument("--run-directory", type=Path, required=True, help="checkpoints are below it")
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT", help="the coordinator's gRPC address")
    parser.add_argument("--peer-id", default="trainer", help="name, stable over restarts")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on, and to be reached at")
    parser.add_argument("--port", type=int, default=0, help="gRPC port; 0 takes any free one")
    parser.add_argument(
        "--metrics-port", type=int, default=None, help="Prometheus port of rank 0; 0 any free one; left out: none"
    )
    parser.add_argument(
        "--until-dismissed", action="store_true", help="a signal before the run's end is a failure: exit code 143"
    )
    tls.add_arguments(parser)
    found = vars(parser.parse_args(arguments))
    identity = tls.identity_of(found.pop("tls"), found.pop("tls_domain"))
    return Options(**found, identity=identity)


def run(spec: RunSpec, options: Options) -> bool:
    """Be one rank until the end. Returns whether the coordinator sent the trainer home. Raises SpecrlError."""
    require_engines("torch", "megatron")
    from specrl.trainer.megatron_backend import MegatronBackend
    from specrl.trainer.ranks import ControlGroup, RankedBackend, follow

    backend = MegatronBackend(spec)
    control = ControlGroup()
    if control.rank == 0:
        with traces.recorder(spec, "trainer", options.peer_id) as recorder:
            return asyncio.run(lead(RankedBackend(backend, control), spec, options, recorder))
    # Told to stop, other ranks wait for rank 0 to say so; it is told, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    follow(backend, control)
    return True  # rank 0 knows better, and one rank that has failed is enough


async def lead(backend: RankedBackend, spec: RunSpec, options: Options, recorder: Recorder) -> bool:
    """Rank 0: load, serve, stay registered, until a signal, a dismissal, a refusal or the loss of a rank.

    Returns whether it was a dismissal.
    """
    from specrl.trainer.service import TrainerService

    service = TrainerService(backend, spec, options.run_directory, options.host)
    await service.load()
    guard = tls.guard_of(options.identity, tls.COORDINATOR)
    border = Border(message_limits(spec).trainer, guard, recorder, TRAINER)
    server, port = await serve(service.add_to, options.host, options.port, border)
    metrics_port = serve_metrics(options.host, options.metrics_port)
    address = f"{options.host}:{port}"
    log.info("trainer_served", address=address, ranks=backend.status().world_size)
    peer = Peer(options.peer_id, Role.TRAINER, address, digest(spec), metrics_port=metrics_port)
    dismissed = asyncio.Event()
    async with CoordinatorClient(options.coordinator, options.identity) as coordinator:
        try:
            await first_to_end(
                stay_registered(coordinator, peer, leaving=dismissed),
                service.watch(),
                _until(dismissed),
                told_to_stop(),
            )
        finally:
            with suppress(TimeoutError):
                await asyncio.wait_for(say_goodbye(coordinator, peer), GOODBYE_S)
            await server.stop(STOP_GRACE_S)
            await service.close()
    return dismissed.is_set()


async def _until(event: asyncio.Event) -> None:
    await event.wait()
