"""What the operator asks of an API server, as an interface; `kube.py` and the tests' API server keep its promises.

Every call is one request, and may be the last thing that this process does: a test raises after each. So no call may
depend on what an earlier one left in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from specrl_operator.api import Kind, Object


class ClusterError(Exception):
    """A request failed. `status` is HTTP's, 0 when there was no answer; what it was about is in the message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_refused(self) -> bool:
        """Whether the API server refuses the object itself: repeating the request unchanged gives the same."""
        return self.status in (400, 403, 405, 422)


class Gone(ClusterError):
    """A watch can not go on from where it was: list again (HTTP 410)."""

    def __init__(self, message: str = "too old resource version") -> None:
        super().__init__(410, message)


@dataclass(frozen=True)
class Listing:
    """Objects, and from where to watch them."""

    items: list[Object]
    resource_version: str


@dataclass(frozen=True)
class Change:
    """One event of a watch: ADDED, MODIFIED, DELETED or BOOKMARK."""

    what: str
    item: Object


class Cluster(Protocol):
    """One API server. Every method but `watch` is one request with a deadline, and raises ClusterError."""

    def served(self) -> frozenset[str]:
        """Group and version of everything that is served, as `apps/v1`."""

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """One object; None when there is none."""

    def list(self, kind: Kind, namespace: str | None, selector: str = "") -> Listing:
        """All objects that carry these labels, of one namespace or of all; of each what `api.seen` keeps."""

    def watch(self, kind: Kind, namespace: str | None, selector: str, resource_version: str) -> Iterator[Change]:
        """What changes from there on, as in a list; ends by itself within minutes. Raises Gone."""

    def apply(self, kind: Kind, body: Object, manager: str) -> Object:
        """Server-side apply under that field manager, by force. Makes the object, or changes the manager's fields."""

    def apply_status(self, kind: Kind, body: Object, manager: str) -> Object:
        """The same for the status alone; 409 unless `metadata.resourceVersion`, if it is given, is still its own."""

    def create(self, kind: Kind, body: Object) -> Object:
        """Make an object; 409 when there is one."""

    def replace(self, kind: Kind, body: Object) -> Object:
        """Replace an object; 409 unless `metadata.resourceVersion` is still its own."""

    def delete(self, kind: Kind, item: Object) -> None:
        """Delete this very object, by its uid, and what it owns. No error when it is gone, or another is there."""
