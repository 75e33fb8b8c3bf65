"""What every store promises. One suite holds all of them to it (tests/contract/test_store_contract.py).

Rollouts and batches are protobuf, reports and facts are JSON. Every method is one transaction and returns when it is
durable; the coordinator acts afterwards. Every write may be repeated: a second time changes nothing.

Who writes. A store is opened with a `Claim`, and the newest claim holds: a write under any other is refused, in the
same transaction in which it would have been made. So of two coordinators of one run, one can write, and the other
learns of it at its next write. Readers claim nothing.
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

SCHEMA_VERSION = 3
"""Of what is stored. 1: SQLite without claims; 2: batches with all tokens in them. Both are migrated when a
coordinator opens them, and can be read as they are."""

REPORTS_KEPT = 1000
"""Newest reports of steps that stay in the store; older ones are in the run's metrics.jsonl."""


@contextmanager
def as_written(place: str) -> Iterator[None]:
    """Raise StoreInvalid for what no specrl has stored: text that is no JSON, names that are no numbers."""
    try:
        yield
    except StoreInvalid:
        raise
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise StoreInvalid(
            f"the store must hold what specrl wrote, got {reason} in {place}; restore its data, or reset it "
            "(specrl store reset) and resume the run from its last checkpoint"
        ) from error


@dataclass(frozen=True)
class StoredRollout:
    """A graded rollout of a prompt that is not trained; `data` is a protobuf GradedRollout.

    step, index: the prompt's own step and its place there, whichever step will train it.
    """

    step: int
    index: int
    sample: int
    attempt: int
    data: bytes


@dataclass(frozen=True)
class Claim:
    """A coordinator's right to write. Claiming twice with one token is claiming once.

    run_id: the run's own, for stores that lie outside its folder; token: no other coordinator's; owner: for people.
    """

    run_id: str = ""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    owner: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")


class Store(Protocol):
    """State of one run.

    Raises StoreFailed when it cannot be read or written now, nothing being half-written then; StoreInvalid when it
    must not be: another coordinator has claimed it, it is damaged, or it has lost what it had acknowledged.
    """

    def fact(self, name: str) -> Any | None:
        """A named JSON value; None when it was never set."""

    def facts(self) -> dict[str, Any]:
        """All of them."""

    def set_fact(self, name: str, value: Any) -> None:
        """Set or replace a named JSON value."""

    def put_rollouts(self, rollouts: Sequence[StoredRollout]) -> None:
        """Keep finished rollouts, all or none. Putting the same slot again replaces it."""

    def rollouts(self) -> list[StoredRollout]:
        """Finished rollouts that no step has forgotten or trained, in stream order."""

    def rollout_counts(self) -> dict[int, int]:
        """How many of them there are of each step, ascending; their content is not read."""

    def put_batch(self, step: int, data: bytes, prompts: Sequence[tuple[int, int]] = ()) -> bool:
        """Fix what step `step` trains on, before it is sent. The first content stays: a second one is ignored.

        prompts: (step, index) of those whose rollouts are part of it; they were put before, and stay as long as it.
        True when this content is the one that is kept, for sure; False when it has to be read to be known.
        """

    def batch(self, step: int) -> bytes | None:
        """What step `step` trains or trained on, without its rollouts, while it is kept."""

    def batch_rollouts(self, step: int) -> list[bytes]:
        """`data` of the batch's rollouts, in the order of its prompts, then samples; none when it is not kept."""

    def batches(self) -> list[int]:
        """Steps whose batch is kept, ascending."""

    def finish_step(self, step: int, report: dict[str, Any], kept: Sequence[tuple[int, int]] = ()) -> None:
        """Step `step` is trained: keep its report, forget the rollouts of steps up to it that no batch names.

        kept: (step, index) of prompts of those steps that are still to be trained; their rollouts stay, too.
        """

    def set_report(self, step: int, report: dict[str, Any]) -> None:
        """Replace a trained step's report, with what became known afterwards."""

    def trained(self) -> int:
        """Last step trained; 0 before the first."""

    def reports(self, after: int = 0) -> list[dict[str, Any]]:
        """Reports of steps > `after`, ascending, of the last `REPORTS_KEPT` steps."""

    def forget_batches(self, up_to: int) -> None:
        """A checkpoint of step `up_to` is complete: batches up to it, and what they trained, will never be replayed."""

    def reset(self) -> None:
        """Forget everything, the claim too: a coordinator that still runs cannot write any more."""

    def describe(self) -> dict[str, Any]:
        """What it is, where it lies, its schema version and who claimed it last; for people."""

    def close(self) -> None:
        """Release the file or connection. Idempotent."""
