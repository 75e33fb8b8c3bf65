"""One operator acts at a time: the one that holds the Lease.

    WAITING --the lease is free, or not renewed for LEASE_S--> LEADING --not renewed in time--> LOST: the process ends

A leader that cannot renew for RENEW_DEADLINE_S ends, before another may take over after LEASE_S: so no two act at once,
as far as the clocks of both run equally fast. Times of other machines are never compared: a lease is stale when it has
not changed for LEASE_S while this process looked.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import structlog

from specrl_operator.api import LEASE, Object, write_micro_time
from specrl_operator.cluster import Cluster, ClusterError

LEASE_S, RENEW_DEADLINE_S, RETRY_S = 15.0, 10.0, 2.0
REQUEST_S = 2.0
"""Deadline of a request about the lease: a turn makes two, and a turn that begins before RENEW_DEADLINE_S is over ends
before LEASE_S is."""

log = structlog.get_logger(__name__)


class Election:
    """One candidate for one lease. `turn` is called every RETRY_S."""

    def __init__(
        self,
        cluster: Cluster,
        lease: tuple[str, str],
        identity: str,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        """lease: namespace and name."""
        self._cluster, self._identity = cluster, identity
        self._namespace, self._name = lease
        self._clock, self._now = clock, now
        self._seen: tuple[str, float] | None = None  # the lease as it last changed, and when that was seen
        self._renewed: float | None = None
        self.is_leader = False

    def turn(self) -> bool:
        """Try for the lease, or renew it. Returns whether this process may act; False after True: end the process."""
        began = self._clock()
        try:
            is_held = self._hold()
        except ClusterError as error:
            log.warning("lease_not_renewed" if self.is_leader else "lease_not_read", reason=str(error))
            is_held = None
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

    def _hold(self) -> bool:
        """Whether the lease is ours after this. False: it is another's."""
        lease = self._cluster.get(LEASE, self._namespace, self._name)
        moment = write_micro_time(self._now())
        if lease is None:
            metadata = {"name": self._name, "namespace": self._namespace}
            body = LEASE.object(metadata, spec=self._spec(moment, moment, 0))
            return self._write(lambda: self._cluster.create(LEASE, body))
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") == self._identity:
            renewed = self._spec(spec.get("acquireTime", moment), moment, int(spec.get("leaseTransitions", 0)))
            return self._write(lambda: self._cluster.replace(LEASE, {**lease, "spec": renewed}))
        version = str(lease["metadata"].get("resourceVersion"))
        if self._seen is None or self._seen[0] != version:
            self._seen = version, self._clock()
        patience_s = float(spec.get("leaseDurationSeconds") or LEASE_S)
        if spec.get("holderIdentity") and self._clock() - self._seen[1] < patience_s:
            return False
        taken = self._spec(moment, moment, int(spec.get("leaseTransitions", 0)) + 1)
        return self._write(lambda: self._cluster.replace(LEASE, {**lease, "spec": taken}))

    @staticmethod
    def _write(write: Callable[[], Object]) -> bool:
        try:
            write()
        except ClusterError as error:
            if error.status == 409:  # somebody was faster
                return False
            raise
        return True

    def release(self) -> None:
        """Give the lease back, so that another need not wait for it. Best effort."""
        if not self.is_leader:
            return
        self.is_leader = False
        try:
            lease = self._cluster.get(LEASE, self._namespace, self._name)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                self._cluster.replace(LEASE, {**lease, "spec": {**lease["spec"], "holderIdentity": ""}})
        except ClusterError as error:
            log.warning("lease_not_released", reason=str(error))

    def _spec(self, acquired: str, renewed: str, transitions: int) -> Object:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(LEASE_S),
            "acquireTime": acquired,
            "renewTime": renewed,
            "leaseTransitions": transitions,
        }
