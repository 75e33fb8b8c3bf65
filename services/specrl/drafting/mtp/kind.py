"""A policy's own heads for multi-token prediction as a kind of drafter: their checks and their size, without torch.

The heads come with the policy's folder, under `model.mtp_layers.N.`, and return to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from specrl.drafting.kind import DrafterKind
from specrl.errors import SpecProblem
from specrl.models import ModelFolder, RunModels
from specrl.models.model_folder import Shape
from specrl.models.policy_config import FAMILIES, PolicyConfig
from specrl.spec import RunSpec

HEADS_PREFIX = "model.mtp_layers."
"""Of the tensors of MiMo's heads, which are the only ones that the trainer can train."""


class MtpKind(DrafterKind):
    """Member `mtp`: the heads in the policy's folder, which are part of the policy."""

    loader = "specrl.drafting.mtp.head:load_heads"
    read_states = 2  # the last layer's and the embedding

    def is_fresh(self, spec: RunSpec) -> bool:
        """Whether the run trains the heads before its first step. Only a run without steps does.

        The heads come with the policy, so they are taken as they are. `specrl drafter init` runs no steps.
        """
        return spec.schedule.steps == 0

    def count_passes(self, spec: RunSpec) -> int:
        """Return numDraftTokens: the heads are trained in the passes that the engine runs."""
        return spec.generation.speculation.num_draft_tokens

    def check(self, spec: RunSpec, models: RunModels) -> list[SpecProblem]:
        """Report a family whose heads cannot be trained, heads other than the config's, and a tied policy."""
        folder = models.policy
        assert folder is not None
        trained = {name for name, family in FAMILIES.items() if family.heads_field is not None}
        if folder.num_mtp_heads and folder.config.get("model_type") not in trained:
            return [
                SpecProblem(
                    "generation.speculation.mtp",
                    f"must have a policy whose heads the trainer can train, {' or '.join(sorted(trained))}, got "
                    f"model_type={folder.config.get('model_type')} in {folder.path}, which is only served",
                    "use such a policy, or eagle3 with one of another family",
                )
            ]
        config = models.policy_config
        return [] if config is None else list(_find_problems(folder, config))

    def count_parameters(self, spec: RunSpec, models: RunModels) -> int:
        """Count the heads, which every trainer rank holds whole. The policy's folder has them, too."""
        assert models.policy is not None
        shapes = models.policy.shapes
        return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(HEADS_PREFIX))


def list_head_shapes(policy: PolicyConfig) -> dict[str, Shape]:
    """List the shape of every tensor of all heads, by its name in the policy's folder."""
    hidden = policy.hidden_size
    inner = policy.intermediate_size
    queries = policy.num_heads * policy.head_dim
    keys = policy.num_groups * policy.head_dim
    shapes: dict[str, Shape] = {
        "token_layernorm.weight": (hidden,),
        "hidden_layernorm.weight": (hidden,),
        "input_proj.weight": (hidden, 2 * hidden),
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.q_proj.bias": (queries,),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "final_layernorm.weight": (hidden,),
    }
    heads = range(policy.num_mtp_heads)
    return {f"{HEADS_PREFIX}{number}.{name}": shape for number in heads for name, shape in shapes.items()}


def _find_problems(folder: ModelFolder, policy: PolicyConfig) -> Iterator[SpecProblem]:
    given = {name: shape for name, shape in folder.shapes.items() if name.startswith(HEADS_PREFIX)}
    expected = list_head_shapes(policy)
    if policy.is_tied:
        # No published policy with heads is tied, so nothing says how its heads were trained.
        yield SpecProblem(
            "generation.speculation.mtp",
            f"must have a policy with an output layer of its own, got tie_word_embeddings=true in {folder.path}",
            "use eagle3, whose head has its own",
        )
    numbers = {name.removeprefix(HEADS_PREFIX).partition(".")[0] for name in given}
    if numbers != {str(number) for number in range(policy.num_mtp_heads)}:
        yield SpecProblem(
            "model.path",
            f"must have the {policy.family.heads_field}={policy.num_mtp_heads} heads that its config.json says, got "
            f"{len(numbers)} ({HEADS_PREFIX}N for N = {', '.join(sorted(numbers)) or 'none'}) in {folder.path}",
            "fetch the model again, or use eagle3",
        )
        return
    wrong = [f"{name} {given.get(name, 'missing')}" for name in expected if given.get(name) != expected[name]]
    wrong += [f"{name}, which no such head has" for name in sorted(given.keys() - expected.keys())]
    if wrong:
        yield SpecProblem(
            "model.path",
            f"must have heads of the sizes in its config.json, got {len(wrong)} other tensors in {folder.path}: "
            f"{', '.join(wrong[:3])}",
            "fetch the model again, or use eagle3",
        )
