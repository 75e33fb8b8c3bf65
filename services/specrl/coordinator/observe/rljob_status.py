"""Writes a run's progress and conditions into the status of its RLJob. The operator reads them; the run never waits.

There is at most one write per PERIOD_S, and none while nothing has changed. Server-side apply under a field manager of
the coordinator's own leaves the operator's fields alone. A failed write is retried later with the then newest status.
A later RLJob of the same name cannot be overwritten by mistake: the token belongs to an account that is deleted with
the job.

The coordinator writes these conditions:

- `CheckpointsWritten`: the newest checkpoint is complete. False when one after it could not be written.
- `CollectiveReady`: the first weights went through the collective that all later ones use, were verified, and met the
  deadline. False when replicas were given up in it, and when `placement.nvlink` is `Required` and NCCL uses another
  transport. The reason is `SocketFallback` when NCCL uses TCP although the job has RDMA or NVLink.
- `DrafterReady`: replicas have the drafter that this run trains. False while it is initialised.
- `RunFinished`: the last step is trained and the policy is exported.
- `SandboxReady`: programs of the policy can be isolated in this pod, and how. The operator asks for trainer and
  replicas after it, so `write_sandbox_condition` writes it before the run's prompts are checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx2
import structlog
from pydantic import ValidationError

from specrl.coordinator.controls import Controls
from specrl.coordinator.observe.observer import RunObserver
from specrl.coordinator.requests.rljob_api import RLJobReference
from specrl.formats.reports import Phase, StatusReport, StepReport
from specrl.spec.base import Section
from specrl.spec.cluster import FailurePolicy, NvLink, Placement
from specrl.spec.load import keep_known_fields
from specrl.spec.rljob.manifest import API_VERSION, KIND, PLURAL
from specrl.spec.rljob.status import MULTI_NODE_NVLINK, CoordinatorCondition

FIELD_MANAGER = "specrl-coordinator"
SANDBOX_MANAGER = "specrl-coordinator-sandbox"
"""Field manager of SandboxReady when it is written alone. A separate manager: under FIELD_MANAGER, server-side apply of
one condition would remove the progress and the conditions of a coordinator that was restarted."""
PERIOD_S = 10.0
FINAL_S = 120.0
"""How long the coordinator retries the last write at the end of a run before it exits without it."""

SOCKETS = "NET/Socket"
"""TCP, as NCCL's log names it (`weights/nccl_log.py`)."""

log = structlog.get_logger(__name__)

Now = Callable[[], datetime]


def build_rljob_status(
    status: StatusReport, reports: Sequence[StepReport], placement: Placement | None
) -> dict[str, Any]:
    """Build the coordinator's part of the RLJob's status, without times. reports: the newest complete ones, ascending.

    placement: the RLJob's; None: not known yet. Then nothing is said of the transport of weights that have arrived.

    The acceptance length is that of the last step that generated anything. With a policy lag, a run's last steps train
    on what was generated before them.
    """
    progress: dict[str, Any] = {"step": status.step}
    if status.policy_version >= 0:
        progress["policyVersion"] = status.policy_version
    if status.is_paused:
        progress["paused"] = True
    if status.weight_transport:
        progress["weightTransport"] = status.weight_transport
    if status.nccl_transport:
        progress["ncclTransport"] = status.nccl_transport
    if reports:
        newest = reports[-1]
        progress["policyLag"] = newest.policy_lag_max
        if newest.phases.wall_seconds > 0:
            progress["exposedGenerationShare"] = f"{newest.phases.exposed_share:.2f}"
        progress["exposedGenerationSeconds"] = f"{newest.exposed_generation:.2f}"
        progress["generationUnderWaySeconds"] = f"{newest.generation_under_way:.2f}"
        progress["hiddenGenerationSeconds"] = f"{newest.hidden_generation:.2f}"
        progress["weightSyncSeconds"] = f"{newest.phases.prepare:.2f}"
        lengths = [it.acceptance_length for it in reports if it.acceptance_length is not None]
        if lengths:
            progress["acceptanceLength"] = f"{lengths[-1]:.2f}"
    return {"progress": progress, "conditions": [_build_condition(*it) for it in _list_conditions(status, placement)]}


def _build_condition(kind: CoordinatorCondition, is_true: bool, reason: str, message: str) -> dict[str, str]:
    """Build a condition without its time."""
    return {"type": kind.value, "status": str(is_true), "reason": reason, "message": message[:1024]}


def _list_conditions(
    status: StatusReport, placement: Placement | None
) -> Iterator[tuple[CoordinatorCondition, bool, str, str]]:
    """Yield each condition that is known: its type, whether it holds, reason and message."""
    given_up = sum(count for moved, count in status.replica_transitions.items() if moved.endswith("-> stale"))
    if status.isolations:
        yield CoordinatorCondition.SANDBOX_READY, True, *_describe_isolations(status.isolations)
    collective = CoordinatorCondition.COLLECTIVE_READY
    if status.policy_version >= 0:
        if placement is not None:
            yield collective, *_judge_transport(status.nccl_transport, placement)
    elif given_up:
        reasons = "; ".join(f"{it.id}: {it.reason}" for it in status.replicas if it.reason)
        message = (
            f"the first weights reached no replica; replicas were given up {given_up} times"
            f"{f' ({reasons})' if reasons else ''}; see the logs of trainer and replicas, and check placement.nvlink, "
            "the network between their nodes and NetworkPolicies"
        )
        yield collective, False, "PreflightFailed", message
    drafter = CoordinatorCondition.DRAFTER_READY
    if status.phase is Phase.INITIALISING:
        progress = f" ({status.done} of {status.total})" if status.total else ""
        yield drafter, False, "Initializing", f"{status.detail}{progress}"
    elif status.phase is not Phase.WAITING and any(replica.drafter_version >= 0 for replica in status.replicas):
        yield drafter, True, "Serving", "replicas serve the drafter that this run trains"
    if status.checkpoint_error:
        message = f"{status.checkpoint_error}; the newest checkpoint is of step {status.checkpoint_step}"
        yield CoordinatorCondition.CHECKPOINTS_WRITTEN, False, "CheckpointFailed", message
    elif status.checkpoint_step:
        message = f"the newest checkpoint is of step {status.checkpoint_step}"
        yield CoordinatorCondition.CHECKPOINTS_WRITTEN, True, "CheckpointComplete", message
    if status.phase is Phase.FINISHED:
        exported = status.summary.policy_path if status.summary else ""
        where = f"; the policy is in {exported}" if exported else ""
        message = f"{status.steps} steps are trained{where}"
        yield CoordinatorCondition.RUN_FINISHED, True, "MaxStepsReached", message


def _describe_isolations(isolations: Mapping[str, str]) -> tuple[str, str]:
    """Return reason and message of SandboxReady. isolations: by section of the run file."""
    return "IsolationChosen", ", ".join(f"{path}: {isolation}" for path, isolation in isolations.items())


def _judge_transport(transport: str, placement: Placement) -> tuple[bool, str, str]:
    """Judge the transport of weights that have arrived: status, reason and message of CollectiveReady."""
    arrived = "all replicas have received the first weights" + (f" over {transport}" if transport else "")
    if not transport:
        return True, "WeightsArrived", arrived
    uses_nvlink = MULTI_NODE_NVLINK in transport
    if placement.nvlink is NvLink.REQUIRED and not uses_nvlink:
        message = (
            f"placement.nvlink is Required, but NCCL uses {transport} instead of {MULTI_NODE_NVLINK}; check the "
            "ComputeDomain and the nodes' IMEX daemons, or use Preferred in a new job"
        )
        return False, "MultiNodeNVLinkUnavailable", message
    expects_more = placement.rdma is not None or placement.nvlink is not NvLink.DISABLED
    if SOCKETS in transport and expects_more:
        remedy = "check the RDMA devices and the limit of locked memory (docs/deploy.md), and the NVLink domain"
        return True, "SocketFallback", f"{arrived}: NCCL fell back to TCP; {remedy}"
    return True, "WeightsArrived", arrived


async def write_sandbox_condition(place: RLJobReference, isolations: Mapping[str, str]) -> None:
    """Write the condition SandboxReady alone. isolations: by section of the run file.

    Best effort: `RLJobStatusWriter` writes it, too, as soon as the run's prompts are checked.
    """
    ready = _build_condition(CoordinatorCondition.SANDBOX_READY, True, *_describe_isolations(isolations))
    status = {"conditions": [ready | {"lastTransitionTime": _format_time(datetime.now(UTC))}]}
    try:
        await _apply_status(place, status, SANDBOX_MANAGER)
    except (httpx2.HTTPError, OSError, ValueError) as error:
        log.warning("rljob_status_not_written", rljob=place.name, reason=str(error))


def _read_section[S: Section](section: type[S], fields: dict[str, Any] | None) -> S:
    """Read a section of the RLJob's spec. A newer CRD may have fields that this version does not know."""
    try:
        return section.model_validate(keep_known_fields(fields or {}, section))
    except ValidationError:  # a newer CRD may admit other values, too
        return section()


def _format_time(moment: datetime) -> str:
    """Format a time in UTC as Kubernetes does."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


async def _apply_status(place: RLJobReference, status: dict[str, Any], manager: str) -> dict[str, Any]:
    """Apply fields of the RLJob's status. Returns the RLJob.

    Raises httpx2.HTTPError; OSError: no token; ValueError: a bad certificate.
    """
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": place.name}, "status": status}
    path = f"{API_VERSION}/namespaces/{place.namespace}/{PLURAL}/{place.name}/status"
    return await place.call_api("PATCH", path, body, "application/apply-patch+yaml", fieldManager=manager, force="true")


class RLJobStatusWriter:
    """Keeps the status of one RLJob up to date.

    `write_changes` writes once, if anything has changed. `run` repeats it every PERIOD_S until it is cancelled.
    """

    def __init__(
        self,
        observer: RunObserver,
        place: RLJobReference,
        controls: Controls,
        now: Now = lambda: datetime.now(UTC),
    ) -> None:
        """controls: is given what may change in the RLJob's spec, which each write's answer has."""
        self._controls = controls
        self._observer = observer
        self._place = place
        self._placement: Placement | None = None  # the RLJob's, which the first write's answer has
        self._now = now
        self._written: dict[str, Any] | None = None  # the last status that was written
        self._since: dict[str, tuple[str, str]] = {}  # by condition: its status, and since when it has had it

    async def run(self) -> None:
        """Write changes until cancelled."""
        while True:
            await self.write_changes()
            await asyncio.sleep(PERIOD_S)

    async def write_final_status(self) -> bool:
        """Write the final status, retrying for up to FINAL_S. Returns whether it was written."""
        try:
            async with asyncio.timeout(FINAL_S):
                while True:
                    if await self.write_changes():
                        return True
                    await asyncio.sleep(1.0)
        except TimeoutError:
            log.error("rljob_final_status_not_written", rljob=self._place.name)
            return False

    async def write_changes(self) -> bool:
        """Write the status if it has changed. Returns whether the RLJob is up to date."""
        status = self._observer.build_status()
        found = build_rljob_status(status, self._observer.list_recent_reports(), self._placement)
        if found == self._written:
            return True
        try:
            rljob = await _apply_status(self._place, self._add_times(found), FIELD_MANAGER)
        except (httpx2.HTTPError, OSError, ValueError) as error:
            log.warning("rljob_status_not_written", rljob=self._place.name, reason=str(error))
            return False
        self._written = found
        is_first = self._placement is None
        self._follow_rljob(rljob["spec"])
        # Only now is it known how to judge the transport of weights that have arrived.
        return await self.write_changes() if is_first else True

    def _follow_rljob(self, spec: dict[str, Any]) -> None:
        """Take over what the run file lacks, which is immutable: cluster sections, and what `kubectl scale` changed."""
        placement = _read_section(Placement, spec.get("placement"))
        policy = _read_section(FailurePolicy, spec.get("failurePolicy"))
        self._placement = placement
        self._controls.follow_rljob(spec["generation"].get("replicas", 1), policy)

    def _add_times(self, found: dict[str, Any]) -> dict[str, Any]:
        """Add times. A condition's lastTransitionTime changes only with its status, as Kubernetes defines it."""
        moment = _format_time(self._now())
        conditions = []
        for condition in found["conditions"]:
            known_status, since = self._since.get(condition["type"], ("", moment))
            since = since if known_status == condition["status"] else moment
            self._since[condition["type"]] = condition["status"], since
            conditions.append(condition | {"lastTransitionTime": since})
        return {"progress": found["progress"] | {"lastUpdateTime": moment}, "conditions": conditions}
