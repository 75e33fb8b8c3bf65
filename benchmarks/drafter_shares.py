"""Computes what share of a policy's operations the online training of a drafter adds to a step's critical path.

    python -m benchmarks.drafter_shares

All ranks wait for the slowest in each update of the drafter. So the share is the most operations of a rank, summed over
updates, divided by the policy's operations of a rank. The policy is Qwen3-8B, with an EAGLE-3 drafter that drafts all
tokens, or 32,768 of them. Nothing is trained: lengths and the product's own functions suffice. Lengths of completions
are log-normal (sigma 0.8), in groups of 16, after prompts of 256 tokens.

`tests/unit/drafting/test_critical_path.py` bounds the table.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from specrl.drafting import budget
from specrl.drafting.budget import LessonCosts, RolloutLengths
from specrl.drafting.eagle3.head import Eagle3Head, HeadConfig
from specrl.models.policy_config import PolicyConfig
from specrl.trainer.micro_batches import deal_rollouts

QWEN3_8B = PolicyConfig(
    path=Path("Qwen/Qwen3-8B"),
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_heads=32,
    num_groups=8,
    head_dim=128,
    max_length=40_960,
    norm_epsilon=1e-6,
    rope_theta=1e6,
    is_tied=False,
)
RANKS = (4, 8, 16, 32, 64)  # data parallel
BATCHES = ((512, 1024), (512, 4096), (2048, 4096))  # rollouts, mean tokens of a completion
DRAFT_VOCABULARIES = (151_936, 32_768)
PASSES = 3
PROMPT = 256
GROUP = 16
SIGMA = 0.8


def draw_batch(rollouts: int, mean: int, seed: int) -> list[RolloutLengths]:
    """Draw the lengths of a batch."""
    lengths = np.random.default_rng(seed).lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA, rollouts)
    return [RolloutLengths(f"g{n // GROUP}", PROMPT, max(2, int(length))) for n, length in enumerate(lengths)]


def make_costs(draft_vocabulary: int) -> LessonCosts:
    """Make the costs of a drafter in bfloat16, without its weights."""
    with torch.device("meta"):
        drafter = Eagle3Head(HeadConfig(QWEN3_8B, draft_vocabulary, (2, 18, 33)))
    return LessonCosts(drafter, PASSES, QWEN3_8B.hidden_size, item_bytes=2)


def compute_shares(costs: LessonCosts, samples: list[RolloutLengths], step: int) -> list[float]:
    """Compute the share of a step for each number of ranks in `RANKS`."""
    flops = sum(budget.estimate_policy_flops(QWEN3_8B, item.prompt, item.completion) for item in samples)
    updates = budget.split_into_updates(budget.choose_step_slices(costs, samples, step, flops))
    found = []
    for ranks in RANKS:
        shares = deal_rollouts(range(len(samples)), [item.prompt + item.completion for item in samples], ranks)
        home = {index: rank for rank, share in enumerate(shares) for index in share}
        critical = 0.0
        for update in updates:
            prices = [costs.estimate_flops(item.length, item.completion_length - 1) for item in update]
            dealt = budget.deal_update(prices, [home[item.index] for item in update], ranks, 1, may_move=True)
            loads = [0.0] * ranks
            for price, (rank, _) in zip(prices, dealt, strict=True):
                loads[rank] += price
            critical += max(loads)
        found.append(critical / (flops / ranks))
    return found


def main() -> None:
    """Print the table: the most of three batches and steps."""
    table = Table("draft vocabulary", "batch", *(f"{ranks} ranks" for ranks in RANKS))
    for draft_vocabulary in DRAFT_VOCABULARIES:
        costs = make_costs(draft_vocabulary)
        for rollouts, mean in BATCHES:
            steps = [compute_shares(costs, draw_batch(rollouts, mean, seed), seed + 1) for seed in range(3)]
            worst = [max(shares) for shares in zip(*steps, strict=True)]
            table.add_row(f"{draft_vocabulary:,}", f"{rollouts} x {mean}", *(f"{share:.3f}" for share in worst))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
