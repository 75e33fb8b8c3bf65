"""The Engine protocol: what the generation service needs of an engine.

`vllm_backend.engine` implements it with vLLM, and tests/stand_ins/engine.py without a model. One contract suite tests
both. Called by `service` and `main`.

    LOADING -> SERVING -> CLOSED
    SERVING: receive_weights* (sampling goes on) -> load_weights (pauses sampling) -> SERVING, new version

All methods run on one event loop. Only `generate` may run concurrently with itself. `receive_weights` may run
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
    """Seconds for which `Engine.load_weights` interrupted sampling: pausing, loading, resuming."""

    pause_s: float
    load_s: float
    resume_s: float


class Engine(Protocol):
    """A replica's engine. It samples rollouts and takes weight updates."""

    async def start(self) -> None:
        """Load the model and get ready to serve. Raises CheckpointInvalid, MemoryTooSmall or EngineFailed."""

    def generate(self, requests: Sequence[RolloutRequest], admit_together: bool) -> AsyncIterator[Rollout]:
        """Yield each rollout when it finishes. Closing the iterator aborts the unfinished ones.

        admit_together: queue all requests before any of them is computed.

        Raises EngineFailed if the engine dies, and RecordInvalid for a request that exceeds the model's length.
        """

    async def receive_weights(
        self, group: WeightGroup, manifest: WeightManifest, policy_version: int
    ) -> WeightChecksums:
        """Receive one version into a staging area while rollouts go on; returns its checksums. Loads nothing.

        Joins the weight group if needed and takes part in one broadcast. If the group names a folder, reads that
        folder instead.

        Replaces tensors that were staged before. Raises DeadlineExceeded, CollectiveFailed, or ChecksumMismatch if the
        folder does not have the version. The staging area is empty then.
        """

    async def load_weights(self, sent: WeightChecksums) -> LoadTiming:
        """Verify the staging area against `sent`, pause, load policy and drafter, switch to the version, resume.

        A cancelled call leaves no pause and no version in part: the load still ends, or the engine has failed.

        Raises ChecksumMismatch (nothing is loaded, no pause, and the staging area is dropped) or VersionConflict
        (nothing was staged).
        """

    async def get_status(self) -> GenerationStatus:
        """Return versions and counters. Raises EngineFailed if the engine is dead."""

    async def close(self) -> None:
        """Stop the engine and its processes. Idempotent."""


async def generate_checked(
    engine: Engine, requests: Sequence[RolloutRequest], admit_together: bool
) -> AsyncGenerator[Rollout]:
    """Yield each rollout of `engine.generate` once, and check that all of them arrive.

    Raises EngineFailed if the engine yields a rollout that was not requested, or ends before all were yielded.
    Otherwise a caller whose call stays open would wait forever.
    """
    missing = {request.rollout_id for request in requests}
    # Every engine's `generate` is an async generator; the protocol cannot say so.
    stream = cast(AsyncGenerator[Rollout], engine.generate(requests, admit_together))
    async with aclosing(stream) as rollouts:
        async for rollout in rollouts:
            if rollout.rollout_id not in missing:
                raise EngineFailed(
                    f"the engine yielded rollout {rollout.rollout_id!r}, which was not requested; this is a bug of the "
                    "replica"
                )
            missing.remove(rollout.rollout_id)
            yield rollout
    if missing:
        raise EngineFailed(
            f"the engine ended without rollout {min(missing)!r} and {len(missing) - 1} more; this is a bug of the "
            "replica"
        )
