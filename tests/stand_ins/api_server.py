"""A Kubernetes API server in memory, for tests of the operator without a control plane.

It implements what the operator relies on: resource versions and 409, uids, generations, the status subresource, field
ownership (server-side apply), label selectors, watches that resume from a version or are Gone, garbage collection by
owner, and 404 for kinds that are not served.

Not implemented, so not tested here: admission, defaulting, CEL and schemas, RBAC, finalizers, pagination, conversion.
Only the lists that two managers share are merged by key: status.conditions, env, containers and ownerReferences. Any
other list belongs as a whole to the manager that applied it last.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

from specrl_operator.api import Object, is_controlled_by, trim_object
from specrl_operator.cluster.interface import ClusterError, Listing, WatchEvent, WatchExpired
from specrl_operator.kinds import Kind

CORE = frozenset(
    {
        "v1",
        "apps/v1",
        "batch/v1",
        "autoscaling/v2",
        "coordination.k8s.io/v1",
        "events.k8s.io/v1",
        "networking.k8s.io/v1",
        "policy/v1",
        "rbac.authorization.k8s.io/v1",
        "specrl.dev/v1alpha1",
    }
)
CREATED = "created"  # the part of an object whose fields `create` has set, until they are adopted
BY_KEY = {"conditions": "type", "containers": "name", "env": "name", "ownerReferences": "uid"}

Place = tuple[str, str, str, str]  # apiVersion, kind, namespace, name


def _copy_json(item: Any) -> Any:
    """Return a deep copy, as a round trip through JSON would."""
    return json.loads(json.dumps(item))


class Killed(BaseException):
    """The process that made the call died right after it. Not an Exception, so that no handler catches it."""


class FakeApiServer:
    """Implements `Cluster` in memory, and counts its calls."""

    def __init__(self, served: frozenset[str] = CORE) -> None:
        self.group_versions = served
        self.objects: dict[Place, Object] = {}
        self.calls: list[tuple[str, str]] = []
        """The calls that were made: verb and kind."""
        self.kill_after: int | None = None
        """Raise Killed after this number of calls has been carried out."""
        self.refuse: Callable[[str, Object], ClusterError | None] = lambda verb, body: None
        """Errors with which the server refuses calls, chosen by verb and body."""
        self.events: dict[str, list[Object]] = {}
        """FailedCreate events by the name of the object that could not create a pod."""
        self._managed: dict[tuple[Place, str, str], Object] = {}
        self._log: list[tuple[int, str, Place, Object]] = []
        self._oldest = 0
        self._version = 100
        self._uid = 0
        self._changed = threading.Condition()

    def copy(self) -> FakeApiServer:
        """Return a server with a copy of the state, and without watches."""
        return copy.deepcopy(self, {id(self._changed): threading.Condition()})

    # -- the interface ---------------------------------------------------------------------------------------------

    def list_served_versions(self) -> frozenset[str]:
        self._record_call("served", "")
        return self.group_versions

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        self._check_served(kind)
        found = _copy_json(self.objects.get(_place(kind, namespace, name)))
        self._record_call("get", kind.name)
        return found

    def list(self, kind: Kind, namespace: str | None, selector: str = "") -> Listing:
        self._check_served(kind)
        found = [
            trim_object(_copy_json(item))
            for place, item in sorted(self.objects.items())
            if place[:2] == (kind.api_version, kind.name)
            and namespace in (None, place[2])
            and _matches_selector(item, selector)
        ]
        self._record_call("list", kind.name)
        return Listing(found, str(self._version))

    def list_events(self, namespace: str, name: str, reason: str | None = None) -> list[Object]:
        self._record_call("list", "Event")
        return [_copy_json(it) for it in self.events.get(name, []) if reason in (None, it["reason"])]

    def watch(self, kind: Kind, namespace: str | None, selector: str, resource_version: str) -> Iterator[WatchEvent]:
        self._check_served(kind)
        self._record_call("watch", kind.name)
        if int(resource_version) < self._oldest:
            raise WatchExpired
        for version, what, place, item in list(self._log):
            is_asked = place[:2] == (kind.api_version, kind.name) and namespace in (None, place[2])
            if version > int(resource_version) and is_asked and _matches_selector(item, selector):
                yield WatchEvent(what, trim_object(_copy_json(item)))

    def apply(self, kind: Kind, body: Object, manager: str) -> Object:
        return self._apply(kind, body, manager, "")

    def apply_status(self, kind: Kind, body: Object, manager: str) -> Object:
        return self._apply(kind, body, manager, "status")

    def create(self, kind: Kind, body: Object, manager: str) -> Object:
        self._check_served(kind)
        self._check_refused("create", body)
        place = _place_of(kind, body)
        if place in self.objects:
            raise ClusterError(409, f"{kind.plural} {place[3]!r} already exists")
        item = self._init_metadata(kind, _copy_json(body))
        item["metadata"]["managedFields"] = [{"manager": manager, "operation": "Update"}]
        self._managed[place, manager, CREATED] = _list_fields(body, "")
        self._store(place, item, "ADDED")
        self._record_call("create", kind.name)
        return _copy_json(item)

    def merge(self, kind: Kind, body: Object) -> Object:
        self._check_served(kind)
        place = _place_of(kind, body)
        there = self.objects.get(place)
        if there is None:
            raise ClusterError(404, f"{kind.plural} {place[3]!r} not found")
        if body["metadata"].get("resourceVersion") not in (None, there["metadata"]["resourceVersion"]):
            raise ClusterError(409, "the object has been modified")
        for entry in body["metadata"].get("managedFields", ()):
            created = self._managed.pop((place, entry["manager"], CREATED), None)
            if created is not None and entry["operation"] == "Apply":
                self._managed[place, entry["manager"], ""] = created
        item = _merge_patch(_copy_json(there), body)
        self._store(place, item, "MODIFIED")
        self._record_call("merge", kind.name)
        return _copy_json(item)

    def replace(self, kind: Kind, body: Object) -> Object:
        self._check_served(kind)
        place = _place_of(kind, body)
        there = self.objects.get(place)
        if there is None:
            raise ClusterError(404, f"{kind.plural} {place[3]!r} not found")
        if body["metadata"].get("resourceVersion") != there["metadata"]["resourceVersion"]:
            raise ClusterError(409, "the object has been modified")
        item = _copy_json(body)
        item["metadata"]["uid"] = there["metadata"]["uid"]
        self._store(place, item, "MODIFIED")
        self._record_call("replace", kind.name)
        return _copy_json(item)

    def delete(self, kind: Kind, item: Object) -> None:
        self._check_served(kind)
        place = _place_of(kind, item)
        there = self.objects.get(place)
        if there is not None and there["metadata"]["uid"] == item["metadata"]["uid"]:
            self._remove(place)
        self._record_call("delete", kind.name)

    # -- changes by others -------------------------------------------------------------------------------------------

    def put_object(self, item: Object) -> Object:
        """Create or replace a whole object, status included, as a user, a controller or a kubelet would."""
        place: Place = (
            item["apiVersion"],
            item["kind"],
            item["metadata"].get("namespace", ""),
            item["metadata"]["name"],
        )
        before = self.objects.get(place)
        fresh = self._init_metadata(None, _copy_json(item)) if before is None else _copy_json(item)
        if before is not None:
            fresh["metadata"] = {**before["metadata"], **fresh["metadata"]}
            if fresh.get("spec") != before.get("spec"):
                fresh["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
        self._store(place, fresh, "ADDED" if before is None else "MODIFIED")
        return _copy_json(fresh)

    def compact_history(self) -> None:
        """Compact the history: watches that resume from an older version are Gone."""
        self._oldest = self._version
        self._log.clear()

    def objects_by_name(self, kind: Kind) -> dict[str, Object]:
        """Return objects of a kind by name, from all namespaces."""
        places = sorted(place for place in self.objects if place[:2] == (kind.api_version, kind.name))
        return {place[3]: _copy_json(self.objects[place]) for place in places}

    def list_writes(self) -> list[tuple[str, str]]:
        """Return the number of calls that changed something."""
        return [call for call in self.calls if call[0] not in ("get", "list", "watch", "served")]

    # -- inside -----------------------------------------------------------------------------------------------------

    def _record_call(self, verb: str, kind: str) -> None:
        self.calls.append((verb, kind))
        if self.kill_after is not None and len(self.calls) >= self.kill_after:
            raise Killed

    def _check_served(self, kind: Kind) -> None:
        if kind.api_version not in self.group_versions:
            raise ClusterError(404, f"the server could not find the requested resource: {kind.plural}")

    def _check_refused(self, verb: str, body: Object) -> None:
        error = self.refuse(verb, body)
        if error is not None:
            raise error

    def _init_metadata(self, kind: Kind | None, item: Object) -> Object:
        self._uid += 1
        item["metadata"].setdefault("uid", f"00000000-0000-4000-8000-{self._uid:012d}")
        item["metadata"].setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        item["metadata"].setdefault("generation", 1)
        return item

    def _store(self, place: Place, item: Object, what: str) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self.objects[place] = item
        self._log.append((self._version, what, place, _copy_json(item)))

    def _remove(self, place: Place) -> None:
        item = self.objects.pop(place)
        self._managed = {key: body for key, body in self._managed.items() if key[0] != place}
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self._log.append((self._version, "DELETED", place, item))
        for owned in [it for it, body in self.objects.items() if is_controlled_by(body, item["metadata"]["uid"])]:
            if owned in self.objects:
                self._remove(owned)

    def _apply(self, kind: Kind, body: Object, manager: str, part: str) -> Object:
        self._check_served(kind)
        self._check_refused("apply", body)
        place = _place_of(kind, body)
        there = self.objects.get(place)
        asked = body["metadata"].get("resourceVersion")
        if part == "status" and there is None:
            raise ClusterError(404, f"{kind.plural} {place[3]!r} not found")
        if asked is not None and there is not None and asked != there["metadata"]["resourceVersion"]:
            raise ClusterError(409, "the object has been modified")
        wanted = _list_fields(body, part)
        item = _copy_json(there) if there else {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {}}
        key = (place, manager, part)
        # Fields that this manager applied before and leaves out now are removed, unless other managers own them, too.
        others = [
            old
            for (at, who, at_part), old in self._managed.items()
            if at == place and (at_part == CREATED if who == manager else at_part in (part, CREATED))
        ]
        _remove_fields(item, self._managed.get(key, {}), wanted, others)
        _merge_fields(item, wanted)
        item["metadata"] |= {"name": place[3]} | ({"namespace": place[2]} if place[2] else {})
        self._managed[key] = wanted
        if there is None:
            item = self._init_metadata(kind, item)
        elif item.get("spec") != there.get("spec"):
            item["metadata"]["generation"] = there["metadata"].get("generation", 1) + 1
        if there != item:
            self._store(place, item, "ADDED" if there is None else "MODIFIED")
        self._record_call("apply" if not part else "applyStatus", kind.name)
        return _copy_json(item)


def _list_fields(body: Object, part: str) -> Object:
    """Return the fields of a body that a manager owns: those of the status, or all others."""
    fields: Object = {
        name: value
        for name, value in _copy_json(body).items()
        if (name == "status") == (part == "status") and name not in ("apiVersion", "kind")
    }
    meta = fields.pop("metadata", {}) if part == "status" else fields.get("metadata", {})
    for name in ("uid", "resourceVersion", "namespace", "name"):
        meta.pop(name, None)
    return fields


def _merge_patch(item: Any, change: Any) -> Any:
    """Return the item after a JSON merge patch (RFC 7396)."""
    if not isinstance(change, dict):
        return _copy_json(change)
    merged = item if isinstance(item, dict) else {}
    for name, value in change.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_patch(merged.get(name), value)
    return merged


def _merge_fields(item: Any, wanted: Any) -> None:
    """Merge the wanted fields into `item`."""
    for name, value in wanted.items():
        key = BY_KEY.get(name)
        if isinstance(value, dict):
            if not isinstance(item.get(name), dict):
                item[name] = {}
            _merge_fields(item[name], value)
        elif isinstance(value, list) and key is not None:
            there = item.setdefault(name, [])
            for entry in value:
                same = next((it for it in there if it.get(key) == entry.get(key)), None)
                if same is None:
                    there.append(_copy_json(entry))
                else:
                    _merge_fields(same, entry)
        else:
            item[name] = _copy_json(value)


def _remove_fields(item: Any, before: Any, wanted: Any, others: list[Any]) -> None:
    """Remove from `item` the fields that the manager wanted before, no longer wants, and no other manager owns."""
    for name, old in before.items():
        if name not in item:
            continue
        new = wanted.get(name)
        theirs = [it[name] for it in others if name in it]
        key = BY_KEY.get(name)
        if isinstance(old, dict) and isinstance(item[name], dict):
            _remove_fields(
                item[name], old, new if isinstance(new, dict) else {}, [it for it in theirs if isinstance(it, dict)]
            )
            if not item[name] and new is None and not theirs:
                del item[name]
        elif isinstance(old, list) and key is not None:
            kept = {entry.get(key) for entry in new or []} | {entry.get(key) for it in theirs for entry in it}
            gone = {entry.get(key) for entry in old} - kept
            item[name] = [entry for entry in item[name] if entry.get(key) not in gone]
        elif new is None and not theirs:
            del item[name]


def _place(kind: Kind, namespace: str | None, name: str) -> Place:
    return kind.api_version, kind.name, namespace or "", name


def _place_of(kind: Kind, item: Object) -> Place:
    return _place(kind, item["metadata"].get("namespace"), item["metadata"]["name"])


def _matches_selector(item: Object, selector: str) -> bool:
    labels = item["metadata"].get("labels") or {}
    wanted = [part.split("=", 1) for part in selector.split(",") if part]
    return all(labels.get(name) == value for name, value in wanted)
