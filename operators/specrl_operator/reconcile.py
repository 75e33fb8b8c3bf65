"""One look at one RLJob: read, decide, apply, remove, say so. The only module that changes a cluster.

    read -> accepted? -> ending? -> what is wanted -> apply what differs -> remove what is not wanted -> status, events

Everything is read anew, and every write is one that a repetition would not do again: so the process may die between
any two requests, and whoever looks next ends in the same state. It waits for nothing: `reconcile` returns when to look
again, and changes of children wake it before.

Pods that run are never restarted from here. What runs once is never changed: a JobSet or Job is made, left alone, and
removed. Kueue writes into its pod templates, and JobSet refuses changes while it runs.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Protocol

import structlog

from specrl.errors import SpecInvalid
from specrl.spec.cluster import NvLink, Profile
from specrl_operator import children, events, placement, pods, tls
from specrl_operator.acceptance import Refusal, refusal_of, secret_refusal
from specrl_operator.api import (
    ATTEMPT_ANNOTATION,
    CHILDREN,
    CLAIM_TEMPLATE,
    COMPONENT_LABEL,
    COMPUTE_DOMAIN,
    DEPLOYMENT,
    GENERATION,
    HASH_ANNOTATION,
    JOB,
    JOB_LABEL,
    JOB_SET,
    LEADER_WORKER_SET,
    MANAGER,
    OPTIONAL,
    POD,
    RLJOB,
    SECRET,
    STATEFUL_SET,
    STORE,
    TEMPLATE_ANNOTATION,
    TRAINER,
    Job,
    Kind,
    Object,
    condition_of,
    is_controlled_by,
    read_job,
    read_time,
    write_micro_time,
    write_time,
)
from specrl_operator.cluster import Cluster, ClusterError
from specrl_operator.facts import Facts, Settings, Want
from specrl_operator.status import (
    LONGEST_MESSAGE,
    TRAINER_END_S,
    Ending,
    Observed,
    attempt_of,
    ending_of,
    has_trainer_ended,
    next_moment,
    summarize,
    want_of,
)
from specrl_operator.topology import Topology

RUN_ONCE = (JOB_SET, JOB)
MADE_ONCE = (*RUN_ONCE, COMPUTE_DOMAIN)
"""Kinds whose specs must not, or cannot, be changed."""
SCALED = (DEPLOYMENT, STATEFUL_SET, LEADER_WORKER_SET)
"""Kinds that run pods for as long as they are there. Of what runs only the number of replicas is changed: an operator
that is replaced by a newer one, or gets other images, must not restart a single pod. Others come with a suspension."""
SCALE_MANAGER = f"{MANAGER}-scale"
RETRY_S = 15.0
"""When to look again at what was refused or is not served: an admin may have changed it."""
OPERATOR_NAMES = (None, "specrl.dev/operator")

log = structlog.get_logger(__name__)


class Cache(Protocol):
    """Children as they were moments ago (`watches.py`)."""

    @property
    def served(self) -> frozenset[str]:
        """Group versions that the API server serves."""

    def find(self, kind: Kind, namespace: str, job: str) -> list[Object]:
        """Objects of a kind that carry the job's label."""


class Reconciler:
    """Brings clusters to what RLJobs ask for."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        now: Callable[[], datetime],
        cache: Cache | None = None,
        show: Callable[[tuple[str, str], Object, Object], None] = lambda key, before, after: None,
    ) -> None:
        """cache: somebody who knows children and what is served without asking; without one they are asked for.

        show: is told of every look, with a job's status before and after.
        """
        self._cluster, self._settings, self._now, self._cache, self._show = cluster, settings, now, cache, show
        self._topology = Topology(cluster, now)

    def reconcile(self, namespace: str, name: str) -> float | None:
        """Look at one RLJob once. Returns the seconds until the next look; None: when something changes.

        Raises ClusterError when a request failed for no fault of the job: the caller looks again later.
        """
        item = self._cluster.get(RLJOB, namespace, name)
        if item is None or "deletionTimestamp" in item["metadata"]:
            return None  # what it owns goes with it
        if item["spec"].get("managedBy") not in OPERATOR_NAMES:
            return None
        try:
            job = read_job(item)
        except SpecInvalid as error:
            self._say_invalid(item, str(error))
            return None
        if self._is_expired(job):
            log.info("job_expired", namespace=namespace, name=name)
            self._cluster.delete(RLJOB, item)
            return None
        return self._drive(job)

    # -- one job ---------------------------------------------------------------------------------------------------

    def _drive(self, job: Job) -> float | None:
        versions = self._cluster.served() if self._cache is None else self._cache.served
        now, owned = self._now(), self._owned(job, versions)
        facts = self._facts(job, owned, versions)
        observed = self._observed(job, owned, facts)
        refusal = refusal_of(job, facts)
        ending = ending_of(job, observed, now)
        has_begun = observed.trainer is not None or observed.generation is not None
        if refusal is None or ending is not None or (has_begun and job.spec.suspend):
            facts = replace(facts, want=want_of(job, facts, observed, ending))
            refusal = self._converge(job, facts, observed, owned, ending) or refusal
        observed = replace(observed, refusal=refusal)
        status = summarize(job, facts, observed, now)
        self._publish(job, status)
        self._show((job.namespace, job.name), job.status, status)
        after = next_moment(job, status, now)
        return after if refusal is None else min(RETRY_S, after or RETRY_S)

    def _facts(self, job: Job, owned: dict[Kind, list[Object]], versions: frozenset[str]) -> Facts:
        served = frozenset(kind for kind in OPTIONAL if _is_served(kind, versions))
        trainers = [item for kind in RUN_ONCE for item in owned[kind] if _is_part(item, TRAINER)]
        if trainers and not owned[COMPUTE_DOMAIN] and job.spec.placement.nvlink is NvLink.PREFERRED:
            served -= {COMPUTE_DOMAIN}  # it was not there when the pods were made, which have no channel
        plain = any(JOB.is_of(item) and "deletionTimestamp" not in item["metadata"] for item in trainers)
        return Facts(self._settings, served, has_plain_trainer=plain)

    def _owned(self, job: Job, versions: frozenset[str]) -> dict[Kind, list[Object]]:
        """The job's children by kind. A kind that is not served has none."""
        found = {}
        for kind in CHILDREN:
            items = self._labelled(kind, job) if _is_served(kind, versions) else []
            found[kind] = [item for item in items if is_controlled_by(item, job.uid)]
        return found

    def _labelled(self, kind: Kind, job: Job) -> list[Object]:
        if self._cache is not None:
            return self._cache.find(kind, job.namespace, job.name)
        return self._cluster.list(kind, job.namespace, f"{JOB_LABEL}={job.name}").items

    def _observed(self, job: Job, owned: dict[Kind, list[Object]], facts: Facts) -> Observed:
        trainers = [item for kind in RUN_ONCE for item in owned[kind] if _is_part(item, TRAINER)]
        replicas = [
            item for kind in (STATEFUL_SET, LEADER_WORKER_SET) for item in owned[kind] if _is_part(item, GENERATION)
        ]
        template = None
        if placement.has_domain(job, facts):
            template = self._cluster.get(CLAIM_TEMPLATE, job.namespace, placement.claim_template(job))
        of_job = [pod for pod in self._labelled(POD, job) if pod["metadata"]["labels"].get(COMPONENT_LABEL)]
        domain = None
        if job.spec.placement.profile is Profile.GB200:
            bound = [pod["spec"].get("nodeName") for pod in of_job if _is_part(pod, TRAINER)]
            domain = self._topology.domains(filter(None, bound), job.spec.placement.topology_key)
        return Observed(
            trainer=trainers[0] if trainers else None,
            generation=replicas[0] if replicas else None,
            pods=tuple(of_job),
            has_claim_template=template is not None,
            domain=domain,
        )

    # -- to what is wanted -----------------------------------------------------------------------------------------

    def _converge(
        self,
        job: Job,
        facts: Facts,
        observed: Observed,
        owned: dict[Kind, list[Object]],
        ending: Ending | None,
    ) -> Refusal | None:
        """Apply and remove. Returns why the job cannot have what it needs; the rest is done all the same."""
        wanted = self._wanted(job, facts, observed, ending)
        known = {(item["kind"], item["metadata"]["name"]): item for items in owned.values() for item in items}
        if facts.want is not Want.STOPPED:
            refusal = self._keep_secrets(job)
            if refusal is not None:
                return refusal
        refusal, made = None, list[tuple[Kind, str]]()
        for child in wanted:
            refusal = self._keep(job, child, known.get((child["kind"], child["metadata"]["name"])), made)
            if refusal is not None:
                break  # what comes after needs what comes before
        if made:
            self._tell(events.created(job, made))
        if refusal is not None:
            return refusal
        kept = {(child["kind"], child["metadata"]["name"]) for child in wanted}
        for kind in reversed(CHILDREN):
            for item in owned[kind]:
                if (item["kind"], item["metadata"]["name"]) not in kept and "deletionTimestamp" not in item["metadata"]:
                    log.info("child_removed", kind=kind.name, namespace=job.namespace, name=item["metadata"]["name"])
                    self._cluster.delete(kind, item)
        return None

    def _wanted(self, job: Job, facts: Facts, observed: Observed, ending: Ending | None) -> list[Object]:
        """The children that are to be there, each with owner and hash."""
        found = children.desired(job, facts)
        trainer, is_running = observed.trainer, facts.want is Want.RUNNING
        attempt = int(job.status.get("restarts") or 0)
        is_spent = trainer is not None and JOB.is_of(trainer) and attempt_of(trainer) < attempt
        if is_spent and is_running:  # its failure is counted: it is removed now, and made again when it is gone
            found = [child for child in found if not JOB.is_of(child)]
        if not is_running:
            is_over = facts.want is Want.STOPPED or (ending is not None and self._took_long(job))
            found = [child for child in found if not _is_once(child)]
            if trainer is not None and (not is_over or (ending is not None and has_trainer_ended(observed))):
                found.append(trainer)  # never made anew, and never changed
        return [self._complete(job, child, attempt) for child in found]

    def _took_long(self, job: Job) -> bool:
        """Whether a trainer has had the time to end by itself."""
        ended = job.status.get("completionTime")
        return ended is not None and self._now() >= read_time(ended) + timedelta(seconds=TRAINER_END_S)

    def _complete(self, job: Job, child: Object, attempt: int) -> Object:
        meta = dict(child["metadata"])
        if "uid" in meta:
            return child  # it is what is there
        meta |= {"namespace": job.namespace, "ownerReferences": [job.owner]}
        notes = dict(meta.get("annotations") or {})
        if JOB.is_of(child):
            notes[ATTEMPT_ANNOTATION] = str(attempt)
        complete = {**child, "metadata": {**meta, "annotations": notes}}
        if _kind_of(child) in SCALED:
            notes[TEMPLATE_ANNOTATION] = _hash({**child["spec"], "replicas": None})
        notes[HASH_ANNOTATION] = _hash(complete)
        return complete

    def _keep(self, job: Job, child: Object, known: Object | None, made: list[tuple[Kind, str]]) -> Refusal | None:
        """Make or change one child, unless it is as it is to be. What was made is added to `made`."""
        kind = _kind_of(child)
        if known is not None:
            if kind in MADE_ONCE or _note(known, HASH_ANNOTATION) == _note(child, HASH_ANNOTATION):
                return None
            if kind in SCALED and _runs_otherwise(known, child):
                self._scale(kind, child, known)
                return None
        name = child["metadata"]["name"]
        try:
            there = self._cluster.get(kind, job.namespace, name)
            if there is not None:
                if not is_controlled_by(there, job.uid):
                    return _conflict(kind, name)
                if kind in MADE_ONCE or "deletionTimestamp" in there["metadata"]:
                    return None
            self._cluster.apply(kind, child, MANAGER)
        except ClusterError as error:
            if not error.is_refused:
                raise
            return Refusal("ChildRejected", f"{kind.name} {name} was refused: {error}; change the job accordingly")
        if there is None:
            log.info("child_created", kind=kind.name, namespace=job.namespace, name=name)
            made.append((kind, name))
        return None

    def _scale(self, kind: Kind, child: Object, known: Object) -> None:
        """Change the number of replicas of what runs, and nothing else."""
        replicas = child["spec"]["replicas"]
        if known["spec"].get("replicas") != replicas:
            meta = {"name": child["metadata"]["name"], "namespace": child["metadata"]["namespace"]}
            self._cluster.apply(kind, kind.object(meta, spec={"replicas": replicas}), SCALE_MANAGER)

    def _keep_secrets(self, job: Job) -> Refusal | None:
        """What the job's own Secrets are, made once: the store's password, and those that cert-manager fills.

        Refuses the job, too, while a Secret of its user's is not there.
        """
        own = tls.own_secrets(job) | ({STORE: job.child(STORE)} if pods.needs_store(job) else {})
        for component, name in own.items():
            there = self._cluster.get(SECRET, job.namespace, name)
            if there is None:
                metadata: Object = {"name": name, "namespace": job.namespace, "labels": job.labels(component)}
                metadata["ownerReferences"] = [job.owner]
                content: Object = {}
                if component == STORE:
                    content = {"immutable": True, "stringData": {"password": secrets.token_urlsafe(32)}}
                self._cluster.create(SECRET, SECRET.object(metadata, type="Opaque", **content))
            elif not is_controlled_by(there, job.uid):
                return _conflict(SECRET, name)
        given = job.spec.tls.secret_name
        if given is None:
            return None
        return secret_refusal(job, self._cluster.get(SECRET, job.namespace, given))

    # -- what is said ----------------------------------------------------------------------------------------------

    def _publish(self, job: Job, status: Object) -> None:
        """One write of the status, if it is another; then events of what has changed."""
        metadata = {"name": job.name, "namespace": job.namespace, "resourceVersion": job.resource_version}
        if self._write_status(metadata, job.status, status):
            for event in events.transitions(job, status):
                self._tell(event)

    def _write_status(self, metadata: Object, before: Object, status: Object) -> bool:
        """Write a status in place of the one before, if it is another. Returns whether it was written.

        Refused (409) when the job was written to since it was read: then this is another's status, or an older one's.
        """
        if _is_same(before, status):
            return False
        self._cluster.apply_status(RLJOB, RLJOB.object(metadata, status=status), MANAGER)
        return True

    def _say_invalid(self, item: Object, message: str) -> None:
        """The spec cannot be read: whatever runs goes on, and the job says what to mend."""
        meta, before = item["metadata"], item.get("status") or {}
        kept = [it for it in before.get("conditions") or [] if it["type"] not in ("Accepted", *events.OTHERS_WRITE)]
        said = condition_of(before, "Accepted")
        moment = said["lastTransitionTime"] if said.get("status") == "False" else write_time(self._now())
        accepted = {
            "type": "Accepted",
            "status": "False",
            "reason": "SpecInvalid",
            "message": message[:LONGEST_MESSAGE],
            "lastTransitionTime": moment,
            "observedGeneration": meta.get("generation", 0),
        }
        own = {name: value for name, value in before.items() if name not in ("conditions", "progress")}
        status = own | {
            "observedGeneration": meta.get("generation", 0),
            "state": before.get("state", "NotAccepted") if kept else "NotAccepted",
            "conditions": [accepted, *kept],
        }
        self._write_status({name: meta[name] for name in ("name", "namespace", "resourceVersion")}, before, status)

    def _tell(self, event: Object) -> None:
        """Events are for people: one that is lost is not missed."""
        try:
            self._cluster.create(events.KIND, event | {"eventTime": write_micro_time(self._now())})
        except ClusterError as error:
            log.warning("event_lost", reason=str(error))

    def _is_expired(self, job: Job) -> bool:
        ended, ttl = job.status.get("completionTime"), job.spec.ttl_seconds_after_finished
        return ended is not None and ttl is not None and self._now() >= read_time(ended) + timedelta(seconds=ttl)


def _conflict(kind: Kind, name: str) -> Refusal:
    return Refusal(
        "ChildConflict",
        f"{kind.name} {name} is there already and not the job's own; remove it, or give the job another name",
    )


def _is_served(kind: Kind, versions: frozenset[str]) -> bool:
    """Whether the API server knows a kind. Queues are asked for by group: nothing here reads one."""
    if kind in OPTIONAL and kind.name in ("LocalQueue", "Queue"):
        group = kind.api_version.partition("/")[0]
        return any(version.startswith(f"{group}/") for version in versions)
    return kind not in OPTIONAL or kind.api_version in versions


def _kind_of(child: Object) -> Kind:
    return next(kind for kind in CHILDREN if kind.is_of(child))


def _is_part(item: Object, component: str) -> bool:
    return (item["metadata"].get("labels") or {}).get(COMPONENT_LABEL) == component


def _is_once(child: Object) -> bool:
    return any(kind.is_of(child) for kind in RUN_ONCE)


def _hash(child: Object) -> str:
    return hashlib.sha256(json.dumps(child, sort_keys=True).encode()).hexdigest()[:32]


def _note(item: Object, annotation: str) -> str | None:
    found: str | None = (item["metadata"].get("annotations") or {}).get(annotation)
    return found


def _runs_otherwise(known: Object, child: Object) -> bool:
    """Whether it runs, goes on running, and would get another pod template: of a newer operator, or of new flags."""
    both = known["spec"].get("replicas", 1), child["spec"].get("replicas", 1)
    return min(both) > 0 and _note(known, TEMPLATE_ANNOTATION) != _note(child, TEMPLATE_ANNOTATION)


def _is_same(before: Object, after: Object) -> bool:
    """Whether a status says what `after` would, what others write aside."""
    theirs: Sequence[str] = events.OTHERS_WRITE
    mine = {name: value for name, value in before.items() if name not in ("progress", "conditions")}
    conditions = {it["type"]: it for it in before.get("conditions") or [] if it["type"] not in theirs}
    rest = {name: value for name, value in after.items() if name != "conditions"}
    return mine == rest and conditions == {it["type"]: it for it in after["conditions"]}
