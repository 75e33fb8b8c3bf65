"""Decides whether a replica on CPUs compiles its models, if generation.eager is null.

Compiling costs CPU time at each start and saves some at each step, since fused operators replace many small ones. So it
pays for long runs:

    saved    steps of the replica x layers x STEP_PER_LAYER_S
    cost     START_S + layers x START_PER_LAYER_S

The constants were measured (docs/measured.md, "Compiled engines on CPUs"). The number of steps is an estimate, so what
is saved must be SURE_FACTOR times the cost. All nodes of a replica decide alike. Called by `vllm_backend`.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from specrl.machine import visible_gpus
from specrl.models import ModelFolder
from specrl.spec import RunSpec

START_S = 18.0
"""CPU seconds that compiling adds to a start, besides those of each layer."""
START_PER_LAYER_S = 1.25
STEP_PER_LAYER_S = 0.0004
"""CPU seconds that a compiled step saves, by layer, with 8 live rollouts. With more of them it saves more."""
SURE_FACTOR = 2.0
LENGTH_SHARE = 0.5
"""A rollout's length, as a share of sampling.maxTokens."""
TOKENS_PER_DRAFTING_STEP = 2.0
"""Tokens that a step adds to a rollout with speculation."""


@dataclass(frozen=True)
class CompileGain:
    """The cost of compiling for a replica and its saving over the whole run, in CPU seconds."""

    steps: float
    saved_s: float
    cost_s: float

    @property
    def is_worth_it(self) -> bool:
        return self.saved_s >= SURE_FACTOR * self.cost_s


def estimate_gain(spec: RunSpec, layers: int) -> CompileGain:
    """Estimate what compiling brings. layers: of the policy."""
    generation = spec.generation
    schedule = spec.schedule
    rollouts_of_step = schedule.prompts_per_step * schedule.group_size / generation.replicas
    # Rollouts of a step that do not fit into the batch wait for others to end.
    batches = max(1.0, rollouts_of_step / generation.max_live_rollouts)
    per_step = TOKENS_PER_DRAFTING_STEP if generation.speculation.num_draft_tokens else 1.0
    steps = schedule.steps * batches * LENGTH_SHARE * generation.sampling.max_tokens / per_step
    return CompileGain(steps, steps * layers * STEP_PER_LAYER_S, START_S + layers * START_PER_LAYER_S)


def can_compile() -> bool:
    """Whether this node has what torch's C++ kernels need: the compiler that torch calls, and Python's headers."""
    has_compiler = shutil.which(os.environ.get("CXX", "g++")) is not None
    return has_compiler and (Path(sysconfig.get_path("include")) / "Python.h").exists()


def resolve_eager(spec: RunSpec, policy: ModelFolder) -> RunSpec:
    """Return the run with generation.eager chosen if it is null and this node has no GPU."""
    if spec.generation.eager is not None or visible_gpus():
        return spec
    gain = estimate_gain(spec, policy.config_number("num_hidden_layers") or 0)
    is_eager = not gain.is_worth_it or not can_compile()
    return spec.model_copy(update={"generation": spec.generation.model_copy(update={"eager": is_eager})})
