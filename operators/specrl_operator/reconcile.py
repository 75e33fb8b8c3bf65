"""Reconcile one RLJob: get, validate, plan, observe, decide, apply or delete children, update the status once.

This is the only module that writes RLJobs and their children. Reconciliation is idempotent: it re-reads all state, and
repeating a write is a no-op. The process may therefore die between any two requests; the next reconciliation reaches
the same state.

`reconcile` never blocks on the job. It returns the delay until the next reconciliation. A change of the job or of a
child triggers one earlier (`cluster/watches.py`). The workers of `main.py` call it.

The operator never restarts running pods. It creates and deletes JobSets and Jobs but never patches them: Kueue writes
into their pod templates, and JobSet rejects most changes while it runs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import structlog

from specrl.errors import SpecInvalid, first_line
from specrl.spec.cluster import Profile
from specrl_operator import kinds, telemetry
from specrl_operator.api import (
    COMPONENT_LABEL,
    COORDINATOR,
    GENERATION,
    MANAGER,
    STORE,
    TRAINER,
    UID_LABEL,
    Job,
    Object,
    find_condition,
    format_micro_time,
    has_component,
    has_elapsed,
    is_controlled_by,
    parse_time,
    read_job,
)
from specrl_operator.children import revision, tls
from specrl_operator.children.desired import build_children
from specrl_operator.children.revision import ChildAction
from specrl_operator.cluster.cache import WatchedObjects
from specrl_operator.cluster.interface import Cluster, ClusterError
from specrl_operator.cluster.topology import NodeTopology
from specrl_operator.kinds import Kind
from specrl_operator.observed import TRAINER_KINDS, ObservedState, has_pod_ended, is_stuck_in_creation, list_trainers
from specrl_operator.plan.acceptance import Refusal
from specrl_operator.plan.decision import Decision, DesiredState, TrainerAction, make_decision
from specrl_operator.plan.job_plan import JobPlan, Settings, find_ttl_s, plan_job
from specrl_operator.status import events
from specrl_operator.status.deadlines import find_next_deadline_s
from specrl_operator.status.job_status import build_invalid_status, build_status, is_same_status
from specrl_operator.status.readiness import CREATION_FAILURES, EVENTS_S, PULLING, ROLE_CONDITIONS

SCALE_MANAGER = f"{MANAGER}-scale"
"""Field manager of replica counts that are patched alone. A separate manager: under MANAGER, server-side apply of a
body with only `replicas` would remove every other field that MANAGER owns."""
RECHECK_S = 15.0
"""Delay before a refused job is reconciled again. No watch event reports most fixes, such as a new right or quota."""
WAITING_REASONS = ("PodsPending", "FailedCreate", "ConfigurationMissing", "WaitingForSandbox")
"""Reasons of Ready or of a part for which a job is reconciled again after RECHECK_S: no watch event says that pods
still do not start, or why they are not created."""
POD_SET_KINDS = (kinds.STATEFUL_SET, kinds.LEADER_WORKER_SET)
OPERATOR_NAMES = (None, "specrl.dev/operator")
"""Values of spec.managedBy that this operator handles. MultiKueue has another one."""

Children = dict[Kind, list[Object]]
"""The children that a job owns, by kind."""

log = structlog.get_logger(__name__)


class Reconciler:
    """Reconciles RLJobs with the objects in a cluster. Worker threads share one, each on another job."""

    def __init__(
        self, cluster: Cluster, cache: WatchedObjects, settings: Settings, now: Callable[[], datetime]
    ) -> None:
        """cache: the children, pods and served kinds of the same cluster, possibly seconds old."""
        self._cluster = cluster
        self._cache = cache
        self._settings = settings
        self._now = now
        self._topology = NodeTopology(cluster, now)

    def reconcile(self, namespace: str, name: str) -> float | None:
        """Reconcile one RLJob once. Returns the seconds until the next reconciliation; None: at the next change.

        Raises ClusterError when a request failed for a reason other than the job. The caller retries with backoff.
        """
        # Get the job from the API server, not from the cache: decisions need its newest spec and resourceVersion.
        item = self._cluster.get(kinds.RLJOB, namespace, name)
        if item is None or "deletionTimestamp" in item["metadata"]:
            return None  # the garbage collector deletes the children
        # Another controller, such as MultiKueue, reconciles jobs that name it.
        if item["spec"].get("managedBy") not in OPERATOR_NAMES:
            return None
        try:
            return self._reconcile_job(item)
        except ClusterError:
            raise
        except Exception as error:  # the edge of a reconciliation: the user must see that nothing happens, and why
            what = f"{type(error).__name__}: {first_line(error)}"
            self._reject_spec(
                item, "OperatorFailed", f"the operator failed on this job: {what}; see the operator's log"
            )
            raise

    def _reconcile_job(self, item: Object) -> float | None:
        """Reconcile an existing job that this operator handles."""
        namespace = item["metadata"]["namespace"]
        name = item["metadata"]["name"]

        # Validate the spec. The API server has checked it already, unless an older CRD accepted it.
        try:
            job = read_job(item)
        except SpecInvalid as error:
            self._reject_spec(item, "SpecInvalid", str(error))
            return None

        # List the children and plan the job. A plan depends on the spec, the cluster and which children exist.
        now = self._now()
        children = self._list_children(job)
        plan = plan_job(job, self._settings, self._cache.served, children)

        # Observe the pods, then decide how much of the job should run now.
        observed = self._observe_children(plan, children)
        decision = make_decision(plan, observed, now)

        # Delete a finished job whose time to live has passed, but not while its coordinator still saves the run.
        is_expired = has_elapsed(job.status.get("completionTime"), find_ttl_s(job, self._settings), now)
        if is_expired and decision.state is not DesiredState.SAVING:
            log.info("job_expired", namespace=namespace, name=name)
            self._cluster.delete(kinds.RLJOB, item)
            return None

        # Apply the desired children and delete the others. A job that this cluster cannot run keeps its children.
        refusal = decision.refusal
        if decision.changes_children:
            refusal = self._apply_children(plan, decision, observed, children) or refusal

        # Update the status once, from the observations above. Children applied just now appear in it next time.
        status = build_status(plan, decision, observed, refusal, now)
        self._update_status(job, status)
        telemetry.export_status((job.namespace, job.name), job.status, status)

        # Reconcile again at the next deadline, and soon after a refusal or while pods do not start.
        next_deadline_s = find_next_deadline_s(job, status, now, find_ttl_s(job, self._settings))
        reasons = {find_condition(status, kind).get("reason") for kind in ("Ready", *ROLE_CONDITIONS.values())}
        is_waiting = not reasons.isdisjoint(WAITING_REASONS)
        # No watch event says that a pod's kubelet does not report its end.
        is_waiting = is_waiting or any("deletionTimestamp" in pod["metadata"] for pod in observed.pods)
        return min(RECHECK_S, next_deadline_s or RECHECK_S) if refusal is not None or is_waiting else next_deadline_s

    # -- read ------------------------------------------------------------------------------------------------------

    def _list_children(self, job: Job) -> Children:
        """List the job's children by kind."""
        found = {}
        for kind in kinds.CHILD_KINDS:
            items = self._cache.list_objects(kind, job.namespace, job.name)
            # Labels can be copied by users, and a deleted job of the same name had the same ones: the uid decides.
            found[kind] = [item for item in items if is_controlled_by(item, job.uid)]
        return found

    def _observe_children(self, plan: JobPlan, children: Children) -> ObservedState:
        """Collect the job's trainer, replicas and pods, whether its claim template exists, and its NVLink domain."""
        job = plan.job
        trainers = list_trainers(children)
        workloads = [item for kind in POD_SET_KINDS for item in children[kind]]
        labelled = self._cache.list_objects(kinds.POD, job.namespace, job.name)
        # By uid: pods of a deleted job of the same name may still be on their way out, with exit codes of their own.
        pods = [
            pod
            for pod in labelled
            if pod["metadata"]["labels"].get(COMPONENT_LABEL) and pod["metadata"]["labels"].get(UID_LABEL) == job.uid
        ]
        pods = [pod for pod in pods if not (has_component(pod, COORDINATOR) and has_pod_ended(pod))]
        domain = None
        if job.spec.placement.profile is Profile.GB200:
            nodes = [pod["spec"].get("nodeName") for pod in pods if has_component(pod, TRAINER)]
            domain = self._topology.find_domains(filter(None, nodes), job.spec.placement.topology_key)
        return ObservedState(
            trainer=trainers[0] if trainers else None,
            generation=next((item for item in workloads if has_component(item, GENERATION)), None),
            pods=tuple(pods),
            has_claim_template=bool(self._cache.list_objects(kinds.CLAIM_TEMPLATE, job.namespace, job.name)),
            domain=domain,
            refused_pods=self._find_refused_pods(plan, children, pods),
            creation_events=self._find_creation_events(job, pods),
            moment=self._now(),
        )

    def _find_refused_pods(self, plan: JobPlan, children: Children, pods: Sequence[Object]) -> dict[str, str]:
        """Find why pods of a role cannot be created: a quota, Pod Security, a webhook. Returns messages by role.

        Of a role without pods alone. Only events of the pods' owner have the reason, but for the coordinator's
        Deployment, whose status has it.
        """
        job = plan.job
        found: dict[str, str] = {}
        for deployment in children[kinds.DEPLOYMENT]:
            failure = find_condition(deployment.get("status") or {}, "ReplicaFailure")
            if failure.get("status") == "True":
                found[COORDINATOR] = str(failure.get("message", ""))
        owners = [item for kind in (*TRAINER_KINDS, *POD_SET_KINDS) for item in children[kind]]
        for owner in owners:
            role = owner["metadata"]["labels"].get(COMPONENT_LABEL, "")
            wants_none = owner["spec"].get("replicas") == 0 or owner["spec"].get("suspend")
            if wants_none or role in found or any(has_component(pod, role) for pod in pods):
                continue
            # A JobSet's pods belong to its Job, which workloads.py calls `node`.
            name = owner["metadata"]["name"] + ("-node-0" if kinds.JOB_SET.is_kind_of(owner) else "")
            events = self._cluster.list_events(job.namespace, name, "FailedCreate")
            # Events of a deleted job of this name live on for an hour.
            recent = [it for it in events if parse_time(str(it.get("lastTimestamp"))) >= job.created]
            if recent:
                found[role] = str(max(recent, key=lambda it: str(it["lastTimestamp"])).get("message", ""))
        return found

    def _find_creation_events(self, job: Job, pods: Sequence[Object]) -> dict[str, Object]:
        """Find the kubelet's newest event about the first pod of each role whose containers are not created.

        Of one pod, since the condition names one, and all pods of a role may wait for the same image.
        """
        now = self._now()
        by_role: dict[str, Object] = {}
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
            if is_stuck_in_creation(pod, now, EVENTS_S):
                by_role.setdefault(pod["metadata"]["labels"][COMPONENT_LABEL], pod)
        found: dict[str, Object] = {}
        for pod in by_role.values():
            name = pod["metadata"]["name"]
            # By uid: events of a deleted pod of this name live on for an hour.
            told = [
                it
                for it in self._cluster.list_events(job.namespace, name)
                if it["involvedObject"].get("uid") == pod["metadata"]["uid"]
                and it.get("reason") in (PULLING, *CREATION_FAILURES)
            ]
            found[name] = max(told, key=lambda it: str(it.get("lastTimestamp")), default={})
        return found

    # -- create, patch, delete -------------------------------------------------------------------------------------

    def _apply_children(
        self, plan: JobPlan, decision: Decision, observed: ObservedState, children: Children
    ) -> Refusal | None:
        """Apply the desired children, then delete all others.

        Returns why an object that the job needs could not be applied; None when all were.
        """
        job = plan.job

        # Ensure the Secrets first: pods that mount them would otherwise hang in ContainerCreating.
        if decision.state.starts_pods:
            refusal = self._ensure_secrets(plan)
            if refusal is not None:
                return refusal

        # Apply in the order of `build_children`: each child needs those before it, so a child that cannot be created
        # ends the loop. One that exists and cannot be changed is there for those after it.
        known = {_name_of(item): item for items in children.values() for item in items}
        desired = [revision.add_revision(job, child) for child in build_children(plan, decision)]
        actions = {_name_of(it): revision.choose_action(known.get(_name_of(it)), it) for it in desired}
        # Running workloads keep their templates, and with them the run files that these mount.
        mounted = _list_mounted_run_files(desired, known, actions)
        run_files = {(kinds.CONFIG_MAP.name, name) for name in mounted}
        desired = [it for it in desired if not kinds.CONFIG_MAP.is_kind_of(it) or _name_of(it) in run_files]
        refusal = None
        created = list[tuple[Kind, str]]()
        for child in desired:
            name = _name_of(child)
            refused = self._change_child(job, child, actions[name], known.get(name), created)
            refusal = refusal or refused
            if refused is not None and name not in known and decision.state.starts_pods:
                break
            if refused is None and name in known and has_component(child, GENERATION):
                self._report_scaling(job, known[name], child)
        if created:
            self._create_event(events.build_created_event(job, created))

        # Delete the rest only after every apply succeeded, so that a refused replacement deletes nothing. A job that is
        # being stopped has no replacements, and its trainer must go whatever is refused.
        if refusal is None or not decision.state.starts_pods:
            kept = {_name_of(child) for child in desired} | run_files
            if decision.trainer is TrainerAction.KEEP and observed.trainer is not None:
                # Not among the desired children, which hold a trainer only where it may be created.
                kept.add(_name_of(observed.trainer))
            self._delete_stale_children(job, children, kept)
        return refusal

    def _change_child(
        self, job: Job, child: Object, action: ChildAction, known: Object | None, created: list[tuple[Kind, str]]
    ) -> Refusal | None:
        """Carry out the action on one child. Returns why it is refused; None if it is not.

        known: the child as it was listed; None if it was not. A new child is appended to `created`.
        """
        try:
            if action is ChildAction.APPLY:
                return self._apply_child(job, child, known, created)
            if action is ChildAction.SCALE and known is not None:
                self._patch_replicas(child, known)
        except ClusterError as error:
            if not error.is_refused:
                raise
            name = f"{child['kind']} {child['metadata']['name']}"
            return Refusal("ChildRejected", f"the API server rejected {name}: {error}; change the job's spec")
        return None

    def _apply_child(
        self, job: Job, child: Object, known: Object | None, created: list[tuple[Kind, str]]
    ) -> Refusal | None:
        """Create or patch one child. A new child is appended to `created`."""
        kind = revision.kind_of(child)
        name = child["metadata"]["name"]
        if known is None:
            try:
                self._cluster.create(kind, child, MANAGER)
            except ClusterError as error:
                if error.status != 409:
                    raise
                # The listing was older, or the object is another's.
            else:
                log.info("child_created", kind=kind.name, namespace=job.namespace, name=name)
                created.append((kind, name))
                return None
        # Apply is forced: without this read it would take over another's object.
        existing = self._cluster.get(kind, job.namespace, name)
        if existing is None:
            raise ClusterError(409, f"{kind.name} {name} was deleted meanwhile")
        if not is_controlled_by(existing, job.uid):
            return _build_conflict_refusal(kind, name)
        # An object that is being deleted is created again when the watch reports that it is gone.
        if kind in revision.CREATE_ONLY_KINDS or "deletionTimestamp" in existing["metadata"]:
            return None
        change = revision.prepare_apply(existing, child, MANAGER)
        if change is not None:
            self._cluster.merge(kind, change)
        self._cluster.apply(kind, child, MANAGER)
        return None

    def _report_scaling(self, job: Job, known: Object, child: Object) -> None:
        """Create an event if the number of replicas was changed."""
        before = known["spec"].get("replicas")
        after = child.get("spec", {}).get("replicas")
        if before is not None and after is not None and before != after:
            self._create_event(events.build_scaled_event(job, before, after))

    def _patch_replicas(self, child: Object, known: Object) -> None:
        """Patch the replica count of a running workload, and nothing else."""
        kind = revision.kind_of(child)
        replicas = child["spec"]["replicas"]
        if known["spec"].get("replicas") != replicas:
            meta = {"name": child["metadata"]["name"], "namespace": child["metadata"]["namespace"]}
            self._cluster.apply(kind, kind.build_object(meta, spec={"replicas": replicas}), SCALE_MANAGER)

    def _delete_stale_children(self, job: Job, children: Children, kept: set[tuple[str, str]]) -> None:
        """Delete the children that are not kept, in the reverse order of their creation."""
        # Workloads go before the access, network policies and Secrets that their pods use while they drain.
        for kind in reversed(kinds.CHILD_KINDS):
            for item in children[kind]:
                if _name_of(item) not in kept and "deletionTimestamp" not in item["metadata"]:
                    log.info("child_deleted", kind=kind.name, namespace=job.namespace, name=item["metadata"]["name"])
                    self._cluster.delete(kind, item)

    def _ensure_secrets(self, plan: JobPlan) -> Refusal | None:
        """Ensure the job's own Secrets: the store's password, and empty ones that cert-manager fills.

        Returns a refusal if another object has the name of one, or if the Secret of tls.secretName is missing or
        incomplete.
        """
        job = plan.job
        own = tls.own_secrets(job) | ({STORE: job.child_name(STORE)} if plan.has_own_store else {})
        for component, name in own.items():
            existing = self._cluster.get(kinds.SECRET, job.namespace, name)
            if existing is None:
                metadata: Object = {"name": name, "namespace": job.namespace, "labels": job.build_labels(component)}
                metadata["ownerReferences"] = [job.owner_reference]
                content: Object = {}
                if component == STORE:
                    # Created, never applied: a second write would replace the password of a running store.
                    content = {"immutable": True, "stringData": {"password": secrets.token_urlsafe(32)}}
                secret = kinds.SECRET.build_object(metadata, type="Opaque", **content)
                self._cluster.create(kinds.SECRET, secret, MANAGER)
            elif not is_controlled_by(existing, job.uid):
                return _build_conflict_refusal(kinds.SECRET, name)
        given = job.spec.tls.secret_name
        if given is None:
            return None
        return tls.find_missing_secret(job, self._cluster.get(kinds.SECRET, job.namespace, given))

    # -- status and events -----------------------------------------------------------------------------------------

    def _update_status(self, job: Job, status: Object) -> None:
        """Write the status if it changed, then create events for what has changed."""
        metadata = {"name": job.name, "namespace": job.namespace, "resourceVersion": job.resource_version}
        if self._write_status(metadata, job.status, status):
            for event in events.build_status_events(job, status):
                self._create_event(event)

    def _reject_spec(self, item: Object, reason: str, message: str) -> None:
        """Report in the status why the job cannot be reconciled. The children stay as they are."""
        metadata = item["metadata"]
        before = item.get("status") or {}
        status = build_invalid_status(before, metadata.get("generation", 0), reason, message, self._now())
        self._write_status({name: metadata[name] for name in ("name", "namespace", "resourceVersion")}, before, status)
        telemetry.export_status((metadata["namespace"], metadata["name"]), before, status)

    def _write_status(self, metadata: Object, before: Object, status: Object) -> bool:
        """Replace the status if it changed. Returns whether it was written.

        Raises ClusterError 409 when the job changed since it was read, since this status describes the older spec.
        """
        if is_same_status(before, status):
            return False
        self._cluster.apply_status(kinds.RLJOB, kinds.RLJOB.build_object(metadata, status=status), MANAGER)
        return True

    def _create_event(self, event: Object) -> None:
        """Create a Kubernetes event, best effort: nothing reads events to decide."""
        try:
            self._cluster.create(kinds.EVENT, event | {"eventTime": format_micro_time(self._now())}, MANAGER)
        except ClusterError as error:
            # 409 is the ordinary case: the name is a hash of the event, so a repeated one exists already.
            log.warning("event_not_created", reason=str(error))


def _build_conflict_refusal(kind: Kind, name: str) -> Refusal:
    return Refusal(
        "ChildConflict",
        f"{kind.name} {name} exists and does not belong to this job; delete it, or give the job another name",
    )


def _list_mounted_run_files(
    desired: Sequence[Object],
    known: Mapping[tuple[str, str], Object],
    actions: Mapping[tuple[str, str], ChildAction],
) -> set[str]:
    """List the ConfigMaps with run files that the workloads mount after the desired children are applied."""
    # A child that is not applied keeps its template.
    kept = [known[name] for name, action in actions.items() if action is not ChildAction.APPLY]
    applied = [child for child in desired if actions[_name_of(child)] is ChildAction.APPLY]
    found = {revision.find_run_file(item) for item in (*kept, *applied)}
    # Also of a trainer that is kept and not among the desired children.
    found |= {revision.find_run_file(item) for item in known.values() if revision.kind_of(item) in TRAINER_KINDS}
    return {name for name in found if name is not None}


def _name_of(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]
