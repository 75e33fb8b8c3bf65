"""Has a mixture's routers send tokens to the experts that the sampler sent them to (R3, arXiv:2510.11370).

What is replayed is the choice alone. The weights of the chosen experts are the trainer's, of its own router's logits,
and so are gradients. Tokens whose experts are not known - the last one of a rollout, padding, rollouts that nobody
sampled - are routed anew.

Megatron-Core 0.19.2 asks a router's `router_replay`, if it has one, for its experts. Its own class for that holds the
choices of one pass, or a queue of them for recomputation; here each layer takes them from the packing that it is called
with, which is right whatever passes are under way, and in recomputation.

Shapes: P packed tokens on a rank, E experts of a layer, K of them for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Choose = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Replay:
    """Of one layer's router. chosen_PK: experts of the tokens that it sees next, -1 where not known; None: of none."""

    chosen_PK: torch.Tensor | None = None

    def get_replay_topk(
        self, scores_PE: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Choose
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and numbers [P, K] of the experts to use; Megatron's name and arguments."""
        found, experts_PK = choose(scores_PE, topk, num_groups, group_topk)
        if self.chosen_PK is None:
            return found, experts_PK
        experts_PK = torch.where(self.chosen_PK < 0, experts_PK, self.chosen_PK)
        return scores_PE.gather(1, experts_PK), experts_PK


def install(layer: Any, tensor_rank: int, tensor_size: int) -> None:
    """Have a TransformerLayer's router do as the packing says that the layer is called with."""
    replay = layer.mlp.router.router_replay = Replay()
    number = layer.layer_number - 1  # counted over all stages

    def take(_layer: Any, _arguments: Any, by_name: dict[str, Any]) -> None:
        experts_PLK = by_name["packed_seq_params"].experts_PLK
        if experts_PLK is None:
            replay.chosen_PK = None
        else:  # between matrices tensor parallel ranks share the tokens
            replay.chosen_PK = experts_PLK[:, number].chunk(tensor_size)[tensor_rank].long()

    layer.register_forward_pre_hook(take, with_kwargs=True)
