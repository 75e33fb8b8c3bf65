"""Completions have the policy's exact distribution with every mechanism, and broken samplers are detected.

The policy has four possible tokens. The first four tokens of each completion are counted: one after the prompt, two
that were drafted and verified, and the bonus token. `enumeration` describes the statistic.

False alarms: each comparison of a correct sampler fails with probability 2e-4 under fresh seeds. Power: a sampler at
the chi-square distance of `POWER` from the policy fails with a probability of at least 0.99
(`test_the_power_is_as_documented`). All broken samplers must fail, also with the fewer samples of `make test`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import engine_fork, enumeration, sampling_lab
from tests.conftest import MECHANISMS
from tests.requirements import SUFFIX
from tests.sampling_lab import Job, SamplingTurn, TurnOutcome
from tests.tiny_models import Shape, allow_only, make_bigram_drafter, make_draft_model, make_mtp_policy, make_policy
from tests.vllm_cases import (
    EAGLE3,
    MTP,
    NGRAM,
    NONE,
    Judge,
    Models,
    a_spec,
    margins_of,
    some_requests,
    speculation,
    z_scores,
)

from specrl.generation.vllm_backend import preflight
from specrl.records import RolloutRequest, Sampling

pytestmark = pytest.mark.slow

TOKENS = range(40, 44)
PROMPT = [40, 41, 43, 42, 40]
PROMPTS = [[*PROMPT[start:], *PROMPT[:start]] for start in range(5)]
LENGTH = 4
FEW = 500
MANY = 1000
"""Completions per comparison in `make test` and in `make test-deep`."""
POWER = {FEW: (40, 0.18), MANY: (150, 0.15)}
"""By number of samples: cells of the most powerful statistic, and the chi-square distance that it detects.

`enumeration.fit_next` is the most powerful for FEW samples, `enumeration.fit` for MANY.
"""
CROWD = 10  # requests that need two KV cache blocks each
CROWDED_BLOCKS = 7
CROWDED_TOKENS = 160

LAB_S = 1800  # four minutes on a quiet machine, with many samples

PLAIN: dict[str, Any] = {}
EVERY_SETTING: list[dict[str, Any]] = [PLAIN, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 3}]
ALL_AT_ONCE: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 3}
TOP_P: dict[str, Any] = {"top_p": 0.9}
EACH_AND_BOTH: list[dict[str, Any]] = [
    PLAIN,
    ALL_AT_ONCE,
    {"temperature": 0.7},
    TOP_P,
    {"top_k": 3},
    {"top_p": 0.9, "top_k": 3},
]

PROBABILISTIC = {"draftSampling": "Probabilistic"}
# Mechanism, its section of the run file, and sampling settings. vLLM's sampler has one path for certain drafts and one
# for drawn drafts. One mechanism of each kind is tested under every setting.
VARIANTS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "none": ("none", {}, [PLAIN, ALL_AT_ONCE, TOP_P]),
    "ngram": ("ngram", {}, EVERY_SETTING),
    "suffix": ("suffix", {}, [PLAIN, ALL_AT_ONCE]),
    "eagle3": ("eagle3", {}, [PLAIN, ALL_AT_ONCE, TOP_P]),
    "eagle3-probabilistic": ("eagle3", PROBABILISTIC, EVERY_SETTING),
    "draftModel": ("draftModel", {}, EACH_AND_BOTH),
    "draftModel-probabilistic": ("draftModel", PROBABILISTIC, EACH_AND_BOTH),
    "mtp": ("mtp", {}, EACH_AND_BOTH),
    "mtp-probabilistic": ("mtp", PROBABILISTIC, EACH_AND_BOTH),
    # The default, an adaptive length: our scheduler, steps without the drafter, and drafts on incomplete context.
    "ngram-live": ("ngram", {}, EVERY_SETTING),
    "eagle3-live": ("eagle3", {}, [PLAIN, ALL_AT_ONCE]),
    "eagle3-probabilistic-live": ("eagle3", PROBABILISTIC, EVERY_SETTING),
}
LIVE = "-live"
DEEP_VARIANTS = {"mtp-probabilistic", "eagle3-live"}
"""Variants with an engine of their own in the deep tests alone. Their code is that of other variants."""
# One mechanism with certain drafts and one with drawn drafts: the two branches of the rejection sampler. The last one
# is deep: some of its steps have no drafts, so detection needs three times as many samples.
BROKEN = ("ngram", "eagle3-probabilistic", "eagle3-probabilistic-live")
BONUS_LOST = "drop_bonus"  # the distribution stays right, but a token is lost each time, which the counts show


def by_size(quick: Iterable[tuple[Any, ...]], every: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Prepend the number of samples: FEW for the quick cases, and MANY, marked deep, for all cases."""
    marks = [pytest.mark.deep, pytest.mark.timeout(LAB_S)]
    deep = [pytest.param(MANY, *case, marks=marks) for case in every]
    return [*((FEW, *case) for case in quick), *deep]


def is_quick(name: str, number: int) -> bool:
    """Whether a case runs in `make test`: the first setting of nearly all, and the others of one variant with certain
    drafts and of two with drawn drafts.
    """
    if name in DEEP_VARIANTS:
        return False
    return number == 0 or name in {"ngram", "eagle3-probabilistic"} or (name, number) == ("draftModel-probabilistic", 1)


CASES = [(name, number) for name, (_, _, settings) in VARIANTS.items() for number in range(len(settings))]
FAULTY = [(name, fault) for name in BROKEN for fault in sampling_lab.FAULTS]


@dataclass(frozen=True)
class Folders:
    """The policy with few tokens, one with MTP heads, and drafters of the first."""

    policy: Path
    mtp: Path
    head: Path
    draft_model: Path

    def policy_of(self, name: str) -> Path:
        """The policy that a variant is tested with."""
        return self.mtp if VARIANTS[name][0] == MTP else self.policy

    def job(self, name: str, turns: list[SamplingTurn]) -> Job:
        """Build the job of a variant's engine."""
        kind, options, _ = VARIANTS[name]
        drafter = {EAGLE3: self.head, "draftModel": self.draft_model}.get(kind)
        section = {} if kind == NONE else {"numDraftTokens": 2} | options
        if drafter is not None:
            section["path"] = str(drafter)
        generation = {"maxLiveRollouts": 256, "draftLength": "Adaptive" if name.endswith(LIVE) else "Fixed"}
        spec = a_spec(self.policy_of(name), {kind: section}, generation=generation)
        return Job(spec.model_dump(mode="json", by_alias=True, exclude_none=True), turns, str(drafter or "") or None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("few-tokens")
    shape = Shape(layers=2)
    policy = allow_only(make_policy(folder / "policy", seed=1, shape=shape, sharpness=6, bigram=2), TOKENS)
    mtp = allow_only(make_mtp_policy(folder / "mtp", seed=1, shape=shape, sharpness=6, bigram=2), TOKENS)
    # So noisy that many drafts are rejected. Otherwise so few samples would prove nothing.
    head = make_bigram_drafter(folder / "head", policy, noise=1.5)
    return Folders(policy, mtp, head, make_draft_model(folder / "draft-model", policy, noise=0.3))


def make_turn(samples: int, **setting: Any) -> SamplingTurn:
    """Request completions one token longer than is counted, so that the length limit affects no counted token."""
    return SamplingTurn([PROMPT], list(range(samples)), LENGTH + 1, **setting)


def run_lab(jobs: list[Job], exchange: Path, **environment: str) -> list[list[TurnOutcome]]:
    """Run jobs in a process of their own."""
    sampling_lab.write_jobs(exchange, jobs)
    process = engine_fork.start_fork(
        sampling_lab.main, exchange, environment=os.environ | sampling_lab.build_environment(jobs[0]) | environment
    )
    process.join(timeout=LAB_S)
    assert process.exitcode == 0
    return sampling_lab.read_outcomes(exchange)


@pytest.fixture(scope="module")
def samples(request: pytest.FixtureRequest) -> int:
    """Number of completions per comparison."""
    return int(request.param)


@pytest.fixture(scope="module")
def outcomes(folders: Folders, samples: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[TurnOutcome]]:
    """Outcomes by variant: one for each setting, one for each fault, and two with few KV cache blocks."""
    jobs = {}
    for name, (_, _, settings) in VARIANTS.items():
        if name == "suffix" and not preflight.has_suffix_package():
            continue
        asked = [setting for number, setting in enumerate(settings) if samples == MANY or is_quick(name, number)]
        if not asked:
            continue
        turns = [make_turn(samples, **setting) for setting in asked]
        if name in BROKEN and (samples == MANY or not name.endswith(LIVE)):
            spoilt = 3 * samples if name.endswith(LIVE) else samples
            turns += [make_turn(spoilt, fault=fault) for fault in sampling_lab.FAULTS]
        if name in MECHANISMS and samples == FEW:
            turns += [
                SamplingTurn(PROMPTS, list(range(CROWD)), CROWDED_TOKENS, temperature, blocks=CROWDED_BLOCKS)
                for temperature in (1.0, 0.0)
            ]
        jobs[name] = folders.job(name, turns)
    found = run_lab(list(jobs.values()), tmp_path_factory.mktemp("lab") / "exchange.json")
    return dict(zip(jobs, found, strict=True))


@pytest.fixture(scope="module")
def logits(folders: Folders) -> dict[Path, list[np.ndarray]]:
    """Exact logits by policy and position."""
    return {policy: enumeration.next_logits(policy, PROMPT, TOKENS, LENGTH) for policy in (folders.policy, folders.mtp)}


def fits(outcome: TurnOutcome, logits_of_policy: list[np.ndarray], **setting: Any) -> list[enumeration.Fit]:
    """Compare an outcome with the policy's distribution under a setting, with both statistics."""
    setting = {"temperature": 1.0, **setting}
    conditionals = [enumeration.apply_sampling(logits_BA, **setting) for logits_BA in logits_of_policy]
    return [
        enumeration.fit(outcome.tokens, TOKENS, enumeration.chain(conditionals)),
        enumeration.fit_next(outcome.tokens, TOKENS, conditionals),
    ]


def smallest_p(found: list[enumeration.Fit]) -> float:
    return min(fit.p_value for fit in found)


def outcomes_of(name: str, outcomes: dict[str, list[TurnOutcome]]) -> list[TurnOutcome]:
    """Return a variant's outcomes, or skip the test if it was not run."""
    if name not in outcomes:
        SUFFIX.skip("its variant was not run")
    return outcomes[name]


@pytest.mark.parametrize(
    ("samples", "name", "number"),
    by_size([case for case in CASES if is_quick(*case)], CASES),
    indirect=["samples"],
    scope="module",
)
def test_first_tokens_have_their_exact_probabilities(
    name: str,
    number: int,
    outcomes: dict[str, list[TurnOutcome]],
    logits: dict[Path, list[np.ndarray]],
    folders: Folders,
) -> None:
    setting = VARIANTS[name][2][number]
    outcome = outcomes_of(name, outcomes)[number]
    found = fits(outcome, logits[folders.policy_of(name)], **setting)
    print(f"{name} {setting}: {found}, accepted {outcome.counts.get('num_accepted_tokens')}")  # noqa: T201
    assert smallest_p(found) > enumeration.ALARM
    assert outcome.refusal is None
    assert max(fit.cells for fit in found) <= POWER[len(outcome.tokens)][0]
    if name.endswith(LIVE):
        assert outcome.counts["num_draft_tokens"] < 2 * outcome.counts["num_drafts"], (
            "the draft length must have varied"
        )
    if name != NONE:  # drafts were accepted completely and rejected, so the test covers both
        assert 0 < outcome.counts["accepted_last"] < outcome.counts["num_drafts"]


@pytest.mark.parametrize(
    ("samples", "name", "fault"),
    by_size([case for case in FAULTY if not case[0].endswith(LIVE)], FAULTY),
    indirect=["samples"],
    scope="module",
)
def test_a_broken_sampler_is_detected(
    name: str,
    fault: str,
    outcomes: dict[str, list[TurnOutcome]],
    logits: dict[Path, list[np.ndarray]],
    folders: Folders,
) -> None:
    outcome = outcomes[name][len(VARIANTS[name][2]) + list(sampling_lab.FAULTS).index(fault)]
    found = fits(outcome, logits[folders.policy_of(name)])
    print(f"{name} {fault}: {found}, {outcome.counts}")  # noqa: T201
    assert outcome.refusal is not None, "an engine must not start with this sampler"
    if fault == BONUS_LOST:
        assert outcome.counts["accepted_last"] == 0
    else:
        assert smallest_p(found) < enumeration.ALARM


@pytest.mark.parametrize("samples", POWER)
def test_the_power_is_as_documented(samples: int) -> None:
    """For Pearson's test with as many cells as these samples can fill."""
    cells, distance = POWER[samples]
    assert enumeration.detectable_distance(cells, samples, power=0.99) < distance


@pytest.mark.parametrize("samples", [FEW], indirect=True, scope="module")
@pytest.mark.parametrize("name", MECHANISMS)
def test_preempted_completions_follow_the_policy(
    name: str, outcomes: dict[str, list[TurnOutcome]], folders: Folders
) -> None:
    """The KV cache is too small for all requests: some are preempted while drafting, and computed again.

    Greedy tokens are compared with transformers, and so with the same policy without speculation.
    """
    drawn, greedy = outcomes_of(name, outcomes)[-2:]
    assert drawn.counts["num_preemptions"] > 0
    assert greedy.counts["num_preemptions"] > 0
    judge = Judge(folders.policy_of(name))
    requests = [
        RolloutRequest(
            f"r{seed}", "group", seed, tuple(PROMPTS[seed % len(PROMPTS)]), Sampling(CROWDED_TOKENS, seed=seed)
        )
        for seed in range(len(drawn.tokens))
    ]
    for request, tokens, logprobs in zip(requests, drawn.tokens, drawn.logprobs, strict=True):
        expected_TV = judge.logprobs_TV(request.prompt_token_ids, tokens)
        assert np.abs(expected_TV[np.arange(len(tokens)), tokens] - logprobs).max() < 1e-2
    assert np.abs(z_scores(judge, requests, drawn.tokens)[:2]).max() < 4.5
    margins = [margins_of(judge, request, tokens) for request, tokens in zip(requests, greedy.tokens, strict=True)]
    assert np.concatenate(margins).max() < 1e-3


def test_the_unrepaired_kernel_is_detected(
    folders: Folders, logits: dict[Path, list[np.ndarray]], models: Models, tmp_path: Path
) -> None:
    """With our plugin switched off, the distribution tests and the engine's check at its start must fail.

    If this test fails, vLLM may have fixed the kernel: see cpu_repair.
    """
    requests = some_requests(96, 48)
    drafted = a_spec(models.first.policy, speculation(EAGLE3, models.first))
    turn = SamplingTurn([list(r.prompt_token_ids) for r in requests], [r.sampling.seed or 0 for r in requests], 48)
    raw = drafted.model_dump(mode="json", by_alias=True, exclude_none=True)
    jobs = [Job(raw, [turn], str(models.first.drafter)), folders.job(NGRAM, [make_turn(FEW)])]
    (followed,), (counted,) = run_lab(jobs, tmp_path / "exchange.json", VLLM_PLUGINS="none")
    scores = z_scores(Judge(models.first.policy), requests, followed.tokens)
    found = fits(counted, logits[folders.policy])
    print(f"unrepaired: z {scores.round(1)}, {found}")  # noqa: T201
    assert np.abs(scores).max() > 9
    assert smallest_p(found) < enumeration.ALARM
    for refusal in (followed.refusal, counted.refusal):
        assert refusal is not None
        assert "55005" in refusal
