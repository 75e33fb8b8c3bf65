"""Plans the faults of a run before it starts. Pure: the same seed gives the same faults.

Faults are dealt from a shuffled deck of all kinds, so that each has happened before any happens twice.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.points.sitecustomize import MOMENTS, POINTS


class Kind(StrEnum):
    KILL = "kill"
    FREEZE = "freeze"
    CUT = "cut"
    SLOW_STORE = "slow store"
    FULL_DISK = "full disk"
    POINT = "point"


@dataclass(frozen=True)
class Fault:
    """One fault.

    target: the process, or the point and moment. wait_s: after the previous fault. for_s: how long it lasts.
    calls: the point strikes at this call from now on. signal: the signal that it sends.
    """

    kind: Kind
    target: str = ""
    wait_s: float = 0.0
    for_s: float = 0.0
    calls: int = 1
    signal: signal.Signals = signal.SIGKILL

    def __str__(self) -> str:
        words = [self.kind.value, self.target]
        if self.kind is Kind.POINT:
            words += [self.signal.name, f"at call {self.calls}"]
        if self.for_s:
            words.append(f"for {self.for_s:g} s")
        return " ".join(word for word in words if word)


PROCESSES = ("coordinator", "gen-0", "gen-1", "engine of gen-0", "engine of gen-1", "trainer-0", "trainer-1")
"""Processes that are killed and frozen. An engine is the process in which vLLM computes for a replica."""

ANYWHERE = (
    *(Fault(kind, target) for target in PROCESSES for kind in (Kind.KILL, Kind.FREEZE)),
    *(Fault(Kind.CUT, target) for target in ("coordinator", "gen-0", "gen-1", "trainer-0", "everybody")),
    *(
        Fault(Kind.POINT, f"{name}.{moment}", signal=number)
        for name in POINTS
        for moment in MOMENTS
        for number in (signal.SIGKILL, signal.SIGSTOP)
    ),
    Fault(Kind.KILL, "launcher"),
    Fault(Kind.SLOW_STORE),
    Fault(Kind.FULL_DISK),
)
REDIS = tuple(Fault(kind, "redis") for kind in (Kind.KILL, Kind.FREEZE, Kind.CUT))
VERIFIER = tuple(Fault(kind, "verifier") for kind in (Kind.KILL, Kind.FREEZE))
"""Not for runs that are compared bit by bit: an ungraded rollout is sampled again with another seed."""

FOR_S = (1.0, 4.0, 14.0)
"""Shorter than the time-out of heartbeats, about as long, and longer than it and than a collective's time-out."""


@dataclass(frozen=True)
class Possible:
    """Which faults a run can have: is_on_redis, is_compared (bit by bit), has_namespace (its network can be cut).

    only: prefixes of the faults' names; empty for all.
    """

    is_on_redis: bool
    is_compared: bool
    has_namespace: bool = True
    only: tuple[str, ...] = ()

    def faults(self) -> tuple[Fault, ...]:
        """All possible faults in a fixed order. Raises ValueError when there are none."""
        found = ANYWHERE + (REDIS if self.is_on_redis else ()) + (() if self.is_compared else VERIFIER)
        if not self.has_namespace:
            found = tuple(fault for fault in found if fault.kind not in {Kind.CUT, Kind.FULL_DISK})
        if self.only:
            found = tuple(fault for fault in found if str(fault).startswith(self.only))
        if not found:
            raise ValueError(f"--only must leave a fault that is possible in this run, got {', '.join(self.only)}")
        return found


def faults(seed: str, possible: Possible) -> Iterator[Fault]:
    """Yield the faults of the run with this seed, without end."""
    dice = random.Random(seed)  # noqa: S311 - repeatable, not secret
    all_of_them = possible.faults()
    while True:
        for fault in dice.sample(all_of_them, len(all_of_them)):
            is_sudden = fault.kind is Kind.KILL or (fault.kind is Kind.POINT and fault.signal is signal.SIGKILL)
            yield Fault(
                kind=fault.kind,
                target=fault.target,
                wait_s=round(dice.uniform(0.5, 8), 1),
                for_s=0.0 if is_sudden else dice.choice(FOR_S),
                calls=dice.randint(1, 3) if fault.kind is Kind.POINT else 1,
                signal=fault.signal,
            )
