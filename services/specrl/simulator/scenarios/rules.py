"""The rules between a scenario's fields. Each yields problems with path, rule and remedy; all of them are reported.

`scenario.py` has the rules of single fields. Called by `simulate.prepare_scenario`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from specrl.errors import SpecProblem
from specrl.simulator.scenarios.hardware import GPUS
from specrl.simulator.scenarios.lengths import NAMED_LENGTHS
from specrl.simulator.scenarios.models import MODELS
from specrl.simulator.scenarios.scenario import Mechanism, Precision, Scenario


def find_rule_problems(scenario: Scenario, *, has_calibration: bool) -> list[SpecProblem]:
    """Return everything that contradicts itself or does not exist."""
    rules = (
        _model_problems,
        _cluster_problems,
        _layout_problems,
        _workload_problems,
        _schedule_problems,
        _speculation_problems,
    )
    found = [problem for rule in rules for problem in rule(scenario)]
    if scenario.cluster.gpu is None and not has_calibration:
        remedy = "name a GPU in cluster.gpu, or pass --calibration RUN/calibration.json of a run on such a machine"
        found.append(SpecProblem("cluster.gpu", "must be given without a calibration, got none", remedy))
    return found


def _unknown_name_problems(path: str, value: str, known: dict[str, object]) -> Iterator[SpecProblem]:
    if value not in known:
        close = difflib.get_close_matches(value.lower(), [name.lower() for name in known], n=1)
        nearest = next((name for name in known if close and name.lower() == close[0]), None)
        remedy = f"did you mean {nearest}?" if nearest else "use one of these"
        yield SpecProblem(path, f"must be one of {', '.join(known)}, got {value!r}", remedy)


def _model_problems(scenario: Scenario) -> Iterator[SpecProblem]:
    model = scenario.model
    if (model.name is None) == (model.path is None):
        yield SpecProblem("model", "must have a name or a path, not both", "as in model: {name: qwen3-8b}")
    elif model.name is not None:
        yield from _unknown_name_problems("model.name", model.name, dict(MODELS))


def _cluster_problems(scenario: Scenario) -> Iterator[SpecProblem]:
    name = scenario.cluster.gpu
    if name is None:
        return
    yield from _unknown_name_problems("cluster.gpu", name, dict(GPUS))
    if name in GPUS and scenario.model.precision is Precision.FP8 and GPUS[name].fp8_flops is None:
        yield SpecProblem("model.precision", f"must be bfloat16 on {name}, which has no FP8, got fp8", "use bfloat16")


def _layout_problems(scenario: Scenario) -> Iterator[SpecProblem]:
    layout = scenario.layout
    gpus = scenario.cluster.gpus
    if layout.colocated:
        if not layout.generation_gpus == layout.training_gpus == gpus:
            rule = (
                f"must be all {gpus} GPUs when colocated, got generationGpus={layout.generation_gpus} "
                f"and trainingGpus={layout.training_gpus}"
            )
            yield SpecProblem("layout", rule, "set both to cluster.gpus, or colocated: false")
    elif layout.generation_gpus + layout.training_gpus > gpus:
        rule = f"must have at most {gpus} GPUs, got {layout.generation_gpus} + {layout.training_gpus}"
        yield SpecProblem("layout", rule, "give generation or training fewer, or add to cluster.gpus")
    if layout.generation_gpus % layout.gpus_per_replica:
        rule = f"must be a multiple of the {layout.gpus_per_replica} GPUs of a replica, got {layout.generation_gpus}"
        yield SpecProblem("layout.generationGpus", rule, "change it, tensorParallel or expertParallel")
    if layout.expert_parallel > 1 and layout.gpus_per_replica % layout.tensor_parallel:
        rule = f"must divide expertParallel={layout.expert_parallel}, got {layout.tensor_parallel}"
        yield SpecProblem("layout.tensorParallel", rule, "use a power of two")
    shape = MODELS.get(scenario.model.name or "")
    if shape is not None:
        if shape.heads % layout.tensor_parallel:
            rule = f"must divide the model's {shape.heads} attention heads, got {layout.tensor_parallel}"
            yield SpecProblem("layout.tensorParallel", rule, "use a power of two")
        if layout.expert_parallel > 1 and (not shape.experts or shape.experts % layout.expert_parallel):
            rule = f"must divide the model's {shape.experts} experts, got {layout.expert_parallel}"
            yield SpecProblem("layout.expertParallel", rule, "use 1 for a dense model")
    for place, failure in enumerate(scenario.failures):
        if failure.replica >= layout.replica_count:
            rule = f"must be below the {layout.replica_count} replicas, got {failure.replica}"
            yield SpecProblem(f"failures.{place}.replica", rule, "replicas are counted from 0")
    lost = {failure.replica for failure in scenario.failures if failure.back_after_s is None}
    if layout.replica_count and len(lost) >= layout.replica_count:
        yield SpecProblem("failures", "must leave at least one replica, got none", "give one failure a backAfterS")


def _workload_problems(scenario: Scenario) -> Iterator[SpecProblem]:
    work = scenario.workload
    log_normal = work.median_tokens is not None or work.sigma is not None
    if (work.named is not None) + log_normal + (work.quantiles is not None) + (work.groups is not None) != 1:
        rule = "must have lengths from exactly one of named, medianTokens with sigma, quantiles, and groups"
        yield SpecProblem("workload", rule, "keep one of them")
    elif log_normal and (work.median_tokens is None or work.sigma is None):
        yield SpecProblem("workload", "must have both medianTokens and sigma, got one", "add the other")
    if work.named is not None:
        yield from _unknown_name_problems("workload.named", work.named, dict(NAMED_LENGTHS))
    if work.median_tokens is not None and work.median_tokens > work.max_tokens:
        rule = f"must be at most maxTokens={work.max_tokens}, got {work.median_tokens:g}"
        yield SpecProblem("workload.medianTokens", rule, "lower it, or raise maxTokens")
    if work.quantiles is not None:
        if list(work.quantiles) != sorted(work.quantiles):
            yield SpecProblem("workload.quantiles", "must be ascending, got some that fall", "sort them")
        elif work.quantiles[-1] > work.max_tokens:
            rule = f"must be at most maxTokens={work.max_tokens}, got {work.quantiles[-1]:g}"
            yield SpecProblem("workload.quantiles", rule, "raise maxTokens")
    longest = max((max(group) for group in work.groups or ()), default=0.0)
    if longest > work.max_tokens:
        rule = f"must be at most maxTokens={work.max_tokens}, got {longest:g}"
        yield SpecProblem("workload.groups", rule, "raise maxTokens")


def _schedule_problems(scenario: Scenario) -> Iterator[SpecProblem]:
    lag = scenario.schedule.max_policy_lag
    if scenario.layout.colocated and lag:
        remedy = "set layout.colocated=false and split the GPUs, or use schedule.maxPolicyLag=0"
        yield SpecProblem(
            "schedule.maxPolicyLag", f"must be 0 where generation and training share GPUs, got {lag}", remedy
        )
    if scenario.schedule.steps <= lag + 1:
        rule = f"must be more than maxPolicyLag + 1 = {lag + 1}, in which the pipeline fills"
        yield SpecProblem("schedule.steps", f"{rule}, got {scenario.schedule.steps}", f"use {4 * (lag + 2)}")


def _speculation_problems(scenario: Scenario) -> Iterator[SpecProblem]:
    speculation = scenario.speculation
    if speculation.mechanism is Mechanism.NONE:
        return
    k = speculation.k
    length = speculation.acceptance_length
    if k == 0:
        yield SpecProblem("speculation.k", "must be at least 1 with a mechanism, got 0", "use mechanism: none")
    if (length is None) == (speculation.chances is None):
        rule = "must have exactly one of acceptanceLength and chances"
        yield SpecProblem("speculation", rule, "measure it: `specrl status RUN` shows a run's acceptance length")
    if length is not None and not 1 <= length <= k + 1:
        rule = f"must be from 1 to k + 1 = {k + 1}, got {length:g}"
        yield SpecProblem("speculation.acceptanceLength", rule, "it counts the bonus token, and is measured at this k")
