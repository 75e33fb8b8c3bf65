"""What the generation service needs of an engine. `vllm_backend` implements it with vLLM; tests/ has a stand-in.

    LOADING -> SERVING <-> PAUSED -> CLOSED
    SERVING: receive* (tokens go on) -> load (paused for as long as the model changes) -> SERVING under the new version
             receive* -> discard -> SERVING under the old one

All methods are coroutines of one event loop. Nothing but `generate` runs concurrently with itself; `receive` runs
concurrently with `generate`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, cast

from specrl.errors import EngineFailed
from specrl.records import GenerationStatus, Rollout, RolloutRequest, WeightChecksums, WeightGroup, WeightManifest


@dataclass(frozen=True)
class LoadTiming:
    """Seconds of the parts of `Engine.load`, in which no token is computed: to stop, to change, to go on."""

    pause_s: float
    load_s: float
    resume_s: float


class Engine(Protocol):
    """A replica's engine: tokens out, weights in."""

    async def start(self) -> None:
        """Load the model and become able to generate. Raises CheckpointInvalid, MemoryTooSmall or EngineFailed."""

    def generate(self, requests: Sequence[RolloutRequest], admit_together: bool) -> AsyncIterator[Rollout]:
        """Yield each rollout when it finishes. Closing the iterator aborts the unfinished ones.

        admit_together: all requests are in the engine's queue before any is computed.
        Raises EngineFailed when the engine dies; RecordInvalid for a request that does not fit the model's length.
        """

    async def pause(self) -> float:
        """Stop computing; keep every unfinished request and its KV cache. Returns seconds. Idempotent."""

    async def resume(self) -> None:
        """Go on computing. Idempotent."""

    async def receive(self, group: WeightGroup, manifest: WeightManifest, policy_version: int) -> WeightChecksums:
        """Join `group` if not yet joined, take part in one broadcast into a staging area, return its checksums.

        A group with a folder is read from there instead. Rollouts go on meanwhile. Loads nothing.
        Raises DeadlineExceeded, CollectiveFailed, or ChecksumMismatch for a folder without it; staging is empty then.
        """

    async def load(self, sent: WeightChecksums) -> LoadTiming:
        """Compare the staging area with `sent`, pause, load policy and drafter from it, take the version, resume.

        Raises ChecksumMismatch (nothing loaded, never paused, staging dropped) or VersionConflict (nothing staged).
        """

    async def discard(self) -> None:
        """Drop the staging area. Idempotent."""

    async def status(self) -> GenerationStatus:
        """Versions and counters."""

    async def close(self) -> None:
        """Stop the engine and its processes. Idempotent."""


async def answers(engine: Engine, requests: Sequence[RolloutRequest], admit_together: bool) -> AsyncGenerator[Rollout]:
    """What `engine.generate` yields, each rollout once. Raises EngineFailed for others, and when it ends without all:
    whoever waits for them over a call that goes on would wait for ever."""
    missing = {request.rollout_id for request in requests}
    # Every engine's `generate` is an async generator; the protocol cannot say so.
    stream = cast(AsyncGenerator[Rollout], engine.generate(requests, admit_together))
    async with aclosing(stream) as rollouts:
        async for rollout in rollouts:
            if rollout.rollout_id not in missing:
                raise EngineFailed(
                    f"an engine must answer what it was asked, got {rollout.rollout_id!r}; the replica is at fault"
                )
            missing.remove(rollout.rollout_id)
            yield rollout
    if missing:
        raise EngineFailed(
            f"an engine must finish what it takes, got none of {min(missing)!r} and {len(missing) - 1} more; the "
            "replica is at fault"
        )
