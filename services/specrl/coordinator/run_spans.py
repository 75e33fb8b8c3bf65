"""Traces of a run: one per step, one for the start before the first step, and one for the finish after the last.

    step ─┬─ collect ── (sync, canary of a replica that joins)
          ├─ prompt ─┬─ rollout         one for each time that it was given to a replica
          │          └─ reward
          ├─ train_step ─┬─ logprob
          │              └─ train
          ├─ sync, canary, checkpoint, write, validation

The ids of a step's trace and root span are hashes of the run id and the step. So a rollout can be put below a step that
begins later, and a restarted coordinator continues the trace of the previous one. All other ids are random.
A prompt belongs to the trace of its step, which is known before its first rollout begins (docs/decisions/0018).

The loop and the rollout pipeline open these spans. Spans below them are opened with `recorder` where the work happens.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from specrl.coordinator.schedule.scheduler import SlotId
from specrl.telemetry.spans import (
    COORDINATOR,
    NO_SPAN,
    SILENT_RECORDER,
    VERIFIERS,
    OpenSpan,
    Recorder,
    SpanContext,
    SpanName,
)


class RunSpans:
    """Opens the root spans of a run and the spans of its prompts.

    run_id: unique to the run, and the same after a restart.
    """

    def __init__(self, recorder: Recorder = SILENT_RECORDER, run_id: str = "") -> None:
        self.recorder = recorder
        self._run_id = run_id
        self._prompts: dict[str, OpenSpan] = {}

    def open_start_span(self, step: int) -> OpenSpan:
        """Open the span of the start: the version of `step`, the last trained one, is published."""
        return self.recorder.begin_root(SpanName.START, COORDINATOR, self._root_context(step, f"start/{uuid.uuid4()}"))

    def open_finish_span(self, step: int) -> OpenSpan:
        """Open the span of the finish: the checkpoint of `step`, the last one, and the export."""
        root = self._root_context(step, f"finish/{uuid.uuid4()}")
        return self.recorder.begin_root(SpanName.FINISH, COORDINATOR, root)

    @contextmanager
    def trace_step(self, step: int) -> Iterator[None]:
        """Open the root span of a step. If the step is cancelled, the span is dropped: a restart opens it again."""
        with self.recorder.begin_root(SpanName.STEP, COORDINATOR, self._root_context(step)) as span:
            try:
                yield
            except asyncio.CancelledError:
                span.discard()
                raise

    def open_rollout_span(self, slot: SlotId, replica_id: str, policy_version: int) -> OpenSpan:
        """Open the span of a rollout that is given to a replica. The first one of a prompt opens the prompt's span."""
        if not self.recorder.has_sinks:
            return NO_SPAN
        prompt = self._prompts.get(slot.group_id)
        if prompt is None:
            prompt = self.recorder.begin_span(
                SpanName.PROMPT, COORDINATOR, self._root_context(slot.step), prompt=slot.group_id
            )
            self._prompts[slot.group_id] = prompt
        return self.recorder.begin_span(
            SpanName.ROLLOUT, replica_id, prompt.context, rollout=str(slot), policy_version=policy_version
        )

    def open_reward_span(self, slot: SlotId) -> OpenSpan:
        """Open the span of a rollout that is given to the verifier."""
        prompt = self._prompts.get(slot.group_id)
        above = None if prompt is None else prompt.context
        return self.recorder.begin_span(SpanName.REWARD, VERIFIERS, above, rollout=str(slot))

    def end_prompts(self, groups: Iterable[str], error: str = "") -> None:
        """End the spans of these prompts, which the next step trains. error: why the prompts are not trained."""
        for group in groups:
            prompt = self._prompts.pop(group, None)  # none if all of it was sampled before a restart
            if prompt is not None:
                prompt.end(error)

    def end_open_prompts(self) -> None:
        """End the spans of all prompts that no step has chosen: the run stops."""
        self.end_prompts(list(self._prompts), "unfinished")

    def _root_context(self, step: int, beside: str = "") -> SpanContext:
        """Derive trace id (128 bits) and span id (64 bits) of a root span. beside: sets start and finish apart."""
        ids = hashlib.blake2b(f"{self._run_id}/{step}/{beside}".encode(), digest_size=24).digest()
        return SpanContext(int.from_bytes(ids[:16], "big"), int.from_bytes(ids[16:], "big"), step)
