"""VllmEngine: implements the Engine protocol on vLLM's AsyncLLM, with speculation and weight updates in flight.

    LOADING -> SERVING -> CLOSED          FAILED: vLLM died or hangs, or a load failed; every call raises
    SERVING -> (paused: nothing is computed) -> SERVING        load_weights, generate(admit_together=True)

Called by `GenerationService` and `generation.main`.

Locks. `_lock` is held while changing weights or admitting requests. The waits under it are vLLM's pause, which ends
with the current step, and the load. `_transfer` is held during a weight transfer. Weights arrive in a thread of each
worker while rollouts go on. A rank of this node tells the engine when it has its share, and the group's `timeout_s`
bounds the collectives. A rollout waits for vLLM's next output under neither lock. Lock order: `_transfer` before
`_lock`.

A core that hangs, such as in a kernel that never ends, leaves the front end alive. So the core is asked for a sign of
life now and then. Without an answer the engine is FAILED, and its process ends.

Cancellation. gRPC cancels a call whose caller dies. A load has a task of its own and goes on: half of one would leave
the engine paused, with weights of one version under the label of another.

KV cache across versions. vLLM cannot drop cached prefixes while unfinished requests hold blocks. So prompts are salted
with the number of loads, and a request never finds a prefix that was computed with older weights. Requests without a
token when weights change are restarted, so that none starts on an older version's prefix. With weights.kvCache
Recompute, all unfinished requests are computed again instead.

Determinism. With `admit_together` on an idle engine, the prefix cache is emptied, and all requests are queued in order
before the first is scheduled. Then batches repeat, and with per-request seeds so do tokens and log-probabilities, bit
for bit. Stop strings are the exception: vLLM finds them in the front end, so a slot is freed at a varying time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from specrl.errors import (
    CheckpointInvalid,
    ChecksumMismatch,
    DeadlineExceeded,
    EngineFailed,
    SpecrlError,
    VersionConflict,
)
from specrl.forked_process import ReservedFork
from specrl.generation.compilation import resolve_eager
from specrl.generation.engine import LoadTiming
from specrl.generation.nodes import ONE_NODE, ReplicaNodes
from specrl.generation.vllm_backend import arguments, checkpoint, draft_length_client, launch
from specrl.generation.vllm_backend.extensions import worker
from specrl.generation.vllm_backend.translation import translate_errors
from specrl.models.end_tokens import find_end_tokens, find_stop_tokens
from specrl.records import (
    NO_DRAFTER,
    GenerationStatus,
    Rollout,
    RolloutRequest,
    WeightChecksums,
    WeightGroup,
    WeightManifest,
)
from specrl.records.weights import compute_phase_deadline_s
from specrl.rpc.shared_costs import SharedCosts
from specrl.spec import RunSpec
from specrl.spec.run import KvCache
from specrl.telemetry import metrics
from specrl.telemetry.spans import SILENT_RECORDER, Recorder
from specrl.weights.arrival import ArrivalListener
from specrl.weights.staging import merge_checksums

INITIAL_VERSION = -1  # weights of the model's folder, before the first update
CLOSE_GRACE_S = 20.0  # for the engine core to end by itself before it is killed
COLLECTIVE_MARGIN_S = 10.0  # for a worker's answer, beyond the deadlines of its collectives

# Between two questions for a sign of life, and the longest wait for an answer. The core answers after the steps that it
# has scheduled ahead, at most two. vLLM bounds a step of several workers by 300 s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS),
# and one of a single worker not at all.
CORE_CHECK_S = 30.0
CORE_ANSWER_S = 600.0

# Between two questions whether weights have arrived. vLLM 0.33's engine core answers after all steps that it has
# scheduled ahead (v1/engine/core.py), so each question costs the overlap of some steps. Before the first notification,
# a question only has to notice a dead worker. After it, the other ranks are about to have theirs.
ARRIVAL_CHECK_S = 5.0
ARRIVAL_POLL_S = 0.01

log = structlog.get_logger(__name__)


class VllmEngine:
    """The engine of one replica. The constructor loads nothing; `start` does."""

    def __init__(
        self,
        spec: RunSpec,
        replica_id: str,
        recorder: Recorder = SILENT_RECORDER,
        nodes: ReplicaNodes = ONE_NODE,
        shared_costs: SharedCosts | None = None,
    ) -> None:
        """nodes: of the replica, with this process as the leader. shared_costs: None keeps draft costs to itself."""
        self._spec = spec
        self._nodes = nodes
        self._shared_costs = shared_costs
        self._replica_id = replica_id
        self._recorder = recorder
        self._lock = asyncio.Lock()
        self._transfer = asyncio.Lock()
        self._live: dict[int, Any] = {}  # id(pending) -> PendingRollout; importing the class would import vllm
        self._policy_version = INITIAL_VERSION
        self._drafter_version = NO_DRAFTER
        self._drafting: draft_length_client.ReportPoller | None = None
        self._loads = 0
        self._is_paused = False
        self._staged: tuple[WeightManifest, WeightChecksums] | None = None
        self._expected: WeightManifest | None = None
        self._watch: asyncio.Task[None] | None = None
        self._loading: set[asyncio.Task[LoadTiming]] = set()  # keeps the tasks alive when their callers are gone
        self._failure: SpecrlError | None = None
        self._llm: Any = None
        self._counters: Any = None
        self._folders: launch.ReplicaFolders
        self._end_token_ids: tuple[int, ...] = ()
        self._cleanup = ExitStack()

    async def start(self, core: ReservedFork | None = None) -> None:
        """Check folders and memory, start vLLM and check its samplers. Blocks the event loop.

        core: where to run the engine core; None spawns it.
        Raises SpecInvalid, CheckpointInvalid, MemoryTooSmall or EngineFailed; nothing is left running then.
        """
        began = time.monotonic()
        try:
            self._folders = launch.read_folders(self._spec, self._cleanup)
            self._spec = resolve_eager(self._spec, self._folders.policy)
            self._end_token_ids = find_end_tokens(self._spec, self._folders.policy)
            self._start_vllm(launch.build_vllm_config(self._spec, self._folders, self._nodes), core)
            async with self._bound_core(CORE_ANSWER_S):
                await self._prepare_core()
            self._watch = asyncio.create_task(self._watch_core(), name="watch-core")
        except BaseException:
            await self.close()
            raise
        log.info(
            "engine_started",
            replica=self._replica_id,
            seconds=round(time.monotonic() - began, 1),
            eager=self._spec.generation.eager,
        )

    async def _prepare_core(self) -> None:
        await self._check_workers()
        if self._draft_lengths:
            file = self._costs_file()
            await draft_length_client.seed_costs(self._llm, file, self._shared_costs)
            self._drafting = draft_length_client.ReportPoller(self._llm, self._replica_id, file, self._shared_costs)
        with translate_errors("take its first version"):
            await self._llm.update_weight_version(str(INITIAL_VERSION))

    def _start_vllm(self, config: Any, core: ReservedFork | None) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        from specrl.generation.vllm_backend.counters import CountingLogger

        self._counters = CountingLogger()
        if self._draft_lengths:
            draft_length_client.configure_scheduler(config, self._draft_lengths)
        if core is not None:
            launch.use_reserved_fork(core)
        try:
            self._llm = AsyncLLM.from_vllm_config(config, stat_loggers=[self._counters])
            self._counters.set_requests(self._llm.output_processor.request_states)
        except Exception as error:  # any failure of the engine core, which logs the cause in its own process
            raise EngineFailed(
                f"vLLM failed to start with {self._folders.policy.path}: {type(error).__name__}: {error}; "
                "see the log above for the engine core's error"
            ) from error

    @property
    def _draft_lengths(self) -> tuple[int, ...]:
        return arguments.list_adaptive_lengths(self._spec)

    def _costs_file(self) -> Path:
        folders = (self._folders.policy, self._folders.drafter)
        return draft_length_client.costs_file(self._spec, [folder.config for folder in folders if folder])

    async def _check_workers(self) -> None:
        """Check the samplers of every worker, and the tensors that policy and drafter share.

        They must share the embedding and must not share the output layer.
        """
        workers = await self._call_workers("specrl_inspect")
        for found in workers:
            if found["shares_embedding"] is False:
                raise CheckpointInvalid(
                    f"the drafter must share the policy's embedding, got embed_tokens of its own in "
                    f"{self._drafter_path()}; remove it from the folder"
                )
            if found["shares_lm_head"]:
                raise CheckpointInvalid(
                    f"the drafter must have an lm_head of its own, got the policy's in {self._drafter_path()}: vLLM "
                    "would share one tensor, and a drafter update would overwrite the policy; train the head first"
                )

    def _drafter_path(self) -> Path | None:
        return self._folders.drafter.path if self._folders.drafter is not None else None

    async def generate(self, requests: Sequence[RolloutRequest], admit_together: bool) -> AsyncIterator[Rollout]:
        """Yield each rollout when it finishes. Closing the iterator aborts the unfinished ones."""
        self._check_alive()
        for request in requests:
            arguments.check_request(request, self._spec, self._folders.policy.config["vocab_size"])
        admitted = await self._admit_requests(requests, admit_together)
        tasks = [asyncio.create_task(self._collect_rollout(pending)) for pending in admitted]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _admit_requests(self, requests: Sequence[RolloutRequest], together: bool) -> list[Any]:
        """Queue requests in vLLM, in order. together: vLLM schedules none of them before all are queued."""
        from specrl.generation.vllm_backend.completion import PendingRollout

        admitted: list[PendingRollout] = []
        async with self._lock:
            self._check_alive()  # a load may have failed during the wait
            try:
                try:
                    if together:
                        await self._pause_scheduling()
                        if not self._live:
                            with translate_errors("empty its prefix cache"):
                                await self._llm.reset_prefix_cache()
                    for request in requests:
                        stop_tokens = find_stop_tokens(request.sampling.stop, self._folders.policy)
                        admitted.append(PendingRollout(request, await self._add_request(request), stop_tokens))
                finally:
                    if together:  # also if the pause was cancelled, since vLLM pauses all the same
                        await self._resume_scheduling()
            except BaseException:
                for pending in admitted:
                    await self._abort_request(pending)
                raise
        self._live.update({id(pending): pending for pending in admitted})
        return admitted

    async def _add_request(self, request: RolloutRequest) -> Any:
        """Send one request to vLLM and return its output queue.

        `AsyncLLM.generate` would do the same, but in no guaranteed order.
        """
        from vllm.inputs.engine import tokens_input

        from specrl.generation.vllm_backend.completion import convert_sampling

        prompt = tokens_input(list(request.prompt_token_ids), cache_salt=f"load-{self._loads}")
        with_sets = self._spec.generation.sampling.is_truncated
        stop_tokens = find_stop_tokens(request.sampling.stop, self._folders.policy)
        end_tokens = sorted({*self._end_token_ids, *stop_tokens})
        params = convert_sampling(request.sampling, end_tokens, with_sets=with_sets)
        with translate_errors(f"take request {request.rollout_id}"):
            return await self._llm.add_request(request.rollout_id, prompt, params)

    async def _collect_rollout(self, pending: Any) -> Rollout:
        """Wait for one request's output; abort the request on cancellation.

        vLLM's output handler wakes this wait, with the output or with the engine's death.
        """
        is_finished = False
        try:
            while True:
                with translate_errors(f"generate {pending.request.rollout_id}"):
                    output = pending.collector.get_nowait() or await pending.collector.get()
                if not pending.must_restart:
                    break
                pending.restart_with(await self._add_request(pending.request))
            is_finished = True
            pending.record_spans(self._recorder, self._replica_id, output.metrics)
            rollout: Rollout = pending.build_rollout(output.outputs[0], self._replica_id, self._llm.get_tokenizer())
            return rollout
        finally:
            self._live.pop(id(pending), None)
            if not is_finished:
                await self._abort_request(pending)

    async def _abort_request(self, pending: Any) -> None:
        if not self._llm.errored:
            await self._llm.abort(pending.collector.request_id, internal=True)

    async def _pause_scheduling(self) -> None:
        """Stop vLLM from scheduling. Unfinished requests keep their KV cache."""
        with translate_errors("pause"):
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def _resume_scheduling(self) -> None:
        with translate_errors("resume"):
            await self._llm.resume_generation()

    async def receive_weights(
        self, group: WeightGroup, manifest: WeightManifest, policy_version: int
    ) -> WeightChecksums:
        """Receive one version into the workers' staging areas while rollouts go on. Loads nothing."""
        self._check_alive()
        async with self._transfer:
            if manifest != self._expected:
                uses_heads = self._spec.generation.speculation.mtp is not None
                drafter = self._folders.updated_drafter
                checkpoint.check_manifest(manifest, self._folders.policy, drafter, uses_heads=uses_heads)
                await self._call_workers("specrl_expect", worker.MANIFEST_CODEC.dump_json(manifest))
                self._expected = manifest
            self._staged = None
            per_node = self._ranks_of_node
            # Joining the group may take one timeout, and the last collective another.
            longest_s = group.timeout_s + compute_phase_deadline_s(group.timeout_s, manifest.size_bytes)
            with ArrivalListener() as listener:
                await self._call_workers("specrl_receive", asdict(group), per_node, listener.address)
                within_s = longest_s + COLLECTIVE_MARGIN_S
                received = await self._wait_for_arrival(listener, policy_version, within_s)
            # The ranks of a node each keep a share of the weights; together they are one copy.
            shares = [rank["checksums"] for rank in received]
            nodes = {
                merge_checksums(manifest, shares[first : first + per_node]) for first in range(0, len(shares), per_node)
            }
            if len(nodes) > 1:
                raise ChecksumMismatch(
                    f"the nodes of {self._replica_id} received different weights for version {policy_version}; the "
                    "transfer is repeated"
                )
            await self._call_workers("specrl_gather", [rank["address"] for rank in received])
            checksums = WeightChecksums(policy_version, nodes.pop())
            self._staged = (manifest, checksums)
        return checksums

    @property
    def _ranks_of_node(self) -> int:
        return self._spec.generation.tensor_parallel // self._nodes.count

    async def _wait_for_arrival(
        self, listener: ArrivalListener, policy_version: int, within_s: float
    ) -> list[dict[str, Any]]:
        """Wait until every worker has its share; returns the shares by rank.

        Raises a worker's error, or DeadlineExceeded after `within_s`.
        """
        deadline = time.monotonic() + within_s
        is_near = False
        while (left_s := deadline - time.monotonic()) > 0:
            wait_s = ARRIVAL_POLL_S if is_near else ARRIVAL_CHECK_S
            is_near = await listener.wait_for_notification(min(wait_s, left_s)) or is_near
            found = await self._call_workers("specrl_received")
            if all(share is not None for share in found):
                return found
        raise DeadlineExceeded(
            f"weights of version {policy_version} did not arrive at all ranks of {self._replica_id} within "
            f"{within_s:g} s; the transfer is repeated"
        )

    async def load_weights(self, sent: WeightChecksums) -> LoadTiming:
        """Verify the staging area against `sent`, pause, load policy and drafter, switch versions, resume.

        A cancelled call ends at once, and its load goes on.
        """
        self._check_alive()
        loading = asyncio.create_task(self._load_version(sent), name="load-weights")
        self._loading.add(loading)
        loading.add_done_callback(self._loading.discard)
        return await asyncio.shield(loading)

    async def _load_version(self, sent: WeightChecksums) -> LoadTiming:
        async with self._transfer:
            if self._staged is None:
                raise VersionConflict(
                    f"weights of version {sent.policy_version} are not staged and cannot be loaded; repeat the transfer"
                )
            manifest, staged = self._staged
            self._staged = None
            try:
                staged.check_equal(sent, [meta.name for meta in manifest.tensors])
            except ChecksumMismatch:
                await self._call_workers("specrl_discard")
                raise
            async with self._lock:
                return await self._swap_weights(sent, manifest.has_drafter)

    async def _swap_weights(self, sent: WeightChecksums, has_drafter: bool) -> LoadTiming:
        """Pause, load and resume. This is the only part of an update that interrupts rollouts."""
        began = time.monotonic()
        try:
            await self._pause_scheduling()
            self._is_paused = True
            paused = time.monotonic()
            await self._load_staged(sent.policy_version)
            self._drafter_version = sent.drafter_version if has_drafter else NO_DRAFTER
            metrics.REPLICA_DRAFTER_VERSION.set(self._drafter_version)
            loaded = time.monotonic()
            self._counters.times.note_interruption()
            await self._resume_scheduling()
        except Exception as error:
            # Some tensors may be new, and scheduling may be paused for good: this engine must not be used again.
            self._failure = error if isinstance(error, SpecrlError) else EngineFailed(f"a load raised {error!r}")
            raise
        self._is_paused = False
        return LoadTiming(paused - began, loaded - paused, time.monotonic() - loaded)

    async def _load_staged(self, policy_version: int) -> None:
        await self._call_workers("specrl_load")
        with translate_errors("take a new version"):
            await self._llm.update_weight_version(str(policy_version))
            if self._draft_lengths:
                await draft_length_client.notify_new_weights(
                    self._llm, is_same_policy=policy_version == self._policy_version
                )
            self._policy_version = policy_version
            self._loads += 1
            # Without running requests the prefix cache can simply be emptied. Otherwise see "KV cache across versions".
            if self._spec.weights.kv_cache is KvCache.RECOMPUTE:
                await self._llm.reset_prefix_cache(reset_running_requests=True)
            elif not await self._llm.reset_prefix_cache():
                await self._restart_unstarted()

    async def _restart_unstarted(self) -> None:
        """Abort requests without a token. `_collect_rollout` sends them again, with the new salt."""
        for pending in list(self._live.values()):
            state = self._llm.output_processor.request_states.get(pending.collector.request_id)
            if state is not None and state.stats.num_generation_tokens == 0:
                pending.mark_for_restart()
                await self._llm.abort(pending.collector.request_id, internal=True)

    async def get_status(self) -> GenerationStatus:
        """Return versions and counters. Raises EngineFailed if the engine is dead."""
        self._check_alive()
        return GenerationStatus(
            replica_id=self._replica_id,
            policy_version=self._policy_version,
            is_paused=self._is_paused,
            live_requests=len(self._live),
            speculation=self._counters.total,
            drafter_version=self._drafter_version,
            drafting=self._drafting.last if self._drafting is not None else None,
            step_costs=self._counters.times.list_costs(),
        )

    async def _watch_core(self) -> None:
        """Ask the engine core for a sign of life every CORE_CHECK_S. Without one the engine is FAILED.

        This also bounds all other calls to the core, since it answers in order.
        """
        while self._failure is None:
            await asyncio.sleep(CORE_CHECK_S)
            # The core may be loading weights, whose time depends on their size.
            loaded_bytes = self._expected.size_bytes if self._expected is not None else 0
            try:
                async with self._bound_core(compute_phase_deadline_s(CORE_ANSWER_S, loaded_bytes)):
                    with translate_errors("give a sign of life"):
                        await self._llm.is_paused()
            except EngineFailed as error:
                self._failure = error

    @asynccontextmanager
    async def _bound_core(self, within_s: float) -> AsyncIterator[None]:
        """Raise EngineFailed if the body, which waits for the engine core, takes longer than `within_s`."""
        bound = asyncio.timeout(within_s)
        try:
            async with bound:
                yield
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise EngineFailed(
                f"the engine core of {self._replica_id} did not answer within {within_s:g} s and seems to hang; the "
                "replica is restarted"
            ) from error

    async def close(self) -> None:
        """Stop vLLM and its processes, and delete the scratch folder. Idempotent."""
        llm = self._llm
        self._llm = None
        if self._watch is not None:
            self._watch.cancel()
        for loading in self._loading:
            loading.cancel()
        if self._drafting is not None:
            self._drafting.close()
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # otherwise it logs the shutdown as a failure
            await asyncio.to_thread(llm.shutdown, CLOSE_GRACE_S)
        self._cleanup.close()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(
                f"the engine of {self._replica_id} failed and must be restarted: {self._failure}"
            ) from self._failure
        if self._llm is None:
            raise EngineFailed(f"the engine of {self._replica_id} is not running; start it first")
        if self._llm.errored:
            raise EngineFailed(f"the engine of {self._replica_id} is dead; the replica is restarted")

    async def _call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` on every rank; returns the values by rank. Raises a worker's error."""
        with translate_errors(f"answer {method}"):
            answers = await self._llm.collective_rpc(method, args=args)
        return [worker.unwrap_answer(answer) for answer in answers]
