"""Checks at every start, on every device, that vLLM's samplers draw from the right distribution.

Called by `worker` in each rank of a replica before the engine serves. Every rank checks its own samplers without
waiting for the others, because each rank samples for itself and continues with the tokens that it drew.

The check calls the same sampler objects as the model runner (`samplers`) on known distributions over four tokens. It
tests the plain sampler and, with speculation, the rejection sampler: with certain drafts (as look-up makes them) and
with drawn drafts. Rows differ in distribution, temperature, top-k, top-p and number of drafts. Each row has its own
seed, as rollouts do.

Tokens are counted by case and position. The test statistic is the likelihood-ratio chi-square,
G = 2 sum n ln(n / expected).

False alarms. For n draws from k cells, E[exp(x G/2)] <= (1 - x)^(1 - k) for 0 <= x < 1, for every n and all cell
probabilities (Agrawal, "Finite-sample concentration of the multinomial in relative entropy", 2020). Statistics of
independent draws add up, so P(G >= g) <= exp(d - g/2) (g/2d)^d, where d is the sum of k - 1. The bound also holds for
small counts. The check fails if this bound is below ALARM divided by the number of comparisons. So, over the choice of
seeds, a correct sampler fails with a probability below ALARM. The seeds are fixed, so a device and version that pass
once always pass.

Power. `tests/unit/generation/test_sampling_check.py` computes which biases are detected with a probability above 0.999,
and breaks samplers on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import batched, product
from typing import Any

import numpy as np
import torch

from specrl.errors import EngineFailed
from specrl.generation.vllm_backend.extensions.samplers import (
    PLACEHOLDER,
    BoundSamplers,
    SamplerBatch,
    SamplingSetting,
    find_bound_samplers,
)

# Shapes: R rows (requests), K draft tokens of a row at most, A tokens that can be drawn, V vocabulary, N logit rows.

ALARM = 1e-9
"""Upper bound of the probability that a correct sampler fails the check, for each worker of a replica."""

ROWS = 2048  # per case; enough to detect the biases in the tests
ROWS_PER_CALL = 128  # a realistic batch; its logits take 41 MB on GPUs, less than vLLM leaves free
SEED = 20_240_229  # arbitrary
VOCABULARY = 50  # on CPUs, whose kernels use vectors of 8 or 16; not a multiple of them
VOCABULARY_IN_BLOCKS = 20_011  # on GPUs, whose Triton kernels use blocks of 1024 and 8192; not a multiple of them
IMPOSSIBLE = -1000.0  # a logit whose probability is 0 in float32

# Probabilities of policy and drafter by position. A certain draft is the policy's most probable token.
POLICY_KA = np.array([[0.5, 0.25, 0.15, 0.1], [0.15, 0.5, 0.1, 0.25], [0.25, 0.1, 0.5, 0.15], [0.5, 0.25, 0.1, 0.15]])
DRAFTER_KA = np.array([[0.1, 0.65, 0.1, 0.15], [0.35, 0.3, 0.25, 0.1], [0.1, 0.45, 0.2, 0.25]])
TOKENS = POLICY_KA.shape[1]


SETTINGS = {
    "temperatures": (SamplingSetting(1.0), SamplingSetting(0.5)),
    "top-k and top-p": (SamplingSetting(1.3, top_k=3), SamplingSetting(1.0, top_p=0.7)),
}
"""The two settings of each case, which rows alternate between. The second one has its vocabulary ids reversed."""

NO_DRAFTS = "no drafts"
CERTAIN_DRAFTS = "certain drafts"  # of look-up, or a drafter's most probable token
DRAWN_DRAFTS = "drawn drafts"


@dataclass(frozen=True)
class SamplingCase:
    """A kind of drafts, and a key of SETTINGS."""

    drafts: str
    settings: str

    def __str__(self) -> str:
        return f"{self.drafts}, {self.settings}"


def check_model_runner(model_runner: Any) -> None:
    """Raise EngineFailed unless the model runner's samplers are known and draw from the right distribution.

    The engine's samplers, requests and random generators are left unchanged.
    """
    device = torch.device(model_runner.device)
    samplers = find_bound_samplers(model_runner)
    is_on_cpu = device.type == "cpu"
    with (
        torch.random.fork_rng([] if is_on_cpu else [device], device_type="cuda" if is_on_cpu else device.type),
        torch.inference_mode(),
    ):
        check_samplers(samplers, device, VOCABULARY if is_on_cpu else VOCABULARY_IN_BLOCKS)


def check_samplers(samplers: BoundSamplers, device: torch.device, vocabulary: int) -> None:
    """Raise EngineFailed at the first case that fails."""
    kinds = (NO_DRAFTS, CERTAIN_DRAFTS, DRAWN_DRAFTS) if samplers.num_drafts else (NO_DRAFTS,)
    cases = [SamplingCase(drafts, settings) for drafts, settings in product(kinds, SETTINGS)]
    comparisons = sum(1 if case.drafts == NO_DRAFTS else samplers.num_drafts + 1 for case in cases)
    for case in cases:
        check_case(case, samplers, device, vocabulary, ALARM / comparisons)


def check_case(
    case: SamplingCase, samplers: BoundSamplers, device: torch.device, vocabulary: int, alarm: float
) -> None:
    """Raise EngineFailed if a case fails. alarm: probability of a false alarm per comparison."""
    is_plain = case.drafts == NO_DRAFTS
    num_drafts, draw = (0, samplers.draw) if is_plain else (samplers.num_drafts, samplers.verify)
    where = f"{samplers.names[0 if is_plain else 1]} on {device}"
    found = TokenCounts(num_drafts)
    for batch in make_batches(case, num_drafts, device, vocabulary):
        try:
            tokens_RK = draw(batch)
        except Exception as error:  # kernels raise many types; the message must name the case
            raise EngineFailed(
                f"{where} failed to sample rows with {case}: {type(error).__name__}: {error}; {REMEDY}"
            ) from error
        found.add_batch(batch, tokens_RK, vocabulary)
    found.check_distribution(case, where, alarm)


REMEDY = (
    "the replica does not serve, since its rollouts would not follow the policy's distribution. On CPUs, keep specrl's "
    "entry point in vllm.general_plugins installed and VLLM_PLUGINS unset: vLLM 0.32 needs its repair "
    "(vllm-project/vllm#55005). Otherwise install versions of vLLM and torch that specrl supports"
)


# -- rows to sample ----------------------------------------------------------------------------------------------------


def expected_probs_KA(setting: SamplingSetting) -> np.ndarray:
    """Compute the policy's probabilities by position after temperature, then top-k, then top-p."""
    probs_KA = POLICY_KA ** (1 / setting.temperature)
    probs_KA /= probs_KA.sum(-1, keepdims=True)
    rank_KA = np.argsort(np.argsort(-probs_KA, axis=-1), axis=-1)
    probs_KA = np.where(rank_KA < (setting.top_k or TOKENS), probs_KA, 0.0)
    probs_KA /= probs_KA.sum(-1, keepdims=True)
    # Top-p keeps a token while the more probable ones sum to less than top_p.
    likelier_KA = (probs_KA[:, None, :] > probs_KA[:, :, None]) * probs_KA[:, None, :]
    probs_KA = np.where(likelier_KA.sum(-1) < setting.top_p, probs_KA, 0.0)
    return np.asarray(probs_KA / probs_KA.sum(-1, keepdims=True))


def vocabulary_ids_2A(vocabulary: int) -> np.ndarray:
    """Return the tokens' vocabulary ids by setting, spread over the kernels' blocks."""
    ids_A = np.array([1, vocabulary // 3, 2 * vocabulary // 3, vocabulary - 2])
    return np.stack([ids_A, ids_A[::-1]])


def make_batches(case: SamplingCase, num_drafts: int, device: torch.device, vocabulary: int) -> Iterator[SamplerBatch]:
    """Yield all rows of a case. Of each setting, one row in eight has fewer drafts than the others, or none."""
    random = np.random.default_rng(SEED)
    ids_2A = vocabulary_ids_2A(vocabulary)
    drawn_RK = np.stack([random.choice(TOKENS, ROWS, p=probs_A) for probs_A in DRAFTER_KA], axis=1)
    for numbers in batched(range(ROWS), ROWS_PER_CALL):
        number_R = np.array(numbers)
        turn_R = number_R // 2
        counts_R = np.where(turn_R % 8 == 7, turn_R // 8 % max(num_drafts, 1), num_drafts)
        ids_RA = ids_2A[number_R % 2]
        token_RK = (
            drawn_RK[number_R]
            if case.drafts == DRAWN_DRAFTS
            else POLICY_KA.argmax(-1)[None, :].repeat(len(number_R), 0)
        )
        drafts_RK = np.take_along_axis(ids_RA, token_RK[:, :num_drafts], -1)
        drafts_RK = np.where(np.arange(num_drafts) < counts_R[:, None], drafts_RK, PLACEHOLDER)
        row_N = np.repeat(np.arange(len(number_R)), counts_R + 1)
        position_N = np.concatenate([np.arange(count + 1) for count in counts_R])
        yield SamplerBatch(
            [SETTINGS[case.settings][number % 2] for number in numbers],
            [SEED + number for number in numbers],
            counts_R,
            drafts_RK,
            _spread_logits(np.log(POLICY_KA[position_N]), ids_RA[row_N], device, vocabulary),
            None
            if case.drafts != DRAWN_DRAFTS
            else _spread_logits(
                np.log(DRAFTER_KA[None, :num_drafts].repeat(len(number_R), 0)),
                ids_RA[:, None, :].repeat(num_drafts, 1),
                device,
                vocabulary,
            ),
        )


def _spread_logits(values: np.ndarray, ids: np.ndarray, device: torch.device, vocabulary: int) -> torch.Tensor:
    """Scatter values [..., A] to their vocabulary ids; all other logits are IMPOSSIBLE."""
    spread = torch.full((*values.shape[:-1], vocabulary), IMPOSSIBLE, device=device)
    indices = torch.tensor(ids, dtype=torch.int64, device=device)
    return spread.scatter_(-1, indices, torch.tensor(values, dtype=torch.float32, device=device))


# -- comparing ---------------------------------------------------------------------------------------------------------


class TokenCounts:
    """Counts of emitted tokens in a case, by setting and position, and the number of malformed rows."""

    def __init__(self, num_drafts: int) -> None:
        self.count_2KA = np.zeros((2, num_drafts + 1, TOKENS + 1), dtype=np.int64)
        """The last column counts all tokens that have probability 0."""
        self.malformed = 0

    def add_batch(self, batch: SamplerBatch, tokens_RK: np.ndarray, vocabulary: int) -> None:
        """Count a batch's tokens."""
        self.malformed += sum(
            not is_well_formed(tokens_K, drafts_K, count)
            for tokens_K, drafts_K, count in zip(tokens_RK, batch.drafts_RK, batch.counts_R, strict=True)
        )
        tokens_RK = tokens_RK[:, : self.count_2KA.shape[1]]
        setting_R = np.arange(len(tokens_RK)) % 2
        ids_2A = vocabulary_ids_2A(vocabulary)
        is_token_RKA = tokens_RK[:, :, None] == ids_2A[setting_R][:, None, :]
        token_RK = np.where(is_token_RKA.any(-1), is_token_RKA.argmax(-1), TOKENS)
        row, position = np.nonzero(tokens_RK != PLACEHOLDER)
        np.add.at(self.count_2KA, (setting_R[row], position, token_RK[row, position]), 1)

    def check_distribution(self, case: SamplingCase, sampler: str, alarm: float) -> None:
        """Raise EngineFailed if tokens at a position do not fit their distribution, or if a row is malformed."""
        probs_2KA = np.stack([expected_probs_KA(setting) for setting in SETTINGS[case.settings]])
        for position in range(self.count_2KA.shape[1]):
            pairs = list(zip(self.count_2KA[:, position], probs_2KA[:, position], strict=True))
            statistic = sum(g_statistic(count_A, np.append(probs_A, 0.0)) for count_A, probs_A in pairs)
            degrees = sum(int((probs_A > 0).sum()) - 1 for _, probs_A in pairs)
            if false_alarm_bound(statistic, degrees) < alarm:
                limit = alarm_threshold(degrees, alarm)
                raise EngineFailed(
                    f"{sampler} must draw from the policy's distribution, got a chi-square statistic of "
                    f"{statistic:.1f} with {degrees} degrees of freedom for token {position + 1} of rows with {case}, "
                    f"above the threshold {limit:.1f} (false alarms: below {ALARM:g} per start); {REMEDY}"
                )
        if self.malformed:
            raise EngineFailed(
                f"{sampler} must emit the accepted drafts and one more token, got {self.malformed} of {ROWS} other "
                f"rows, with {case}; {REMEDY}"
            )


def is_well_formed(tokens_K: np.ndarray, drafts_K: np.ndarray, count: int) -> bool:
    """Whether a row's tokens are its accepted drafts and one more token: a replacement, or the bonus token.

    A replacement differs from the rejected draft. A draft is rejected only if the drafter gives it a higher probability
    than the policy, and there the replacement's distribution, max(p - q, 0), is 0.
    """
    emitted = int((tokens_K != PLACEHOLDER).sum())
    last = emitted - 1
    if not 0 <= last <= count or (tokens_K[:emitted] == PLACEHOLDER).any():
        return False
    return bool((tokens_K[:last] == drafts_K[:last]).all()) and (last == count or tokens_K[last] != drafts_K[last])


def g_statistic(count_A: np.ndarray, probs_A: np.ndarray) -> float:
    """Compute 2 sum n ln(n / expected); infinite if a token of probability 0 was counted."""
    expected_A = count_A.sum() * probs_A
    if (count_A[expected_A == 0] > 0).any():
        return math.inf
    seen_A = count_A > 0
    return 2 * float((count_A[seen_A] * np.log(count_A[seen_A] / expected_A[seen_A])).sum())


def false_alarm_bound(statistic: float, degrees: int) -> float:
    """Bound the probability that correct draws reach a statistic. See the module's docstring."""
    half = statistic / 2
    if half <= degrees:
        return 1.0
    return 0.0 if math.isinf(half) else math.exp(degrees - half + degrees * math.log(half / degrees))


def alarm_threshold(degrees: int, alarm: float) -> float:
    """Solve for the statistic whose `false_alarm_bound` is `alarm`, by fixed-point iteration."""
    half = float(degrees)
    needed = degrees - math.log(alarm)
    for _ in range(100):  # error shrinks by degrees / half each time, below 1/2 for useful alarms
        half = needed + degrees * math.log(half / degrees)
    return 2 * half
