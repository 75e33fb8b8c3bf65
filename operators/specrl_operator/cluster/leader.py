"""Leader election: of several operators, the one that holds the Lease is active.

    WAITING --the lease is free, or not renewed for LEASE_S--> LEADING --not renewed in time--> LOST: the process exits

Invariant: no two operators are active at once, if their clocks run equally fast. A leader that cannot renew for
RENEW_DEADLINE_S exits; another may take over only after LEASE_S. Timestamps of other machines are never compared: a
lease is stale when this process has seen it unchanged for LEASE_S.

The main loop of `main.py` calls `acquire_or_renew` every RETRY_S.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import structlog

from specrl_operator import kinds
from specrl_operator.api import MANAGER, Object, format_micro_time
from specrl_operator.cluster.interface import Cluster, ClusterError

# LEASE_S, RENEW_DEADLINE_S and RETRY_S have the defaults of client-go's leader election.
LEASE_S = 15.0
"""Seconds without renewal after which another process may take the lease."""
RENEW_DEADLINE_S = 10.0
"""Seconds without renewal after which a leader stops being one."""
RETRY_S = 2.0
"""Seconds between two attempts."""
REQUEST_S = 2.0
"""Deadline of a request about the lease. An attempt makes two, so one that begins within RENEW_DEADLINE_S ends before
LEASE_S."""

log = structlog.get_logger(__name__)


class LeaderElection:
    """One candidate for one lease."""

    def __init__(
        self,
        cluster: Cluster,
        lease: tuple[str, str],
        identity: str,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        """lease: namespace and name. clock: monotonic seconds, for durations. now: wall time, written to the lease."""
        self._cluster = cluster
        self._identity = identity
        self._namespace, self._name = lease
        self._clock = clock
        self._now = now
        # The resource version of the lease, and when this process first saw it.
        self._seen: tuple[str, float] | None = None
        self._renewed: float | None = None
        self.is_leader = False

    def acquire_or_renew(self) -> bool:
        """Try to acquire the lease, or renew it. Returns whether this process leads.

        The process must exit when this returns False after it returned True.
        """
        # Before the request: the API server may write the renewal as early as now, and others count from there.
        began = self._clock()
        try:
            is_held = self._try_acquire_or_renew()
        except ClusterError as error:
            if error.status == 409:  # another candidate wrote the lease first
                is_held = False
            else:
                log.warning("lease_not_renewed" if self.is_leader else "lease_not_read", reason=str(error))
                is_held = None  # unknown: a leader goes on until RENEW_DEADLINE_S
        if is_held:
            self._renewed = began
        elif self.is_leader and (is_held is False or self._clock() - (self._renewed or 0.0) >= RENEW_DEADLINE_S):
            log.error("leadership_lost", lease=self._name)
            self.is_leader = False
            return False
        if is_held and not self.is_leader:
            log.info("leadership_won", lease=self._name, identity=self._identity)
            self.is_leader = True
        return self.is_leader

    def _try_acquire_or_renew(self) -> bool:
        """Write the lease if it is free, stale or ours. Returns whether this process holds it afterwards.

        Raises ClusterError, 409 if another process wrote the lease meanwhile.
        """
        lease = self._cluster.get(kinds.LEASE, self._namespace, self._name)
        moment = format_micro_time(self._now())
        if lease is None:
            metadata = {"name": self._name, "namespace": self._namespace}
            lease = kinds.LEASE.build_object(metadata, spec=self._build_lease_spec(moment, moment, 0))
            self._cluster.create(kinds.LEASE, lease, MANAGER)
            return True
        spec = lease.get("spec") or {}
        transitions = int(spec.get("leaseTransitions", 0))
        if spec.get("holderIdentity") == self._identity:
            renewed = self._build_lease_spec(spec.get("acquireTime", moment), moment, transitions)
            self._cluster.replace(kinds.LEASE, {**lease, "spec": renewed})
            return True
        version = str(lease["metadata"].get("resourceVersion"))
        if self._seen is None or self._seen[0] != version:
            self._seen = version, self._clock()
        # The holder's own duration, in case its version of the operator has another LEASE_S.
        patience_s = float(spec.get("leaseDurationSeconds") or LEASE_S)
        if spec.get("holderIdentity") and self._clock() - self._seen[1] < patience_s:
            return False
        taken = self._build_lease_spec(moment, moment, transitions + 1)
        self._cluster.replace(kinds.LEASE, {**lease, "spec": taken})
        return True

    def release_lease(self) -> None:
        """Release the lease, so that another process need not wait LEASE_S for it. Best effort."""
        if not self.is_leader:
            return
        self.is_leader = False
        try:
            lease = self._cluster.get(kinds.LEASE, self._namespace, self._name)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                self._cluster.replace(kinds.LEASE, {**lease, "spec": {**lease["spec"], "holderIdentity": ""}})
        except ClusterError as error:
            log.warning("lease_not_released", reason=str(error))

    def _build_lease_spec(self, acquired: str, renewed: str, transitions: int) -> Object:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(LEASE_S),
            "acquireTime": acquired,
            "renewTime": renewed,
            "leaseTransitions": transitions,
        }
