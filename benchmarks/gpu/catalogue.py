"""All parts, in the order in which they run: those that need least first."""

from __future__ import annotations

from benchmarks.gpu import generation_parts, group_parts, kernel_parts, machine_parts, trainer_parts
from benchmarks.gpu.part import Part

PARTS = (
    Part(
        "versions",
        "packages, driver and cards",
        machine_parts.measure_versions,
        machine_parts.find_versions_fault,
        {"driverState": "problem"},
    ),
    Part(
        "step",
        "seconds and MFU of a policy step in bf16, packed and padded",
        trainer_parts.measure_step,
        trainer_parts.find_step_fault,
        {"mfu": 3.0},
    ),
    Part(
        "memory",
        "memory of a trainer rank against what preflight counts",
        trainer_parts.measure_memory,
        trainer_parts.find_memory_fault,
        {"restMib": 1.0},
    ),
    Part(
        "optimizer",
        "seconds of an optimizer step",
        trainer_parts.measure_optimizer,
        trainer_parts.find_optimizer_fault,
        {"normOfZeros": None},
    ),
    Part(
        "attention",
        "each attention kernel against plain arithmetic",
        trainer_parts.measure_attention,
        trainer_parts.find_attention_fault,
        {"worstDifference": float("nan")},
    ),
    Part(
        "varlenAttention",
        "attention of packed sequences in one call against one call each",
        kernel_parts.measure_varlen_attention,
        kernel_parts.find_kernel_fault,
        {"outputDifference": 0.5},
    ),
    Part(
        "fusedSwiglu",
        "Megatron's compiled SwiGLU against plain arithmetic",
        kernel_parts.measure_fused_swiglu,
        kernel_parts.find_kernel_fault,
        {"gradientDifference": float("nan")},
    ),
    Part(
        "copies",
        "staging, checksum and copies of a weight update, in GB/s",
        machine_parts.measure_copies,
        machine_parts.find_copies_fault,
        {"isEqual": False},
    ),
    Part(
        "broadcast",
        "a version's broadcast over Gloo, in GB/s",
        machine_parts.measure_broadcast,
        machine_parts.find_broadcast_fault,
        {"glooGbS": 0.0},
    ),
    Part(
        "lockedMemory",
        "the limit of locked memory, and pinned memory of a bucket's size",
        machine_parts.measure_locked_memory,
        machine_parts.find_locked_memory_fault,
        {"hasRdma": True, "canLockBucket": False},
    ),
    Part(
        "sharedCard",
        "a version sent between two processes on one card",
        group_parts.measure_shared_card,
        group_parts.find_shared_card_fault,
        {"transport": "nccl"},
    ),
    Part(
        "busyDevice",
        "a broadcast received while the card computes",
        group_parts.measure_busy_device,
        group_parts.find_busy_device_fault,
        {"isStillBusy": False},
    ),
    Part(
        "lostMember",
        "a weight group whose member is killed",
        group_parts.measure_lost_member,
        group_parts.find_lost_member_fault,
        {"raised": ""},
    ),
    Part(
        "generation",
        "milliseconds of a step by draft length, acceptance, canary quantiles",
        generation_parts.measure_generation,
        generation_parts.find_generation_fault,
        {"canaryMax": 5.0},
    ),
    Part(
        "eagerSteps",
        "milliseconds of a step without CUDA graphs",
        generation_parts.measure_eager_steps,
        generation_parts.find_eager_steps_fault,
        {"stepOffMs": 0.0},
    ),
    Part(
        "draftLengths",
        "n-gram drafts that are switched off and on again",
        generation_parts.measure_draft_lengths,
        generation_parts.find_draft_lengths_fault,
        {"offDrafts": 1},
    ),
)
