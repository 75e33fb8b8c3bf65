"""Check the references of a data set before the run, in worker processes that may hang or crash.

Called by `coordinator/rollouts/checked_prompts.py`. Invariant: every reference that the verifier cannot use is known
before anything is generated. A reference that makes its worker hang or crash, or that fails in a sandbox, is refused
like a malformed one. But only a malformed one is certain to be refused again, so no other refusal is cached
(`reference_cache.py`).

    chunk of references --results after 1 s--> done; the unchecked rest becomes a chunk again
                        --hangs or crashes---> each reference alone --hangs or crashes--> refused, uncertain
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import xxhash

from specrl.errors import VerifierFailed
from specrl.rewards.pool import VerifierPool
from specrl.rewards.verifier import Ungraded, Verifier

_CHUNK = 256
"""References that a worker gets at once. Large enough that even for cheap references the messages cost little."""

CHUNK_TURN_S = 1.0
"""Time after which a worker returns the results that it has. Most chunks take less. It bounds the work that is repeated
if a later reference of the chunk hangs."""


class CheckedReference(NamedTuple):
    """A problem's reference, and the data set's own solution if it has one."""

    text: str
    solution: str | None

    @property
    def cache_key(self) -> str:
        """A digest that identifies the reference and its solution in the cache."""
        # The length in front keeps "a" with solution "b" apart from a reference that contains the separator.
        solution = "" if self.solution is None else f"\0{self.solution}"
        content = f"{len(self.text)}\0{self.text}{solution}"
        return xxhash.xxh3_128_hexdigest(content.encode(errors="surrogatepass"))


@dataclass(frozen=True)
class ReferenceFinding:
    """The result for one reference.

    refusal: why it is refused; "" if it is accepted.
    is_certain: whether checking it again must give the same result.
    """

    refusal: str
    is_certain: bool = True


class ReferencePool(VerifierPool):
    """The worker processes of the check. They are spawned, so that no fork server stays behind in the launcher."""

    start_method: ClassVar[str] = "spawn"

    async def check_one(self, reference: CheckedReference, verifier: Verifier) -> ReferenceFinding:
        """Check one reference with one verifier of the pool. Raises VerifierFailed as `grade` does."""
        found = list[tuple[CheckedReference, ReferenceFinding]]()
        await self.check_all([reference], verifier, found.extend)
        return found[0][1]

    async def check_all(
        self,
        references: Sequence[CheckedReference],
        verifier: Verifier,
        found: Callable[[Sequence[tuple[CheckedReference, ReferenceFinding]]], None],
    ) -> None:
        """Check every reference with one verifier of the pool, and pass results to `found` as they arrive.

        Raises VerifierFailed as `grade` does.
        """
        waiting = deque(list(references[first : first + _CHUNK]) for first in range(0, len(references), _CHUNK))

        async def check_chunks() -> None:
            while waiting:
                chunk = waiting.popleft()
                answer = await self._ask_worker(_check_chunk, verifier, chunk, CHUNK_TURN_S)
                if isinstance(answer.value, list):
                    found(list(zip(chunk, answer.value, strict=False)))
                    if len(answer.value) < len(chunk):  # CHUNK_TURN_S was over
                        waiting.appendleft(chunk[len(answer.value) :])
                elif len(chunk) == 1:
                    rule = f"the reference must pass its check before the run, got {answer.failure}"
                    found([(chunk[0], ReferenceFinding(rule, is_certain=False))])
                else:  # one of the chunk hung or crashed: check each alone to find out which
                    waiting.extendleft([reference] for reference in reversed(chunk))

        await asyncio.gather(*(check_chunks() for _ in range(self._limits.workers)))


def _check_chunk(verifier: Verifier, references: Iterable[CheckedReference], turn_s: float) -> list[ReferenceFinding]:
    """Check references, in a worker, until the time is over. Returns at least one result, for the first references."""
    ends = time.monotonic() + turn_s
    findings = list[ReferenceFinding]()
    for reference in references:
        findings.append(_check_reference(verifier, reference))
        if time.monotonic() > ends:
            break
    return findings


def _check_reference(verifier: Verifier, reference: CheckedReference) -> ReferenceFinding:
    is_read = False
    try:
        verifier.check_reference(reference.text)
        is_read = True
        verifier.try_reference(*reference)
    except VerifierFailed as error:
        # A trial runs programs. A busy machine, or a package that is missing now, may be why they failed.
        return ReferenceFinding(str(error), is_certain=not is_read)
    except Ungraded:
        return ReferenceFinding("", is_certain=False)
    except MemoryError:
        raise  # the worker exits then, and the pool's message names memoryMib
    except Exception as error:  # noqa: BLE001 - without an answer, only the reference can make a library raise
        fault = f"{type(error).__name__}: {error!s:.200}"
        rule = f"the reference must be one that the verifier can read, got {fault}"
        return ReferenceFinding(rule, is_certain=not is_read)
    return ReferenceFinding("")
