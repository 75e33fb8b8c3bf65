"""Turns a run file or RLJob into a scenario, with what a calibration measured and what a cluster file adds.

Called by `specrl simulate` and `specrl plan`.
"""

from __future__ import annotations

from typing import Any

from specrl.errors import SpecInvalid, SpecProblem
from specrl.formats.calibration import RunCalibration
from specrl.simulator.scenarios.scenario import Mechanism
from specrl.spec import RunSpec
from specrl.spec.generation import DraftLength

# A longer run repeats what its last simulated steps show. With fewer steps, too few lengths would be drawn.
SIMULATED_STEPS = 24


def scenario_from_run(
    spec: RunSpec, calibration: RunCalibration | None, cluster: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the mapping of a scenario; `--set` overrides come later. Raises SpecInvalid for what cannot be simulated.

    cluster: the content of a cluster file; None: a machine without GPUs, whose costs come from a calibration.
    """
    generation = spec.generation
    schedule = spec.schedule
    gpus_per_replica = max(generation.gpus_per_replica, generation.tensor_parallel)
    generating = generation.replicas * gpus_per_replica
    training = spec.trainer.parallelism.world_size
    steps = max(SIMULATED_STEPS, 2 * (schedule.max_policy_lag + 2))
    return {
        "name": spec.name,
        "model": {"path": spec.model.path},
        "cluster": {"gpus": generating + training} | (cluster or {}),
        "layout": {"generationGpus": generating, "trainingGpus": training, "tensorParallel": gpus_per_replica},
        "workload": _workload_fields(spec, calibration),
        "schedule": {
            "steps": steps,
            "runSteps": max(1, schedule.steps),
            "promptsPerStep": schedule.prompts_per_step,
            "groupSize": schedule.group_size,
            "maxPolicyLag": schedule.max_policy_lag,
            "seed": schedule.seed,
        },
        "speculation": _speculation_fields(spec, calibration),
        "engine": {"maxLiveRollouts": generation.max_live_rollouts},
    }


def _workload_fields(spec: RunSpec, calibration: RunCalibration | None) -> dict[str, Any]:
    known = {"maxTokens": spec.generation.sampling.max_tokens, "promptTokens": spec.prompts.max_tokens}
    if calibration is None or not calibration.groups:
        return known
    # A run's own lengths, capped at this run file's limit, which may be lower.
    return known | {
        "groups": [[min(length, known["maxTokens"]) for length in group] for group in calibration.groups],
        "promptTokens": max(1, round(calibration.prompt_tokens)),
    }


def _speculation_fields(spec: RunSpec, calibration: RunCalibration | None) -> dict[str, Any]:
    speculation = spec.generation.speculation
    if speculation.kind == "none":
        return {"mechanism": Mechanism.NONE.value}
    if speculation.kind not in [mechanism.value for mechanism in Mechanism]:
        known = ", ".join(mechanism.value for mechanism in Mechanism)
        rule = f"must be one of {known} to be simulated, got {speculation.kind}"
        raise SpecInvalid((SpecProblem("generation.speculation", rule, "simulate it as the nearest of them"),))
    found: dict[str, Any] = {
        "mechanism": speculation.kind,
        "k": speculation.num_draft_tokens,
        "isAdaptive": spec.generation.draft_length is DraftLength.ADAPTIVE,
    }
    if calibration is not None and calibration.acceptance:
        found["chances"] = calibration.acceptance
    return found
