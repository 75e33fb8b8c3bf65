"""Owner reference and hashes of a child. Pure.

Two annotations hold hashes of what the operator applied. The hash of the whole child decides whether it must be
patched, and so does a change by others: of a replica count, a NetworkPolicy, a Service, a Role or its subjects. The
hash of its pod template decides whether the patch would restart pods. `choose_action` decides by both.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Any

from specrl_operator import kinds
from specrl_operator.api import (
    ATTEMPT_ANNOTATION,
    HASH_ANNOTATION,
    RUN_FILE_ANNOTATION,
    TEMPLATE_ANNOTATION,
    Job,
    Object,
)
from specrl_operator.kinds import Kind
from specrl_operator.observed import TRAINER_KINDS
from specrl_operator.plan.restarts import read_restarts

CREATE_ONLY_KINDS = (*TRAINER_KINDS, kinds.COMPUTE_DOMAIN)
"""Kinds that are created and deleted but never patched. A ComputeDomain's spec is immutable."""
LONG_RUNNING_KINDS = (kinds.DEPLOYMENT, kinds.STATEFUL_SET, kinds.LEADER_WORKER_SET)
"""Kinds with long-running pods. While they run, only their replica count is patched: upgrading the operator, or giving
it other images, must not restart a pod. Other changes are applied while the job is suspended."""
REPAIRED_FIELDS = ("spec", "rules", "subjects")
"""Fields of REPAIRED_KINDS."""


class ChildAction(StrEnum):
    """The action on one desired child."""

    APPLY = "created, or patched as a whole"
    SCALE = "its replica count alone is patched: it runs, and would get another pod template"
    NONE = "left as it is: it is up to date"


def add_revision(job: Job, child: Object) -> Object:
    """Return a child with its owner reference, namespace and hashes."""
    notes = dict(child["metadata"].get("annotations") or {})
    if kinds.JOB.is_kind_of(child):
        notes[ATTEMPT_ANNOTATION] = str(read_restarts(job))
    metadata = {
        **child["metadata"],
        "namespace": job.namespace,
        "ownerReferences": [job.owner_reference],
        "annotations": notes,
    }
    complete = {**child, "metadata": metadata}
    # `complete` holds `notes` itself: the second hash covers the first, but not itself.
    if kind_of(child) in LONG_RUNNING_KINDS:
        notes[TEMPLATE_ANNOTATION] = _hash_object({**child["spec"], "replicas": None})
    notes[HASH_ANNOTATION] = _hash_object(complete)
    return complete


def choose_action(known: Object | None, child: Object) -> ChildAction:
    """Choose what to do about a desired child. known: the existing one; None if there is none."""
    if known is not None and _is_up_to_date(known, child):
        return ChildAction.NONE
    if known is not None and _would_restart_pods(known, child):
        return ChildAction.SCALE
    return ChildAction.APPLY


def _is_up_to_date(known: Object, child: Object) -> bool:
    """Whether an existing child needs no patch: it is what the operator applied, and nobody has changed it since."""
    kind = kind_of(child)
    if kind in CREATE_ONLY_KINDS:
        return True
    if _read_annotation(known, HASH_ANNOTATION) != _read_annotation(child, HASH_ANNOTATION):
        return False
    if kind in LONG_RUNNING_KINDS:
        return bool(known["spec"].get("replicas", 1) == child["spec"].get("replicas", 1))
    if kind is kinds.SERVICE:
        return _contains(known.get("spec"), child["spec"])
    # Whole, since one more selector can open a policy. The API server adds no defaults to what the operator writes.
    return kind not in kinds.REPAIRED_KINDS or all(known.get(name) == child.get(name) for name in REPAIRED_FIELDS)


def _contains(found: Any, wanted: Any) -> bool:
    """Whether JSON that the API server has completed with defaults still has the wanted values."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(_contains(found.get(name), value) for name, value in wanted.items())
    if isinstance(wanted, list):
        same_length = isinstance(found, list) and len(found) == len(wanted)
        return same_length and all(map(_contains, found, wanted))
    return bool(found == wanted)


def _would_restart_pods(known: Object, child: Object) -> bool:
    """Whether a child runs, keeps running, and would get another pod template."""
    if kind_of(child) not in LONG_RUNNING_KINDS:
        return False
    both = known["spec"].get("replicas", 1), child["spec"].get("replicas", 1)
    return min(both) > 0 and _read_annotation(known, TEMPLATE_ANNOTATION) != _read_annotation(
        child, TEMPLATE_ANNOTATION
    )


def prepare_apply(existing: Object, child: Object, manager: str) -> Object | None:
    """Build the merge patch that an existing child needs before it is applied; None if it needs none.

    An apply removes no field but those that its manager has applied. Fields that the manager's creation of the object
    has set count as updated: their record is turned into that of an apply, as client-go's csaupgrade does. Fields that
    others have added to what is kept as it is (REPAIRED_FIELDS) are removed.
    """
    entries = [dict(entry) for entry in existing["metadata"].get("managedFields", ())]
    of_creation = (manager, "Update", "")
    created = [it for it in entries if (it["manager"], it["operation"], it.get("subresource", "")) == of_creation]
    for entry in created:
        entry["operation"] = "Apply"
    change: Object = {}
    if kind_of(child) in kinds.REPAIRED_KINDS:
        change = {name: _list_removals(existing.get(name), child.get(name)) for name in REPAIRED_FIELDS}
        change = {name: removals for name, removals in change.items() if removals}
    if not created and not change:
        return None
    metadata = {name: existing["metadata"][name] for name in ("name", "namespace", "resourceVersion")}
    if created:
        metadata["managedFields"] = entries
    return kind_of(child).build_object(metadata, **change)


def _list_removals(found: Any, wanted: Any) -> Object:
    """List the fields of an object that are not wanted, as a merge patch. An apply replaces lists as a whole."""
    if not isinstance(found, dict) or not isinstance(wanted, dict):
        return {}
    nested = {name: _list_removals(value, wanted[name]) for name, value in found.items() if name in wanted}
    return {name: removals for name, removals in nested.items() if removals} | dict.fromkeys(found.keys() - wanted)


def find_run_file(workload: Object) -> str | None:
    """Return the name of the ConfigMap that the pod template of an existing workload mounts; None without one."""
    return _read_annotation(workload, RUN_FILE_ANNOTATION)


def kind_of(child: Object) -> Kind:
    """Return the kind of a child."""
    return next(kind for kind in kinds.CHILD_KINDS if kind.is_kind_of(child))


def _hash_object(child: Object) -> str:
    return hashlib.sha256(json.dumps(child, sort_keys=True).encode()).hexdigest()[:32]


def _read_annotation(item: Object, annotation: str) -> str | None:
    found: str | None = (item["metadata"].get("annotations") or {}).get(annotation)
    return found
