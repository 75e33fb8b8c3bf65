"""The losses against TRL, against their formulas in plain Python, and against finite differences."""

from __future__ import annotations

import collections
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from specrl.spec.trainer import KlEstimator, Loss
from specrl.trainer.losses.divergence import (
    compute_effective_sample_size,
    estimate_reference_kl,
    estimate_weighted_kl,
    measure_mismatch,
)
from specrl.trainer.losses.policy_loss import SUMS, PolicyLoss, SampledTokens
from specrl.trainer.losses.sequences import Sequences

LENGTHS = (7, 1, 12, 4, 30, 9)
TOKENS = sum(LENGTHS)
LONGEST = 32


@dataclass(frozen=True)
class Sample:
    """Six rollouts, [T] float64, whose log-probabilities are so far apart that every clip, bound and mask is hit."""

    policy: torch.Tensor
    proximal: torch.Tensor
    sampler: torch.Tensor
    reference: torch.Tensor
    advantage: torch.Tensor
    sequence_T: torch.Tensor

    def tokens(self, first: int = 0, end: int = len(LENGTHS)) -> tuple[torch.Tensor, SampledTokens]:
        """Return the rollouts [first, end) as one micro-batch: policy_T, and the rest as SampledTokens."""
        place_T = (self.sequence_T >= first) & (self.sequence_T < end)
        rest = (x[place_T] for x in (self.proximal, self.sampler, self.advantage))
        sequences = Sequences(self.sequence_T[place_T] - first, end - first)
        return self.policy[place_T], SampledTokens(*rest, sequences, self.reference[place_T])

    def rows(self, name: str) -> torch.Tensor:
        """Return a field as [B, longest], padded."""
        parts = getattr(self, name).split(LENGTHS)
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


@pytest.fixture
def sample() -> Sample:
    generator = torch.Generator().manual_seed(1)

    def draw(scale: float, count: int = TOKENS) -> torch.Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    sequence_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    policy_T = -1 - draw(1).abs()
    proximal_T = policy_T + draw(0.2) + draw(0.25, len(LENGTHS))[sequence_T]
    sampler_T = proximal_T + draw(0.4) + draw(0.2, len(LENGTHS))[sequence_T]
    advantages_S = torch.tensor([1.0, -0.5, 0.3, -1.0, 0.8, -0.9], dtype=torch.float64)
    return Sample(policy_T, proximal_T, sampler_T, policy_T + draw(0.5), advantages_S[sequence_T], sequence_T)


def of_batch(settings: dict[str, Any]) -> PolicyLoss:
    return PolicyLoss(Loss.model_validate(settings), LONGEST, TOKENS, len(LENGTHS))


def loss_and_gradient(settings: dict[str, Any], sample: Sample, *cuts: int) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return loss, gradient [T] and sums, added up over micro-batches. cuts: rollouts at which a new one starts."""
    policy_T = sample.policy.clone().requires_grad_()
    whole = Sample(policy_T, *list(vars(sample).values())[1:])
    terms = [of_batch(settings)(*whole.tokens(*ends)) for ends in itertools.pairwise((0, *cuts, len(LENGTHS)))]
    loss = sum((item.loss for item in terms), torch.zeros((), dtype=torch.float64))
    (gradient_T,) = torch.autograd.grad(loss, policy_T)
    return float(loss.detach()), gradient_T, sum((item.sums_N for item in terms), torch.zeros(len(SUMS)))


OBJECTIVES: dict[str, dict[str, Any]] = {
    "clip": {"clipHigh": "0.3"},
    "gspo": {"objective": "Gspo", "clipLow": "0.1", "clipHigh": "0.15"},
    "cispo": {"objective": "Cispo", "clipLow": "0.3", "clipHigh": "0.3"},
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {"method": "None"},
    "truncate": {"high": "1.5"},
    "truncate sequences": {"level": "Sequence", "low": "0.5", "high": "1.5"},
    "mask": {"method": "Mask", "low": "0.5", "high": "1.5"},
    "mask sequences": {"method": "Mask", "level": "Sequence", "low": "0.2", "high": "3"},
}
REST: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequences": {"normaliser": "Sequences", "referenceKl": {"coefficient": "0.1", "estimator": "K2"}},
    "fixed": {"normaliser": "FixedLength", "referenceKl": {"coefficient": "0.1", "estimator": "K3"}},
    "without weights": {"referenceKl": {"coefficient": "0.1", "estimator": "K2", "importanceWeighted": False}},
    "masked": {"rolloutMask": {"ratioLow": "0.85", "ratioHigh": "1.15"}},
    "near": {"rolloutMask": {"maxDivergence": "0.05"}, "referenceKl": {"coefficient": "1", "place": "Reward"}},
}


def by_formula(settings: dict[str, Any], sample: Sample) -> dict[str, float]:
    """Compute the same sums in plain Python, one token at a time."""
    found = dict.fromkeys(SUMS, 0.0)
    correction = {"method": "Truncate", "level": "Token", "low": "0", "high": "2"} | settings.get("correction", {})
    mask = settings.get("rolloutMask", {})
    kl = settings.get("referenceKl")
    low = 1 - float(settings.get("clipLow", 0.2))
    high = 1 + float(settings.get("clipHigh", 0.2))
    columns = [x.split(LENGTHS) for x in (sample.policy, sample.proximal, sample.sampler, sample.reference)]
    advantages = [part[0].item() for part in sample.advantage.split(LENGTHS)]
    for policy_T, proximal_T, sampler_T, reference_T, advantage in zip(*columns, advantages, strict=True):
        rows = list(zip(*(x.tolist() for x in (policy_T, proximal_T, sampler_T, reference_T)), strict=True))
        base = 2 if settings.get("ratioTo") == "Sampler" else 1
        of_sequence = math.exp(fmean(row[0] - row[base] for row in rows))
        mean_ratio = math.exp(fmean(row[1] - row[2] for row in rows))
        is_left_out = (
            mean_ratio < float(mask.get("ratioLow", 0))
            or mean_ratio > float(mask.get("ratioHigh", math.inf))
            or (advantage < 0 and fmean(row[2] - row[0] for row in rows) > float(mask.get("maxDivergence", math.inf)))
        )
        divisor = {"Tokens": TOKENS, "Sequences": len(LENGTHS) * len(rows), "FixedLength": len(LENGTHS) * LONGEST}
        for row in rows:
            ratio = of_sequence if settings.get("objective") == "Gspo" else math.exp(row[0] - row[base])
            held = min(max(ratio, low), high)
            if settings.get("objective") == "Cispo":
                loss = -held * advantage * row[0]
                is_held = held != ratio
            else:
                loss = -min(ratio * advantage, held * advantage)
                is_held = held * advantage < ratio * advantage
            ratios = rows if correction["level"] == "Sequence" else [row]
            weight = math.prod(math.exp(r[1] - r[2]) for r in ratios)
            bounded = min(max(weight, float(correction["low"])), float(correction["high"]))
            is_bounded = correction["method"] != "None" and bounded != weight
            weight = {"None": 1.0, "Truncate": bounded, "Mask": 0.0 if is_bounded else weight}[correction["method"]]
            weight *= not is_left_out
            scale = 1 / divisor[settings.get("normaliser", "Tokens")]
            found["loss"] += scale * weight * loss
            found["masked"] += weight == 0
            weight *= math.exp(row[0] - row[2]) if base == 2 else 1
            log_ratio = row[3] - row[0]
            k3 = math.exp(log_ratio) - log_ratio - 1
            lag_weight = math.exp(row[0] - row[2])
            if kl is not None and kl.get("place") != "Reward":
                divergence = k3 if kl["estimator"] == "K3" else log_ratio**2 / 2
                found["loss"] += scale * 0.1 * divergence * (lag_weight if kl.get("importanceWeighted", True) else 1)
            found["reference_kl"] += lag_weight * k3 if kl is not None else 0
            found["clipped"] += is_held
            found["clipped_high"] += is_held and ratio > 1
            found["weight"] += weight
            found["weight_square"] += weight**2
            found["bounded"] += is_bounded
    return found


@pytest.mark.parametrize("rest", REST)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_figures_are_their_formulas(objective: str, correction: str, rest: str, sample: Sample) -> None:
    settings = OBJECTIVES[objective] | {"correction": CORRECTIONS[correction]} | REST[rest]
    _, _, sums_N = loss_and_gradient(settings, sample, 2, 5)
    assert dict(zip(SUMS, sums_N.tolist(), strict=True)) == pytest.approx(by_formula(settings, sample), rel=1e-11)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_ratio_to_the_sampler_is_its_formula(objective: str, sample: Sample) -> None:
    settings = OBJECTIVES[objective] | {"ratioTo": "Sampler", "correction": {"method": "None"}} | REST["masked"]
    _, _, sums_N = loss_and_gradient(settings, sample, 3)
    expected = by_formula(settings, sample)
    assert dict(zip(SUMS, sums_N.tolist(), strict=True)) == pytest.approx(expected, rel=1e-11)
    assert 0 < expected["masked"] < TOKENS
    assert 0 < expected["clipped_high"] < expected["clipped"]


@pytest.mark.parametrize("rest", ["plain", "fixed", "without weights", "masked"])
@pytest.mark.parametrize("objective", ["clip", "gspo"])
def test_gradient_is_that_of_finite_differences(objective: str, rest: str, sample: Sample) -> None:
    """Weighted K2 is left out: its weight has no gradient by definition."""
    loss = of_batch(OBJECTIVES[objective] | REST[rest])
    policy_T, sampled = sample.tokens()
    assert torch.autograd.gradcheck(lambda policy_T: loss(policy_T, sampled).loss, policy_T.clone().requires_grad_())


def test_gradient_of_cispo_is_its_weight_at_every_token(sample: Sample) -> None:
    """Finite differences would include the change of the weight, which has no gradient by definition."""
    settings = OBJECTIVES["cispo"] | {"correction": {"method": "None"}}
    _, gradient_T, _ = loss_and_gradient(settings, sample)
    held_T = (sample.policy - sample.proximal).exp().clamp(0.7, 1.3)
    torch.testing.assert_close(gradient_T, -held_T * sample.advantage / TOKENS)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_first_update_is_a_plain_policy_gradient(objective: str, sample: Sample) -> None:
    start = Sample(sample.proximal, *list(vars(sample).values())[1:])
    settings = OBJECTIVES[objective] | {"correction": {"method": "None"}, "normaliser": "Sequences"}
    _, gradient_T, sums_N = loss_and_gradient(settings, start)
    lengths_T = torch.tensor(LENGTHS)[sample.sequence_T]
    torch.testing.assert_close(gradient_T, -sample.advantage / (len(LENGTHS) * lengths_T))
    assert sums_N[SUMS.index("clipped")] == 0


def trl_arguments(**settings: object) -> SimpleNamespace:
    return SimpleNamespace(**{"delta": None, "steps_per_generation": 1, "use_bias_correction_kl": False} | settings)


# Settings here, and what the same is called in TRL.
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"normaliser": "Sequences"}, {"loss_type": "grpo"}),
    "grpo with kl": (
        {"normaliser": "Sequences", "referenceKl": {"coefficient": "0.04", "importanceWeighted": False}},
        {"loss_type": "grpo", "beta": 0.04},
    ),
    "grpo with weighted kl": (
        {"normaliser": "Sequences", "referenceKl": {"coefficient": "0.04"}},
        {"loss_type": "grpo", "beta": 0.04, "args": trl_arguments(use_bias_correction_kl=True)},
    ),
    "dr. grpo": ({"normaliser": "FixedLength"}, {"loss_type": "dr_grpo"}),
    "dapo": ({"clipHigh": "0.28"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (
        {"objective": "Gspo", "normaliser": "Sequences", "clipLow": "3e-4", "clipHigh": "4e-4"},
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": (
        {"objective": "Cispo", "clipLow": "1", "clipHigh": "0.1"},
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "off-policy sequence mask": (
        {"rolloutMask": {"maxDivergence": "0.05"}},
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_equal_those_of_trl(recipe: str, sample: Sample) -> None:
    trainer_class = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is the independent loss").GRPOTrainer
    ours, theirs = RECIPES[recipe]
    if recipe == "grpo with weighted kl":  # TRL weighs by policy over proximal
        sample = replace(sample, proximal=sample.sampler)
    weight_T = (sample.proximal - sample.sampler).exp().clamp(max=2)
    weights = torch.nn.utils.rnn.pad_sequence(weight_T.split(LENGTHS), batch_first=True)
    policy = sample.rows("policy").requires_grad_()
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.int64),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": sample.rows("advantage")[:, 0],
        "old_per_token_logps": sample.rows("proximal"),
        "ref_per_token_logps": sample.rows("reference"),
        "importance_sampling_ratio": weights,
        "sampling_per_token_logps": sample.rows("sampler"),
        "num_items_in_batch": torch.tensor(TOKENS),
    }
    loss = trainer_class._compute_loss(trl_trainer(trainer_class, policy, **theirs), None, inputs)
    (gradient,) = torch.autograd.grad(loss, policy)
    found, gradient_T, _ = loss_and_gradient(ours, sample, 1, 4)
    assert found == pytest.approx(float(loss.detach()), rel=1e-6)
    torch.testing.assert_close(gradient_T, gradient[mask.bool()], rtol=1e-6, atol=1e-12)


def _same(tensor: torch.Tensor, **_: object) -> torch.Tensor:
    """Stands in for a collective of one process."""
    return tensor


def trl_trainer(trainer_class: type, policy: torch.Tensor, **settings: object) -> object:
    """Build just enough of a GRPOTrainer to compute its loss, without generation and logging."""
    trainer = trainer_class.__new__(trainer_class)
    standard: dict[str, object] = {
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "off_policy_mask_threshold": None,
        "max_completion_length": LONGEST,
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "args": trl_arguments(),
        "accelerator": SimpleNamespace(num_processes=1, gather=_same, reduce=_same, sync_gradients=True),
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": collections.defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (policy, torch.zeros_like(policy), None),
    }
    trainer.__dict__.update(standard | settings)
    return trainer


def test_absurd_ratios_leave_loss_and_gradient_finite(sample: Sample) -> None:
    """In float32, as a sampler or a reference of a wrong model would give them."""
    policy_T = sample.policy.clone()
    sampler_T = sample.sampler.clone()
    sampler_T[::3] -= 500
    policy_T[::4] -= 500
    absurd = Sample(*(x.float() for x in (policy_T, sample.proximal, sampler_T)), *list(vars(sample).values())[3:])
    for settings in (
        {},
        {"correction": {"method": "Mask"}},
        {"ratioTo": "Sampler", "correction": {"method": "None"}},
        {"referenceKl": {"coefficient": "1", "estimator": "K2"}},
        {"referenceKl": {"coefficient": "1", "estimator": "K3"}},
    ):
        loss, gradient_T, sums_N = loss_and_gradient(settings, absurd)
        assert math.isfinite(loss)
        assert gradient_T.isfinite().all()
        assert sums_N.isfinite().all()


def test_micro_batch_without_rollouts_adds_nothing(sample: Sample) -> None:
    for settings in (*OBJECTIVES.values(), *REST.values()):
        policy_T, sampled = sample.tokens(0, 0)
        terms = of_batch(settings)(policy_T.requires_grad_(), sampled)
        terms.loss.backward()
        assert terms.sums_N.tolist() == [0.0] * len(SUMS)


class Operations(TorchDispatchMode):
    """Records the names of torch operations, including those of backward passes, as torch's documentation spells them.

    `cumsum` and `bincount` of integers are left out: their results do not depend on the order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_").removesuffix("_impl")
        if name not in {"cumsum", "bincount"} or any(
            isinstance(x, torch.Tensor) and x.is_floating_point() for x in args
        ):
            self.names.add(name.strip("_"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rest", REST)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_sum_depends_on_the_order_of_threads(objective: str, rest: str, sample: Sample) -> None:
    """Sums over a rollout used `index_add`, and their gradients `index_put`. Neither has a fixed order by default.

    torch lists such operations in the documentation of `use_deterministic_algorithms`. On two CPU threads the gradient
    of indexing 400,000 tokens had two values in 30 tries, and nothing turns the switch on there.
    """
    listed = re.findall(r":(?:func|class|meth):`(?:\w+\.)*(\w+)`", torch.use_deterministic_algorithms.__doc__ or "")
    unordered = {name.strip("_") for name in listed}
    assert {"index_add", "index_put", "scatter_add", "gather", "cumsum", "bincount"} <= unordered
    loss = of_batch(OBJECTIVES[objective] | REST[rest] | {"correction": {"level": "Sequence"}})
    policy_T, sampled = sample.tokens()
    policy_T.requires_grad_()
    with Operations() as seen:
        torch.autograd.grad(loss(policy_T, sampled).loss, policy_T)
    assert "segment_reduce" in seen.names
    assert not seen.names & unordered


def test_sums_over_rollouts_are_taken_one_token_after_another(sample: Sample) -> None:
    """The order is that of `index_add` on one thread, so that figures of earlier runs do not change."""
    sequences = Sequences(sample.sequence_T, len(LENGTHS))
    for dtype in (torch.float32, torch.float64):
        values_T = sample.policy.to(dtype)
        expected_S = values_T.new_zeros(len(LENGTHS)).index_add(0, sample.sequence_T, values_T)
        assert torch.equal(sequences.sum_tokens(values_T), expected_S)
        values_S = expected_S.clone().requires_grad_()
        (gradient_S,) = torch.autograd.grad((sequences.spread_to_tokens(values_S) * values_T).sum(), values_S)
        assert torch.equal(gradient_S, expected_S)


def test_mismatch_counts_tokens_of_the_present_version_only() -> None:
    proximal_T = torch.tensor([-1.0, -2.0, -3.0])
    sampler_T = torch.tensor([-1.5, -2.0, -9.0])
    mismatch = measure_mismatch(proximal_T, sampler_T, torch.tensor([True, True, False]))
    assert int(mismatch.tokens) == 2
    assert float(mismatch.abs_sum) == pytest.approx(0.5)
    assert float(mismatch.abs_max) == pytest.approx(0.5)
    assert float(mismatch.kl_sum) == pytest.approx(math.exp(0.5) - 1 - 0.5)


def test_mismatch_of_no_tokens_is_zero() -> None:
    mismatch = measure_mismatch(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    assert [float(value) for value in vars(mismatch).values()] == [0.0] * 4


POLICY_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
OTHER_V = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
DIVERGENCE = float((POLICY_V * (POLICY_V / OTHER_V).log()).sum())


def test_mismatch_estimates_the_divergence_without_bias() -> None:
    per_token = [
        float(measure_mismatch(OTHER_V[i : i + 1].log(), POLICY_V[i : i + 1].log(), torch.tensor([True])).kl_sum)
        for i in range(3)
    ]
    assert sum(p * k for p, k in zip(POLICY_V.tolist(), per_token, strict=True)) == pytest.approx(DIVERGENCE)


@pytest.mark.parametrize("estimator", [KlEstimator.K1, KlEstimator.K3])
def test_reference_kl_is_unbiased(estimator: KlEstimator) -> None:
    assert float((POLICY_V * estimate_reference_kl(POLICY_V.log(), OTHER_V.log(), estimator)).sum()) == pytest.approx(
        DIVERGENCE
    )


@pytest.mark.parametrize("estimator", KlEstimator)
@given(difference=st.floats(-1e6, 1e6, width=32))
def test_reference_kl_is_finite_at_any_token(estimator: KlEstimator, difference: float) -> None:
    """K3 overflowed float32 where the policy was 94 nats below the reference. One such token had its step skipped."""
    for d in (-94.0, difference):
        policy_1 = torch.tensor([d], requires_grad=True)
        cost_1 = estimate_reference_kl(policy_1, torch.zeros(1), estimator)
        assert cost_1.isfinite().all()
        assert torch.autograd.grad(cost_1.sum(), policy_1)[0].isfinite().all()


def test_k3_below_its_bound_is_constant() -> None:
    policy_T = torch.tensor([-94.0, -21.0, -20.0, -19.0, 94.0], dtype=torch.float64, requires_grad=True)
    cost_T = estimate_reference_kl(policy_T, torch.zeros(5), KlEstimator.K3)
    (gradient_T,) = torch.autograd.grad(cost_T.sum(), policy_T)
    assert cost_T.tolist() == pytest.approx([*[math.exp(20) - 21] * 3, math.exp(19) - 20, 93])
    assert gradient_T[[0, 1, 3, 4]].tolist() == pytest.approx([0, 0, 1 - math.exp(19), 1])


def test_gradients_of_k1_vanish_and_those_of_k2_are_the_divergences_own() -> None:
    """In expectation over the policy's tokens. This is why the run file rejects K1 in the loss."""
    logits_V = POLICY_V.log().requires_grad_()
    (expected_V,) = torch.autograd.grad(
        (logits_V.log_softmax(0).exp() * (logits_V.log_softmax(0) - OTHER_V.log())).sum(), logits_V
    )
    for estimator, gradient_V in ((KlEstimator.K1, torch.zeros(3).double()), (KlEstimator.K2, expected_V)):
        loss = (POLICY_V * estimate_reference_kl(logits_V.log_softmax(0), OTHER_V.log(), estimator)).sum()
        torch.testing.assert_close(torch.autograd.grad(loss, logits_V)[0], gradient_V)


@dataclass(frozen=True)
class Lagging:
    """Logits of a policy over seven tokens, [V] float64, and log-probabilities of the policies it is compared with."""

    logits_V: torch.Tensor
    sampler_V: torch.Tensor
    proximal_V: torch.Tensor
    reference_V: torch.Tensor

    def expected(self, cost: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, torch.Tensor]:
        """Return the expectation over the sampler's tokens of a cost [V], and its gradient by the logits."""
        logits_V = self.logits_V.clone().requires_grad_()
        value = (self.sampler_V.exp() * cost(logits_V.log_softmax(0))).sum()
        return float(value.detach()), torch.autograd.grad(value, logits_V)[0]

    def divergence(self) -> tuple[float, torch.Tensor]:
        """Return KL(policy || reference) and its gradient by the logits."""
        logits_V = self.logits_V.clone().requires_grad_()
        policy_V = logits_V.log_softmax(0)
        value = (policy_V.exp() * (policy_V - self.reference_V)).sum()
        return float(value.detach()), torch.autograd.grad(value, logits_V)[0]

    def in_loss(self, settings: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Compute the loss [V] of each token as a rollout with advantage 0, so that only the divergence counts."""
        whole = PolicyLoss(Loss.model_validate(settings), longest=1, tokens=1, rollouts=1)
        nothing = torch.zeros(1, dtype=torch.float64)
        one = Sequences(torch.zeros(1, dtype=torch.int64), 1)

        def cost(policy_V: torch.Tensor) -> torch.Tensor:
            rows = zip(policy_V, self.proximal_V, self.sampler_V, self.reference_V, strict=True)
            return torch.stack(
                [whole(p[None], SampledTokens(q[None], s[None], nothing, one, r[None])).loss for p, q, s, r in rows]
            )

        return cost


@pytest.fixture
def lagging() -> Lagging:
    """The sampler lags: its logits are the policy's plus N(0, 0.5), and so are those of the proximal policy."""
    generator = torch.Generator().manual_seed(4)
    draws_4V = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    logits_V = draws_4V[0]
    return Lagging(
        logits_V,
        (logits_V + 0.5 * draws_4V[1]).log_softmax(0),
        (logits_V + 0.1 * draws_4V[2]).log_softmax(0),
        draws_4V[3].log_softmax(0),
    )


def error(found_V: torch.Tensor, expected_V: torch.Tensor) -> float:
    """Return the relative error."""
    return float((found_V - expected_V).norm() / expected_V.norm())


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("estimator", ["K2", "K3"])
def test_gradient_of_the_divergence_is_right_when_the_sampler_lags(
    estimator: str, objective: str, correction: str, lagging: Lagging
) -> None:
    """The divergence had no importance weight, so its gradient was wrong by half or more for tokens of an older policy.

    Expectations are computed exactly, over all tokens.
    """
    settings = OBJECTIVES[objective] | {"correction": CORRECTIONS[correction]}
    divergence, gradient_V = lagging.divergence()
    kl = {"coefficient": "1", "estimator": estimator}
    value, found_V = lagging.expected(lagging.in_loss(settings | {"referenceKl": kl}))
    assert error(found_V, gradient_V) < 1e-12
    if estimator == "K3":
        assert value == pytest.approx(divergence)
    kl |= {"importanceWeighted": False}
    value, found_V = lagging.expected(lagging.in_loss(settings | {"referenceKl": kl}))
    assert error(found_V, gradient_V) > 0.8
    if estimator == "K3":
        assert value < 0.8 * divergence


def test_reported_divergence_is_right_when_the_sampler_lags(lagging: Lagging) -> None:
    """The reported figure does not depend on the loss."""
    for kl in ({"importanceWeighted": False}, {"place": "Reward", "estimator": "K1"}, {}):
        whole = PolicyLoss(Loss.model_validate({"referenceKl": {"coefficient": "1"} | kl}), 1, 1, 1)
        one = Sequences(torch.zeros(1, dtype=torch.int64), 1)
        policy_V = lagging.logits_V.log_softmax(0)
        found = 0.0
        for place, probability in enumerate(lagging.sampler_V.exp().tolist()):
            row = (x[place : place + 1] for x in (lagging.proximal_V, lagging.sampler_V, torch.zeros(7).double()))
            sampled = SampledTokens(*row, one, lagging.reference_V[place : place + 1])
            terms = whole(policy_V[place : place + 1], sampled)
            found += probability * float(terms.sums_N[SUMS.index("reference_kl")])
        assert found == pytest.approx(lagging.divergence()[0])


def test_weight_changes_no_value_and_not_the_gradient_of_k2_where_the_sampler_is_the_policy(sample: Sample) -> None:
    """K3's gradient does change, from that of KL(reference || policy) to that of KL(policy || reference)."""
    for estimator in KlEstimator:
        policy_T = sample.policy.clone().requires_grad_()
        plain_T = estimate_reference_kl(policy_T, sample.reference, estimator)
        weighted_T = estimate_weighted_kl(policy_T, sample.policy, sample.reference, estimator)
        assert torch.equal(plain_T, weighted_T)
        plain, weighted = (torch.autograd.grad(x.sum(), policy_T)[0] for x in (plain_T, weighted_T))
        assert torch.equal(weighted, sample.policy - sample.reference)
        assert torch.equal(plain, weighted) == (estimator is KlEstimator.K2)


def test_gradient_of_weighted_k3_is_that_of_its_value(sample: Sample) -> None:
    """Compared with autograd through value and weight, where no bound is hit."""
    policy_T = sample.policy.clone().requires_grad_()
    naive_T = (policy_T - sample.sampler).exp() * estimate_reference_kl(policy_T, sample.reference, KlEstimator.K3)
    found_T = estimate_weighted_kl(policy_T, sample.sampler, sample.reference, KlEstimator.K3)
    torch.testing.assert_close(found_T, naive_T)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), policy_T)[0] for x in (found_T, naive_T)))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=50))
def test_effective_sample_size_is_a_share(weights: list[float]) -> None:
    share = compute_effective_sample_size(sum(weights), sum(w * w for w in weights), len(weights))
    assert 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9


def test_effective_sample_size_of_equal_weights_is_1() -> None:
    assert compute_effective_sample_size(6.0, 12.0, 3) == pytest.approx(1.0)
