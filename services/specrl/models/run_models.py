"""Reads every model folder that a run file names, once each, and checks that the policy fits the run.

Called by preflight and by a replica at its start. A requirement of one package only is checked by that package, in its
own `check(spec, models)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specrl.errors import CheckpointInvalid, SpecProblem, collect_problems
from specrl.models.end_tokens import find_end_tokens
from specrl.models.model_folder import ModelFolder, read_model_folder
from specrl.models.policy_config import PolicyConfig
from specrl.spec import RunSpec
from specrl.spec.base import is_gguf, is_hub_name


@dataclass(frozen=True)
class RunModels:
    """The models of a run.

    A model is None if the run names no such folder or if the folder cannot be read. In the latter case `problems` has
    the reason.
    """

    policy: ModelFolder | None = None
    drafter: ModelFolder | None = None
    draft_model: ModelFolder | None = None
    reference: ModelFolder | None = None
    problems: tuple[SpecProblem, ...] = ()

    @property
    def policy_config(self) -> PolicyConfig | None:
        """The policy's config as the trainer needs it; None if there is none. `trainer.preflight` reports why."""
        try:
            return self.policy.policy_config if self.policy is not None else None
        except CheckpointInvalid:
            return None


def read_models(spec: RunSpec) -> RunModels:
    """Read every model of the run, including those that only the trainer needs."""
    kl = spec.trainer.loss.reference_kl
    served = read_served_models(spec)
    problems = list[SpecProblem]()
    reference = _read_if_named(kl.path if kl is not None else None, "trainer.loss.referenceKl.path", problems)
    return replace(served, reference=reference, problems=(*served.problems, *problems))


def read_served_models(spec: RunSpec) -> RunModels:
    """Read the models that a generation replica needs. It has no copy of the reference policy."""
    speculation = spec.generation.speculation
    problems = list[SpecProblem]()
    eagle3 = speculation.eagle3
    draft_model = speculation.draft_model
    return RunModels(
        policy=_read_if_named(spec.model.path, "model.path", problems),
        drafter=_read_if_named(eagle3.path if eagle3 else None, "generation.speculation.eagle3.path", problems),
        draft_model=_read_if_named(
            draft_model.path if draft_model else None, "generation.speculation.draftModel.path", problems
        ),
        problems=tuple(problems),
    )


def _read_if_named(path: str | None, field: str, problems: list[SpecProblem]) -> ModelFolder | None:
    # A name on the hub, or a GGUF file, stays in the run file only if it could not be fetched or converted, which has
    # been reported.
    if path is not None and not is_hub_name(path) and not is_gguf(path):
        with collect_problems(problems):  # adds a SpecrlError to the problems instead of raising it
            return read_model_folder(Path(path), field)
    return None


def check(spec: RunSpec, models: RunModels) -> list[SpecProblem]:
    """Report unreadable models, and a policy whose tokenizer or context length does not fit the run."""
    policy = models.policy
    if policy is None:
        return list(models.problems)
    problems = list(models.problems)
    # A config without vocab_size counts as 0, so any tokenizer is too large for it and is reported.
    vocab_size = policy.config_number("vocab_size") or 0
    longest = policy.config_number("max_position_embeddings")
    if policy.vocabulary is None:
        rule = f"must have a tokenizer, got {policy.path} without tokenizer.json"
        problems.append(SpecProblem("model.path", rule, "copy the model's tokenizer there"))
    # A smaller tokenizer is fine, since models pad their embedding. An id beyond the embedding would be an index error
    # in the trainer.
    elif policy.vocabulary.size > vocab_size:
        problems.append(
            SpecProblem(
                "the tokenizer's token ids",
                f"must be < the model's vocabulary, got {policy.vocabulary.size} tokens for vocab_size={vocab_size} in "
                f"{policy.path}",
                "use the tokenizer that the model was trained with",
            )
        )
    else:
        with collect_problems(problems):
            find_end_tokens(spec, policy)
    top_p = spec.generation.sampling.top_p
    if vocab_size > 0 and top_p * vocab_size <= 1:
        # The most likely of V tokens has a probability of at least 1/V, so topP is reached by it alone.
        problems.append(
            SpecProblem(
                "generation.sampling.topP",
                f"must be > 1/{vocab_size} for a vocabulary of {vocab_size} tokens, got {top_p}",
                'raise it, as to "0.9": only the most likely token could be sampled, and nothing would be learned',
            )
        )
    if longest is not None and spec.model.max_length > longest:
        problems.append(
            SpecProblem(
                "model.maxLength",
                f"must be <= {longest}, the model's max_position_embeddings, got maxLength={spec.model.max_length}",
                "shorten prompts.maxTokens or generation.sampling.maxTokens, use another model, or stretch this one's "
                "positions by YaRN (docs/models.md)",
            )
        )
    return problems
