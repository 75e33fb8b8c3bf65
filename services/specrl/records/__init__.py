"""What flows through the loop. Frozen dataclasses that carry numpy, never torch; `wire` turns them into protobuf."""

from specrl.records.peer import Acknowledgement, HeldRollout, Peer, Registration, Role
from specrl.records.rollout import (
    Batch,
    ExpertArray,
    FinishReason,
    GradedRollout,
    Group,
    OutputSpan,
    Prompt,
    Reward,
    Rollout,
    RolloutRequest,
    Sampling,
    TrainRollout,
    VersionSpan,
)
from specrl.records.status import (
    DrafterMetrics,
    Drafting,
    GenerationStatus,
    SpeculationCounters,
    TrainerStatus,
    TrainMetrics,
)
from specrl.records.step_costs import StepCost
from specrl.records.stream_place import StreamPlace
from specrl.records.weights import (
    NO_DRAFTER,
    TensorMeta,
    WeightChecksums,
    WeightGroup,
    WeightManifest,
    WeightOwner,
)

__all__ = [
    "NO_DRAFTER",
    "Acknowledgement",
    "Batch",
    "DrafterMetrics",
    "Drafting",
    "ExpertArray",
    "FinishReason",
    "GenerationStatus",
    "GradedRollout",
    "Group",
    "HeldRollout",
    "OutputSpan",
    "Peer",
    "Prompt",
    "Registration",
    "Reward",
    "Role",
    "Rollout",
    "RolloutRequest",
    "Sampling",
    "SpeculationCounters",
    "StepCost",
    "StreamPlace",
    "TensorMeta",
    "TrainMetrics",
    "TrainRollout",
    "TrainerStatus",
    "VersionSpan",
    "WeightChecksums",
    "WeightGroup",
    "WeightManifest",
    "WeightOwner",
]
