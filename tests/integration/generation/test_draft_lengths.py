"""The live draft length in a real engine: it changes what steps cost, never what is sampled, and knows when to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import structlog
from prometheus_client import REGISTRY
from tests.vllm_cases import (
    DRAFT_MODEL,
    EAGLE3,
    MTP,
    NGRAM,
    Judge,
    Models,
    a_spec,
    collect,
    errors_of,
    margins_of,
    running,
    some_requests,
    speculation,
    z_scores,
)
from tests.weight_sender import WeightSender, folder_tensors, update

from specrl.drafting.head import write_untrained
from specrl.generation.draft_length import OFF
from specrl.generation.vllm_backend import drafting
from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.records import WeightOwner
from specrl.spec.generation import Eagle3

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

LENGTHS = (3, OFF, 1, 0, 2, OFF, 0, 3)
Z_LIMIT = 4.5  # as in test_losslessness: a false alarm in 150,000 seeds


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Calibration files of these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(models: Models, cache: Path) -> AsyncIterator[VllmEngine]:
    """Adaptive, with a drafter that guesses right often."""
    spec = a_spec(models.first.policy, speculation(EAGLE3, models.first), generation={"draftLength": "Adaptive"})
    async with running(spec) as started:
        yield started


async def change_lengths(engine: VllmEngine) -> None:
    """Another length every few steps, until cancelled."""
    while True:
        for length in LENGTHS:
            await drafting.fix(engine._llm, length)
            await asyncio.sleep(0.03)


def catch_ups() -> float:
    return REGISTRY.get_sample_value("specrl_generation_catch_ups_total") or 0.0


def preempted() -> float:
    """Requests that vLLM computed anew, in all engines of this process."""
    families = [family for family in REGISTRY.collect() if family.name == "vllm:num_preemptions"]
    return sum(sample.value for family in families for sample in family.samples if sample.name.endswith("_total"))


async def collect_while_changing(engine: VllmEngine, requests: Any) -> Any:
    changing = asyncio.create_task(change_lengths(engine))
    try:
        return await collect(engine, requests)
    finally:
        changing.cancel()
        await asyncio.gather(changing, return_exceptions=True)
        await drafting.fix(engine._llm, None)


async def test_costs_are_calibrated_at_start_and_kept(engine: VllmEngine, cache: Path) -> None:
    (file,) = (cache / "specrl" / "draft-costs").iterdir()
    assert drafting._read(file) is not None
    report = await drafting.report(engine._llm)
    assert report["state"] == "drafting"
    assert {length for _, _, length in report["table"]} <= {0, 1, 2, 3}
    assert report["table"][0][0] == 1
    assert report["table"][-1][1] == 32


async def test_greedy_tokens_are_the_policys_while_the_length_changes(engine: VllmEngine, models: Models) -> None:
    requests = some_requests(24, 100, temperature=0)
    rollouts = await collect_while_changing(engine, requests)
    judge = Judge(models.first.policy)
    for request, rollout in zip(requests, rollouts, strict=True):
        assert margins_of(judge, request, rollout.token_ids_T.tolist()).max() < 1e-3
    drafted = (await engine.status()).speculation
    assert drafted.drafts > 0
    assert drafted.draft_tokens < 3 * drafted.drafts, "lengths did differ"


async def test_samples_follow_the_policy_while_the_length_changes(engine: VllmEngine, models: Models) -> None:
    requests = [replace(item, rollout_id=f"sampled-{item.rollout_id}") for item in some_requests(96, 48)]
    rollouts = await collect_while_changing(engine, requests)
    judge = Judge(models.first.policy)
    assert max(errors_of(judge, *pair).max() for pair in zip(requests, rollouts, strict=True)) < 1e-4
    scores = z_scores(judge, requests, [rollout.token_ids_T.tolist() for rollout in rollouts])
    assert abs(scores).max() < Z_LIMIT, scores


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_batch_is_decoded_plainly_while_it_is_full_and_drafted_for_at_its_end(
    models: Models, cache: Path, temperature: float
) -> None:
    spec = a_spec(models.first.policy, speculation(EAGLE3, models.first, k=1), generation={"draftLength": "Adaptive"})
    judge = Judge(models.first.policy)
    async with running(spec) as started:
        costs = (await drafting.report(started._llm))["costs"]
        # Made up, since drafts of so small a policy may pay everywhere or nowhere: they pay up to four, by far.
        plain = costs["seconds"][str(OFF)]
        drafted = [cost * (1.0 if live <= 4 else 2.5) for live, cost in zip(costs["nodes"], plain, strict=True)]
        rows = {k: plain if int(k) == OFF else drafted for k in costs["seconds"]}
        assert await drafting._call(started._llm, "take_costs", {"nodes": costs["nodes"], "seconds": rows})
        before, preempted_before = catch_ups(), preempted()
        drafted_before = (await started.status()).speculation
        requests = [
            *some_requests(24, 120, temperature),
            *(replace(item, rollout_id=f"long-{item.rollout_id}") for item in some_requests(3, 300, temperature)),
        ]
        found = {}
        async for rollout in started.generate(requests, False):
            found[rollout.rollout_id] = rollout
            if len(found) == 24:
                until_drained = (await started.status()).speculation
        rollouts = [found[request.rollout_id] for request in requests]
        await asyncio.sleep(2 * drafting.REPORT_S)
        at_end = (await started.status()).speculation.minus(until_drained)
    begun = until_drained.minus(drafted_before)
    assert catch_ups() > before
    assert preempted() > preempted_before, "to be read by the drafter"
    assert begun.drafts < 0.5 * 24 * 120, "of the first steps, which show what is accepted"
    assert at_end.drafts > 50
    for request, rollout in zip(requests, rollouts, strict=True):
        if temperature == 0:
            assert margins_of(judge, request, rollout.token_ids_T.tolist()).max() < 1e-3
        else:
            assert errors_of(judge, request, rollout).max() < 1e-4


async def test_useless_drafter_is_switched_off_and_a_better_one_on_again_after_new_weights(
    engine: VllmEngine, models: Models, tmp_path: Path
) -> None:
    costs = (await drafting.report(engine._llm))["costs"]
    # Made up, so that it is the drafters that differ, whatever the machine: each draft that is accepted pays.
    rows = dict.fromkeys(costs["seconds"], costs["seconds"][str(OFF)])
    write_untrained(tmp_path / "useless", models.first.policy, Eagle3(), seed=3)
    useless = folder_tensors(tmp_path / "useless", WeightOwner.DRAFTER)
    sender = WeightSender()
    try:
        with structlog.testing.capture_logs() as events:
            await update(engine, sender, [*models.first.tensors(False), *useless], 1)
            await generate_until(engine, "drafter_switched_off", events)
            resting = (await engine.status()).drafting
            await update(engine, sender, models.first.tensors(True), 2)
            assert await drafting._call(engine._llm, "take_costs", {"nodes": costs["nodes"], "seconds": rows})
            await generate_until(engine, "drafter_switched_on", events)
        drafts = (await engine.status()).drafting
    finally:
        sender.close()
    assert resting is not None
    assert resting.state == "off"
    assert drafts is not None
    assert drafts.state == "drafting"
    switched = [event["event"] for event in events if str(event["event"]).startswith("drafter_")]
    assert switched[0] == "drafter_switched_off"
    assert switched[-2:] == ["drafter_tried", "drafter_switched_on"]


async def generate_until(engine: VllmEngine, name: str, events: list[Any]) -> None:
    """Generate until the engine has logged this event."""
    for number in range(100):
        if any(event["event"] == name for event in events):
            return
        requests = some_requests(16, 60)
        await collect(engine, [replace(item, rollout_id=f"{name}-{number}-{item.rollout_id}") for item in requests])
        await asyncio.sleep(0)
    await asyncio.sleep(2 * drafting.REPORT_S)
    assert any(event["event"] == name for event in events), f"never {name}"


@pytest.mark.parametrize(
    ("kind", "sampling"), [(NGRAM, {}), (DRAFT_MODEL, {}), (MTP, {}), (EAGLE3, {"draftSampling": "Probabilistic"})]
)
async def test_other_mechanisms_have_a_live_length_too(
    models: Models, cache: Path, kind: str, sampling: dict[str, str]
) -> None:
    version = models.versions(kind)[0]
    section = {kind: speculation(kind, version)[kind] | sampling}
    judge = Judge(version.policy)
    async with running(a_spec(version.policy, section, generation={"draftLength": "Adaptive"})) as started:
        greedy = some_requests(8, 60, temperature=0)
        for request, rollout in zip(greedy, await collect_while_changing(started, greedy), strict=True):
            assert margins_of(judge, request, rollout.token_ids_T.tolist()).max() < 1e-3
        requests = [replace(item, rollout_id=f"sampled-{item.rollout_id}") for item in some_requests(96, 48)]
        rollouts = await collect_while_changing(started, requests)
        drafted = (await started.status()).speculation
    assert max(errors_of(judge, *pair).max() for pair in zip(requests, rollouts, strict=True)) < 1e-4
    scores = z_scores(judge, requests, [rollout.token_ids_T.tolist() for rollout in rollouts])
    assert abs(scores).max() < Z_LIMIT, scores
    assert 0 < drafted.draft_tokens < 3 * drafted.drafts, "lengths did differ"


async def test_a_calibration_outlasts_requests_that_are_too_short_for_it_and_serves_like_engines(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = a_spec(
        models.first.policy,
        speculation(NGRAM, models.first),
        generation={"draftLength": "Adaptive", "maxLiveRollouts": 4, "sampling": {"maxTokens": 24}},
        model={"path": str(models.first.policy), "dtype": "float32", "maxLength": 48},
        prompts={"source": {"generated": {"family": "any", "count": 1}}, "maxTokens": 16},
    )
    for expected in ("measured", "read"):
        with structlog.testing.capture_logs() as events:
            async with running(spec):
                pass
        known = [event["event"] for event in events if event["event"].startswith("draft_costs")]
        assert known == [f"draft_costs_{expected}"]


async def test_a_calibration_is_of_one_engine_one_policy_and_one_machine(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def file(policy: dict[str, Any], **generation: Any) -> Path:
        spec = a_spec(models.first.policy, speculation(NGRAM, models.first), generation=generation)
        return drafting.calibration_file(spec, [policy])

    found = [file({"layers": 1}), file({"layers": 2}), file({"layers": 1}, maxLiveRollouts=2)]
    assert file({"layers": 1}) == found[0]
    monkeypatch.setattr(drafting, "hardware", lambda: "another machine")
    assert len({*found, file({"layers": 1})}) == 4


async def test_engine_that_cannot_be_calibrated_serves_with_full_drafts(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(drafting, "NODE_PATIENCE_S", -1.0)
    spec = a_spec(models.first.policy, speculation(NGRAM, models.first), generation={"draftLength": "Adaptive"})
    with structlog.testing.capture_logs() as events:
        async with running(spec) as started:
            report = await drafting.report(started._llm)
            rollouts = await collect(started, some_requests(8, 20))
    assert any(event["event"] == "draft_costs_not_measured" for event in events)
    assert {length for _, _, length in report["table"]} == {3}
    assert [rollout.length for rollout in rollouts] == [20] * 8
    assert not list(tmp_path.rglob("*.json"))  # noqa: ASYNC240 - a test may wait
