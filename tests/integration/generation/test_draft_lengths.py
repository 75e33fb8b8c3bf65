"""The adaptive draft length in a real engine: it changes the cost of steps, never the samples, and switches off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import structlog
from prometheus_client import REGISTRY
from tests.vllm_cases import (
    EAGLE3,
    LIVE_KINDS,
    NGRAM,
    Engines,
    Judge,
    Models,
    a_spec,
    collect_rollouts,
    errors_of,
    made_up_costs,
    margins_of,
    running_engine,
    some_requests,
    speculation,
    z_scores,
)
from tests.weight_sender import WeightSender, folder_tensors, update_weights

from specrl import machine
from specrl.drafting.eagle3.head import write_untrained_head
from specrl.generation.draft_lengths.decoding_step import OFF
from specrl.generation.vllm_backend import draft_length_client
from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.records import WeightOwner
from specrl.spec.generation import Eagle3

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

LENGTHS = (3, OFF, 1, 2, OFF, 3)
Z_LIMIT = 4.5  # as in test_losslessness: a false alarm in 150,000 seeds
MORE_THAN_DRAFTS_SAVE = {OFF: 1.0, 1: 2.5, 2: 3.3, 3: 4.2}
"""Made-up cost of a step with k drafts, in steps without the drafter. With k + 1 tokens at most, drafts cannot pay."""
LONG_STEP_S = 0.1  # made-up seconds of a step, more than a real one takes on a crowded machine


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder for the step costs of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("SPECRL_CACHE_DIR", str(folder))
        yield folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(models: Models, cache: Path) -> AsyncIterator[VllmEngine]:
    """An engine with an adaptive length and a good drafter. It saves its costs every few seconds."""
    section = {EAGLE3: speculation(EAGLE3, models.first)[EAGLE3] | {"draftSampling": "Probabilistic"}}
    spec = a_spec(models.first.policy, section, generation={"draftLength": "Adaptive"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_length_client, "SAVE_S", 1.0)
        patch.setattr(draft_length_client, "LONGEST_SAVE_S", 1.0)
        async with running_engine(spec) as started:
            yield started


async def reset_controller(engine: VllmEngine, seconds: dict[str, list[float]]) -> None:
    """Reset the controller: it knows these costs, and nothing about the drafter."""
    nodes = (await draft_length_client.fetch_report(engine._llm))["costs"]["nodes"]
    assert await draft_length_client._call_scheduler(engine._llm, "take_costs", {"nodes": nodes, "seconds": seconds})
    await draft_length_client._call_scheduler(engine._llm, "drafter_replaced")


@asynccontextmanager
async def keeping_costs(engine: VllmEngine, seconds: dict[str, list[float]]) -> AsyncIterator[None]:
    """Restore these costs every few steps, before the controller has corrected them by this machine's real steps."""

    async def keep() -> None:
        nodes = (await draft_length_client.fetch_report(engine._llm))["costs"]["nodes"]
        while True:
            await draft_length_client._call_scheduler(engine._llm, "take_costs", {"nodes": nodes, "seconds": seconds})
            await asyncio.sleep(0.03)

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def change_lengths(engine: VllmEngine) -> None:
    """Set another length every few steps, until cancelled."""
    while True:
        for length in LENGTHS:
            await draft_length_client.fix_length(engine._llm, length)
            await asyncio.sleep(0.03)


def catch_ups() -> float:
    return REGISTRY.get_sample_value("specrl_generation_catch_ups_total") or 0.0


def preempted() -> float:
    """Number of preemptions in all engines of this process."""
    families = [family for family in REGISTRY.collect() if family.name == "vllm:num_preemptions"]
    return sum(sample.value for family in families for sample in family.samples if sample.name.endswith("_total"))


async def collect_while_changing(engine: VllmEngine, requests: Any) -> Any:
    """Collect rollouts while the length changes. Afterwards the controller decides again."""
    changing = asyncio.create_task(change_lengths(engine))
    try:
        return await collect_rollouts(engine, requests)
    finally:
        changing.cancel()
        await asyncio.gather(changing, return_exceptions=True)
        await draft_length_client.fix_length(engine._llm, None)


async def test_an_engine_starts_without_costs_learns_them_and_saves_them(engine: VllmEngine, cache: Path) -> None:
    """Once each start waited until it had measured them, for seconds or, with 30 layers on two cores, minutes."""
    assert not engine._costs_file().exists()
    rollouts = await collect_rollouts(engine, some_requests(8, 200))
    await asyncio.sleep(3 * draft_length_client.REPORT_S)
    assert len(rollouts) == 8
    report = await draft_length_client.fetch_report(engine._llm)
    assert report["state"] in {"drafting", "off"}
    assert {length for _, _, length in report["table"]} <= {OFF, 1, 2, 3}
    assert report["table"][0][0] == 1
    assert report["table"][-1][1] == 32
    known = [length for length, row in report["costs"]["seconds"].items() if any(row)]
    assert str(OFF) in known
    assert len(known) > 1
    (file,) = (cache / "draft-costs").iterdir()
    assert file == engine._costs_file()
    with structlog.testing.capture_logs() as events:
        await draft_length_client.seed_costs(engine._llm, file)
    assert [event["event"] for event in events] == ["draft_costs_read"]


async def test_tokens_follow_the_policy_while_the_length_changes(engine: VllmEngine, models: Models) -> None:
    await check_tokens_while_the_length_changes(engine, models.first.policy)


async def check_tokens_while_the_length_changes(engine: VllmEngine, policy: Path) -> None:
    """Check greedy and sampled tokens."""
    before = (await engine.get_status()).speculation
    judge = Judge(policy)
    greedy = some_requests(16, 80, temperature=0)
    completions = [rollout.token_ids_T.tolist() for rollout in await collect_while_changing(engine, greedy)]
    judge.read_completions((request.prompt_token_ids for request in greedy), completions)
    for request, tokens in zip(greedy, completions, strict=True):
        assert margins_of(judge, request, tokens).max() < 1e-3
    requests = [replace(item, rollout_id=f"sampled-{item.rollout_id}") for item in some_requests(96, 48)]
    rollouts = await collect_while_changing(engine, requests)
    drafted = (await engine.get_status()).speculation.minus(before)
    scores = z_scores(judge, requests, [rollout.token_ids_T.tolist() for rollout in rollouts])
    assert max(errors_of(judge, *pair).max() for pair in zip(requests, rollouts, strict=True)) < 1e-4
    assert abs(scores).max() < Z_LIMIT, scores
    assert 0 < drafted.draft_tokens < 3 * drafted.drafts, "the draft length must have varied"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_batch_is_decoded_without_drafts_while_full_and_with_drafts_at_its_end(
    engine: VllmEngine, models: Models, temperature: float
) -> None:
    judge = Judge(models.first.policy)
    # Costs are made up, since drafts may pay always or never for so small a policy. Here they pay up to four requests.
    nodes = (await draft_length_client.fetch_report(engine._llm))["costs"]["nodes"]
    made_up = {
        str(k): [LONG_STEP_S * (1.0 if live <= 4 else times) for live in nodes]
        for k, times in MORE_THAN_DRAFTS_SAVE.items()
    }
    await reset_controller(engine, made_up)
    before = catch_ups()
    preempted_before = preempted()
    drafted_before = (await engine.get_status()).speculation
    requests = [
        *some_requests(24, 120, temperature),
        *(replace(item, rollout_id=f"long-{item.rollout_id}") for item in some_requests(3, 300, temperature)),
    ]
    found = {}
    async with keeping_costs(engine, made_up):
        async for rollout in engine.generate(requests, False):
            found[rollout.rollout_id] = rollout
            if len(found) == 24:
                until_drained = (await engine.get_status()).speculation
    rollouts = [found[request.rollout_id] for request in requests]
    await asyncio.sleep(2 * draft_length_client.REPORT_S)
    at_end = (await engine.get_status()).speculation.minus(until_drained)
    begun = until_drained.minus(drafted_before)
    assert catch_ups() > before
    assert preempted() > preempted_before, "a catch-up must have computed requests again"
    assert begun.drafts < 0.5 * 24 * 120, "only the first steps may draft, to observe acceptance"
    assert at_end.drafts > 50
    for request, rollout in zip(requests, rollouts, strict=True):
        if temperature == 0:
            assert margins_of(judge, request, rollout.token_ids_T.tolist()).max() < 1e-3
        else:
            assert errors_of(judge, request, rollout).max() < 1e-4


async def test_a_useless_drafter_is_switched_off_and_a_better_one_on_after_new_weights(
    engine: VllmEngine, models: Models, tmp_path: Path
) -> None:
    nodes = (await draft_length_client.fetch_report(engine._llm))["costs"]["nodes"]
    # Costs are made up, so that the result depends on the drafters alone: a draft pays if more than 30 % are accepted.
    rows = {str(k): [LONG_STEP_S * (1 + 0.3 * max(0, k))] * len(nodes) for k in MORE_THAN_DRAFTS_SAVE}
    await reset_controller(engine, rows)
    write_untrained_head(tmp_path / "useless", models.first.policy, Eagle3(), seed=3)
    useless = folder_tensors(tmp_path / "useless", WeightOwner.DRAFTER)
    sender = WeightSender()
    try:
        with structlog.testing.capture_logs() as events:
            await update_weights(engine, sender, [*models.first.tensors(False), *useless], 1)
            await generate_until(engine, "drafter_switched_off", events)
            resting = (await engine.get_status()).drafting
            await update_weights(engine, sender, models.first.tensors(True), 2)
            assert await draft_length_client._call_scheduler(
                engine._llm, "take_costs", {"nodes": nodes, "seconds": rows}
            )
            await generate_until(engine, "drafter_switched_on", events)
        drafts = (await engine.get_status()).drafting
    finally:
        sender.close()
    assert resting is not None
    assert resting.state == "off"
    assert drafts is not None
    assert drafts.state == "drafting"
    switched = [event["event"] for event in events if str(event["event"]).startswith("drafter_")]
    assert switched[0] == "drafter_switched_off"
    assert switched[-1] == "drafter_switched_on"


async def generate_until(engine: VllmEngine, name: str, events: list[Any]) -> None:
    """Generate rollouts until the engine has logged this event."""
    for number in range(100):
        if any(event["event"] == name for event in events):
            return
        requests = some_requests(16, 60)
        await collect_rollouts(
            engine, [replace(item, rollout_id=f"{name}-{number}-{item.rollout_id}") for item in requests]
        )
        await asyncio.sleep(0)
    await asyncio.sleep(2 * draft_length_client.REPORT_S)
    assert any(event["event"] == name for event in events), f"never {name}"


async def test_a_file_of_costs_belongs_to_one_engine_policy_and_machine(
    models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def file(policy: dict[str, Any], **generation: Any) -> Path:
        spec = a_spec(models.first.policy, speculation(NGRAM, models.first), generation=generation)
        return draft_length_client.costs_file(spec, [policy])

    found = [file({"layers": 1}), file({"layers": 2}), file({"layers": 1}, maxLiveRollouts=2)]
    assert file({"layers": 1}) == found[0]
    assert file({"layers": 1}, eager=True) == found[0], "CPUs use no graphs, unless the run file says so"
    found.append(file({"layers": 1}, eager=False))
    with monkeypatch.context() as patch:
        patch.setattr(draft_length_client, "describe_hardware", lambda: "another machine")
        found.append(file({"layers": 1}))
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05\nGCC version:\n"
    )
    monkeypatch.setattr(machine, "DRIVER_FILE", tmp_path / "version")
    assert len({*found, file({"layers": 1})}) == 6


# Last in this module: tests of other modules that use the same engines follow these.
@pytest.mark.parametrize("kind", LIVE_KINDS, scope="session")
async def test_other_mechanisms_have_an_adaptive_length_too(kind: str, engines: Engines) -> None:
    """Their engines read their step costs from a file."""
    served = await engines.get_served(kind)
    await served.publish(0)
    costs = (await draft_length_client.fetch_report(served.engine._llm))["costs"]["seconds"]
    assert costs == {k: pytest.approx(row) for k, row in made_up_costs(served.engine._spec)["seconds"].items()}
    try:
        await check_tokens_while_the_length_changes(served.engine, served.versions[0].policy)
    finally:
        await served.use_full_drafts()
