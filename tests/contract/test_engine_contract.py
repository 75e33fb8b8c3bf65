"""The contract of the Engine protocol: the stand-in and vLLM with every speculation mechanism must keep it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from tests.conftest import MECHANISMS
from tests.stand_ins.engine import TableEngine, TableShape, log_softmax, seeded_table
from tests.weight_sender import Tensors, WeightSender, manifest_of, transfer_weights, update_weights

from specrl.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    EngineFailed,
    PeerUnavailable,
    RecordInvalid,
    VersionConflict,
)
from specrl.generation.engine import Engine
from specrl.records import (
    NO_DRAFTER,
    FinishReason,
    RolloutRequest,
    Sampling,
    TensorMeta,
    WeightChecksums,
    WeightGroup,
    WeightOwner,
)
from specrl.weights import files

if TYPE_CHECKING:
    from tests.vllm_cases import Engines

STAND_IN = "stand-in"

pytestmark = [pytest.mark.asyncio(loop_scope="session")]

Judgement = Callable[[Sequence[int], Sequence[int]], np.ndarray]


@dataclass
class Case:
    """An engine, the weights of two versions, and a function for each that computes its log-probabilities [T, V].

    spoilt: the tensor that a corrupt transfer changes. current: index of the version that is served.
    """

    engine: Engine
    weights: tuple[Tensors, Tensors]
    judgements: tuple[Judgement, Judgement]
    spoilt: str
    current: int = 0
    repeats: bool = True
    """Whether earlier rollouts have no influence on later ones. False for suffix decoding."""

    def requests(self, count: int, max_tokens: int = 24, temperature: float = 1.0) -> list[RolloutRequest]:
        """Build seeded requests with different prompts that share no prefix."""
        return [
            RolloutRequest(
                f"rollout-{n}", f"group-{n}", 0, (5 + n, 9 + n, 7 + n), Sampling(max_tokens, temperature, seed=n)
            )
            for n in range(count)
        ]

    async def update(self, sender: WeightSender) -> int:
        """Publish the other version under the next version number, and return the number."""
        number = (await self.engine.get_status()).policy_version + 1
        await update_weights(self.engine, sender, self.weights[1 - self.current], number)
        self.current = 1 - self.current
        return number

    def margins(self, version: int, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Return [T] the gap between the best log-probability and that of each token, under a version."""
        logprobs_TV = self.judgements[version](prompt, tokens)
        return np.asarray(logprobs_TV.max(-1) - logprobs_TV[np.arange(len(tokens)), list(tokens)])


def _table_judgement(table_VV: np.ndarray) -> Judgement:
    def judge(prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        before = [prompt[-1], *tokens[:-1]]
        return np.stack([log_softmax(table_VV[token]) for token in before])

    return judge


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stand_in_case() -> AsyncIterator[Case]:
    engine = TableEngine(shape=TableShape(token_seconds=0.001))
    await engine.start()
    tables = (engine.table_VV, seeded_table(7, engine.shape.vocab))
    weights = [
        [(TensorMeta("table", WeightOwner.POLICY, "float32", table.shape), torch.from_numpy(table).float())]
        for table in tables
    ]
    judgements = (_table_judgement(tables[0]), _table_judgement(tables[1]))
    yield Case(engine, (weights[0], weights[1]), judgements, "table")
    await engine.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that has a case on every engine."""
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", [*MECHANISMS, STAND_IN], scope="session")


@pytest.fixture(scope="session")
def vllm_cases() -> dict[str, Case]:
    """vLLM cases by mechanism, created on demand."""
    return {}


@pytest_asyncio.fixture(loop_scope="session")
async def case(kind: str, stand_in_case: Case, engines: Engines, vllm_cases: dict[str, Case]) -> Case:
    """The case of an engine kind. Tests of the stand-in alone do not start vLLM."""
    if kind == STAND_IN:
        return stand_in_case
    if kind not in vllm_cases:
        vllm_cases[kind] = await _vllm_case(kind, engines)
    return vllm_cases[kind]


async def _vllm_case(kind: str, engines: Engines) -> Case:
    from tests.vllm_cases import SUFFIX, Judge

    served = await engines.get_served(kind)
    await served.publish(0)
    first, second = served.versions
    return Case(
        served.engine,
        (first.tensors_of(kind), second.tensors_of(kind)),
        (Judge(first.policy).logprobs_TV, Judge(second.policy).logprobs_TV),
        "model.layers.2.mlp.up_proj.weight",
        repeats=kind != SUFFIX,
    )


@pytest_asyncio.fixture(loop_scope="session")
async def sender() -> AsyncIterator[WeightSender]:
    found = WeightSender()
    yield found
    found.close()


async def test_a_stop_string_ends_a_completion_at_the_token_that_completes_it(case: Case) -> None:
    """The next turn continues after that token, even if later drafts were accepted.

    Sampled tokens of suffix decoding depend on its drafts, so its completion is a greedy one.
    """
    (request,) = case.requests(1, max_tokens=24, temperature=1.0 if case.repeats else 0.0)
    (whole,) = await _collect(case, [request])
    assert whole.stop == ""
    stop = next(
        whole.text[first : first + 2]
        for first in range(8, len(whole.text) - 4)
        if whole.text.find(whole.text[first : first + 2]) == first and "\ufffd" not in whole.text[first : first + 2]
    )
    stopping = replace(request, sampling=replace(request.sampling, stop=("never said", stop)))
    (ended,) = await _collect(case, [stopping])
    ended.check(24)
    assert (ended.finish_reason, ended.stop) == (FinishReason.STOP, stop)
    assert ended.text == whole.text.partition(stop)[0]
    assert ended.total_length < whole.total_length
    np.testing.assert_array_equal(ended.token_ids_T, whole.token_ids_T[: ended.total_length])
    one_less = replace(stopping, sampling=replace(stopping.sampling, max_tokens=ended.total_length - 1))
    (shorter,) = await _collect(case, [one_less])
    assert shorter.stop == "", "without its last token the stop string is incomplete"


async def _collect(case: Case, requests: Sequence[RolloutRequest], together: bool = True) -> list[Any]:
    found = {rollout.rollout_id: rollout async for rollout in case.engine.generate(requests, together)}
    return [found[request.rollout_id] for request in requests]


async def test_rollouts_are_valid_and_carry_the_served_version(case: Case) -> None:
    served = (await case.engine.get_status()).policy_version
    requests = case.requests(6)
    for request, rollout in zip(requests, await _collect(case, requests), strict=True):
        rollout.check(request.sampling.max_tokens)
        assert (rollout.group_id, rollout.sample_index) == (request.group_id, request.sample_index)
        assert [span.policy_version for span in rollout.versions] == [served]
        assert rollout.seconds > 0


async def test_the_same_seeds_admitted_together_give_the_same_bits(case: Case) -> None:
    if not case.repeats:
        pytest.skip("drafts of this mechanism depend on all earlier rollouts")
    first = await _collect(case, case.requests(12))
    second = await _collect(case, case.requests(12))
    for mine, other in zip(first, second, strict=True):
        assert mine.token_ids_T.tobytes() == other.token_ids_T.tobytes()
        assert mine.sampler_logprobs_T.tobytes() == other.sampler_logprobs_T.tobytes()


async def test_greedy_rollouts_take_the_top_token_and_report_its_probability(case: Case) -> None:
    requests = case.requests(4, temperature=0)
    for request, rollout in zip(requests, await _collect(case, requests, together=False), strict=True):
        tokens = rollout.token_ids_T.tolist()
        assert case.margins(case.current, request.prompt_token_ids, tokens).max() < 1e-3
        expected_TV = case.judgements[case.current](request.prompt_token_ids, tokens)
        assert np.abs(expected_TV[np.arange(len(tokens)), tokens] - rollout.sampler_logprobs_T).max() < 1e-2


async def test_an_update_in_flight_splits_rollouts_by_version(case: Case, sender: WeightSender) -> None:
    before = (await case.engine.get_status()).policy_version
    old = case.current
    number = before + 1
    _, sent = await transfer_weights(case.engine, sender, case.weights[1 - old], number)
    requests = case.requests(4, max_tokens=200, temperature=0)
    generated = (await case.engine.get_status()).speculation.generated_tokens
    running = asyncio.create_task(_collect(case, requests))
    while (await case.engine.get_status()).speculation.generated_tokens < generated + 40:  # noqa: ASYNC110 - a counter
        await asyncio.sleep(0.002)
    await case.engine.load_weights(sent)
    case.current = 1 - old
    rollouts = await running
    crossed = [rollout for rollout in rollouts if len(rollout.versions) == 2]
    assert crossed, "every rollout ended before the update; lengthen them"
    for request, rollout in zip(requests, rollouts, strict=True):
        rollout.check(200)
        assert [span.policy_version for span in rollout.versions] in ([before], [before, number])
        prefix = rollout.token_ids_T[: rollout.versions[0].end].tolist()
        assert case.margins(old, request.prompt_token_ids, prefix).max() < 1e-3
    (fresh,) = await _collect(case, case.requests(1, temperature=0))
    assert case.margins(case.current, case.requests(1)[0].prompt_token_ids, fresh.token_ids_T.tolist()).max() < 1e-3


async def test_a_corrupt_transfer_is_refused_and_a_repeated_one_succeeds(case: Case, sender: WeightSender) -> None:
    before = (await case.engine.get_status()).policy_version
    new = case.weights[1 - case.current]
    _, sent = await transfer_weights(case.engine, sender, new, before + 1, corrupt=case.spoilt)
    with pytest.raises(ChecksumMismatch, match=case.spoilt):
        await case.engine.load_weights(sent)
    status = await case.engine.get_status()
    assert (status.policy_version, status.is_paused) == (before, False)
    with pytest.raises(VersionConflict):  # the staging area was dropped
        await case.engine.load_weights(sent)
    _, sent = await transfer_weights(case.engine, sender, new, before + 1)
    await case.engine.load_weights(sent)
    case.current = 1 - case.current
    status = await case.engine.get_status()
    assert (status.policy_version, status.is_paused) == (before + 1, False)
    (fresh,) = await _collect(case, case.requests(1, temperature=0))
    assert case.margins(case.current, case.requests(1)[0].prompt_token_ids, fresh.token_ids_T.tolist()).max() < 1e-3


async def test_a_load_whose_caller_is_gone_ends_with_the_new_version(case: Case, sender: WeightSender) -> None:
    number = (await case.engine.get_status()).policy_version + 1
    _, sent = await transfer_weights(case.engine, sender, case.weights[1 - case.current], number)
    loading = asyncio.create_task(case.engine.load_weights(sent))
    async with asyncio.timeout(60):
        while not (loading.done() or (await case.engine.get_status()).is_paused):  # noqa: ASYNC110 - a status
            await asyncio.sleep(0.001)
        loading.cancel()  # as gRPC does when the coordinator dies
        await asyncio.wait([loading])
        while (await case.engine.get_status()).policy_version < number:  # noqa: ASYNC110 - a status
            await asyncio.sleep(0.001)
        while (await case.engine.get_status()).is_paused:  # noqa: ASYNC110 - a status
            await asyncio.sleep(0.001)
    case.current = 1 - case.current
    (fresh,) = await _collect(case, case.requests(1, temperature=0))
    assert fresh.versions[0].policy_version == number
    assert case.margins(case.current, case.requests(1)[0].prompt_token_ids, fresh.token_ids_T.tolist()).max() < 1e-3


async def test_weights_can_arrive_as_files(case: Case, tmp_path: Path) -> None:
    before = (await case.engine.get_status()).policy_version
    new = case.weights[1 - case.current]
    sums = files.write_version(tmp_path / "version", manifest_of(new), [(meta.name, tensor) for meta, tensor in new])
    group = WeightGroup("", "", 0, 0, 1, 60.0, "checkpoint", str(tmp_path / "version"))
    with pytest.raises(ChecksumMismatch, match="could not read all weights"):
        await case.engine.receive_weights(replace(group, folder=str(tmp_path)), manifest_of(new), before + 1)
    received = await case.engine.receive_weights(group, manifest_of(new), before + 1)
    assert received == WeightChecksums(before + 1, sums)
    await case.engine.load_weights(received)
    case.current = 1 - case.current
    (fresh,) = await _collect(case, case.requests(1, temperature=0))
    assert fresh.versions[0].policy_version == before + 1
    assert case.margins(case.current, case.requests(1)[0].prompt_token_ids, fresh.token_ids_T.tolist()).max() < 1e-3


async def test_an_update_that_is_not_loaded_keeps_the_old_version(case: Case, sender: WeightSender) -> None:
    before = (await case.engine.get_status()).policy_version
    await transfer_weights(case.engine, sender, case.weights[1 - case.current], before + 1)
    (rollout,) = await _collect(case, case.requests(1, temperature=0))
    assert rollout.versions[0].policy_version == before
    assert case.margins(case.current, case.requests(1)[0].prompt_token_ids, rollout.token_ids_T.tolist()).max() < 1e-3


async def test_the_drafter_has_the_version_that_was_sent_with_it(case: Case, sender: WeightSender) -> None:
    before = (await case.engine.get_status()).policy_version
    weights = case.weights[case.current]
    _, sent = await transfer_weights(case.engine, sender, weights, before + 1)
    await case.engine.load_weights(replace(sent, drafter_version=before))
    status = await case.engine.get_status()
    expected = before if manifest_of(weights).has_drafter else NO_DRAFTER
    assert (status.policy_version, status.drafter_version) == (before + 1, expected)


async def test_rollouts_begin_and_end_while_weights_arrive(case: Case, sender: WeightSender) -> None:
    before = (await case.engine.get_status()).policy_version
    receiving = asyncio.create_task(
        case.engine.receive_weights(sender.group(), manifest_of(case.weights[0]), before + 1)
    )
    await asyncio.sleep(0.1)  # the engine waits in the group for the sender
    for together in (True, False):
        for rollout in await _collect(case, case.requests(3), together=together):
            assert {span.policy_version for span in rollout.versions} == {before}
    assert not receiving.done()
    assert not (await case.engine.get_status()).is_paused
    received, sent = await asyncio.gather(receiving, sender.send(case.weights[case.current], before + 1))
    assert sent == received
    with pytest.raises(ChecksumMismatch, match="version"):
        await case.engine.load_weights(replace(sent, policy_version=before + 2))


async def test_a_missing_trainer_ends_a_transfer_at_its_deadline(case: Case) -> None:
    absent = WeightSender(timeout_s=1.0)
    with pytest.raises((DeadlineExceeded, PeerUnavailable)):
        await case.engine.receive_weights(absent.group(), manifest_of(case.weights[0]), 99)
    absent.close()
    with pytest.raises(VersionConflict):
        await case.engine.load_weights(WeightChecksums(99, (0,) * len(case.weights[0])))
    assert len(await _collect(case, case.requests(2))) == 2


async def test_closing_the_iterator_aborts_unfinished_rollouts(case: Case) -> None:
    rollouts = case.engine.generate([*case.requests(1, max_tokens=1), *_long_requests(case)], False)
    await anext(rollouts)
    assert (await case.engine.get_status()).live_requests == 3
    await rollouts.aclose()  # type: ignore[attr-defined]
    assert (await case.engine.get_status()).live_requests == 0


def _long_requests(case: Case) -> list[RolloutRequest]:
    return [replace(request, rollout_id=f"long-{request.rollout_id}") for request in case.requests(3, max_tokens=240)]


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ((), Sampling(4)),
        ((3,), Sampling(0)),
        ((3,), Sampling(100_000)),
        ((-1,), Sampling(4)),
        ((1 << 20,), Sampling(4)),
        ((3,), Sampling(4, temperature=-1.0)),
        ((3,), Sampling(4, top_p=0.0)),
        ((3,), Sampling(4, top_p=float("nan"))),
        ((3,), Sampling(4, top_k=-1)),
        ((3,), Sampling(4, seed=-1)),
    ],
    ids=[
        "empty",
        "no-tokens",
        "too-long",
        "negative",
        "unknown-token",
        "negative-temperature",
        "no-top-p",
        "nan-top-p",
        "negative-top-k",
        "negative-seed",
    ],
)
async def test_an_invalid_request_is_refused(case: Case, prompt: tuple[int, ...], sampling: Sampling) -> None:
    bad = RolloutRequest("bad", "group", 0, prompt, sampling)
    with pytest.raises(RecordInvalid, match="bad"):
        await _collect(case, [*case.requests(1), bad])
    assert (await case.engine.get_status()).live_requests == 0


async def test_counters_never_decrease(case: Case) -> None:
    before = (await case.engine.get_status()).speculation
    rollouts = await _collect(case, case.requests(2))
    since = (await case.engine.get_status()).speculation.minus(before)
    assert since.generated_tokens == sum(rollout.total_length for rollout in rollouts)
    assert min(since.drafts, since.draft_tokens, since.accepted_tokens, *since.accepted_per_position, 0) == 0


async def test_a_closed_engine_raises_engine_failed() -> None:
    engine = TableEngine()
    await engine.start()
    await engine.close()
    with pytest.raises(EngineFailed):
        await engine.get_status()
