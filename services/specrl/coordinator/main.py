"""The coordinator's process: gRPC for peers, HTTP for people, one loop. Console script `specrl-coordinator`.

Exit codes: 0 stopped or finished and told to stop, otherwise `SpecrlError.exit_code`. A run that has failed is shown
until the process is told to stop; in a pod (`--rljob`) the process ends with it, and whoever runs the pod decides.
SIGTERM and SIGINT stop it cleanly: the loop is cancelled, the trainer is asked for a checkpoint if it is at rest. Until
that is complete, page, REST and probes answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from specrl.coordinator.admission import ByReview, ByToken
from specrl.coordinator.board import Board
from specrl.coordinator.checked_prompts import CheckedPrompts, load_checked_prompts
from specrl.coordinator.controls import Controls
from specrl.coordinator.events import EventLog
from specrl.coordinator.loop import Loop
from specrl.coordinator.origin import write_origin
from specrl.coordinator.parts import Parts
from specrl.coordinator.registry import Calls, Registry
from specrl.coordinator.report import Phase
from specrl.coordinator.rljob import Place, Teller, place_of
from specrl.coordinator.run_spans import RunSpans
from specrl.coordinator.samples import Samples
from specrl.coordinator.service import CoordinatorService
from specrl.coordinator.sinks import Sinks, check_sinks, leave
from specrl.coordinator.store import claim_for, open_store
from specrl.coordinator.store_link import StoreLink
from specrl.coordinator.timeline import Timeline
from specrl.coordinator.turns import turns_of
from specrl.coordinator.web import make_app
from specrl.errors import PortTaken, SpecrlError
from specrl.files import write_text
from specrl.rewards import VerifierPool, verifier_for
from specrl.rpc import tls
from specrl.rpc.limits import message_limits
from specrl.rpc.server import Border, serve
from specrl.spec import RunSpec, digest, load_spec
from specrl.telemetry import logs, traces
from specrl.telemetry.spans import COORDINATOR, Recorder
from specrl.tools import ToolPool, tool_for

log = structlog.get_logger(__name__)

NEEDS_USER = 2
"""Exit code of an error that a restart would repeat (`SpecrlError.exit_code`)."""

GARBAGE_THRESHOLDS = (100_000, 20, 20)
"""Of Python's collector of reference cycles. A rollout in flight is in none; with Python's own thresholds each look at
100,000 of them stops the event loop for a third of a second, and all looks take a twelfth of its CPU."""

CHECK_LOG_S = 10.0
"""Between two lines of the log about a long check."""


def main() -> None:
    """Run the coordinator until the run ends and it is told to stop."""
    parser = argparse.ArgumentParser(
        prog="specrl-coordinator", description="Decides what is generated, trained, synced."
    )
    parser.add_argument("--run-directory", type=Path, required=True, help="folder with run.yaml; keeps the store")
    parser.add_argument("--spec", type=Path, help="the run file (default: run.yaml in the run directory)")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: %(default)s)")
    parser.add_argument("--port", type=int, help="gRPC port (default: telemetry.grpcPort of the run file)")
    parser.add_argument("--http-port", type=int, help="HTTP port (default: telemetry.httpPort of the run file)")
    parser.add_argument("--rljob", metavar="NAMESPACE/NAME", help="in a pod: tell this RLJob how far the run is")
    parser.add_argument("--rljob-uid", metavar="UID", default="", help="its uid, which is also the run's id")
    tls.add_arguments(parser)
    arguments = parser.parse_args()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    try:
        asyncio.run(_serve(arguments))
    except SpecrlError as error:
        sys.stderr.write(f"specrl-coordinator: {error}\n")
        leave(error.exit_code)
    leave(0)


async def _serve(arguments: argparse.Namespace) -> None:
    """Serve the run, and have what it did exported, where that is wanted, to the last."""
    spec = load_spec(arguments.spec or arguments.run_directory / "run.yaml")
    events, timeline = EventLog(), Timeline()
    logs.configure(spec.telemetry.log_level.value, "coordinator", spec.name, events.note)
    with traces.sinks(spec, "coordinator", COORDINATOR) as sinks:
        recorder = Recorder(timeline, *sinks)
        timeline.ask(recorder)
        await _serve_run(arguments, spec, recorder, (events, timeline))


async def _serve_run(
    arguments: argparse.Namespace, spec: RunSpec, recorder: Recorder, shown: tuple[EventLog, Timeline]
) -> None:
    directory: Path = arguments.run_directory
    check_sinks(spec)
    identity = tls.identity_of(arguments.tls, arguments.tls_domain)
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    place = None if arguments.rljob is None else place_of(arguments.rljob)
    claim = claim_for(directory, arguments.rljob_uid.replace("-", "") or None)
    opening = StoreLink.open(spec.name, lambda: open_store(spec, directory, claim))
    store = await _unless_stopped(opening, stop)
    if store is None:
        return None
    limits = message_limits(spec)
    registry = Registry(digest(spec), spec.telemetry.heartbeat_s, time.monotonic, spec.name, Calls(limits, identity))
    board = Board(spec, directory, registry, store)
    if place is None:
        board.scaled(spec.generation.replicas)
    sinks = Sinks(spec, directory, claim.run_id)
    tries_verifier = place is not None and not store.trained()
    checked = await _unless_stopped(_checked_prompts(spec, directory, board, tries_verifier), stop)
    if checked is None:
        return await store.close()
    pool = VerifierPool(verifier_for(spec.rewards), spec.reward_pool)
    await pool.start()
    tools = ToolPool(tool_for(spec.tools), spec.tools.pool) if spec.tools is not None else None
    if tools is not None:
        await tools.start()
    turns = turns_of(spec, tools)
    controls, samples = Controls(spec, directory, store, board), Samples(spec.telemetry.rollouts_shown)
    parts = Parts(
        spec=spec,
        directory=directory,
        registry=registry,
        store=store,
        board=board,
        controls=controls,
        prompts=checked.stream,
        validation_prompts=checked.validation,
        grader=pool,
        turns=turns,
        spans=RunSpans(recorder, claim.run_id),
        events=shown[0],
        samples=samples,
        timeline=shown[1],
    )
    guard = tls.guard_of(identity, tls.GENERATION, tls.TRAINER)
    service = CoordinatorService(registry, spec.name, spec.telemetry.heartbeat_s, guard)
    grpc_port = spec.telemetry.grpc_port if arguments.port is None else arguments.port
    http_port = spec.telemetry.http_port if arguments.http_port is None else arguments.http_port
    server, bound = await serve(service.add_to, arguments.host, grpc_port, Border(limits.coordinator, guard))
    listener = _listen(arguments.host, http_port)
    web = _web_server(parts, identity, place)
    tasks = [
        asyncio.create_task(web.serve(sockets=[listener]), name="web"),
        asyncio.create_task(_expire(registry, spec.telemetry.heartbeat_s), name="expire"),
        asyncio.create_task(store.watch(spec.telemetry.heartbeat_s), name="watch-store"),
    ]
    if identity is not None and web.config.ssl is not None:
        tasks.append(asyncio.create_task(identity.keep_current(web.config.ssl), name="renew-certificate"))
    scheme = "http" if identity is None else "https"
    write_origin(directory)
    _write_endpoints(directory, f"{arguments.host}:{bound}", f"{scheme}://{arguments.host}:{listener.getsockname()[1]}")
    teller = None if place is None else Teller(board, place)
    if teller is not None:
        tasks.append(asyncio.create_task(teller.run(), name="tell-rljob"))
    sinks.start()
    try:
        await _drive(parts, stop, teller)
    finally:
        web.should_exit = True
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop(grace=1.0)
        await pool.close()
        if tools is not None:
            await tools.close()
        store.give_up()
        await store.close()
        await asyncio.to_thread(sinks.close, board.status())


async def _checked_prompts(spec: RunSpec, directory: Path, board: Board, tries_verifier: bool) -> CheckedPrompts:
    """The run's prompts, and in its folder which of them it does without. Says how far the check is.

    tries_verifier: in a pod, before the first step. Elsewhere the launcher has tried it; and a run that has begun is
    not ended by a trial, since what a function asks may be away for a while.
    """
    told_at = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told_at
        board.say(Phase.WAITING, "checking references", done, total)
        if done == total or time.monotonic() > told_at + CHECK_LOG_S:
            log.info("references_checked", done=done, total=total)
            told_at = time.monotonic()

    workers = spec.reward_pool.workers
    checked = await load_checked_prompts(spec, directory, tell, workers=workers, tries_verifier=tries_verifier)
    checked.decision.write(directory)
    left_out = checked.stream.source.left_out
    board.prompts_read(len(left_out.skipped), left_out.repeated)
    return checked


async def _drive(parts: Parts, stop: asyncio.Event, teller: Teller | None) -> None:
    """Run the loop until it ends or `stop` is set; after its end, serve the result until `stop` is set.

    With a teller a run that has failed ends the process, and one that is finished sends the trainer home, once the
    RLJob has been told: who is still needed then is up to the operator.
    """
    loop, board, store = Loop(parts), parts.board, parts.store
    running = asyncio.create_task(loop.run(), name="loop")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        store.give_up()  # whatever waits for it would wait for ever
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        board.say(board.status().phase, "stopping; a trainer at rest saves its step first")
        with contextlib.suppress(SpecrlError):
            await loop.save()
        board.say(Phase.STOPPED, "stopped; `specrl run --resume` goes on")
        log.info("run_stopped", step=store.trained())
        return
    error = running.exception()
    if error is not None:
        board.fail(str(error), needs_user=isinstance(error, SpecrlError) and error.exit_code == NEEDS_USER)
        log.error("run_failed", reason=str(error), exc_info=None if isinstance(error, SpecrlError) else error)
        if teller is None:
            await stop.wait()
        raise error
    log.info("run_finished", step=store.trained())
    if teller is not None:
        await _unless_stopped(teller.end(), stop)
        parts.registry.dismiss_trainer()
    await stop.wait()


async def _unless_stopped[T](work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The outcome of `work`; None when `stop` was set before, and `work` is cancelled."""
    doing, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        doing.cancel()
        stopping.cancel()


async def _expire(registry: Registry, heartbeat_s: float) -> None:
    """Once a heartbeat, remove the peers that fell silent."""
    while True:
        await asyncio.sleep(heartbeat_s)
        registry.expire()


class _WebServer(uvicorn.Server):
    """Takes no signals: uvicorn's own handlers would close the page while the last checkpoint is still written."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As read from uvicorn 0.54, which documents no such switch; tests/integration/coordinator/test_stop.py."""
        yield


def _web_server(parts: Parts, identity: tls.Identity | None, place: Place | None) -> uvicorn.Server:
    """The HTTP server: with TLS where peers have it; in a cluster for those who may read, or update, the RLJob."""
    if place is None:
        app = make_app(parts, actors=ByToken(parts.directory))
    else:
        app = make_app(parts, ByReview(place, "get"), ByReview(place, "update"), is_local=False)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,  # streams have no end of their own
        ssl_certfile=None if identity is None else identity.folder / "tls.crt",
        ssl_keyfile=None if identity is None else identity.folder / "tls.key",
    )
    config.load()
    return _WebServer(config)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections at once, so that its address can be published before anything serves it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        raise PortTaken(
            f"the HTTP address must be free, got {host}:{port} taken by another process; choose another or use 0"
        ) from error
    return listener


def _write_endpoints(directory: Path, grpc_address: str, http_address: str) -> None:
    """Leave word where this run can be reached; for `specrl status`."""
    write_text(directory / "endpoints.json", json.dumps({"grpc": grpc_address, "http": http_address}))


if __name__ == "__main__":
    main()
