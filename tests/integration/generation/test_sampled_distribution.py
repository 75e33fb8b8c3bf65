"""Completions are drawn from the policy's own distribution, counted against exact probabilities; broken samplers fail.

A policy of four possible tokens; beginnings of four: the first from the prompt, two that were drafted and verified, the
bonus. See `enumeration` for the statistic: each comparison of a right sampler fails with probability 2e-4 under fresh
seeds. Power: a sampler at the chi-square distance of `POWER` from the policy fails with probability 0.99 or more
(`test_power_is_what_the_page_says`). All broken ones here must fail, also in the smaller of the two sizes, which is the
one of `make test`.
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
from tests.sampling_lab import Job, Outcome, Turn
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

from specrl.generation.vllm_backend import mechanisms
from specrl.records import RolloutRequest, Sampling

pytestmark = pytest.mark.slow

TOKENS = range(40, 44)
PROMPT = [40, 41, 43, 42, 40]
PROMPTS = [[*PROMPT[start:], *PROMPT[:start]] for start in range(5)]
LENGTH = 4
FEW, MANY = 500, 1000
"""Completions of each comparison: in `make test`, and in `make test-deep`."""
POWER = {FEW: (40, 0.18), MANY: (150, 0.15)}
"""By size: cells of the statistic that finds most with so many samples, and the chi-square distance that it finds:
`enumeration.fit_next` and `enumeration.fit`."""
CROWD, CROWDED_TOKENS = 10, 160  # two blocks of KV cache each, of the seven or fewer that there are

LAB_S = 1800  # four minutes on a quiet machine, with many samples

PLAIN: dict[str, Any] = {}
EVERY_SETTING: list[dict[str, Any]] = [PLAIN, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 3}]
ALL_AT_ONCE: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 3}

PROBABILISTIC = {"draftSampling": "Probabilistic"}
# Mechanism, its section, how its completions are drawn. vLLM's sampler has one path for drafts that are certain and one
# for drafts that were drawn: a mechanism of each is tried under every setting.
VARIANTS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "none": ("none", {}, [PLAIN, ALL_AT_ONCE]),
    "ngram": ("ngram", {}, EVERY_SETTING),
    "suffix": ("suffix", {}, [PLAIN, ALL_AT_ONCE]),
    "eagle3": ("eagle3", {}, [PLAIN, ALL_AT_ONCE]),
    "eagle3-probabilistic": ("eagle3", PROBABILISTIC, EVERY_SETTING),
    "draftModel": ("draftModel", {}, [PLAIN, ALL_AT_ONCE]),
    "draftModel-probabilistic": ("draftModel", PROBABILISTIC, [PLAIN, ALL_AT_ONCE]),
    "mtp": ("mtp", {}, [PLAIN, ALL_AT_ONCE]),
    # As by default: vLLM with our scheduler, steps without a drafter among them, drafts that miss what it has not read.
    "ngram-live": ("ngram", {}, EVERY_SETTING),
    "eagle3-live": ("eagle3", {}, [PLAIN, ALL_AT_ONCE]),
    "eagle3-probabilistic-live": ("eagle3", PROBABILISTIC, EVERY_SETTING),
}
LIVE = "-live"
# One mechanism whose drafts are certain, one whose drafts were drawn: the two branches of the rejection sampler. The
# last is deep: a part of its steps has no drafts to be wrong about, so that it takes three times as many samples.
BROKEN = ("ngram", "eagle3-probabilistic", "eagle3-probabilistic-live")
BONUS_LOST = "drop_bonus"  # right in distribution, but a token is lost each time: seen by counting


def by_size(quick: Iterable[tuple[Any, ...]], every: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters with `samples` before them: FEW for the quick cases, and MANY, which is deep, for all."""
    marks = [pytest.mark.deep, pytest.mark.timeout(LAB_S)]
    deep = [pytest.param(MANY, *case, marks=marks) for case in every]
    return [*((FEW, *case) for case in quick), *deep]


def is_quick(name: str, number: int) -> bool:
    """A live draft length is under one setting what it is under others."""
    return number == 0 or not name.endswith(LIVE)


CASES = [(name, number) for name, (_, _, settings) in VARIANTS.items() for number in range(len(settings))]
FAULTY = [(name, fault) for name in BROKEN for fault in sampling_lab.FAULTS]


@dataclass(frozen=True)
class Folders:
    """The policy of few tokens, the one with a head, and the drafters of the first."""

    policy: Path
    mtp: Path
    head: Path
    draft_model: Path

    def policy_of(self, name: str) -> Path:
        """The policy that a variant is tried on."""
        return self.mtp if name == MTP else self.policy

    def job(self, name: str, turns: list[Turn], **generation: Any) -> Job:
        """A variant's engine."""
        kind, options, _ = VARIANTS[name]
        drafter = {EAGLE3: self.head, "draftModel": self.draft_model}.get(kind)
        section = {} if kind == NONE else {"numDraftTokens": 2} | options
        if drafter is not None:
            section["path"] = str(drafter)
        generation = {
            "maxLiveRollouts": 256,
            "draftLength": "Adaptive" if name.endswith(LIVE) else "Fixed",
            **generation,
        }
        spec = a_spec(self.policy_of(name), {kind: section}, generation=generation)
        return Job(spec.model_dump(mode="json", by_alias=True, exclude_none=True), turns, str(drafter or "") or None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder, shape = tmp_path_factory.mktemp("few-tokens"), Shape(layers=2)
    policy = allow_only(make_policy(folder / "policy", seed=1, shape=shape, sharpness=6, bigram=2), TOKENS)
    mtp = allow_only(make_mtp_policy(folder / "mtp", seed=1, shape=shape, sharpness=6, bigram=2), TOKENS)
    head = make_bigram_drafter(folder / "head", policy, noise=1.5)  # refused often, or few samples show nothing
    return Folders(policy, mtp, head, make_draft_model(folder / "draft-model", policy, noise=0.3))


def enumerated(samples: int, **setting: Any) -> Turn:
    """Completions, one token longer than is counted, so that none of those is the clamped end."""
    return Turn([PROMPT], list(range(samples)), LENGTH + 1, **setting)


def run_lab(jobs: list[Job], exchange: Path, **environment: str) -> list[list[Outcome]]:
    """Run jobs in a laboratory of their own."""
    sampling_lab.write_jobs(exchange, jobs)
    process = engine_fork.start(
        sampling_lab.main, exchange, environment=os.environ | sampling_lab.environment(jobs[0]) | environment
    )
    process.join(timeout=LAB_S)
    assert process.exitcode == 0
    return sampling_lab.read_outcomes(exchange)


@pytest.fixture(scope="module")
def samples(request: pytest.FixtureRequest) -> int:
    """Of each comparison."""
    return int(request.param)


@pytest.fixture(scope="module")
def outcomes(folders: Folders, samples: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """For each variant: its settings' outcomes, then each fault's; and what happened when memory was short."""
    jobs = {}
    for name, (_, options, settings) in VARIANTS.items():
        if name == "suffix" and not mechanisms.surroundings().has_suffix_package:
            continue
        asked = [setting for number, setting in enumerate(settings) if samples == MANY or is_quick(name, number)]
        turns = [enumerated(samples, **setting) for setting in asked]
        if name in BROKEN and (samples == MANY or not name.endswith(LIVE)):
            spoilt = 3 * samples if name.endswith(LIVE) else samples
            turns += [enumerated(spoilt, fault=fault) for fault in sampling_lab.FAULTS]
        jobs[name] = folders.job(name, turns)
        if options or name.endswith(LIVE) or samples == MANY:
            continue
        crowded = [Turn(PROMPTS, list(range(CROWD)), CROWDED_TOKENS, temperature) for temperature in (1.0, 0.0)]
        jobs[f"{name} crowded"] = folders.job(name, crowded, kvCacheMib=1, maxLiveRollouts=CROWD)
    found = run_lab(list(jobs.values()), tmp_path_factory.mktemp("lab") / "exchange.json")
    return dict(zip(jobs, found, strict=True))


@pytest.fixture(scope="module")
def logits(folders: Folders) -> dict[Path, list[np.ndarray]]:
    """Of each policy, by position."""
    return {policy: enumeration.next_logits(policy, PROMPT, TOKENS, LENGTH) for policy in (folders.policy, folders.mtp)}


def fits(outcome: Outcome, logits_of_policy: list[np.ndarray], **setting: Any) -> list[enumeration.Fit]:
    """Compare an outcome with the policy's distribution under a setting, in both ways."""
    setting = {"temperature": 1.0, **setting}
    conditionals = [enumeration.processed(logits_BA, **setting) for logits_BA in logits_of_policy]
    return [
        enumeration.fit(outcome.tokens, TOKENS, enumeration.chain(conditionals)),
        enumeration.fit_next(outcome.tokens, TOKENS, conditionals),
    ]


def smallest_p(found: list[enumeration.Fit]) -> float:
    return min(fit.p_value for fit in found)


def outcomes_of(name: str, outcomes: dict[str, list[Outcome]]) -> list[Outcome]:
    """Skips the test when the variant could not be tried."""
    if name not in outcomes:
        SUFFIX.skip("its variant was not tried")
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
    outcomes: dict[str, list[Outcome]],
    logits: dict[Path, list[np.ndarray]],
    folders: Folders,
) -> None:
    setting, outcome = VARIANTS[name][2][number], outcomes_of(name, outcomes)[number]
    found = fits(outcome, logits[folders.policy_of(name)], **setting)
    print(f"{name} {setting}: {found}, accepted {outcome.counts.get('num_accepted_tokens')}")  # noqa: T201
    assert smallest_p(found) > enumeration.ALARM
    assert outcome.refusal is None
    assert max(fit.cells for fit in found) <= POWER[len(outcome.tokens)][0]
    if name.endswith(LIVE):
        assert outcome.counts["num_draft_tokens"] < 2 * outcome.counts["num_drafts"], "lengths did differ"
    if name != NONE:  # every outcome of a verification was there to be seen
        assert 0 < outcome.counts["accepted_last"] < outcome.counts["num_drafts"]


@pytest.mark.parametrize(
    ("samples", "name", "fault"),
    by_size([case for case in FAULTY if not case[0].endswith(LIVE)], FAULTY),
    indirect=["samples"],
    scope="module",
)
def test_broken_sampler_is_caught(
    name: str,
    fault: str,
    outcomes: dict[str, list[Outcome]],
    logits: dict[Path, list[np.ndarray]],
    folders: Folders,
) -> None:
    outcome = outcomes[name][len(VARIANTS[name][2]) + list(sampling_lab.FAULTS).index(fault)]
    found = fits(outcome, logits[folders.policy_of(name)])
    print(f"{name} {fault}: {found}, {outcome.counts}")  # noqa: T201
    assert outcome.refusal is not None, "no engine would start with this sampler"
    if fault == BONUS_LOST:
        assert outcome.counts["accepted_last"] == 0
    else:
        assert smallest_p(found) < enumeration.ALARM


@pytest.mark.parametrize("samples", POWER)
def test_power_is_what_the_page_says(samples: int) -> None:
    """Of Pearson's test itself, for as many cells as these samples can fill."""
    cells, distance = POWER[samples]
    assert enumeration.detectable_distance(cells, samples, power=0.99) < distance


@pytest.mark.parametrize("samples", [FEW], indirect=True, scope="module")
@pytest.mark.parametrize("name", MECHANISMS)
def test_preempted_completions_are_the_policys(name: str, outcomes: dict[str, list[Outcome]], folders: Folders) -> None:
    """A KV cache too small for all: requests lose their blocks in the middle of drafting, and are computed again.

    Greedy tokens without a margin are transformers' own, and so those of the same policy without speculation.
    """
    drawn, greedy = outcomes_of(f"{name} crowded", outcomes)
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


def test_unrepaired_kernel_is_caught(
    folders: Folders, logits: dict[Path, list[np.ndarray]], models: Models, tmp_path: Path
) -> None:
    """vLLM as it comes, our plugin switched off by vLLM's own variable: the distribution tests must fail, and so must
    the check that the engine makes at its start. If this fails, vLLM may have been mended: see cpu_repair.
    """
    requests = some_requests(96, 48)
    drafted = a_spec(models.first.policy, speculation(EAGLE3, models.first))
    turn = Turn([list(r.prompt_token_ids) for r in requests], [r.sampling.seed or 0 for r in requests], 48)
    raw = drafted.model_dump(mode="json", by_alias=True, exclude_none=True)
    jobs = [Job(raw, [turn], str(models.first.drafter)), folders.job(NGRAM, [enumerated(FEW)])]
    (followed,), (counted,) = run_lab(jobs, tmp_path / "exchange.json", VLLM_PLUGINS="none")
    scores = z_scores(Judge(models.first.policy), requests, followed.tokens)
    found = fits(counted, logits[folders.policy])
    print(f"unrepaired: z {scores.round(1)}, {found}")  # noqa: T201
    assert np.abs(scores).max() > 9
    assert smallest_p(found) < enumeration.ALARM
    for refusal in (followed.refusal, counted.refusal):
        assert refusal is not None
        assert "55005" in refusal
