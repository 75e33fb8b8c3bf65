"""What the head is trained to minimise, and how well it would draft: pure functions of the two models' logits.

A draft token d is accepted with probability min(1, p(d) / q(d)): p the policy's distribution at the run's temperature,
q the one that d was drawn from (arXiv 2211.17192, theorem 3.5). So a draft is accepted with probability

    greedy drafts          p(d), d the head's top token                     (q is certain of d)
    probabilistic drafts   sum_x min(p(x), q(x)) = 1 - TV(p, q)

Shapes: E positions, V policy vocabulary, K draft vocabulary (K tokens of V).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specrl.spec.trainer import DrafterLoss


@dataclass(frozen=True)
class Criterion:
    """loss: what is minimised. temperature and is_probabilistic: how drafts are made and verified."""

    loss: DrafterLoss = DrafterLoss.SOFT_CROSS_ENTROPY
    temperature: float = 1.0
    is_probabilistic: bool = False


@dataclass(frozen=True)
class Targets:
    """The policy's word on E tokens, for a head that drafts K of the V tokens.

    share_EK: probabilities at temperature 1, renormalised over the draft vocabulary; neg_entropy_E: sum s log s.
    policy_EK: probabilities at the run's temperature over the whole vocabulary, of which the K are a part.
    """

    share_EK: torch.Tensor
    neg_entropy_E: torch.Tensor
    policy_EK: torch.Tensor

    def take(self, rows_E: torch.Tensor) -> Targets:
        """Some of the tokens."""
        if len(rows_E) == len(self.share_EK):
            return self
        share_EK = self.share_EK[rows_E]
        policy_EK = share_EK if self.policy_EK is self.share_EK else self.policy_EK[rows_E]
        return Targets(share_EK, self.neg_entropy_E[rows_E], policy_EK)


@torch.no_grad()
def targets(logits_EV: torch.Tensor, draft_ids_K: torch.Tensor, temperature: float) -> Targets:
    """From the policy's logits [E, V], float32 or wider, and the ids that the head drafts, ascending."""
    is_reduced = len(draft_ids_K) != logits_EV.shape[1]
    drafted_EK = logits_EV[:, draft_ids_K] if is_reduced else logits_EV
    log_share_EK = drafted_EK.log_softmax(-1)
    share_EK = log_share_EK.exp()
    policy_EK = share_EK
    if is_reduced or temperature != 1:
        normaliser_E1 = (logits_EV / temperature).logsumexp(-1, keepdim=True)
        policy_EK = (drafted_EK / temperature - normaliser_E1).exp()
    return Targets(share_EK, (share_EK * log_share_EK).sum(-1), policy_EK)


def soft_cross_entropy(draft_EK: torch.Tensor, wanted: Targets) -> torch.Tensor:
    """[E] KL(policy || head) over the draft vocabulary at temperature 1: cross-entropy less the policy's own entropy.

    The gradient is that of the cross-entropy with the policy's whole distribution as its target.
    """
    cross_E = draft_EK.logsumexp(-1) - (wanted.share_EK * draft_EK).sum(-1)
    return wanted.neg_entropy_E + cross_E


def total_variation(draft_EK: torch.Tensor, wanted: Targets, temperature: float) -> torch.Tensor:
    """[E] 1 - sum_x min(p(x), q(x)), both at the run's temperature: the share of probabilistic drafts that is refused.

    With the whole vocabulary it is the total variation distance; with a part of it, what the head cannot draft counts
    as refused. Differentiable in draft_EK. Sources: DistillSpec, arXiv 2310.08461, section 4; Bebop, arXiv 2606.12370.
    """
    return 1 - torch.minimum((draft_EK / temperature).softmax(-1), wanted.policy_EK).sum(-1)


def loss(criterion: Criterion, draft_EK: torch.Tensor, wanted: Targets) -> torch.Tensor:
    """[E] what the criterion minimises."""
    if criterion.loss is DrafterLoss.TOTAL_VARIATION:
        return total_variation(draft_EK, wanted, criterion.temperature)
    return soft_cross_entropy(draft_EK, wanted)


@torch.no_grad()
def acceptance(
    criterion: Criterion, draft_EK: torch.Tensor, wanted: Targets, next_EK1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[E] how probably the policy accepts the draft, and [E] how probably it accepts the given token as a draft.

    next_EK1 [E, 1]: the token that the policy drew, as an index of the draft vocabulary; -1 where it cannot be drafted.
    The second is the weight with which a rollout of the policy stands for one in which this draft was accepted.
    """
    can_be_drafted_E = next_EK1[:, 0] >= 0
    if not criterion.is_probabilistic:
        top_E1 = draft_EK.argmax(-1, keepdim=True)
        return wanted.policy_EK.gather(1, top_E1)[:, 0], (top_E1 == next_EK1)[:, 0].float()
    draft_EK = (draft_EK / criterion.temperature).softmax(-1)
    token_E1 = next_EK1.clamp(min=0)
    ratio_E = (draft_EK.gather(1, token_E1) / wanted.policy_EK.gather(1, token_E1).clamp(min=1e-30))[:, 0]
    return torch.minimum(draft_EK, wanted.policy_EK).sum(-1), ratio_E.clamp(max=1) * can_be_drafted_E
