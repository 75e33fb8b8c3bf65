"""What a generation replica can be to the coordinator, and how it gets from one to another. The table decides.

    (registers) -> JOINING --transfer begins--> CATCHING_UP --commit--> SERVING --commit begins--> UPDATING
                      ^                              |                  |    ^                       |  |
                      |                              |                  |    +-------- commit -------+  |
                      +--- the trainer was lost before its canary had spoken, or in the update ----------+
                      +--- alive again, and behind --- SUSPECT --- alive again ---> SERVING, DRAINING

    any but STALE   --a call failed, heartbeats missed-->  SUSPECT    new rollouts: none; what it has goes on
    any             --failed beyond repair-->              STALE      until it registers again, as a new record
    any but STALE   --it leaves, or was told to-->         DRAINING   new rollouts: none; what it has is finished
    any             --patience over, left, replaced-->     DEAD       the end of the record

JOINING and CATCHING_UP have committed no weights yet, or have missed some: no rollout of theirs is taken in. SERVING
goes on while a new version arrives; UPDATING is the time in which it is loaded. A replica that is told to leave in
CATCHING_UP or UPDATING is DRAINING when it commits. One whose canary disagreed goes to DEAD, and a new record of the
same process begins in JOINING.

SUSPECT keeps where it came from: a sign of life leads back to SERVING or DRAINING, and to JOINING from everywhere else,
since an update that was interrupted must be repeated; so must one that was missed, or that no canary has proved.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from specrl.errors import TransitionForbidden


class ReplicaState(StrEnum):
    JOINING = "joining"
    CATCHING_UP = "catchingUp"
    SERVING = "serving"
    UPDATING = "updating"
    SUSPECT = "suspect"
    STALE = "stale"
    DRAINING = "draining"
    DEAD = "dead"


_S = ReplicaState
_ANYWHERE = frozenset({_S.SUSPECT, _S.STALE, _S.DRAINING, _S.DEAD})

NEXT: Mapping[ReplicaState, frozenset[ReplicaState]] = {
    _S.JOINING: _ANYWHERE | {_S.CATCHING_UP},
    _S.CATCHING_UP: _ANYWHERE | {_S.SERVING, _S.JOINING},
    _S.SERVING: _ANYWHERE | {_S.UPDATING, _S.JOINING},
    _S.UPDATING: _ANYWHERE | {_S.SERVING, _S.JOINING},
    _S.SUSPECT: frozenset({_S.JOINING, _S.SERVING, _S.DRAINING, _S.STALE, _S.DEAD}),
    _S.DRAINING: frozenset({_S.SUSPECT, _S.STALE, _S.DEAD}),
    _S.STALE: frozenset({_S.DEAD}),
    _S.DEAD: frozenset(),
}

IN_UPDATE = frozenset({_S.CATCHING_UP, _S.UPDATING})
"""It has to commit before anything of it is taken in."""

RECEIVING = IN_UPDATE | {_S.SERVING}
"""A transfer that has begun goes on with it."""

UPDATABLE = frozenset({_S.JOINING, _S.SERVING})
"""A new version goes to it. The others would be waited for in vain, or are about to go."""

COMMITTED = frozenset({_S.SERVING, _S.DRAINING})
"""It has taken the version that it was sent last."""


def check_transition(replica_id: str, before: ReplicaState, after: ReplicaState) -> None:
    """Raise TransitionForbidden unless the table has it. It is a bug of whoever asked for it."""
    if after not in NEXT[before]:
        allowed = ", ".join(sorted(NEXT[before])) or "nowhere"
        raise TransitionForbidden(
            f"{replica_id} must go from {before} to one of {allowed}, got {after}; this is a bug of the coordinator"
        )
