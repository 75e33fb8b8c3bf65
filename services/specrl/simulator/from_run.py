"""A run file or RLJob as a scenario: what it says itself, what a calibration measured, what a cluster file adds."""

from __future__ import annotations

from typing import Any

from specrl.coordinator.calibration import Calibration
from specrl.errors import Problem, SpecInvalid
from specrl.simulator.scenario import Mechanism
from specrl.spec import RunSpec
from specrl.spec.generation import DraftLength

SIMULATED_STEPS = 24
"""Of a longer run what comes after is like the last of these; of a shorter one few steps are few draws of lengths."""


def scenario_of(spec: RunSpec, calibration: Calibration | None, cluster: dict[str, Any] | None) -> dict[str, Any]:
    """The mapping of a scenario, to be completed by `--set`. Raises SpecInvalid for what cannot be simulated.

    cluster: the section of a cluster file; None: processors, whose costs a calibration has.
    """
    generation, schedule = spec.generation, spec.schedule
    gpus_per_replica = max(generation.gpus_per_replica, generation.tensor_parallel)
    generating, training = generation.replicas * gpus_per_replica, spec.trainer.parallelism.world_size
    steps = max(SIMULATED_STEPS, 2 * (schedule.max_policy_lag + 2))
    return {
        "name": spec.name,
        "model": {"path": spec.model.path},
        "cluster": {"gpus": generating + training} | (cluster or {}),
        "layout": {
            "generationGpus": generating,
            "trainingGpus": training,
            "tensorParallel": gpus_per_replica,
        },
        "workload": _workload(spec, calibration),
        "schedule": {
            "steps": steps,
            "runSteps": max(1, schedule.steps),
            "promptsPerStep": schedule.prompts_per_step,
            "groupSize": schedule.group_size,
            "maxPolicyLag": schedule.max_policy_lag,
            "order": schedule.order.value,
            "seed": schedule.seed,
        },
        "speculation": _speculation(spec, calibration),
        "engine": {"maxLiveRollouts": generation.max_live_rollouts},
    }


def _workload(spec: RunSpec, calibration: Calibration | None) -> dict[str, Any]:
    known = {"maxTokens": spec.generation.sampling.max_tokens, "promptTokens": spec.prompts.max_tokens}
    if calibration is None or not calibration.groups:
        return known
    return known | {
        "groups": [[min(length, known["maxTokens"]) for length in group] for group in calibration.groups],
        "promptTokens": max(1, round(calibration.prompt_tokens)),
    }


def _speculation(spec: RunSpec, calibration: Calibration | None) -> dict[str, Any]:
    speculation = spec.generation.speculation
    if speculation.kind == "none":
        return {"mechanism": Mechanism.NONE.value}
    if speculation.kind not in [mechanism.value for mechanism in Mechanism]:
        known = ", ".join(mechanism.value for mechanism in Mechanism)
        rule = f"must be one of {known} to be simulated, got {speculation.kind}"
        raise SpecInvalid((Problem("generation.speculation", rule, "simulate it as the nearest of them"),))
    found: dict[str, Any] = {
        "mechanism": speculation.kind,
        "k": speculation.num_draft_tokens,
        "isAdaptive": spec.generation.draft_length is DraftLength.ADAPTIVE,
    }
    if calibration is not None and calibration.acceptance:
        found["chances"] = calibration.acceptance
    return found
