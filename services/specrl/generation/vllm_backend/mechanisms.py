"""Can this vLLM run the run's mechanism here? Pure; asked by preflight and by the engine, before anything is started.

vLLM 0.32 knows one mechanism at a time (`SpeculativeConfig.method`), so ours are members of one union and combine with
nothing. Which of them the run's models fit is `checkpoint`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pydantic.alias_generators import to_camel

from specrl.errors import Problem, SpecInvalid
from specrl.generation.vllm_backend.checkpoint import EngineModel, read_draft_model
from specrl.spec import RunSpec

SUFFIX_PACKAGE = "arctic_inference"
HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")  # of a config, by family of models
MOST_DRAFT_TOKENS = 128  # MAX_SPEC_LEN of vLLM 0.32's rejection sampler, an assertion in the engine core
# vLLM 0.32 takes the method from these parts of a drafter's path, whatever the method that it was given says.
MISLEADING = ("eagle-", "eagle3", "dflash", "dspark")


@dataclass(frozen=True)
class Surroundings:
    """What decides whether a mechanism can run, apart from models."""

    has_suffix_package: bool


def surroundings() -> Surroundings:
    """This process's. Imports nothing."""
    return Surroundings(has_suffix_package=find_spec(SUFFIX_PACKAGE) is not None)


def check_mechanism(spec: RunSpec, here: Surroundings) -> None:
    """Raise SpecInvalid when the mechanism needs something that is not here, or more than vLLM can do."""
    longest = spec.generation.speculation.num_draft_tokens
    if longest > MOST_DRAFT_TOKENS:
        raise SpecInvalid(
            (
                Problem(
                    f"generation.speculation.{to_camel(spec.generation.speculation.kind)}.numDraftTokens",
                    f"must be <= {MOST_DRAFT_TOKENS}, which vLLM's sampler verifies at most, got {longest}",
                    "lower it; more than a few seldom pay",
                ),
            )
        )
    if spec.generation.speculation.suffix is not None and not here.has_suffix_package:
        raise SpecInvalid(
            (
                Problem(
                    "generation.speculation.suffix",
                    "must have the package arctic-inference 0.1.1, which holds the suffix trees, got none installed",
                    "run `make suffix` (it compiles C++), or use ngram",
                ),
            )
        )


def drafting_model(spec: RunSpec, policy: EngineModel) -> EngineModel | None:
    """The checked folder of `draftModel`; None for other mechanisms. Raises CheckpointInvalid or SpecInvalid.

    For `mtp` the drafter is in the policy's own folder, which is checked for it.
    """
    speculation = spec.generation.speculation
    if speculation.draft_model is not None:
        path = Path(speculation.draft_model.path)
        _refuse_misleading("generation.speculation.draftModel.path", path)
        return read_draft_model(path, policy, spec.model.max_length)
    if speculation.mtp is not None:
        _refuse_misleading("model.path", policy.path)
        _check_heads(policy, speculation.mtp.num_draft_tokens)
    return None


def _refuse_misleading(field: str, path: Path) -> None:
    found = [part for part in MISLEADING if part in str(path).lower()]
    if found:
        raise SpecInvalid(
            (
                Problem(
                    field,
                    f"must not contain {' or '.join(MISLEADING)}, from which vLLM 0.32 would take it for such a "
                    f"drafter, got {found[0]!r} in {path}",
                    "move or link the folder to another name",
                ),
            )
        )


def _check_heads(policy: EngineModel, num_draft_tokens: int) -> None:
    config = policy.config | (policy.config.get("text_config") or {})
    heads = next((config[name] for name in HEADS if config.get(name)), 0)
    if not heads:
        raise SpecInvalid(
            (
                Problem(
                    "generation.speculation.mtp",
                    "must have a policy with heads for multi-token prediction, got none in "
                    f"{policy.path / 'config.json'}",
                    "use eagle3, or a model that has such heads",
                ),
            )
        )
    if num_draft_tokens > heads and num_draft_tokens % heads:
        raise SpecInvalid(
            (
                Problem(
                    "generation.speculation.mtp.numDraftTokens",
                    f"must be at most the policy's {heads} heads or a multiple of them, got {num_draft_tokens}",
                    f"use {heads}",
                ),
            )
        )
