"""What a job's children depend on beside the job: the operator's settings, and what the cluster offers. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from specrl_operator.api import Kind


@dataclass(frozen=True)
class Settings:
    """The operator's flags; the same for every job."""

    control_image: str = "specrl/control:0.1.0"
    generation_image: str = "specrl/generation:0.1.0"
    trainer_image: str = "specrl/trainer:0.1.0"
    store_image: str = "valkey/valkey:8.1-alpine"
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    store_size: str = "8Gi"
    store_class: str | None = None
    """StorageClass of the store's volume; None: the cluster's default."""
    metrics_namespaces: tuple[str, ...] = ()
    """Namespaces whose pods may scrape metrics."""
    api_server_ports: tuple[int, ...] = (443, 6443)
    """Of the API server, by its Service and by itself: coordinators may reach them, wherever they are."""
    prometheus_url: str | None = None
    """What KEDA's triggers ask."""


class Want(StrEnum):
    """How much of a job is to run.

    WAITING -> RUNNING -> ENDED; RUNNING -> SAVING -> STOPPED when it is suspended, and on the way to a failure.
    """

    WAITING = "everything but what takes nodes: a claim template is not there yet"
    RUNNING = "everything"
    SAVING = "all but the coordinator, which saves the run while the others still answer"
    STOPPED = "nothing that has pods"
    ENDED = "the coordinator, which goes on to show the finished run, and a trainer that ends by itself"


@dataclass(frozen=True)
class Facts:
    """What one reconciliation goes by."""

    settings: Settings = Settings()
    served: frozenset[Kind] = field(default_factory=frozenset)
    """Optional kinds that the API server serves."""
    want: Want = Want.RUNNING
    has_plain_trainer: bool = False
    """The trainer runs as a Job since JobSet was not installed when it started; it stays one until it ends."""

    def serves(self, kind: Kind) -> bool:
        """Whether an optional kind is there."""
        return kind in self.served
