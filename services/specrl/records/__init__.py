"""Records of the training loop: prompts, rollouts, batches, weights, peers and their status.

All are frozen dataclasses that carry numpy arrays, never torch tensors. A record that arrives from another process is
validated once, by its `check`. `wire` converts records to protobuf and back.
"""

from specrl.records.peer import Acknowledgement, HeldRollout, Peer, Registration, Role
from specrl.records.rollout import (
    Batch,
    ExpertArray,
    FinishReason,
    GradedRollout,
    Group,
    NamedReward,
    OutputSpan,
    Prompt,
    Reward,
    Rollout,
    RolloutRequest,
    Sampling,
    TrainRollout,
    VersionSpan,
)
from specrl.records.sampling_sets import SamplingSets
from specrl.records.status import (
    DrafterEpoch,
    DrafterEpochMetrics,
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
    SentWeights,
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
    "DrafterEpoch",
    "DrafterEpochMetrics",
    "DrafterMetrics",
    "Drafting",
    "ExpertArray",
    "FinishReason",
    "GenerationStatus",
    "GradedRollout",
    "Group",
    "HeldRollout",
    "NamedReward",
    "OutputSpan",
    "Peer",
    "Prompt",
    "Registration",
    "Reward",
    "Role",
    "Rollout",
    "RolloutRequest",
    "Sampling",
    "SamplingSets",
    "SentWeights",
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
