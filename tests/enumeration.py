"""The exact distribution of a policy's first tokens, and whether samples are drawn from it.

A policy with only a few allowed tokens (`tiny_models.allow_only`) has so few beginnings of completions that
transformers can compute the probability of each. Pearson's chi-square compares counts with them: of whole beginnings
(`fit`), and of each token given those before it (`fit_next`), which detects more with few samples.

False alarms: a correct sampler falls below ALARM with probability ALARM, one in ten thousand per comparison and set of
seeds. The tests' seeds are fixed, and so is their outcome. Power: see `detectable_distance`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy import optimize, stats

ALARM = 1e-4
# Expected count of a cell; below it Pearson's statistic is not chi-square distributed, so cells are pooled.
FEWEST_EXPECTED = 5.0


@dataclass(frozen=True)
class Fit:
    """Pearson's statistic of `samples` completions in `cells` cells. p_value 0: an impossible token was drawn."""

    p_value: float
    statistic: float
    cells: int
    samples: int

    @property
    def distance(self) -> float:
        """Estimated chi-square distance, sum (q - p)^2 / p, of the sampled from the expected distribution."""
        return max(0.0, (self.statistic - (self.cells - 1)) / self.samples)


def beginnings(tokens: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """List all beginnings of `length` tokens, in the order of `chain`."""
    return list(itertools.product(tokens, repeat=length))


def next_logits(policy: Path, prompt: Sequence[int], tokens: Sequence[int], length: int) -> list[np.ndarray]:
    """Compute logits for each position: [len(tokens) ** position, len(tokens)] float64, one row per beginning."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    found = []
    for position in range(length):
        ids = torch.tensor([[*prompt, *beginning] for beginning in beginnings(tokens, position)])
        with torch.no_grad():
            logits_BV = model(ids).logits[:, -1].double()
        others = torch.ones(logits_BV.shape[1], dtype=torch.bool)
        others[list(tokens)] = False
        assert logits_BV.softmax(-1)[:, others].sum(-1).max() < 1e-12
        found.append(np.asarray(logits_BV[:, list(tokens)]))
    return found


def apply_sampling(logits_BA: np.ndarray, temperature: float, top_p: float = 1.0, top_k: int = 0) -> np.ndarray:
    """Compute probabilities [B, A] after temperature, then top-k, then top-p."""
    logits_BA = logits_BA / temperature
    order_BA = np.argsort(-logits_BA, axis=-1)
    rank_BA = np.argsort(order_BA, axis=-1)
    if top_k:
        logits_BA = np.where(rank_BA < top_k, logits_BA, -np.inf)
    probs_BA = _softmax(logits_BA)
    sorted_BA = np.take_along_axis(probs_BA, order_BA, -1)
    before_BA = np.take_along_axis(sorted_BA.cumsum(-1) - sorted_BA, rank_BA, -1)
    return _softmax(np.where(before_BA < top_p, logits_BA, -np.inf)) if top_p < 1 else probs_BA


def _softmax(logits_BA: np.ndarray) -> np.ndarray:
    weights_BA = np.exp(logits_BA - logits_BA.max(-1, keepdims=True))
    return np.asarray(weights_BA / weights_BA.sum(-1, keepdims=True))


def chain(conditionals: Sequence[np.ndarray]) -> np.ndarray:
    """Compute probabilities [A ** n] of whole beginnings from those of each next token."""
    joint = np.ones(1)
    for conditional_BA in conditionals:
        joint = (joint[:, None] * conditional_BA).ravel()
    return joint


def fit(completions: Sequence[Sequence[int]], tokens: Sequence[int], probs: np.ndarray) -> Fit:
    """Compare the beginnings of completions with their probabilities, in the order of `beginnings`."""
    length = round(np.log(len(probs)) / np.log(len(tokens)))
    number = {beginning: index for index, beginning in enumerate(beginnings(tokens, length))}
    found = [number.get(tuple(completion[:length]), -1) for completion in completions]
    samples = len(completions)
    if any(index < 0 or probs[index] == 0 for index in found):
        return Fit(0.0, np.inf, len(probs), samples)
    counts = np.bincount(found, minlength=len(probs)).astype(float)
    expected = probs * samples
    rare = expected < FEWEST_EXPECTED
    if expected[rare].sum() < FEWEST_EXPECTED:  # too few even when pooled: the least likely of the others joins them
        rare |= expected == expected[~rare].min()
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return Fit(float(stats.chi2.sf(statistic, len(counts) - 1)), statistic, len(counts), samples)


def fit_next(completions: Sequence[Sequence[int]], tokens: Sequence[int], conditionals: Sequence[np.ndarray]) -> Fit:
    """Compare each token with its probabilities given those before it. Counts are added by position and last token.

    With few samples most beginnings are too rare for a cell of `fit`; here no sample is lost. A group's counts minus
    their expectation are a sum of martingale differences, whose covariance is at most a multinomial's. So the sum of
    Pearson's statistics is chi-square distributed, or smaller. Arguments as for `fit` and `chain`.
    """
    places = {token: place for place, token in enumerate(tokens)}
    size = len(tokens)
    samples = len(completions)
    length = len(conditionals)
    if any(len(found) < length or not places.keys() >= set(found[:length]) for found in completions):
        return Fit(0.0, np.inf, 0, samples)
    drawn_NT = np.array([[places[token] for token in completion[:length]] for completion in completions])
    statistic = 0.0
    free = 0
    before_N = np.zeros(samples, dtype=int)
    for position, conditional_BA in enumerate(conditionals):
        probs_NA = conditional_BA[before_N]
        now_N = drawn_NT[:, position]
        if (probs_NA[np.arange(samples), now_N] == 0).any():
            return Fit(0.0, np.inf, 0, samples)
        for last in range(size if position else 1):
            group_N = before_N % size == last if position else np.ones(samples, dtype=bool)
            expected_A = probs_NA[group_N].sum(0)
            counts_A = np.bincount(now_N[group_N], minlength=size)
            order_A = np.argsort(-expected_A)
            cells = max(1, int((expected_A >= FEWEST_EXPECTED).sum()))
            heads = order_A[: cells - 1]
            rare = order_A[cells - 1 :]  # the rarest cell takes those that are too rare
            expected = np.append(expected_A[heads], expected_A[rare].sum())
            counts = np.append(counts_A[heads], counts_A[rare].sum())
            statistic += float(((counts - expected) ** 2 / expected).sum()) if cells > 1 else 0.0
            free += cells - 1
        before_N = before_N * size + now_N
    return Fit(float(stats.chi2.sf(statistic, free)), statistic, free + 1, samples)


def detectable_distance(cells: int, samples: int, power: float = 0.99) -> float:
    """Compute the chi-square distance that `fit` detects with probability `power`.

    Pearson's statistic of samples from q is noncentral chi-square distributed, with noncentrality samples x distance.
    """
    limit = stats.chi2.isf(ALARM, cells - 1)
    found = optimize.brentq(lambda it: stats.ncx2.sf(limit, cells - 1, it) - power, 1e-6, 1e6)
    return float(found) / samples
