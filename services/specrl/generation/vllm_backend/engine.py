"""VllmEngine: the Engine protocol on vLLM's AsyncLLM, with speculation and weights that change in flight.

    LOADING -> SERVING <-> PAUSED -> CLOSED          FAILED: vLLM died, or weights loaded in part; every call says so
    SERVING -> (held: requests are queued, nothing is computed) -> SERVING        generate(admit_together=True)

`_lock` is held by whatever pauses, resumes or changes weights; admission takes it too. Waits under it: vLLM's pause
(ends with the step under way), and the load. `_transfer` is held by a transfer: weights arrive in a thread of each
worker while rollouts go on, the engine asks now and then whether they have, and their collectives have the group's
`timeout_s`. A rollout's own wait is for vLLM's next output and is under neither lock.

KV cache over versions. vLLM cannot drop cached prefixes while unfinished requests hold blocks. So prompts are salted
with the number of loads: a prefix computed under one version is never found by a request of another; and requests
that have no token yet when weights change are begun again, so that none starts on an older version's prefix.
With weights.kvCache Recompute every unfinished request is computed again instead.

Determinism. With `admit_together` on an idle engine, the prefix cache is emptied and all requests are queued in order
before the first is scheduled: batches, and with per-request seeds tokens and log-probabilities, repeat bit for bit.
Stop strings are the exception: vLLM finds them in the front end, so the slot is freed at a time that varies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
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
from specrl.generation.engine import LoadTiming
from specrl.generation.nodes import ONE_NODE, Nodes
from specrl.generation.vllm_backend import arguments, checkpoint, drafting, launch, worker
from specrl.generation.vllm_backend.translation import translated
from specrl.records import (
    NO_DRAFTER,
    GenerationStatus,
    Rollout,
    RolloutRequest,
    Sampling,
    WeightChecksums,
    WeightGroup,
    WeightManifest,
)
from specrl.spec import RunSpec
from specrl.spec.run import KvCache
from specrl.telemetry import metrics
from specrl.telemetry.spans import SILENT, Recorder
from specrl.weights.staging import merged

INITIAL_VERSION = -1
CLOSE_GRACE_S = 20.0  # for the engine core to end by itself before it is killed
COLLECTIVE_MARGIN_S = 10.0  # what a worker's answer may take beyond its collectives' own deadlines
ARRIVAL_POLL_S = (
    0.01  # each question waits for the step under way, and delays the next one by less than a tenth of this
)

log = structlog.get_logger(__name__)


class VllmEngine:
    """One replica's vLLM. Built cheaply; `start` loads."""

    def __init__(self, spec: RunSpec, replica_id: str, recorder: Recorder = SILENT, nodes: Nodes = ONE_NODE) -> None:
        """nodes: those that the replica spans; this process is their leader."""
        self._spec, self._nodes = spec, nodes
        self._replica_id, self._recorder = replica_id, recorder
        self._lock = asyncio.Lock()
        self._transfer = asyncio.Lock()
        self._live: dict[int, Any] = {}  # id -> Completion
        self._policy_version = INITIAL_VERSION
        self._drafter_version = NO_DRAFTER
        self._drafting: drafting.Watch | None = None
        self._loads = 0
        self._is_paused = False
        self._staged: WeightChecksums | None = None
        self._expected: WeightManifest | None = None
        self._staged_names: list[str] = []
        self._staged_has_drafter = False
        self._failure: SpecrlError | None = None
        self._llm: Any = None
        self._counters: Any = None
        self._folders: launch.Folders
        self._cleanup = ExitStack()

    async def start(self) -> None:
        """Check folders and memory, start vLLM, check what it made of them. Blocks the event loop meanwhile.

        Raises SpecInvalid, CheckpointInvalid, MemoryTooSmall or EngineFailed; nothing is left running then.
        """
        began = time.monotonic()
        self._folders = launch.read_folders(self._spec)
        self._cleanup.callback(self._folders.clear)
        try:
            self._start_vllm(launch.configure(self._spec, self._folders, self._nodes))
            await self._inspect()
            if self._draft_lengths:
                await drafting.calibrate(self._llm, self._calibration_file(), self._calibration_sampling)
                self._drafting = drafting.Watch(self._llm, self._replica_id)
            with translated("take its first version"):
                await self._llm.update_weight_version(str(INITIAL_VERSION))
        except BaseException:
            await self.close()
            raise
        log.info("engine_started", replica=self._replica_id, seconds=round(time.monotonic() - began, 1))

    def _start_vllm(self, config: Any) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        from specrl.generation.vllm_backend.counters import CountingLogger

        self._counters = CountingLogger()
        if self._draft_lengths:
            drafting.configure(config, self._draft_lengths)
        try:
            self._llm = AsyncLLM.from_vllm_config(config, stat_loggers=[self._counters])
            self._counters.watch(self._llm.output_processor.request_states)
        except Exception as error:  # the engine core is another process; its own words are in the log
            raise EngineFailed(
                f"vLLM must start with {self._folders.policy.path}, got {type(error).__name__}: {error}; "
                "see the log above for the engine core's own words"
            ) from error

    @property
    def _draft_lengths(self) -> tuple[int, ...]:
        return arguments.draft_lengths(self._spec)

    def _calibration_file(self) -> Path:
        folders = (self._folders.policy, self._folders.drafter)
        return drafting.calibration_file(self._spec, [folder.config for folder in folders if folder])

    @property
    def _calibration_sampling(self) -> Sampling:
        """As the run's rollouts are drawn, and as long as the context allows."""
        spec, generation = self._spec, self._spec.generation
        longest = spec.model.max_length - drafting.PROMPT_TOKENS - generation.speculation.num_draft_tokens - 1
        sampling = generation.sampling
        return Sampling(longest, float(sampling.temperature), float(sampling.top_p), sampling.top_k)

    async def _inspect(self) -> None:
        """Raise unless every worker samples right, and shares with the drafter what must be shared, and nothing else.

        Then restrict the draft lengths to what the workers can do.
        """
        workers = await self._call_workers("specrl_inspect")
        for found in workers:
            if found["shares_embedding"] is False:
                raise CheckpointInvalid(
                    f"the drafter must share the policy's embedding, got another embed_tokens in {self._head_path()}; "
                    "remove it from the folder"
                )
            if found["shares_lm_head"]:
                raise CheckpointInvalid(
                    f"the drafter must own its lm_head, got the policy's in {self._head_path()}: vLLM would share one "
                    "tensor, and an update of the drafter would overwrite the policy; train the head first"
                )
        if self._draft_lengths:
            await drafting.set_abilities(self._llm, self._draft_lengths, workers, self._replica_id)

    def _head_path(self) -> Path | None:
        return self._folders.head.path if self._folders.head is not None else None

    async def generate(self, requests: Sequence[RolloutRequest], admit_together: bool) -> AsyncIterator[Rollout]:
        """Yield each rollout when it finishes. Closing the iterator aborts the unfinished ones."""
        self._check_alive()
        for request in requests:
            arguments.check_request(request, self._spec, self._folders.policy.config["vocab_size"])
        admitted = await self._admit(requests, admit_together)
        tasks = [asyncio.create_task(self._follow(completion)) for completion in admitted]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _admit(self, requests: Sequence[RolloutRequest], together: bool) -> list[Any]:
        """Queue requests in vLLM, in order. Together: nothing is scheduled before all are queued."""
        from specrl.generation.vllm_backend.completion import Completion

        admitted: list[Completion] = []
        async with self._lock:
            holds = together and not self._is_paused
            if holds:
                await self._hold()
            try:
                for request in requests:
                    admitted.append(Completion(request, await self._add(request)))  # noqa: PERF401 - kept on failure
            except BaseException:
                for completion in admitted:
                    await self._drop(completion)
                raise
            finally:
                if holds:
                    await self._release()
        self._live.update({id(completion): completion for completion in admitted})
        return admitted

    async def _add(self, request: RolloutRequest) -> Any:
        """Send one request to vLLM; returns its queue of outputs. `AsyncLLM.generate` does the same, out of order."""
        from vllm.inputs.engine import tokens_input

        from specrl.generation.vllm_backend.completion import sampling_params

        prompt = tokens_input(list(request.prompt_token_ids), cache_salt=f"load-{self._loads}")
        with translated(f"take request {request.rollout_id}"):
            return await self._llm.add_request(request.rollout_id, prompt, sampling_params(request.sampling))

    async def _follow(self, completion: Any) -> Rollout:
        """Collect one request's outputs until it is finished; abort it when cancelled."""
        is_finished = False
        try:
            while True:
                with translated(f"generate {completion.request.rollout_id}"):
                    output = completion.collector.get_nowait() or await completion.collector.get()
                if completion.must_restart and output.finished:
                    completion.restart(await self._add(completion.request))
                    continue
                completion.add(output.outputs[0])
                if output.finished:
                    is_finished = True
                    completion.tell(self._recorder, self._replica_id, output.metrics)
                    rollout: Rollout = completion.rollout(output.outputs[0], self._replica_id)
                    return rollout
        finally:
            self._live.pop(id(completion), None)
            if not is_finished:
                await self._drop(completion)

    async def _drop(self, completion: Any) -> None:
        if not self._llm.errored:
            await self._llm.abort(completion.collector.request_id, internal=True)

    async def pause(self) -> float:
        """Stop computing; keep every unfinished request and its KV cache. Returns seconds. Idempotent."""
        self._check_alive()
        began = time.monotonic()
        async with self._lock:
            await self._pause()
        return time.monotonic() - began

    async def _pause(self) -> None:
        if not self._is_paused:
            with translated("pause"):
                await self._llm.pause_generation(mode="keep", clear_cache=False)
            self._is_paused = True

    async def resume(self) -> None:
        """Go on computing. Idempotent."""
        self._check_alive()
        async with self._lock:
            await self._resume()

    async def _resume(self) -> None:
        if self._is_paused:
            self._counters.times.interrupted()
            await self._release()
            self._is_paused = False

    async def _hold(self) -> None:
        """Keep vLLM from scheduling, and empty its prefix cache if nothing is under way."""
        with translated("hold requests"):
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            if not self._live:
                await self._llm.reset_prefix_cache()

    async def _release(self) -> None:
        with translated("resume"):
            await self._llm.resume_generation()

    async def receive(self, group: WeightGroup, manifest: WeightManifest, policy_version: int) -> WeightChecksums:
        """Take part in one broadcast into the workers' staging areas, while rollouts go on. Loads nothing."""
        self._check_alive()
        async with self._transfer:
            if manifest != self._expected:
                checkpoint.check_manifest(manifest, self._folders.policy, self._folders.head)
                await self._call_workers("specrl_expect", worker.manifest_to_rows(manifest), manifest.bucket_bytes)
                self._expected = manifest
            self._staged, per_node = None, self._ranks_of_node
            await self._call_workers("specrl_receive", asdict(group), per_node)
            received = await self._arrival(policy_version, 2 * group.timeout_s + COLLECTIVE_MARGIN_S)
            shares = [rank["checksums"] for rank in received]
            nodes = [merged(manifest, shares[first : first + per_node]) for first in range(0, len(shares), per_node)]
            if any(checksums != nodes[0] for checksums in nodes):
                raise ChecksumMismatch(
                    f"all nodes of {self._replica_id} must receive the same weights of version {policy_version}, got "
                    "different checksums; the transfer is repeated"
                )
            await self._call_workers("specrl_gather", [rank["address"] for rank in received])
            self._staged = WeightChecksums(policy_version, nodes[0])
            self._staged_names = [meta.name for meta in manifest.tensors]
            self._staged_has_drafter = manifest.has_drafter
        return self._staged

    @property
    def _ranks_of_node(self) -> int:
        return self._spec.generation.tensor_parallel // self._nodes.count

    async def _arrival(self, policy_version: int, within_s: float) -> list[dict[str, Any]]:
        """Every worker's share, once all have theirs. Raises what a worker met, or DeadlineExceeded."""
        began = time.monotonic()
        while time.monotonic() - began < within_s:
            found = await self._call_workers("specrl_received")
            if all(share is not None for share in found):
                return found
            await asyncio.sleep(ARRIVAL_POLL_S)
        raise DeadlineExceeded(
            f"weights of version {policy_version} must arrive within {within_s:g} s, got only some at "
            f"{self._replica_id}; the transfer is repeated"
        )

    async def load(self, sent: WeightChecksums) -> LoadTiming:
        """Compare what is staged with `sent`, pause, load policy and drafter, take the version, resume."""
        self._check_alive()
        async with self._transfer:
            staged = self._staged
            if staged is None:
                raise VersionConflict(
                    f"weights of version {sent.policy_version} must have been received before they are loaded, got "
                    "nothing staged; repeat the transfer"
                )
            try:
                staged.check(sent, self._staged_names)
            except ChecksumMismatch:
                await self._discard()
                raise
            self._staged = None
            async with self._lock:
                return await self._change(sent)

    async def _change(self, sent: WeightChecksums) -> LoadTiming:
        """Pause, load, resume: all that a rollout notices of an update."""
        began = time.monotonic()
        await self._pause()
        paused = time.monotonic()
        try:
            await self._load_staged(sent.policy_version)
            self._drafter_version = sent.drafter_version if self._staged_has_drafter else NO_DRAFTER
            metrics.REPLICA_DRAFTER_VERSION.set(self._drafter_version)
        except SpecrlError as error:
            self._failure = error  # part of the model may be new: this engine must not sample again
            raise
        loaded = time.monotonic()
        await self._resume()
        return LoadTiming(paused - began, loaded - paused, time.monotonic() - loaded)

    async def _load_staged(self, policy_version: int) -> None:
        await self._call_workers("specrl_load")
        with translated("take a new version"):
            await self._llm.update_weight_version(str(policy_version))
            if self._draft_lengths:
                await drafting.weights_changed(self._llm, is_same_policy=policy_version == self._policy_version)
            self._policy_version = policy_version
            self._loads += 1
            if self._spec.weights.kv_cache is KvCache.RECOMPUTE:
                await self._llm.reset_prefix_cache(reset_running_requests=True)
            elif not await self._llm.reset_prefix_cache():
                await self._restart_unstarted()

    async def _restart_unstarted(self) -> None:
        """Abort requests that have no token yet; `_follow` sends them once more, under the new salt."""
        for completion in list(self._live.values()):
            if not completion.token_ids:
                completion.mark_for_restart()
                await self._llm.abort(completion.collector.request_id, internal=True)

    async def discard(self) -> None:
        """Drop the staging area. Idempotent."""
        self._check_alive()
        async with self._transfer:
            await self._discard()

    async def _discard(self) -> None:
        self._staged = None
        await self._call_workers("specrl_discard")

    async def status(self) -> GenerationStatus:
        """Versions and counters. Raises EngineFailed once the engine is dead."""
        self._check_alive()
        return GenerationStatus(
            replica_id=self._replica_id,
            policy_version=self._policy_version,
            is_paused=self._is_paused,
            live_requests=len(self._live),
            speculation=self._counters.total,
            drafter_version=self._drafter_version,
            drafting=self._drafting.last if self._drafting is not None else None,
            step_costs=self._counters.times.costs(),
        )

    async def close(self) -> None:
        """Stop vLLM and its processes, remove the scratch folder. Idempotent."""
        llm, self._llm = self._llm, None
        if self._drafting is not None:
            self._drafting.close()
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # or it logs the core's end as a failure
            await asyncio.to_thread(llm.shutdown, CLOSE_GRACE_S)
        self._cleanup.close()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(f"{self._replica_id} must be started again: {self._failure}") from self._failure
        if self._llm is None:
            raise EngineFailed(f"the engine of {self._replica_id} must be running, got a closed one; start it first")
        if self._llm.errored:
            raise EngineFailed(f"the engine of {self._replica_id} must be running, got a dead one; start it again")

    async def _call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` at every rank; returns their values."""
        with translated(f"answer {method}"):
            answers = await self._llm.collective_rpc(method, args=args)
        return [worker.unwrap(answer) for answer in answers]
