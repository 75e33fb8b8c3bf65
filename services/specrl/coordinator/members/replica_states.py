"""The states of a generation replica, as the coordinator sees it, and the allowed transitions.

    (registers) -> JOINING --transfer begins--> CATCHING_UP --commit--> SERVING --commit begins--> UPDATING
                      ^                              |                  |    ^                       |  |
                      |                              |                  |    +-------- commit -------+  |
                      +--- the trainer was lost during the update, or before its canary agreed ----------+
                      +--- heartbeat; missed an update --- SUSPECT --- heartbeat ---> SERVING, DRAINING

    any but STALE   --call failed, heartbeats missed-->     SUSPECT    no new rollouts; those it has go on
    any             --update or call failed for good-->     STALE      excluded until it registers again
    any but STALE   --leaves, or is dismissed-->            DRAINING   no new rollouts; those it has are finished
    any             --heartbeats over, left, replaced-->    DEAD       the record ends

JOINING and CATCHING_UP: the replica has not committed the newest weights, so none of its rollouts is stored. SERVING
continues while a new version arrives; UPDATING is the short time in which it is loaded.

A replica that is dismissed in CATCHING_UP or UPDATING becomes DRAINING at its commit. If its canary disagrees, its
record becomes DEAD, and a new record of the same process starts in JOINING.

SUSPECT remembers the previous state. A heartbeat leads back to SERVING or DRAINING. It leads to JOINING if an update
was interrupted or missed, or if no canary has checked it: the update must then be repeated.
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
"""States that a live replica may enter at any time: calls fail, processes die and users scale down at any time."""

TRANSITIONS: Mapping[ReplicaState, frozenset[ReplicaState]] = {
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
"""An update is in progress. The replica must commit before its rollouts are stored."""

RECEIVING = IN_UPDATE | {_S.SERVING}
"""States in which a replica stays part of a transfer that has begun."""

UPDATABLE = frozenset({_S.JOINING, _S.SERVING})
"""States in which a replica is sent a new version. In the others it would not answer, or is about to leave."""

COMMITTED = frozenset({_S.SERVING, _S.DRAINING})
"""The replica has committed the version that it was sent last."""


def check_transition(replica_id: str, before: ReplicaState, after: ReplicaState) -> None:
    """Raise TransitionForbidden unless the table allows the transition. A forbidden one is a bug of the coordinator."""
    if after not in TRANSITIONS[before]:
        allowed = ", ".join(sorted(TRANSITIONS[before])) or "nowhere"
        raise TransitionForbidden(
            f"{replica_id} must go from {before} to one of {allowed}, got {after}; this is a bug of the coordinator"
        )
