"""Routing replay: routers of a mixture send tokens to the experts that the sampler chose (R3, arXiv:2510.11370).

Only the choice is replayed. The weights of the chosen experts come from the trainer's router, and so do gradients.
Tokens whose experts are unknown are routed by the trainer: a rollout's last token, padding, and rollouts that were not
sampled.

Megatron-Core 0.19.2 asks a router's `router_replay`, if it is set, for the experts. Megatron's own class stores the
choices of one pass, or a queue of them for recomputation. Here each layer takes them from the packing that it is called
with. That is correct for interleaved passes and for recomputation, too.

Called by `gpt_model.py`; see docs/decisions/0024.

Shapes: P packed tokens on a rank, L layers, E experts of a layer, K of them for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Choose = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class RouterReplay:
    """The replayed choices of one layer's router.

    chosen_PK: the experts of the tokens of the current pass, -1 where unknown; None: all unknown.
    """

    chosen_PK: torch.Tensor | None = None

    def get_replay_topk(
        self, scores_PE: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Choose
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and numbers [P, K] of the experts to use. Megatron fixes name and arguments."""
        found, experts_PK = choose(scores_PE, topk, num_groups, group_topk)
        if self.chosen_PK is None:
            return found, experts_PK
        experts_PK = torch.where(self.chosen_PK < 0, experts_PK, self.chosen_PK)
        return scores_PE.gather(1, experts_PK), experts_PK


def install_replay(layer: Any, tensor_rank: int, tensor_size: int) -> None:
    """Make a TransformerLayer's router replay the choices in the packing that the layer is called with."""
    replay = layer.mlp.router.router_replay = RouterReplay()
    number = layer.layer_number - 1  # counted over all stages

    def take_choices(_layer: Any, _arguments: Any, by_name: dict[str, Any]) -> None:
        experts_PLK = by_name["packed_seq_params"].experts_PLK
        if experts_PLK is None:
            replay.chosen_PK = None
        else:  # sequence parallelism: at the router, each tensor parallel rank has a part of the tokens
            replay.chosen_PK = experts_PLK[:, number].chunk(tensor_size)[tensor_rank].long()

    layer.register_forward_pre_hook(take_choices, with_kwargs=True)
