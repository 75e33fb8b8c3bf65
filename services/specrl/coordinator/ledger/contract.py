"""The interface of a run's store. tests/contract/test_store_contract.py tests every implementation against it.

Rollouts and batches are protobuf; reports and facts are JSON. Every method is one transaction and returns once it is
durable. Every write is idempotent.

Only one coordinator can write. A store is opened with a `Claim`, and the newest claim wins. Each write checks its claim
in its own transaction, so a coordinator that was replaced learns it at its next write. Readers need no claim.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from specrl.errors import StoreInvalid

SCHEMA_VERSION = 4
"""Version of the stored layout. Opening a store of any other version raises StoreInvalid."""

# At 1.4 KB a report this bounds the reports in the store, and in the coordinator's memory, to 1.4 MB.
REPORTS_KEPT = 1000
"""Number of the newest step reports that stay in the store. Older ones are only in the run's metrics.jsonl."""


@contextmanager
def translate_decode_errors(place: str) -> Iterator[None]:
    """Translate decoding errors, such as malformed JSON or a key that is not a number, into StoreInvalid.

    place: where the data lies, for the message.
    """
    try:
        yield
    except StoreInvalid:
        raise
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise StoreInvalid(
            f"the store must hold data that specrl wrote, got {reason} in {place}; restore its data, or reset it "
            "(specrl store reset) and resume the run from its last checkpoint"
        ) from error


@dataclass(frozen=True)
class StoredRollout:
    """A graded rollout whose prompt is not trained yet. `data` is a protobuf GradedRollout.

    step, index: the step that trains the prompt, and the prompt's position in that step. Rollouts that initialise the
    drafter have a step below 1.
    """

    step: int
    index: int
    sample: int
    attempt: int
    data: bytes


@dataclass(frozen=True)
class Claim:
    """A coordinator's right to write. Claiming again with the same token changes nothing.

    run_id: id of the run, for stores outside its folder. token: unique to one coordinator process.
    owner: host and process id, for messages only.
    """

    run_id: str = ""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    owner: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")


class Store(Protocol):
    """The stored state of one run.

    Every method raises StoreFailed when the store cannot be read or written now; nothing is half-written then. It
    raises StoreInvalid when a retry cannot help: another coordinator has claimed the store, the data are damaged, or
    acknowledged writes are lost.
    """

    def read_facts(self) -> dict[str, Any]:
        """Read all named JSON values."""

    def set_fact(self, name: str, value: Any) -> None:
        """Set or replace a named JSON value."""

    def put_rollouts(self, rollouts: Sequence[StoredRollout]) -> None:
        """Store finished rollouts, all or none. A rollout with the same step, index and sample is replaced."""

    def read_rollouts(self) -> list[StoredRollout]:
        """Read the rollouts of untrained steps, and those of steps below 1, by step, index and sample."""

    def count_rollouts(self) -> dict[int, int]:
        """Count the rollouts that `read_rollouts` returns, by ascending step, without reading their content."""

    def put_batch(self, step: int, data: bytes, indexes: Sequence[int] = ()) -> bool:
        """Store the batch of step `step`, before it is sent to the trainer. An existing batch is never replaced.

        indexes: positions in the step of the prompts whose rollouts belong to the batch. Those rollouts were put
        before, and are kept as long as the batch.
        Returns True if the stored batch is certainly `data`. After False, the caller must read the stored batch.
        """

    def read_batch(self, step: int) -> bytes | None:
        """Read the batch of step `step`, without its rollouts; None when it is not kept."""

    def read_batch_rollouts(self, step: int) -> list[bytes]:
        """Read `data` of the batch's rollouts, ordered by its indexes, then by sample; empty without a batch."""

    def list_batch_steps(self) -> list[int]:
        """List the steps whose batch is kept, ascending."""

    def finish_step(self, step: int, report: dict[str, Any]) -> None:
        """Record step `step` as trained: store its report, and delete rollouts up to it that no batch names."""

    def set_report(self, step: int, report: dict[str, Any]) -> None:
        """Replace the report of a trained step, with figures that became known later. A step without one is ignored."""

    def read_last_trained_step(self) -> int:
        """Read the last trained step; 0 before the first."""

    def read_reports(self, after: int = 0) -> list[dict[str, Any]]:
        """Read the reports of steps > `after`, ascending, as far back as `REPORTS_KEPT` steps."""

    def forget_batches(self, up_to: int) -> None:
        """Delete batches up to step `up_to`, with their rollouts: a complete checkpoint makes a replay needless."""

    def reset(self) -> None:
        """Delete everything, including the claim, so that a coordinator that still runs can no longer write."""

    def describe(self) -> dict[str, Any]:
        """Return the store's kind, place, schema version and last claimant, for display."""

    def close(self) -> None:
        """Release the file or connection. Idempotent."""
