"""Checks that vLLM can run the configured mechanism, models and tensor parallel size. Imports nothing of vLLM.

vLLM 0.32 supports one mechanism at a time (`SpeculativeConfig.method`), so the run file has a union of them.

Called by the launcher's preflight before anything starts, and by the engine at its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from pydantic.alias_generators import to_camel

from specrl.errors import SpecProblem
from specrl.generation.vllm_backend.checkpoint import find_draft_model_problems
from specrl.models import ModelFolder, RunModels
from specrl.spec import RunSpec

SUFFIX_PACKAGE = "arctic_inference"
MAX_DRAFT_TOKENS = 128  # MAX_SPEC_LEN of vLLM 0.32's rejection sampler; the engine core asserts it
# If a drafter's path contains one of these, vLLM 0.32 derives the method from it and ignores the configured method.
MISLEADING = ("eagle-", "eagle3", "dflash", "dspark")


def has_suffix_package() -> bool:
    """Whether the package of suffix decoding is installed. Does not import it."""
    return find_spec(SUFFIX_PACKAGE) is not None


def check(spec: RunSpec, models: RunModels) -> list[SpecProblem]:
    """Report a mechanism that vLLM cannot run with these models, and a tensor parallel size that divides no heads."""
    problems = [*find_mechanism_problems(spec, has_suffix_package()), *find_drafting_model_problems(spec, models)]
    ranks = spec.generation.tensor_parallel
    policy = models.policy
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = policy.config_number(field) if policy is not None else None
        if heads is not None and heads % ranks:
            rule = f"must divide the model's {field}={heads}, got {ranks}"
            problems.append(SpecProblem("generation.tensorParallel", rule, "use a divisor"))
    # vLLM 0.32 runs a draft model on as many ranks as the policy. It repeats key/value heads where there are too few.
    draft_model = models.draft_model
    heads = draft_model.config_number("num_attention_heads") if draft_model is not None else None
    if heads is not None and heads % ranks:
        rule = f"must divide the draft model's num_attention_heads={heads}, got {ranks}"
        problems.append(SpecProblem("generation.tensorParallel", rule, "use a divisor, or another draft model"))
    family = models.policy_config.family if models.policy_config is not None else None
    if spec.generation.expert_parallel and family is not None and not family.is_mixture:
        rule = f"must be false for a policy without experts, got true for {family.architecture}"
        problems.append(SpecProblem("generation.expertParallel", rule, "leave it out"))
    return problems


def find_expert_problems(spec: RunSpec, is_cpu: bool) -> Iterator[SpecProblem]:
    """Report expert parallelism on a CPU.

    vLLM's kernel there ignores which experts a rank holds (0.32 and 0.33, fused_moe/experts/cpu_moe.py, `apply`), so it
    would compute with other experts.
    """
    if spec.generation.expert_parallel and is_cpu:
        yield SpecProblem(
            "generation.expertParallel",
            "must be false on CPUs, for which vLLM has no expert parallel kernel, got true",
            "leave it out, or use GPUs",
        )


def find_mechanism_problems(spec: RunSpec, can_use_suffix: bool) -> Iterator[SpecProblem]:
    """Report settings beyond vLLM's limits, and suffix decoding without its package."""
    speculation = spec.generation.speculation
    if speculation.num_draft_tokens > MAX_DRAFT_TOKENS:
        yield SpecProblem(
            f"generation.speculation.{to_camel(speculation.kind)}.numDraftTokens",
            f"must be <= {MAX_DRAFT_TOKENS}, the limit of vLLM's sampler, got {speculation.num_draft_tokens}",
            "lower it; more than a few rarely pay",
        )
    if speculation.suffix is not None and not can_use_suffix:
        yield SpecProblem(
            "generation.speculation.suffix",
            "must have the package arctic-inference 0.1.1 for its suffix trees, got none installed",
            "run `make suffix` (it compiles C++), or use ngram",
        )


def find_drafting_model_problems(spec: RunSpec, models: RunModels) -> Iterator[SpecProblem]:
    """Report problems of the drafting model: that of `draftModel`, or the policy's own heads for `mtp`."""
    speculation = spec.generation.speculation
    policy = models.policy
    if speculation.draft_model is not None:
        field = "generation.speculation.draftModel.path"
        yield from _find_path_problems(field, Path(speculation.draft_model.path))
        if models.draft_model is not None and policy is not None:
            yield from find_draft_model_problems(models.draft_model, policy, spec.model.max_length)
    if speculation.mtp is not None and policy is not None:
        yield from _find_path_problems("model.path", policy.path)
        yield from _find_head_problems(policy, speculation.mtp.num_draft_tokens)


def _find_path_problems(field: str, path: Path) -> Iterator[SpecProblem]:
    found = [part for part in MISLEADING if part in str(path).lower()]
    if found:
        yield SpecProblem(
            field,
            f"must not contain {' or '.join(MISLEADING)}, from which vLLM 0.32 would guess another method, got "
            f"{found[0]!r} in {path}",
            "move or link the folder to another name",
        )


def _find_head_problems(policy: ModelFolder, num_draft_tokens: int) -> Iterator[SpecProblem]:
    heads = policy.num_mtp_heads
    if not heads:
        yield SpecProblem(
            "generation.speculation.mtp",
            f"must have a policy with heads for multi-token prediction, got none in {policy.path / 'config.json'}",
            "use eagle3, or a model that has such heads",
        )
    elif num_draft_tokens > heads and num_draft_tokens % heads:
        yield SpecProblem(
            "generation.speculation.mtp.numDraftTokens",
            f"must be at most the policy's {heads} heads or a multiple of them, got {num_draft_tokens}",
            f"use {heads}",
        )
