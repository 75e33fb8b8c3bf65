"""The algorithm of Kubernetes' HorizontalPodAutoscaler for one external metric, with simulated time.

Read from Kubernetes 1.36, pkg/controller/podautoscaler: `GetExternalPerPodMetricReplicas`, `GetExternalMetricReplicas`,
`stabilizeRecommendationWithBehaviors` and `convertDesiredReplicasWithBehaviorRate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 0.1  # --horizontal-pod-autoscaler-tolerance
SYNC_S = 15.0  # --horizontal-pod-autoscaler-sync-period


@dataclass
class HorizontalAutoscaler:
    """One autoscaler. spec: of a HorizontalPodAutoscaler with one external metric."""

    spec: dict[str, Any]
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def sync(self, now_s: float, current: int, metric: float | None) -> int:
        """Return the replicas that are wanted at this time. metric: None if there is no data."""
        if metric is None:
            return current
        if not self._recommended:
            self._recommended.append((now_s, current))
        desired = self._stabilize(now_s, current, self._propose(current, metric))
        desired = self._limit(now_s, current, desired)
        desired = max(self.spec["minReplicas"], min(self.spec["maxReplicas"], desired))
        if desired != current:
            self._changes.append((now_s, desired - current))
        return desired

    def _propose(self, current: int, metric: float) -> int:
        target = self.spec["metrics"][0]["external"]["target"]
        if target["type"] == "AverageValue":
            per_replica = int(target["averageValue"].removesuffix("m")) / 1000
            ratio = metric / (per_replica * current)
            return current if abs(ratio - 1) <= TOLERANCE else math.ceil(metric / per_replica)
        ratio = metric / float(target["value"])
        return current if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * current)

    def _stabilize(self, now_s: float, current: int, desired: int) -> int:
        self._recommended.append((now_s, desired))
        behavior = self.spec["behavior"]
        up_s, down_s = (behavior[way].get("stabilizationWindowSeconds", 0) for way in ("scaleUp", "scaleDown"))
        least = min(count for at_s, count in self._recommended if at_s >= now_s - up_s)
        most = max(count for at_s, count in self._recommended if at_s >= now_s - down_s)
        self._recommended = [it for it in self._recommended if it[0] >= now_s - max(up_s, down_s)]
        return min(max(current, least), most)

    def _limit(self, now_s: float, current: int, desired: int) -> int:
        if desired == current:
            return current
        way = "scaleUp" if desired > current else "scaleDown"
        (policy,) = self.spec["behavior"][way]["policies"]
        started = current - sum(change for at_s, change in self._changes if at_s > now_s - policy["periodSeconds"])
        if way == "scaleUp":
            return min(desired, max(current, started + policy["value"]))
        return max(desired, min(current, started - policy["value"]))
