"""The drafter's training losses, and estimates of its acceptance. Pure functions of the two models' logits.

A draft token d is accepted with probability min(1, p(d) / q(d)). Here p is the policy's distribution at the run's
temperature, and q is the distribution that d was drawn from (arXiv 2211.17192, theorem 3.5). So a draft is accepted
with probability

    greedy drafts          p(d), with d the head's top token                (q(d) = 1)
    probabilistic drafts   sum_x min(p(x), q(x)) = 1 - TV(p, q)

Called by `online.py`.

Shapes: E positions, K draft vocabulary, which may be a part of the policy's; with a `VocabularyShard`, the columns of
this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specrl.drafting.vocabulary import WHOLE, VocabularyShard
from specrl.spec.trainer import DrafterLoss


@dataclass(frozen=True)
class DraftCriterion:
    """The training objective.

    loss: the loss to minimise. temperature: of the policy when it verifies drafts.
    is_probabilistic: whether drafts are drawn from the head's distribution; else they are its top tokens.
    """

    loss: DrafterLoss = DrafterLoss.SOFT_CROSS_ENTROPY
    temperature: float = 1.0
    is_probabilistic: bool = False


@dataclass(frozen=True)
class PolicyTargets:
    """The policy's distributions at E positions, restricted to the K tokens that the head can draft.

    share_EK: probabilities at temperature 1, renormalised over the draft vocabulary.
    neg_entropy_E: sum of s log s over each row s of `share_EK`.
    policy_EK: probabilities at the run's temperature, normalised over the whole vocabulary. So a row may sum to less
    than 1.
    """

    share_EK: torch.Tensor
    neg_entropy_E: torch.Tensor
    policy_EK: torch.Tensor


@torch.no_grad()
def compute_targets(
    logits_EK: torch.Tensor,
    temperature: float,
    normaliser_E: torch.Tensor | None = None,
    shard: VocabularyShard = WHOLE,
) -> PolicyTargets:
    """Compute the targets of a drafter from the policy's logits of the tokens that it can draft, float32 or wider.

    normaliser_E: log of the sum over the whole vocabulary of exp(logit / temperature). None if `logits_EK` has the
    whole vocabulary.
    """
    log_share_EK = shard.log_softmax(logits_EK)
    share_EK = log_share_EK.exp()
    policy_EK = share_EK
    if normaliser_E is not None or temperature != 1:
        scaled_EK = logits_EK / temperature
        normaliser_E = shard.logsumexp(scaled_EK) if normaliser_E is None else normaliser_E
        policy_EK = (scaled_EK - normaliser_E[:, None]).exp()
    return PolicyTargets(share_EK, shard.sum_columns(share_EK * log_share_EK), policy_EK)


def soft_cross_entropy(draft_EK: torch.Tensor, wanted: PolicyTargets, shard: VocabularyShard = WHOLE) -> torch.Tensor:
    """Return [E] KL(policy || head) over the draft vocabulary at temperature 1.

    This is the cross-entropy minus the policy's entropy. Its gradient is the gradient of the cross-entropy with soft
    targets.
    """
    cross_E = shard.logsumexp(draft_EK) - shard.sum_columns(wanted.share_EK * draft_EK)
    return wanted.neg_entropy_E + cross_E


def total_variation(
    draft_EK: torch.Tensor, wanted: PolicyTargets, temperature: float, shard: VocabularyShard = WHOLE
) -> torch.Tensor:
    """Return [E] 1 - sum_x min(p(x), q(x)) at the run's temperature: the rejection rate of probabilistic drafts.

    With the whole vocabulary this is the total variation distance. With a reduced one, tokens that the head cannot
    draft count as rejected. Differentiable in draft_EK.

    Sources: DistillSpec, arXiv 2310.08461, section 4; Bebop, arXiv 2606.12370.
    """
    return 1 - shard.sum_columns(torch.minimum(shard.softmax(draft_EK / temperature), wanted.policy_EK))


def compute_loss(
    criterion: DraftCriterion, draft_EK: torch.Tensor, wanted: PolicyTargets, shard: VocabularyShard = WHOLE
) -> torch.Tensor:
    """Return [E] the criterion's loss."""
    if criterion.loss is DrafterLoss.TOTAL_VARIATION:
        return total_variation(draft_EK, wanted, criterion.temperature, shard)
    return soft_cross_entropy(draft_EK, wanted, shard)


@torch.no_grad()
def estimate_acceptance(
    criterion: DraftCriterion,
    draft_EK: torch.Tensor,
    wanted: PolicyTargets,
    next_EK1: torch.Tensor,
    shard: VocabularyShard = WHOLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [E] the probability that the policy accepts the head's draft, and [E] a weight for the next position.

    next_EK1 [E, 1]: the rollout's token as an index of the draft vocabulary; -1 if the head cannot draft it.

    Decoding reaches the next position only if the draft was accepted. Training follows the rollout's tokens, which the
    policy drew. The weight corrects for this. It is q * min(1, p / q) / p: the probability that the token is drafted
    and accepted, divided by the probability that the policy draws it. For greedy drafts it is 1 if the token is the
    head's top token, and 0 otherwise.
    """
    can_be_drafted_E = next_EK1[:, 0] >= 0
    if not criterion.is_probabilistic:
        top_E1 = shard.find_top(draft_EK)
        return shard.gather_columns(wanted.policy_EK, top_E1)[:, 0], (top_E1 == next_EK1)[:, 0].float()
    draft_EK = shard.softmax(draft_EK / criterion.temperature)
    token_E1 = next_EK1.clamp(min=0)  # -1 is no index; its weight is set to 0 below
    policy_E1 = shard.gather_columns(wanted.policy_EK, token_E1)
    ratio_E = (shard.gather_columns(draft_EK, token_E1) / policy_E1.clamp(min=1e-30))[:, 0]
    kept_E = shard.sum_columns(torch.minimum(draft_EK, wanted.policy_EK))
    return kept_E, ratio_E.clamp(max=1) * can_be_drafted_E
