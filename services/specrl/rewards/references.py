"""References, checked before the run in processes that may hang or die.

Called by `coordinator/checked_prompts.py`. Invariant: a reference that the verifier cannot use is known before anything
is generated. One that hangs or ends its process is refused like one that is read and found wanting, but only the latter
is certain to be refused again, and is remembered (`reference_cache.py`).

    chunk of references --findings in a second--> those; the rest is a chunk again
                        --hangs or dies---------> each of it alone --hangs or dies--> refused, uncertain
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
from specrl.rewards.workers import Answer

_CHUNK = 256
"""References that a worker gets at once: so many that asking costs little of the time for the cheapest of them."""
TURN_S = 1.0
"""After which a worker hands back what it has found. Longer than a chunk of most takes; it bounds what is checked
twice because of one that hangs."""


class Reference(NamedTuple):
    """What is checked: a problem's reference, and the data's own solution where it has one."""

    text: str
    solution: str | None

    @property
    def key(self) -> str:
        """Its digest."""
        solution = "" if self.solution is None else f"\0{self.solution}"
        content = f"{len(self.text)}\0{self.text}{solution}"
        return xxhash.xxh3_128_hexdigest(content.encode(errors="surrogatepass"))


@dataclass(frozen=True)
class Finding:
    """Why a reference is refused, empty when it is sound; and whether another look is certain to find the same."""

    refusal: str
    is_certain: bool = True


class ReferencePool(VerifierPool):
    """The verifier's processes before the run. They are spawned: no fork server stays behind in the launcher."""

    start_method: ClassVar[str] = "spawn"

    async def check_one(self, reference: Reference) -> Finding:
        """What is found of one reference. Raises VerifierFailed as `grade` does."""
        answer = await self._ask(_findings, self._verifier, [reference], TURN_S)
        finding: Finding = answer.value[0] if isinstance(answer.value, list) else _finding_without(answer)
        return finding

    async def check(
        self, references: Sequence[Reference], found: Callable[[Sequence[tuple[Reference, Finding]]], None]
    ) -> None:
        """Check every reference; `found` is told what is known as it comes. Raises VerifierFailed as `grade` does."""
        waiting = deque(list(references[first : first + _CHUNK]) for first in range(0, len(references), _CHUNK))

        async def work() -> None:
            while waiting:
                chunk = waiting.popleft()
                answer = await self._ask(_findings, self._verifier, chunk, TURN_S)
                if isinstance(answer.value, list):
                    found(list(zip(chunk, answer.value, strict=False)))
                    if len(answer.value) < len(chunk):
                        waiting.appendleft(chunk[len(answer.value) :])
                elif len(chunk) == 1:
                    found([(chunk[0], _finding_without(answer))])
                else:
                    waiting.extendleft([reference] for reference in reversed(chunk))

        await asyncio.gather(*(work() for _ in range(self._limits.workers)))


def _finding_without(answer: Answer) -> Finding:
    """Of a reference that has hung or ended its process."""
    return Finding(f"the reference must pass its check before the run, got {answer.failure}", is_certain=False)


def _findings(verifier: Verifier, references: Iterable[Reference], turn_s: float) -> list[Finding]:
    """In a worker: what is found in this time of the first references, at least of one."""
    ends, findings = time.monotonic() + turn_s, list[Finding]()
    for reference in references:
        findings.append(_finding(verifier, reference))
        if time.monotonic() > ends:
            break
    return findings


def _finding(verifier: Verifier, reference: Reference) -> Finding:
    try:
        verifier.check_reference(reference.text)
        verifier.try_reference(*reference)
    except VerifierFailed as error:
        return Finding(str(error))
    except Ungraded:
        return Finding("", is_certain=False)
    except MemoryError:
        raise  # the pool's limit, which says how much there was
    except Exception as error:  # noqa: BLE001 - whatever a library raises for a reference, the reference is at fault
        return Finding(
            f"the reference must be one that the verifier can read, got {type(error).__name__}: {error!s:.200}"
        )
    return Finding("")
