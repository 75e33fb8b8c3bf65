"""Requests of users and of the launcher to a running run: pause, resume, checkpoint now, change the replicas.

Pause. A paused run starts no rollout and no training step. Work in progress is finished and kept. The pause is stored
in the ledger before the request is answered, so it survives a restart of the coordinator.

Checkpoint. The loop writes a requested checkpoint before the next training step. The status says when the request is
open, until the checkpoint is complete or has failed. The request is not stored: it is lost if the coordinator dies
first. After the death of a coordinator the trainer may be one step ahead of the store. Its checkpoint would then be
that of a step which is not recorded, so a request stays open until the step is.

Given up. The launcher of a local run says which replicas it starts no more. This is not stored: the launcher says it
again after a restart of the coordinator.

Scale. A local run keeps its number of replicas in the run file. The coordinator rewrites that file and publishes the
number in the status, and the launcher starts or stops replicas. In a cluster the RLJob's scale subresource holds the
number, and `observe/rljob_status.py` tells this class what it reads there.

`requests/actions.py` calls this class. `asked` wakes the loop (`Loop._handle_user_requests`), and the callback of
`watch_changes` wakes the rollout dispatcher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from specrl.coordinator.ledger.ledger import Ledger
from specrl.coordinator.run_events import ReplicasScaled, RunEvents
from specrl.files import write_text
from specrl.spec import RunSpec, dump_spec
from specrl.spec.cluster import FailurePolicy

log = structlog.get_logger(__name__)


class Controls:
    """Holds the open requests of one run.

    asked: set while the run is paused, or a checkpoint is requested and not held. spec: the run file with the current
    replicas, and in a cluster with the RLJob's current failurePolicy.
    """

    def __init__(self, spec: RunSpec, directory: Path, ledger: Ledger, events: RunEvents) -> None:
        self.spec = spec
        self._run_file = directory / "run.yaml"
        self._ledger = ledger
        self._events = events
        self._wants_checkpoint = False
        self._holds_checkpoints = False
        self._checkpoints_under_way = 0
        self._changed = asyncio.Event()
        self._notify: Callable[[], None] = lambda: None
        self.asked = asyncio.Event()
        self._update_asked()

    def watch_changes(self, notify: Callable[[], None]) -> None:
        """Call `notify` after every request and every change of the pause. There is one such callback."""
        self._notify = notify

    async def pause_run(self) -> None:
        """Pause the run. Durable when this returns. Idempotent."""
        await self._ledger.set_paused(True)
        self._update_asked()

    async def resume_run(self) -> None:
        """End the pause. Durable when this returns. Idempotent."""
        await self._ledger.set_paused(False)
        self._update_asked()

    def request_checkpoint(self) -> None:
        """Request a checkpoint before the next training step. Several requests until then cause one checkpoint."""
        self._wants_checkpoint = True
        log.info("checkpoint_requested", step=self._ledger.last_trained_step)
        self._update_asked()

    def hold_checkpoint_requests(self, is_held: bool) -> None:
        """Keep requests for a checkpoint open, without waking the loop, until this is called with False."""
        self._holds_checkpoints = is_held
        self._update_asked()

    def take_checkpoint_request(self) -> bool:
        """Return whether a checkpoint was requested and is not held, and clear the request.

        The caller must write the checkpoint, and call `end_checkpoint_request` when that has ended. A request that
        arrives meanwhile asks for another one: the first may have begun before it.
        """
        wanted = self._is_checkpoint_due
        if wanted:
            self._wants_checkpoint = False
        self._checkpoints_under_way += wanted
        self._update_asked()
        return wanted

    def end_checkpoint_request(self) -> None:
        """Say that a checkpoint of `take_checkpoint_request` is complete, or has failed."""
        self._checkpoints_under_way -= 1

    @property
    def _is_checkpoint_due(self) -> bool:
        return self._wants_checkpoint and not self._holds_checkpoints

    @property
    def is_checkpoint_requested(self) -> bool:
        """Whether a requested checkpoint is neither complete nor failed. So a request was answered by a checkpoint
        that began after it."""
        return self._wants_checkpoint or self._checkpoints_under_way > 0

    def scale_replicas(self, replicas: int) -> None:
        """Set the number of replicas that the launcher keeps. Durable when this returns. Raises OSError."""
        spec = self._copy_spec(replicas)
        write_text(self._run_file, dump_spec(spec), is_synced=True)
        self.spec = spec  # only after the write: if that fails, nothing has changed
        log.info("run_scaled", replicas=replicas)
        self._events.publish(ReplicasScaled(replicas))

    def follow_rljob(self, replicas: int, policy: FailurePolicy) -> None:
        """Take over what may change in the RLJob, which holds it durably. Idempotent."""
        if replicas != self.spec.generation.replicas:
            self.spec = self._copy_spec(replicas)
            log.info("run_scaled", replicas=replicas)
        self.spec = self.spec.model_copy(update={"failure_policy": policy})

    @property
    def minimum_replicas(self) -> int:
        """Fewest ready replicas with which the run counts as ready."""
        return min(self.spec.failure_policy.min_generation_replicas, self.spec.generation.replicas)

    def _copy_spec(self, replicas: int) -> RunSpec:
        generation = self.spec.generation.model_copy(update={"replicas": replicas})
        return self.spec.model_copy(update={"generation": generation})

    async def wait_for_change(self) -> None:
        """Wait until the next request or change of the pause. Has no limit; `_update_asked` wakes it."""
        self._changed.clear()
        await self._changed.wait()

    def _update_asked(self) -> None:
        """Set or clear `asked`, and wake everyone who waits for a change."""
        if self._ledger.facts.is_paused or self._is_checkpoint_due:
            self.asked.set()
        else:
            self.asked.clear()
        self._changed.set()
        self._notify()
