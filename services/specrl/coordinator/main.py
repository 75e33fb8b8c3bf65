"""The coordinator's process: gRPC for peers, HTTP for users, one loop. Console script `specrl-coordinator`.

After the run has finished or failed, the process keeps serving its status until SIGTERM or SIGINT. In a pod
(`--rljob`), the process of a failed run exits at once, and the pod's restart policy decides what happens next.

SIGTERM and SIGINT stop a run cleanly: the loop is cancelled, and the trainer writes a checkpoint if it is idle. The
live page, REST and probes answer until that checkpoint is complete.

Exit codes: 0 if the run was stopped or has finished, otherwise `SpecrlError.exit_code`.
"""

from __future__ import annotations

import specrl.exit_on_sigterm  # noqa: F401 - first: asyncio and structlog take ten times as long as the interpreter

# isort: split

import argparse
import asyncio
import contextlib
import gc
import json
import signal
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import structlog

from specrl.agent_tools import ToolPool, tool_for
from specrl.coordinator.ledger import make_claim, open_store
from specrl.coordinator.ledger.ledger import DurableFacts
from specrl.coordinator.ledger.run_inputs import RunInputs, compare_inputs
from specrl.coordinator.ledger.store_link import StoreLink
from specrl.coordinator.loop import Loop
from specrl.coordinator.members.draft_costs import DraftCostTables
from specrl.coordinator.members.registry import PeerClients, Registry
from specrl.coordinator.members.replica_session import make_turn_settings
from specrl.coordinator.members.service import CoordinatorService
from specrl.coordinator.observe.event_log import EventLog
from specrl.coordinator.observe.observer import RunObserver
from specrl.coordinator.observe.origin import write_origin
from specrl.coordinator.observe.rljob_status import RLJobStatusWriter, write_sandbox_condition
from specrl.coordinator.observe.sinks import ReportSinks, exit_process
from specrl.coordinator.observe.timeline import Timeline
from specrl.coordinator.observe.web.app import make_app
from specrl.coordinator.preflight import check_writable, find_sink_problems
from specrl.coordinator.requests.admission import OpenAdmission, ReviewAdmission, TokenAdmission
from specrl.coordinator.requests.doors import Doors
from specrl.coordinator.requests.rljob_api import RLJobReference, locate_rljob
from specrl.coordinator.requests.web_server import make_server
from specrl.coordinator.rollouts.checked_prompts import CheckedPrompts, load_checked_prompts
from specrl.coordinator.run_spans import RunSpans
from specrl.coordinator.wiring import wire_coordinator
from specrl.errors import CheckpointInvalid, SpecrlError, raise_problems
from specrl.files import write_text
from specrl.formats.reports import Phase
from specrl.formats.saved_steps import describe_saved
from specrl.models import read_model_folder
from specrl.models.native_heads import list_head_notices
from specrl.models.policy_config import PolicyConfig, read_policy_config
from specrl.models.sampling_defaults import list_sampling_notices
from specrl.prompts import log_left_out
from specrl.rewards.choice import verifiers_for
from specrl.rewards.pool import VerifierPool
from specrl.rewards.verifier import SandboxChoice
from specrl.rpc import run_token, tls
from specrl.rpc.limits import message_limits
from specrl.rpc.run_token import RunToken
from specrl.rpc.server import ServerOptions, start_server
from specrl.spec import RunSpec, digest_spec, load_process_spec
from specrl.telemetry import logs, traces
from specrl.telemetry.hosts import ALL_ADDRESSES, join_address, list_local_hosts
from specrl.telemetry.spans import COORDINATOR, Recorder
from specrl.termination import NEEDS_USER, report_error

log = structlog.get_logger(__name__)

GARBAGE_THRESHOLDS = (100_000, 20, 20)
"""Thresholds of Python's cyclic garbage collector. Rollouts in flight form no reference cycles, so scanning them frees
nothing. With 100,000 rollouts in flight and Python's default thresholds, one full collection was measured to stop the
event loop for a third of a second. All collections took a twelfth of its CPU time."""

CHECK_LOG_S = 10.0
"""Seconds between two log events about the check of references, which may take minutes."""


def main() -> None:
    """Run the coordinator until it receives a signal, or until its run fails in a pod."""
    parser = argparse.ArgumentParser(
        prog="specrl-coordinator", description="Coordinates one run: generation, rewards, training, weight updates."
    )
    parser.add_argument("--run-directory", type=Path, required=True, help="folder of the run; holds its store")
    parser.add_argument("--spec", type=Path, help="the run file (default: run.yaml in the run directory)")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: %(default)s)")
    parser.add_argument("--port", type=int, help="gRPC port (default: telemetry.grpcPort of the run file)")
    parser.add_argument("--http-port", type=int, help="HTTP port (default: telemetry.httpPort of the run file)")
    parser.add_argument("--rljob", metavar="NAMESPACE/NAME", help="in a pod: the RLJob whose status is updated")
    parser.add_argument("--rljob-uid", metavar="UID", default="", help="uid of that RLJob, used as the run id")
    tls.add_tls_arguments(parser)
    arguments = parser.parse_args()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    try:
        asyncio.run(_run_process(arguments))
    except SpecrlError as error:
        report_error("specrl-coordinator", error)
        exit_process(error.exit_code)  # not sys.exit, which would wait for the threads of a sink that hangs
    exit_process(0)


async def _run_process(arguments: argparse.Namespace) -> None:
    """Configure logs and traces, then serve the run. Traces are flushed when it returns."""
    spec = load_process_spec(arguments.spec or arguments.run_directory / "run.yaml")
    if arguments.port is None:
        arguments.port = spec.telemetry.grpc_port
    if arguments.http_port is None:
        arguments.http_port = spec.telemetry.http_port
    if arguments.rljob is not None:
        check_writable(arguments.run_directory)
    events = EventLog()
    timeline = Timeline(arguments.run_directory / "timeline.jsonl")
    # The page shows events.
    logs.configure_logging(spec.telemetry.log_level.value, "coordinator", spec.name, events.add_event)
    logs.log_process_start()
    with traces.open_trace_sinks(spec, "coordinator", COORDINATOR) as sinks:
        recorder = Recorder(timeline, *sinks)
        timeline.set_recorder(recorder)
        await _serve_run(arguments, spec, recorder, events, timeline)


async def _serve_run(
    arguments: argparse.Namespace, spec: RunSpec, recorder: Recorder, events: EventLog, timeline: Timeline
) -> None:
    directory: Path = arguments.run_directory
    raise_problems(find_sink_problems(spec))
    identity = tls.load_identity(arguments.tls, arguments.tls_domain)
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)

    # Open the store and check the prompts. Both may take minutes, and a signal ends either.
    place = None if arguments.rljob is None else locate_rljob(arguments.rljob)
    claim = make_claim(directory, arguments.rljob_uid.replace("-", "") or None)  # run ids are 32 hex digits
    opening = StoreLink.open(spec.name, lambda: open_store(spec, directory, claim))
    store = await _run_unless_stopped(opening, stop)
    if store is None:
        return None
    limits = message_limits(spec)
    token = _load_token(directory) if place is None and identity is None else None
    registry = Registry(
        digest_spec(spec), spec.telemetry.heartbeat_s, time.monotonic, spec.name, PeerClients(limits, identity, token)
    )
    sinks = ReportSinks(spec, directory, claim.run_id)

    # Start the worker processes first: in a pod, trainer and replicas are asked for when programs can be isolated.
    pool, tools, sandboxes = await _start_pools(spec)
    async with contextlib.AsyncExitStack() as opened:
        opened.push_async_callback(_close_pools, pool, tools)
        if place is not None and sandboxes:
            await write_sandbox_condition(place, {it.path: it.isolation.value for it in sandboxes})
        tries_verifier = place is not None and not store.last_trained_step()  # elsewhere the launcher has tried it
        checked = await _run_unless_stopped(_check_prompts(spec, directory, tries_verifier), stop)
        if checked is None:
            return await store.close()
        inputs = _compare_inputs(spec, store, checked)
        opened.pop_all()

    # Wire the run.
    loop = wire_coordinator(
        spec,
        directory,
        store,
        registry,
        checked.stream,
        pool,
        validation_prompts=checked.validation,
        turns=make_turn_settings(spec, tools),
        policy=_read_policy(spec),
        spans=RunSpans(recorder, claim.run_id),
    )
    replicas_wanted = spec.generation.replicas if place is None else None
    await loop.context.ledger.record_inputs(inputs)
    observer = RunObserver(loop.context, loop, replicas_wanted, events=events, timeline=timeline)
    observer.set_problem_counts(checked.stream.skipped, checked.stream.repeated)
    observer.set_notices(_read_notices(spec))
    observer.set_sandboxes(sandboxes)

    # Serve peers over gRPC and users over HTTP. Both listen before endpoints.json names them.
    guard = tls.make_guard(identity, tls.GENERATION, tls.TRAINER)
    service = CoordinatorService(registry, spec.name, spec.telemetry.heartbeat_s, guard, DraftCostTables(directory))
    options = ServerOptions(limits.coordinator, guard, token)
    server, bound = await start_server(service.add_to, arguments.host, arguments.port, options)
    app = make_app(loop.context, observer, _choose_doors(directory, place, arguments.host), is_local=place is None)
    web = make_server(app, arguments.host, arguments.http_port, identity)
    tasks = [
        asyncio.create_task(web.serve(), name="web"),
        asyncio.create_task(_expire_peers(registry, spec.telemetry.heartbeat_s), name="expire"),
        asyncio.create_task(store.probe_periodically(spec.telemetry.heartbeat_s), name="watch-store"),
    ]
    if identity is not None and web.config.ssl is not None:
        tasks.append(asyncio.create_task(identity.keep_context_current(web.config.ssl), name="renew-certificate"))
    scheme = "http" if identity is None else "https"
    write_origin(directory)
    _write_endpoints(directory, arguments.host, bound, scheme, web.port)
    writer = None if place is None else RLJobStatusWriter(observer, place, loop.context.controls)
    if writer is not None:
        tasks.append(asyncio.create_task(writer.run(), name="write-rljob-status"))
    sinks.start()
    try:
        await _run_until_stopped(loop, stop, writer)
    finally:
        web.should_exit = True
        for task in tasks[1:]:  # all but the web server, which ends its open requests by itself
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop(grace=1.0)
        await _close_pools(pool, tools)
        store.stop_retrying()  # else closing a store that is unreachable would retry without end
        await store.close()
        await asyncio.to_thread(sinks.close, observer.build_status())  # it waits for the sinks' servers


def _load_token(directory: Path) -> RunToken:
    """Load the token of a local run. In a cluster certificates and NetworkPolicies decide who may call."""
    run_token.ensure_token(directory)
    return RunToken(directory / run_token.TOKEN_FILE)


async def _check_prompts(spec: RunSpec, directory: Path, tries_verifier: bool) -> CheckedPrompts:
    """Read and check the run's prompts, log the progress, and store which references are refused.

    tries_verifier: grade made-up completions first. True in a pod before the first step. Elsewhere the launcher has
    done so. A run that has trained is not tried again: a service that the verifier needs may be down for a while.
    """
    told_at = time.monotonic()

    def log_progress(done: int, total: int) -> None:
        nonlocal told_at
        if done == total or time.monotonic() > told_at + CHECK_LOG_S:
            log.info("references_checked", done=done, total=total)
            told_at = time.monotonic()

    workers = spec.reward_pool.workers
    checked = await load_checked_prompts(spec, directory, log_progress, workers=workers, tries_verifier=tries_verifier)
    checked.decision.write_file(directory)
    for source in checked.sources:
        log_left_out(source)
    if checked.untried:
        log.warning("references_untried", count=checked.untried)
    return checked


async def _start_pools(spec: RunSpec) -> tuple[VerifierPool, ToolPool | None, Sequence[SandboxChoice]]:
    """Start the workers of verifiers and tools, and log which isolation their programs run in."""
    pool = VerifierPool(verifiers_for(spec.rewards), spec.reward_pool)
    await pool.start()
    tools = ToolPool(tool_for(spec.tools), spec.tools.pool) if spec.tools is not None else None
    if tools is not None:
        await tools.start()
    sandboxes = (*pool.list_sandboxes(), *(tools.list_sandboxes() if tools is not None else ()))
    for choice in sandboxes:
        log.info(
            "isolation_chosen", section=choice.path, isolation=choice.isolation.value, reason=choice.reason or None
        )
    return pool, tools, sandboxes


async def _close_pools(pool: VerifierPool, tools: ToolPool | None) -> None:
    await pool.close()
    if tools is not None:
        await tools.close()


def _compare_inputs(spec: RunSpec, store: StoreLink, checked: CheckedPrompts) -> RunInputs:
    """Compare what this start is made from with what the run began with.

    Raises RunInvalid for another run file or other data. On one machine the launcher has done so before, but a pod has
    no launcher.
    """
    before = DurableFacts.from_stored(store.cached_facts()).inputs
    next_step = store.last_trained_step() + 1
    inputs, notice = compare_inputs(before, spec, checked.stream.identify_sources(), checked.validation, next_step)
    if notice:
        log.warning("function_files_changed", next_step=next_step, reason=notice)
    return inputs


def _read_policy(spec: RunSpec) -> PolicyConfig | None:
    """Read the architecture that rollouts must fit; None, so that none is compared, if it could not be read."""
    try:
        return read_policy_config(Path(spec.model.path))
    except CheckpointInvalid as error:
        # The start goes on: the trainer, which cannot train without it, reads it too and ends the run with this error.
        log.warning("policy_not_read", reason=str(error))
        return None


def _read_notices(spec: RunSpec) -> Sequence[str]:
    """Read what the status says of the policy's folder. A folder that cannot be read is the trainer's to report."""
    folder = Path(spec.model.path)
    notices = list(list_sampling_notices(spec, folder))
    with contextlib.suppress(CheckpointInvalid):
        notices += list_head_notices(spec, read_model_folder(folder, "model.path"))
    return notices


async def _run_until_stopped(loop: Loop, stop: asyncio.Event, writer: RLJobStatusWriter | None) -> None:
    """Run the loop until it ends or `stop` is set. After it ends, wait for `stop`, so that the result stays visible.

    In a pod, which has a `writer` of the RLJob's status, a failed run raises its error at once. A finished run
    dismisses the trainer after the RLJob's status is written; the operator then decides which pods stay.
    """
    context = loop.context
    running = asyncio.create_task(loop.run(), name="loop")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        await _stop_loop(loop, running)
        return
    error = running.exception()
    if error is not None:
        needs_user = isinstance(error, SpecrlError) and error.exit_code == NEEDS_USER
        context.phase.mark_failed(str(error), needs_user=needs_user)
        log.error("run_failed", reason=str(error), exc_info=None if isinstance(error, SpecrlError) else error)
        if writer is None:
            await stop.wait()
        raise error
    log.info("run_finished", step=context.ledger.last_trained_step)
    if writer is not None:
        await _run_unless_stopped(writer.write_final_status(), stop)
        context.registry.dismiss_trainer()
    await stop.wait()


async def _stop_loop(loop: Loop, running: asyncio.Task[None]) -> None:
    """Let the trainer finish its step, cancel the loop, and write a checkpoint if the trainer is idle.

    The phase then says what was saved.
    """
    context = loop.context
    context.ledger.stop_retrying()  # else a loop that retries an unreachable store would not end
    if loop.is_training_step:
        step = context.ledger.last_trained_step + 1
        context.phase.update(context.phase.phase, f"stopping; the trainer finishes step {step}, which is then saved")
        committing = asyncio.create_task(loop.wait_for_commit(), name="commit")
        await asyncio.wait({running, committing}, return_when=asyncio.FIRST_COMPLETED)
        committing.cancel()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    context.phase.update(context.phase.phase, "stopping; an idle trainer writes a checkpoint first")
    failure = ""
    try:
        await loop.checkpoint_if_idle()
    except SpecrlError as error:  # the run stops all the same, and resumes from an older checkpoint
        failure = str(error)
    trained = context.ledger.last_trained_step
    saved = context.ledger.facts.checkpoints[-1]
    context.phase.update(Phase.STOPPED, f"stopped; {describe_saved(trained, saved, failure)}")
    log.info("run_stopped", step=trained, checkpoint=saved, reason=failure or None)


async def _run_unless_stopped[T](work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return the result of `work`. If `stop` is set first, cancel `work` and return None."""
    doing = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        doing.cancel()
        stopping.cancel()


async def _expire_peers(registry: Registry, heartbeat_s: float) -> None:
    """Once per heartbeat interval, remove peers that have missed too many heartbeats."""
    while True:
        await asyncio.sleep(heartbeat_s)
        registry.expire_silent_peers()


def _write_endpoints(directory: Path, host: str, grpc_port: int, scheme: str, http_port: int) -> None:
    """Write the coordinator's addresses on this machine, for `specrl status` and the launcher."""
    host = "127.0.0.1" if host == ALL_ADDRESSES else host
    endpoints = {"grpc": join_address(host, grpc_port), "http": f"{scheme}://{join_address(host, http_port)}"}
    write_text(directory / "endpoints.json", json.dumps(endpoints))


def _choose_doors(directory: Path, place: RLJobReference | None, host: str) -> Doors:
    """Choose who may send which HTTP requests.

    In a cluster, reads need permission to get the RLJob, and actions to update it. On one machine actions and reads of
    prompts need the token in the run directory; other reads are open to whoever uses an address of the machine.
    """
    if place is not None:
        readers = ReviewAdmission(place, "get")
        return Doors(readers, readers, ReviewAdmission(place, "update"))
    owner = TokenAdmission(directory)
    return Doors(OpenAdmission(), owner, owner, list_local_hosts(host))


if __name__ == "__main__":
    main()
