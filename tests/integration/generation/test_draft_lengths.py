"""The live draft length in a real engine: it changes what steps cost, never what is sampled, and knows when to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import structlog
from prometheus_client import REGISTRY
from tests.vllm_cases import (
    EAGLE3,
    LIVE,
    NGRAM,
    Engines,
    Judge,
    Models,
    a_spec,
    collect,
    errors_of,
    made_up_costs,
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
PATIENCE_S = 600.0  # two cores may be shared with other engines
MORE_THAN_DRAFTS_SAVE = {OFF: 1.0, 0: 2.5, 1: 2.5, 2: 3.3, 3: 4.2}
"""Steps without drafts that one of k takes, which emits k + 1 tokens at most."""
SHORT = 28  # tokens: fewer than a pass of a calibration emits


@dataclass(frozen=True)
class Started:
    """The engine of this module, and what it logged at its start."""

    engine: VllmEngine
    events: list[str]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Calibration files of these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def started(models: Models, cache: Path) -> AsyncIterator[Started]:
    """Adaptive, with a drafter that guesses right often. Its calibration is given up at once."""
    section = {EAGLE3: speculation(EAGLE3, models.first)[EAGLE3] | {"draftSampling": "Probabilistic"}}
    spec = a_spec(models.first.policy, section, generation={"draftLength": "Adaptive"})
    async with AsyncExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs() as events:
            patch.setattr(drafting, "NODE_PATIENCE_S", -1.0)
            engine = await stack.enter_async_context(running(spec))
        yield Started(engine, draft_cost_events(events))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def calibrated(started: Started) -> Started:
    """Then it is calibrated as at its start, by requests that are too short."""
    return Started(started.engine, await calibrate(started.engine))


async def calibrate(engine: VllmEngine) -> list[str]:
    """As `VllmEngine.start` does. Returns what was logged of it."""
    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs() as events:
        patch.setattr(drafting, "NODE_PATIENCE_S", PATIENCE_S)
        sampling = replace(engine._calibration_sampling, max_tokens=SHORT)
        await drafting.calibrate(engine._llm, engine._calibration_file(), sampling)
    return draft_cost_events(events)


def draft_cost_events(events: list[Any]) -> list[str]:
    return [event["event"] for event in events if event["event"].startswith("draft_costs")]


async def begin_anew(engine: VllmEngine, seconds: dict[str, list[float]]) -> None:
    """The controller knows these costs, and nothing of the drafter."""
    nodes = (await drafting.report(engine._llm))["costs"]["nodes"]
    assert await drafting._call(engine._llm, "take_costs", {"nodes": nodes, "seconds": seconds})
    await drafting._call(engine._llm, "drafter_replaced")


def measured_costs(engine: VllmEngine) -> dict[str, list[float]]:
    """Seconds by length, as the calibration file has them."""
    found = drafting._read(engine._calibration_file())
    assert found is not None
    return dict(found["seconds"])


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
    """Leaves the length to the controller."""
    changing = asyncio.create_task(change_lengths(engine))
    try:
        return await collect(engine, requests)
    finally:
        changing.cancel()
        await asyncio.gather(changing, return_exceptions=True)
        await drafting.fix(engine._llm, None)


async def test_engine_that_cannot_be_calibrated_serves_with_full_drafts(started: Started, cache: Path) -> None:
    assert started.events == ["draft_costs_not_measured"]
    rollouts = await collect(started.engine, some_requests(8, 20))
    report = await drafting.report(started.engine._llm)
    assert {length for _, _, length in report["table"]} == {3}
    assert [rollout.length for rollout in rollouts] == [20] * 8
    assert not list((cache / "specrl").rglob("*.json"))


async def test_a_calibration_outlasts_requests_that_are_too_short_for_it_and_serves_like_engines(
    calibrated: Started, cache: Path
) -> None:
    assert calibrated.events == ["draft_costs_measured"]
    (file,) = (cache / "specrl" / "draft-costs").iterdir()
    assert drafting._read(file) is not None
    report = await drafting.report(calibrated.engine._llm)
    assert report["state"] == "drafting"
    assert {length for _, _, length in report["table"]} <= {OFF, 0, 1, 2, 3}
    assert report["table"][0][0] == 1
    assert report["table"][-1][1] == 32
    assert await calibrate(calibrated.engine) == ["draft_costs_read"]


async def test_tokens_are_the_policys_while_the_length_changes(calibrated: Started, models: Models) -> None:
    await check_tokens_while_the_length_changes(calibrated.engine, models.first.policy)


async def check_tokens_while_the_length_changes(engine: VllmEngine, policy: Path) -> None:
    """Greedy ones and sampled ones."""
    before, judge = (await engine.status()).speculation, Judge(policy)
    greedy = some_requests(16, 80, temperature=0)
    for request, rollout in zip(greedy, await collect_while_changing(engine, greedy), strict=True):
        assert margins_of(judge, request, rollout.token_ids_T.tolist()).max() < 1e-3
    requests = [replace(item, rollout_id=f"sampled-{item.rollout_id}") for item in some_requests(96, 48)]
    rollouts = await collect_while_changing(engine, requests)
    drafted = (await engine.status()).speculation.minus(before)
    assert max(errors_of(judge, *pair).max() for pair in zip(requests, rollouts, strict=True)) < 1e-4
    scores = z_scores(judge, requests, [rollout.token_ids_T.tolist() for rollout in rollouts])
    assert abs(scores).max() < Z_LIMIT, scores
    assert 0 < drafted.draft_tokens < 3 * drafted.drafts, "lengths did differ"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_batch_is_decoded_plainly_while_it_is_full_and_drafted_for_at_its_end(
    calibrated: Started, models: Models, temperature: float
) -> None:
    engine = calibrated.engine
    judge = Judge(models.first.policy)
    # Made up, since drafts of so small a policy may pay everywhere or nowhere: they pay up to four, by far.
    seconds = measured_costs(engine)
    nodes, plain = (await drafting.report(engine._llm))["costs"]["nodes"], seconds[str(OFF)]
    made_up = {
        str(k): [cost * (1.0 if live <= 4 else times) for live, cost in zip(nodes, plain, strict=True)]
        for k, times in MORE_THAN_DRAFTS_SAVE.items()
    }
    await begin_anew(engine, made_up)
    before, preempted_before = catch_ups(), preempted()
    drafted_before = (await engine.status()).speculation
    requests = [
        *some_requests(24, 120, temperature),
        *(replace(item, rollout_id=f"long-{item.rollout_id}") for item in some_requests(3, 300, temperature)),
    ]
    found = {}
    async for rollout in engine.generate(requests, False):
        found[rollout.rollout_id] = rollout
        if len(found) == 24:
            until_drained = (await engine.status()).speculation
    rollouts = [found[request.rollout_id] for request in requests]
    await asyncio.sleep(2 * drafting.REPORT_S)
    at_end = (await engine.status()).speculation.minus(until_drained)
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
    calibrated: Started, models: Models, tmp_path: Path
) -> None:
    engine = calibrated.engine
    seconds = measured_costs(engine)
    await begin_anew(engine, seconds)
    nodes = (await drafting.report(engine._llm))["costs"]["nodes"]
    # Made up, so that it is the drafters that differ, whatever the machine: each draft that is accepted pays.
    rows = dict.fromkeys(seconds, seconds[str(OFF)])
    write_untrained(tmp_path / "useless", models.first.policy, Eagle3(), seed=3)
    useless = folder_tensors(tmp_path / "useless", WeightOwner.DRAFTER)
    sender = WeightSender()
    try:
        with structlog.testing.capture_logs() as events:
            await update(engine, sender, [*models.first.tensors(False), *useless], 1)
            await generate_until(engine, "drafter_switched_off", events)
            resting = (await engine.status()).drafting
            await update(engine, sender, models.first.tensors(True), 2)
            assert await drafting._call(engine._llm, "take_costs", {"nodes": nodes, "seconds": rows})
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


# Last in this module: tests of other modules that use the same engines follow these.
@pytest.mark.parametrize("kind", LIVE, scope="session")
async def test_other_mechanisms_have_a_live_length_too(kind: str, engines: Engines) -> None:
    """And take what their steps cost from a file."""
    served = await engines.serving(kind)
    await served.publish(0)
    costs = (await drafting.report(served.engine._llm))["costs"]["seconds"]
    assert costs == made_up_costs(served.engine._spec)["seconds"]
    try:
        await check_tokens_while_the_length_changes(served.engine, served.versions[0].policy)
    finally:
        await served.use_full_drafts()
