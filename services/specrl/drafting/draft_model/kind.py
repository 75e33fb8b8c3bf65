"""The draft model as a kind of drafter: its checks and its size, without torch."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from specrl.drafting.kind import DrafterKind
from specrl.errors import SpecProblem
from specrl.models import RunModels
from specrl.spec import RunSpec

FIELD = "generation.speculation.draftModel.path"
MODEL = "specrl.drafting.draft_model.model"
LONG_TOKENS = 4096  # of one forward pass; with more, layers are computed again in the backward pass
LOGITS = 1 << 26  # of one forward pass: 256 MiB in float32
# Activations of a layer, per token and hidden element: 34 bytes at two bytes per number (arXiv:2205.05198).
LAYER_BYTES = 68
LOSS_COPIES = 4  # of the logits, which the loss of one pass keeps for the backward pass


class DraftModelKind(DrafterKind):
    """Member `draftModel`: a language model, which is read from a folder.

    With `trainer.drafter.online: false` the trainer does not hold it. Replicas then keep the model of the folder.
    """

    loader = f"{MODEL}:load_drafter"
    learning_rate = 1e-5  # usual for language models; 1e-3 would destroy what they learnt before

    def is_held(self, spec: RunSpec) -> bool:
        """Whether the run trains the draft model."""
        return spec.trainer.drafter.online or self.is_fresh(spec)

    def is_fresh(self, spec: RunSpec) -> bool:
        """Whether the run trains the draft model before its first step. Only a run without steps does.

        A draft model is a language model already, so it is taken as it is. `specrl drafter init` runs no steps.
        """
        return spec.schedule.steps == 0

    def count_passes(self, spec: RunSpec) -> int:
        """Return numDraftTokens: one forward pass has the logits of all passes, so that more of them cost little."""
        return spec.generation.speculation.num_draft_tokens

    def check(self, spec: RunSpec, models: RunModels) -> list[SpecProblem]:
        """Report a draft model that cannot be trained. Whether it can draft is checked by the generation package."""
        folder = models.draft_model
        if folder is None:
            return []
        remedy = "use another draft model, or keep this one as it is by trainer.drafter.online: false"
        if "quantization_config" in folder.config:
            rule = f"must not be quantised to be trained, got quantization_config in {folder.path / 'config.json'}"
            return [SpecProblem(folder.field, rule, remedy)]
        if find_spec("torch") is None:
            return []  # reported by preflight
        # By name, as `loader`. transformers takes seconds to import, and no other mechanism needs it.
        obstacle: str | None = import_module(MODEL).describe_obstacle(folder)
        return [] if obstacle is None else [SpecProblem(folder.field, obstacle, remedy)]

    def count_parameters(self, spec: RunSpec, models: RunModels) -> int:
        """Count the parameters of the draft model's folder."""
        return models.draft_model.num_parameters if models.draft_model is not None else 0

    def estimate_pass_bytes(self, spec: RunSpec, models: RunModels) -> int:
        """Estimate the activations of one forward pass: those of the layers, and the logits with their loss."""
        folder = models.draft_model
        if folder is None:
            return 0
        hidden = folder.config_number("hidden_size") or 0
        layers = folder.config_number("num_hidden_layers") or 0
        vocabulary = folder.config_number("vocab_size") or 1
        longest = spec.prompts.max_tokens + spec.generation.sampling.max_tokens
        rollouts = spec.schedule.prompts_per_step * spec.schedule.group_size
        short = LAYER_BYTES * hidden * layers * min(LONG_TOKENS, rollouts * longest)
        # Of long sequences: each layer's input in float32, and one layer at a time.
        long = hidden * longest * (4 * layers + LAYER_BYTES) if longest > LONG_TOKENS else 0
        starts = min(most_starts(vocabulary), rollouts * spec.generation.sampling.max_tokens)
        return max(short, long) + 4 * vocabulary * starts * (1 + LOSS_COPIES * self.count_passes(spec))


def most_starts(vocabulary: int) -> int:
    """Return the most starts of one forward pass, whose logits are held at once."""
    return max(1, LOGITS // vocabulary)
