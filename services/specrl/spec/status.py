"""What an RLJob's status holds: its part of the CRD.

The operator writes it, but for `progress` and the conditions that only the run knows (CollectiveReady, RunFinished),
which the coordinator applies under a field manager of its own.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, WithJsonSchema

from specrl.spec.base import Section

Timestamp = Annotated[str, Field(max_length=64), WithJsonSchema({"type": "string", "format": "date-time"})]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(max_length=256)]
ConditionType = Annotated[str, Field(max_length=316, pattern=r"^[A-Za-z][A-Za-z0-9]*$")]
Reason = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]


class Truth(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Section):
    """One claim about the job, as in every Kubernetes API (metav1.Condition)."""

    type: ConditionType
    """What is claimed, such as Ready."""
    status: Truth
    """Whether it is so."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """metadata.generation of the spec that it was seen at."""
    last_transition_time: Timestamp
    """When status last changed."""
    reason: Reason
    """One word for why."""
    message: Annotated[str, Field(max_length=32768)]
    """Why, and what to do about it."""


class RoleStatus(Section):
    """The pods of one role."""

    replicas: Count | None = None
    """Pods that there are to be."""
    ready_replicas: Count | None = None
    """Pods that are ready."""


class GenerationStatus(RoleStatus):
    """The replicas of generation."""

    replicas: Count | None = None
    """Replicas that there are."""
    ready_replicas: Count | None = None
    """Replicas that are ready."""
    updated_replicas: Count | None = None
    """Replicas of the newest template."""
    selector: Annotated[str, Field(max_length=2048)] | None = None
    """Selects one pod per replica; the scale subresource hands it to autoscalers."""


class MultiNodeNvLink(StrEnum):
    ACTIVE = "Active"
    INACTIVE = "Inactive"


class PlacementStatus(Section):
    """Where the job is."""

    domain: Text | None = None
    """NVLink domain of the trainer, by the label placement.topologyKey of its nodes."""
    multi_node_nvlink: MultiNodeNvLink | None = Field(default=None, alias="multiNodeNVLink")
    """Whether weights travel by NVLink between nodes."""


class Progress(Section):
    """How far the run is. The coordinator writes it under its own field manager, at most every 10 s."""

    step: Count | None = None
    """Last finished step."""
    policy_version: Annotated[int, Field(ge=0)] | None = None
    """Newest version that the replicas serve."""
    policy_lag: Count | None = None
    """Largest lag among the tokens of the last step, in steps."""
    exposed_generation_share: Annotated[str, Field(max_length=16)] | None = None
    """Share of the last step's time in which training waited for rollouts, a decimal."""
    acceptance_length: Annotated[str, Field(max_length=16)] | None = None
    """Mean tokens per verification in the last step, a decimal."""
    paused: bool | None = None
    """Whether people have the run paused."""
    last_update_time: Timestamp | None = None
    """When this was written."""


class RLJobStatus(Section):
    """What has become of the job. Read conditions; state is for people."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """metadata.generation of the spec that this is about."""
    state: Text | None = None
    """The conditions in one word, for `kubectl get`."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=32)] = ()
    """What is true of the job, one entry for each type."""
    start_time: Timestamp | None = None
    """When the job was first seen running, or last resumed."""
    completion_time: Timestamp | None = None
    """When it completed or failed."""
    restarts: Count | None = None
    """Restarts of the trainer that count."""
    coordinator: RoleStatus | None = None
    """The coordinator's pod."""
    trainer: RoleStatus | None = None
    """The trainer's pods."""
    generation: GenerationStatus | None = None
    """The replicas of generation."""
    placement: PlacementStatus | None = None
    """Where the job is."""
    progress: Progress | None = None
    """How far the run is."""
