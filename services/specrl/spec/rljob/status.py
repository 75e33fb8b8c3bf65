"""The model of an RLJob's status, from which the CRD's status schema is generated.

The operator writes the status. The coordinator writes `progress` and the conditions that only the run knows
(`CoordinatorCondition`), under its own field manager.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, WithJsonSchema

from specrl.spec.base import Section

Timestamp = Annotated[str, Field(max_length=64), WithJsonSchema({"type": "string", "format": "date-time"})]
# The largest int32, which Kubernetes uses for counts of pods.
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(max_length=256)]
# Limits as in metav1.Condition.
ConditionType = Annotated[str, Field(max_length=316, pattern=r"^[A-Za-z][A-Za-z0-9]*$")]
Reason = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]


MULTI_NODE_NVLINK = "P2P/MNNVL"
"""NVLink between nodes, as NCCL's log and `progress.ncclTransport` name it."""


class CoordinatorCondition(StrEnum):
    """Types of the conditions that the coordinator writes. The operator reads them, and writes all others."""

    CHECKPOINTS_WRITTEN = "CheckpointsWritten"
    COLLECTIVE_READY = "CollectiveReady"
    DRAFTER_READY = "DrafterReady"
    RUN_FINISHED = "RunFinished"
    SANDBOX_READY = "SandboxReady"


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Section):
    """One condition of the job, as in every Kubernetes API (metav1.Condition)."""

    type: ConditionType
    """Type of the condition, such as Ready."""
    status: ConditionStatus
    """Whether the condition holds."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """metadata.generation of the spec that the condition was set for."""
    last_transition_time: Timestamp
    """When status last changed."""
    reason: Reason
    """Machine-readable reason, one word in CamelCase."""
    message: Annotated[str, Field(max_length=32768)]
    """Explanation for people, with what to do if something is wrong."""


class RoleStatus(Section):
    """The pods of one role."""

    replicas: Count | None = None
    """Desired number of pods."""
    ready_replicas: Count | None = None
    """Number of ready pods."""


class GenerationRoleStatus(RoleStatus):
    """The generation replicas."""

    replicas: Count | None = None
    """Number of existing replicas."""
    ready_replicas: Count | None = None
    """Number of ready replicas."""
    selector: Annotated[str, Field(max_length=2048)] | None = None
    """Label selector of one pod per replica, for the scale subresource and autoscalers."""


class MultiNodeNvLink(StrEnum):
    ACTIVE = "Active"
    INACTIVE = "Inactive"
    UNKNOWN = "Unknown"


class PlacementStatus(Section):
    """Placement of the job's pods."""

    domain: Text | None = None
    """NVLink domain of the trainer: the value of the label placement.topologyKey on its nodes."""
    multi_node_nvlink: MultiNodeNvLink | None = Field(default=None, alias="multiNodeNVLink")
    """Whether weights are sent over NVLink between nodes, by progress.ncclTransport. Unknown until the first are."""


class RunProgress(Section):
    """Progress of the run. The coordinator writes it under its own field manager, at most every 10 s."""

    step: Count | None = None
    """Last finished step."""
    policy_version: Annotated[int, Field(ge=0)] | None = None
    """Newest policy version that the replicas serve."""
    policy_lag: Count | None = None
    """Largest policy lag of the tokens of the last step, in steps."""
    exposed_generation_share: Annotated[str, Field(max_length=16)] | None = None
    """Share of the last step's time in which training waited for rollouts, a decimal."""
    exposed_generation_seconds: Annotated[str, Field(max_length=16)] | None = None
    """Seconds of the last step in which training waited for rollouts, a decimal."""
    generation_under_way_seconds: Annotated[str, Field(max_length=16)] | None = None
    """Seconds of the last step in which at least one rollout was in flight, a decimal."""
    hidden_generation_seconds: Annotated[str, Field(max_length=16)] | None = None
    """Seconds of generationUnderWaySeconds in which training did not wait for rollouts, a decimal."""
    weight_sync_seconds: Annotated[str, Field(max_length=16)] | None = None
    """Seconds of the last step in which the replicas received its weights, a decimal. No part of exposed generation."""
    acceptance_length: Annotated[str, Field(max_length=16)] | None = None
    """Mean tokens per verification in the last step that generated rollouts, a decimal."""
    weight_transport: Text | None = None
    """Transport of the weights to the replicas, and why it was chosen, such as "Gloo: 2 ranks on 1 GPUs"."""
    nccl_transport: Text | None = None
    """NCCL's transports between trainer and replicas, such as NET/IB, NET/Socket or P2P/MNNVL."""
    paused: bool | None = None
    """Whether a user has paused the run."""
    last_update_time: Timestamp | None = None
    """When progress was last written."""


class RLJobStatus(Section):
    """Observed state of the job. Programs should read conditions; state is for people."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """metadata.generation of the spec that this status is about."""
    state: Text | None = None
    """Summary of the conditions in one word, for `kubectl get`."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=32)] = ()
    """Conditions of the job, one of each type."""
    start_time: Timestamp | None = None
    """When the job was accepted, or last resumed; with Kueue, when its first part was admitted. Deadlines count from
    it. Null while the job is suspended or waits in a queue."""
    completion_time: Timestamp | None = None
    """When the job completed or failed."""
    restarts: Count | None = None
    """Number of times that the trainer was restarted."""
    store: RoleStatus | None = None
    """The pod of the job's own Redis server. Null for a job that names a store."""
    coordinator: RoleStatus | None = None
    """The coordinator's pod."""
    trainer: RoleStatus | None = None
    """The trainer's pods."""
    generation: GenerationRoleStatus | None = None
    """The generation replicas."""
    placement: PlacementStatus | None = None
    """Placement of the job's pods."""
    progress: RunProgress | None = None
    """Progress of the run."""
