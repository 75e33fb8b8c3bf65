"""The EAGLE-3 head as a kind of drafter: its checks and its size, without torch."""

from __future__ import annotations

from specrl.drafting.kind import DrafterKind
from specrl.errors import SpecProblem
from specrl.models import ModelFolder, RunModels
from specrl.models.policy_config import find_rope_problems
from specrl.spec import RunSpec


class Eagle3Kind(DrafterKind):
    """Member `eagle3`: a head that is read from a folder, or initialised on the policy's own rollouts."""

    loader = "specrl.drafting.eagle3.head:load_drafter"
    read_states = 4  # three layers' and the embedding
    learning_rate = 1e-3  # for heads of millions of parameters; published ones as wide as an 8B model use 1e-4

    def is_fresh(self, spec: RunSpec) -> bool:
        """Whether the run names no head to start from."""
        eagle3 = spec.generation.speculation.eagle3
        return eagle3 is not None and eagle3.path is None

    def check(self, spec: RunSpec, models: RunModels) -> list[SpecProblem]:
        """Report a head whose vocabulary, hidden size or tokenizer differs from the policy's.

        A head without a tokenizer is accepted.
        """
        policy = models.policy
        drafter = models.drafter
        eagle3 = spec.generation.speculation.eagle3
        assert policy is not None
        assert eagle3 is not None
        problems = []
        vocabulary = policy.config_number("vocab_size") or 0
        if eagle3.draft_vocab_size is not None and eagle3.draft_vocab_size > vocabulary:
            problems.append(
                SpecProblem(
                    "generation.speculation.eagle3.draftVocabSize",
                    f"must be <= {vocabulary}, the policy's vocabulary, got {eagle3.draft_vocab_size}",
                    "lower it, or leave it out to draft every token",
                )
            )
        if drafter is None:
            return problems
        # Of heads in the speculators layout, the decoder layer's config is nested.
        problems += [
            SpecProblem(
                drafter.field, f"must have rotary positions that the trainer can compute: {wrong}", "use another"
            )
            for wrong in find_rope_problems(drafter.config.get("transformer_layer_config") or drafter.config)
        ]
        for name in ("vocab_size", "hidden_size"):
            # speculators heads may have another width themselves, and name the policy's in target_hidden_size.
            theirs = drafter.config_number("target_hidden_size") if name == "hidden_size" else None
            theirs = theirs or drafter.config_number(name)
            if theirs != policy.config_number(name):
                problems.append(
                    SpecProblem(
                        drafter.field,
                        f"must be a drafter trained for this policy, got {name}={theirs} in {drafter.path} and "
                        f"{policy.config_number(name)} in {policy.path}",
                        "use the policy's own drafter, or leave path out for a fresh one",
                    )
                )
        if drafter.vocabulary not in (None, policy.vocabulary):
            problems.append(
                SpecProblem(
                    drafter.field,
                    f"must have the policy's tokenizer, got different vocabularies in "
                    f"{drafter.path / 'tokenizer.json'} and {policy.path / 'tokenizer.json'}",
                    "use the policy's own drafter, or leave path out for a fresh one",
                )
            )
        return problems

    def count_draft_ids(self, spec: RunSpec, policy: ModelFolder) -> int:
        """Count the tokens of the draft vocabulary."""
        eagle3 = spec.generation.speculation.eagle3
        assert eagle3 is not None
        return eagle3.draft_vocab_size or super().count_draft_ids(spec, policy)

    def count_parameters(self, spec: RunSpec, models: RunModels) -> int:
        """Count the head's parameters.

        It has one decoder layer over two streams, a projection that fuses three hidden states, and its own output
        matrix.
        """
        policy = models.policy
        assert policy is not None
        width = policy.config_number("hidden_size") or 0
        inner = policy.config_number("intermediate_size") or 0
        return 9 * width**2 + 3 * width * inner + self.count_draft_ids(spec, policy) * width
