"""The sampling check at a worker's start: correct samplers pass, broken and unknown ones fail.

The samplers are vLLM's own: those of its first model runner with its CPU kernels, those of its second one with PyTorch
stand-ins for its Triton kernels. `tests/integration/generation/test_sampled_distribution.py` tests real engines.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests import sampling_lab

from specrl.errors import EngineFailed
from specrl.generation.vllm_backend.extensions import cpu_repair, samplers, sampling_check, worker
from specrl.generation.vllm_backend.extensions.sampling_check import (
    ALARM,
    CERTAIN_DRAFTS,
    DRAWN_DRAFTS,
    NO_DRAFTS,
    POLICY_KA,
    ROWS,
    SETTINGS,
    VOCABULARY,
    SamplingCase,
    alarm_threshold,
    expected_probs_KA,
    false_alarm_bound,
    g_statistic,
)

CPU = torch.device("cpu")
FIRST = CPU, VOCABULARY, ALARM / 18  # the check makes 18 comparisons
VERIFIED = [SamplingCase(drafts, settings) for drafts in (CERTAIN_DRAFTS, DRAWN_DRAFTS) for settings in SETTINGS]
TEMPERATURES, FILTERS = SETTINGS


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """With so few rows, more threads would spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- vLLM's first model runner ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def kernels(vllm_imported: None) -> None:
    """Bind vLLM's CPU kernels as a worker does. This works once per process."""
    from vllm.platforms import current_platform
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.v1.sample import rejection_sampler

    cpu_repair.repair_if_needed()
    cpu_repair.accept_empty_top_k()
    if not isinstance(rejection_sampler.expand_kernel, KernelOverride):
        with warnings.catch_warnings():  # it inspects modules of other packages, which warn
            warnings.simplefilter("ignore")
            current_platform.register_triton_kernel_overrides()


def a_speculation(method: str = "standard", num_drafts: int = 3) -> Any:
    return SimpleNamespace(
        rejection_sample_method=method, num_speculative_tokens=num_drafts, enable_adaptive_verification=False
    )


@pytest.fixture
def runner(kernels: None) -> Any:
    """The attributes of vLLM's first model runner that sampling uses."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    sampler = Sampler(logprobs_mode="processed_logprobs")
    nothing = torch.empty(0)
    idle = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return SimpleNamespace(
        device=CPU,
        sampler=sampler,
        rejection_sampler=RejectionSampler(sampler, a_speculation(), CPU),
        vllm_config=SimpleNamespace(speculative_config=a_speculation()),
        input_batch=SimpleNamespace(sampling_metadata=idle),
    )


def test_correct_samplers_pass_and_random_generators_are_unchanged(runner: Any) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    bound = dict(vars(runner))
    sampling_check.check_model_runner(runner)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert vars(runner) == bound


@pytest.mark.parametrize("case", VERIFIED, ids=str)
@pytest.mark.parametrize("fault", sampling_lab.FAULTS)
def test_a_broken_rejection_sampler_fails(fault: str, case: SamplingCase, runner: Any) -> None:
    """With certain drafts and with drawn drafts, each alone. The real engines are tested with the same faults."""
    # Without the bonus token the other tokens still have the right distribution.
    sign = "chi-square statistic" if fault != "drop_bonus" else "one more token"
    with sampling_lab.broken_sampler(fault), pytest.raises(EngineFailed, match=f"{sign}.*{case}"):
        sampling_check.check_case(case, samplers.find_bound_samplers(runner), *FIRST)


def test_a_worker_reports_a_broken_sampler_as_data(runner: Any) -> None:
    """vLLM would turn an exception of a worker into another one."""
    rank = worker.WorkerExtension()
    rank.model_runner = runner
    with sampling_lab.broken_sampler("accept_too_often"), pytest.raises(EngineFailed, match="chi-square statistic"):
        worker.unwrap_answer(rank.specrl_inspect())


def leave_alone(output: torch.Tensor, *inputs: Any) -> None:
    """The kernel of vLLM 0.32.0 for other types than int64: the caller's tensor keeps what was in memory."""
    output.zero_()


def mend_floats_only(output: torch.Tensor, *inputs: Any) -> None:
    """The same kernel, repaired for temperature and top-p but not for top-k."""
    if output.dtype.is_floating_point:
        cpu_repair.expand_values(output, *inputs)
    else:
        output.fill_(VOCABULARY)


def give_neighbours(output: torch.Tensor, values: torch.Tensor, *inputs: Any) -> None:
    """Each request gets the temperature, top-k and top-p of the one before it."""
    cpu_repair.expand_values(output, values.roll(1), *inputs)


@pytest.mark.parametrize("kernel", [leave_alone, mend_floats_only, give_neighbours])
def test_a_wrong_expand_kernel_fails(kernel: Callable[..., None], runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#55005 as it is in vLLM 0.32, and half repaired."""
    monkeypatch.setattr("vllm.v1.sample.rejection_sampler._expand", kernel)
    with pytest.raises(EngineFailed, match=r"RejectionSampler on cpu must .*55005"):
        sampling_check.check_model_runner(runner)


def ignore(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits


def sharpen(logits: torch.Tensor, temperature: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.div_(temperature[:, None] * 0.75)


@pytest.mark.parametrize(
    ("seam", "fault", "settings"),
    [
        ("sampler.Sampler.apply_temperature", staticmethod(ignore), TEMPERATURES),
        ("sampler.Sampler.apply_temperature", staticmethod(sharpen), TEMPERATURES),
        ("ops.topk_topp_sampler.apply_top_k_top_p", ignore, FILTERS),
    ],
)
def test_a_broken_plain_sampler_fails(
    seam: str, fault: Any, settings: str, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"vllm.v1.sample.{seam}", fault)
    runner.vllm_config.speculative_config = None
    with pytest.raises(EngineFailed, match=rf"sampler\.Sampler on cpu must draw.*{NO_DRAFTS}, {settings}"):
        sampling_check.check_model_runner(runner)


def test_samplers_without_speculation_pass(runner: Any) -> None:
    runner.vllm_config.speculative_config = None
    runner.rejection_sampler = None
    sampling_check.check_model_runner(runner)


def test_a_kernels_exception_becomes_an_engine_failure_that_names_the_case(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr("vllm.v1.sample.rejection_sampler._sample_recovered_tokens", fail)
    with pytest.raises(EngineFailed, match=r"rows with certain drafts, temperatures: \w+: "):
        sampling_check.check_model_runner(runner)


# -- which samplers are known ----------------------------------------------------------------------------------------


def test_a_sampler_of_another_class_fails_by_name(runner: Any) -> None:
    """Even a subclass of vLLM's sampler, since it may draw differently."""

    class Foreign(type(runner.rejection_sampler)):  # type: ignore[misc]
        pass

    runner.rejection_sampler.__class__ = Foreign
    with pytest.raises(EngineFailed, match=r"got .*Foreign, method standard"):
        sampling_check.check_model_runner(runner)


def test_a_missing_rejection_sampler_fails(runner: Any) -> None:
    del runner.rejection_sampler
    with pytest.raises(EngineFailed, match="and None, method standard"):
        sampling_check.check_model_runner(runner)


@pytest.mark.parametrize("method", ["synthetic", "block", "fly"])
def test_other_verification_methods_fail_by_name(method: str, runner: Any) -> None:
    runner.vllm_config.speculative_config = a_speculation(method)
    with pytest.raises(EngineFailed, match=f"method {method}"):
        sampling_check.check_model_runner(runner)


# -- vLLM's second model runner --------------------------------------------------------------------------------------


def gumbel_argmax(logits_NV: torch.Tensor) -> torch.Tensor:
    noise_NV = -torch.empty_like(logits_NV).exponential_().log()
    return (logits_NV + noise_NV).argmax(-1)


def verify_as_the_kernels(  # noqa: PLR0917 - vLLM's parameters
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what the Triton kernels of `rejection_sample` do, with noise from PyTorch."""
    assert len(seed.unique()) == len(seed), "each request has a seed of its own"
    policy_NV = target_logits.softmax(-1)
    last_N = torch.zeros(len(pos), dtype=torch.bool).index_fill_(0, cu_num_logits[1:].long() - 1, True)
    draft_N = torch.where(last_N, 0, draft_sampled.roll(-1).long())
    if draft_logits is None:
        drafter_NV = torch.nn.functional.one_hot(draft_N, policy_NV.shape[1]).float()
    else:
        of_N = expanded_idx_mapping.long()
        step_N = expanded_local_pos.long().clamp(max=num_speculative_steps - 1)
        drafter_NV = (draft_logits[of_N, step_N] / temperature[of_N][:, None]).softmax(-1)
    drafter_NV = torch.where(last_N[:, None], 0.0, drafter_NV)
    at = torch.arange(len(pos)), draft_N
    accepted_N = (policy_NV[at] > torch.rand(len(pos)) * drafter_NV[at]) & ~last_N
    instead_N = gumbel_argmax((policy_NV - drafter_NV).clamp(min=0).log())
    sampled_RK = np.full((len(idx_mapping), num_speculative_steps + 1), 7777)  # vLLM leaves what was in memory
    ends_R = cu_num_logits.tolist()
    drafts_N = draft_N.tolist()
    others_N = instead_N.tolist()
    kept_R = [accepted_N[start:end].tolist().index(False) for start, end in itertools.pairwise(ends_R)]
    for row, (start, kept) in enumerate(zip(ends_R[:-1], kept_R, strict=True)):
        sampled_RK[row, : kept + 1] = [*drafts_N[start : start + kept], others_N[start + kept]]
    return torch.from_numpy(sampled_RK), torch.tensor(kept_R) + 1


@pytest.fixture
def second_runner(vllm_imported: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The attributes of vLLM's second model runner that sampling uses, with two drafts per step."""
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample import sampler as plain
    from vllm.v1.worker.gpu.sample import states
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler as verifying

    def divide(logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor) -> None:
        logits.div_(temperature[rows.long()][:, None])

    def gather(ids: torch.Tensor, positions: torch.Tensor, indices: torch.Tensor, *_: Any) -> Any:
        return ids[indices], positions[indices]

    def count(num_sampled: torch.Tensor, *_: Any) -> Any:
        return num_sampled, None

    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    monkeypatch.setattr(states, "apply_temperature", divide)
    monkeypatch.setattr(plain, "gumbel_sample", lambda logits, *_, **__: gumbel_argmax(logits))
    monkeypatch.setattr(plain, "get_num_sampled_and_rejected", count)
    monkeypatch.setattr(verifying, "get_num_sampled_and_rejected", count)
    monkeypatch.setattr(verifying, "gather_draft_sampled", gather)
    monkeypatch.setattr(verifying, "rejection_sample", verify_as_the_kernels)
    sampler: Any = plain.Sampler.__new__(plain.Sampler)
    sampler.logprobs_mode = "processed_logprobs"
    sampler.compute_nans = sampler.use_fp64_gumbel = sampler.return_sampling_mask = False
    sampler.use_flashinfer = sampler.use_xpu_sampler = False
    sampler.trace_replay_state = None
    speculation = a_speculation(num_drafts=2)
    return SimpleNamespace(
        device=CPU,
        sampler=sampler,
        rejection_sampler=verifying.RejectionSampler(sampler, speculation, CPU),
        vllm_config=SimpleNamespace(speculative_config=speculation),
    )


def test_the_second_runners_samplers_pass_and_are_unchanged(second_runner: Any) -> None:
    before = dict(vars(second_runner.sampler)), dict(vars(second_runner.rejection_sampler))
    torch.manual_seed(0)
    sampling_check.check_model_runner(second_runner)
    assert (vars(second_runner.sampler), vars(second_runner.rejection_sampler)) == before


def test_a_second_runner_without_speculation_passes(second_runner: Any) -> None:
    torch.manual_seed(0)
    second_runner.vllm_config.speculative_config = second_runner.rejection_sampler = None
    sampling_check.check_model_runner(second_runner)


@pytest.mark.parametrize("case", VERIFIED, ids=str)
def test_a_broken_sampler_of_the_second_runner_fails(
    case: SamplingCase, second_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler replaces a rejected draft from the policy's own distribution."""

    def redraw(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sampled_RK, num_sampled_R = verify_as_the_kernels(logits, *args, **kwargs)
        last_R = num_sampled_R - 1
        starts_R = args[2][:-1].long()
        sampled_RK[torch.arange(len(last_R)), last_R] = gumbel_argmax(logits)[starts_R + last_R]
        return sampled_RK, num_sampled_R

    monkeypatch.setattr("vllm.v1.worker.gpu.spec_decode.rejection_sampler.rejection_sample", redraw)
    torch.manual_seed(0)
    with pytest.raises(EngineFailed, match=f"chi-square statistic.*{case}"):
        sampling_check.check_case(case, samplers.find_bound_samplers(second_runner), *FIRST)


# -- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5])
@pytest.mark.parametrize("draws", [1, 5, 50, 2000])
def test_the_bound_of_the_moments_holds(draws: int, probability: float, x: float) -> None:
    """Sums the moment of the statistic exactly for two cells. More cells are a chain of pairs of cells."""
    from scipy import stats

    probs_A = np.array([probability, 1 - probability])
    counts = np.arange(draws + 1)
    statistics = [g_statistic(np.array([count, draws - count]), probs_A) for count in counts]
    logs = stats.binom.logpmf(counts, draws, probability) + x * np.array(statistics) / 2
    assert np.exp(logs).sum() <= 1 / (1 - x)


def test_false_alarms_are_rarer_than_the_bound() -> None:
    """With a bound large enough to count alarms, and with rare tokens and few draws."""
    random = np.random.default_rng(0)
    probs_A = np.array([0.9, 0.06, 0.03, 0.01])
    alarm = 0.1
    counts = random.multinomial(30, probs_A, size=4_000)
    alarms = sum(false_alarm_bound(g_statistic(count_A, probs_A), 3) < alarm for count_A in counts)
    assert 0 < alarms < 4_000 * alarm


@pytest.mark.parametrize("degrees", [2, 3, 6, 24])
def test_the_bound_at_the_threshold_is_the_alarm(degrees: int) -> None:
    assert false_alarm_bound(alarm_threshold(degrees, ALARM), degrees) == pytest.approx(ALARM)
    assert false_alarm_bound(np.inf, degrees) == 0
    assert false_alarm_bound(2 * degrees, degrees) == 1


def test_the_power_is_as_documented_in_the_architecture() -> None:
    """A sampler that moves 0.15 of probability between two tokens is detected with a probability above 0.999.

    This holds for any two tokens and both temperatures. The KL divergence is at least 2 * 0.15^2 (Pinsker).
    """
    random = np.random.default_rng(0)
    rows = ROWS // 2
    limit = alarm_threshold(6, ALARM / 18)
    right = [expected_probs_KA(setting)[0] for setting in SETTINGS[TEMPERATURES]]
    moves = [(a, b) for a in range(4) for b in range(4) if a != b and all(probs_A[a] > 0.15 for probs_A in right)]
    assert len(moves) >= 6
    for source, target in moves:
        total = np.zeros(2_000)
        for probs_A in right:
            moved_A = probs_A.copy()
            moved_A[source], moved_A[target] = moved_A[source] - 0.15, moved_A[target] + 0.15
            counts = random.multinomial(rows, moved_A, size=2_000)
            total += [g_statistic(count_A, probs_A) for count_A in counts]
        assert (total < limit).mean() < 1e-3


def test_expected_probabilities_apply_the_setting() -> None:
    plain, cold = (expected_probs_KA(setting)[0] for setting in SETTINGS[TEMPERATURES])
    top_k, top_p = (expected_probs_KA(setting)[0] for setting in SETTINGS[FILTERS])
    assert plain == pytest.approx(POLICY_KA[0])
    assert cold == pytest.approx(POLICY_KA[0] ** 2 / (POLICY_KA[0] ** 2).sum())
    warm = POLICY_KA[0, :3] ** (1 / 1.3)
    assert top_k == pytest.approx([*(warm / warm.sum()), 0])
    assert top_p == pytest.approx([2 / 3, 1 / 3, 0, 0])
