"""The interface of an API server. `kube.py` and the tests' stand-in implement it; one contract suite tests both.

Invariant: every call but `list` and `watch` is one request and depends on no earlier call. The process may die after
any of them; a test kills it after each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from specrl_operator.api import Object
from specrl_operator.kinds import Kind


class ClusterError(Exception):
    """A request failed. `status` is the HTTP status, 0 if there was no answer; the message says what was requested."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_refused(self) -> bool:
        """Whether the API server rejects the object itself, so that repeating the request unchanged fails again."""
        return self.status in (400, 403, 405, 422)


class WatchExpired(ClusterError):
    """A watch cannot continue from its resource version (HTTP 410): the caller must list again."""

    def __init__(self, message: str = "too old resource version") -> None:
        super().__init__(410, message)


@dataclass(frozen=True)
class Listing:
    """Listed objects, and the resource version to watch from."""

    items: list[Object]
    resource_version: str


@dataclass(frozen=True)
class WatchEvent:
    """One event of a watch: ADDED, MODIFIED, DELETED or BOOKMARK."""

    type: str
    item: Object


class Cluster(Protocol):
    """One API server. Requests have deadlines. Every method raises ClusterError when its request fails."""

    def list_served_versions(self) -> frozenset[str]:
        """List the group versions that the API server serves, as in `apps/v1`."""

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """Get one object; None if it does not exist."""

    def list(self, kind: Kind, namespace: str | None, selector: str = "") -> Listing:
        """List the objects with these labels, of one namespace or of all, trimmed by `api.trim_object`."""

    def list_events(self, namespace: str, name: str, reason: str | None = None) -> Sequence[Object]:
        """List the events about objects of this name, whatever their kind. reason: only those with this reason."""

    def watch(self, kind: Kind, namespace: str | None, selector: str, resource_version: str) -> Iterator[WatchEvent]:
        """Yield the changes after a resource version, trimmed as in `list`. Ends within minutes.

        Raises WatchExpired if the version is too old.
        """

    def apply(self, kind: Kind, body: Object, manager: str) -> Object:
        """Apply an object (server-side, forced): create it, or change the fields of this field manager."""

    def apply_status(self, kind: Kind, body: Object, manager: str) -> Object:
        """Apply the status subresource. 409 if `metadata.resourceVersion` is given and no longer the object's."""

    def create(self, kind: Kind, body: Object, manager: str) -> Object:
        """Create an object for this field manager; 409 if it exists."""

    def merge(self, kind: Kind, body: Object) -> Object:
        """Merge fields into an object; None removes one. 409 if `metadata.resourceVersion` is no longer the object's.

        A change of `metadata.managedFields` changes which fields a manager's next `apply` removes.
        """

    def replace(self, kind: Kind, body: Object) -> Object:
        """Replace an object; 409 if `metadata.resourceVersion` is no longer the object's."""

    def delete(self, kind: Kind, item: Object) -> None:
        """Delete an object by its uid. The objects that it owns are deleted in the background.

        No error if it does not exist, or if another object has its name now.
        """
