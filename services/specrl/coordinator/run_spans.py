"""A run's traces: one for each step, and one each for what comes before the first and after the last.

    step ─┬─ collect ── (sync, canary of a replica that joins)
          ├─ prompt ─┬─ rollout         one for each time that it was given to a replica
          │          └─ reward
          ├─ train_step ─┬─ logprob
          │              └─ train
          ├─ sync, canary, checkpoint, write, validation

The ids of a step's trace and of its root follow from the run's id and the step, so that a rollout can be put below a
step that begins later, and a coordinator that is started again goes on with the trace of the one before. All other ids
are drawn.
A prompt belongs to its own step's trace, which is known before its first rollout begins (docs/decisions/0018). The
collect that takes it for another step is linked to it.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from specrl.coordinator.scheduler import SlotId
from specrl.telemetry.spans import COORDINATOR, NO_SPAN, SILENT, VERIFIERS, OpenSpan, Recorder, SpanContext, SpanName


class RunSpans:
    """Begins the spans whose place in a run must be known; all others are begun below these, with `recorder`.

    run_id: no other run's, and the same after a restart.
    """

    def __init__(self, recorder: Recorder = SILENT, run_id: str = "") -> None:
        self.recorder = recorder
        self._run_id = run_id
        self._prompts: dict[str, OpenSpan] = {}

    def start(self, step: int) -> OpenSpan:
        """Before the steps: the version of the last trained one, `step`, is served, the drafter initialised."""
        return self.recorder.root(SpanName.START, COORDINATOR, self._root(step, f"start/{uuid.uuid4()}"))

    def finish(self, step: int) -> OpenSpan:
        """After the last one, `step`: its checkpoint, the export."""
        return self.recorder.root(SpanName.FINISH, COORDINATOR, self._root(step, f"finish/{uuid.uuid4()}"))

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """One step's wall time: the root of its trace. One that is cut short is ended by whoever goes on with it."""
        with self.recorder.root(SpanName.STEP, COORDINATOR, self._root(step)) as span:
            try:
                yield
            except asyncio.CancelledError:
                span.forget()
                raise

    def rollout(self, slot: SlotId, replica_id: str, policy_version: int) -> OpenSpan:
        """A rollout is given to a replica. Its prompt's span begins with its first."""
        if not self.recorder.is_heard:
            return NO_SPAN
        prompt = self._prompts.get(slot.group_id)
        if prompt is None:
            prompt = self.recorder.begin(SpanName.PROMPT, COORDINATOR, self._root(slot.step), prompt=slot.group_id)
            self._prompts[slot.group_id] = prompt
        return self.recorder.begin(
            SpanName.ROLLOUT, replica_id, prompt.context, rollout=str(slot), policy_version=policy_version
        )

    def reward(self, slot: SlotId) -> OpenSpan:
        """A rollout is given to the verifiers."""
        prompt = self._prompts.get(slot.group_id)
        above = None if prompt is None else prompt.context
        return self.recorder.begin(SpanName.REWARD, VERIFIERS, above, rollout=str(slot))

    def chosen(self, step: int, groups: Iterable[str], failed: Iterable[str], collecting: OpenSpan) -> None:
        """Step `step` takes these groups, or settles them as failed; `collecting` is what waited for them."""
        for group, error in [*((group, "") for group in groups), *((group, "failed") for group in failed)]:
            prompt = self._prompts.pop(group, None)  # none where a coordinator before this one sampled all of it
            if prompt is None:
                continue
            prompt.note(trained_at=step)
            prompt.end(error)
            if prompt.context.step != step:
                collecting.link(prompt.context)

    def close(self) -> None:
        """The run stops: what was begun and not chosen ends with it."""
        for prompt in self._prompts.values():
            prompt.end("unfinished")
        self._prompts.clear()

    def _root(self, step: int, beside: str = "") -> SpanContext:
        ids = hashlib.blake2b(f"{self._run_id}/{step}/{beside}".encode(), digest_size=24).digest()
        return SpanContext(int.from_bytes(ids[:16], "big"), int.from_bytes(ids[16:], "big"), step)
