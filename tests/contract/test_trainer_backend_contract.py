"""The promises of TrainerBackend. The suite runs on Megatron and on the stand-in."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.integration.trainer.runs import a_rollout, a_spec, plan_epochs
from tests.stand_ins.trainer_backend import StandInBackend
from tests.tiny_models import Shape, make_policy

from specrl.errors import CheckpointInvalid, RecordInvalid, SpecrlError, StoreFailed, VersionConflict
from specrl.records import (
    Batch,
    DrafterEpochMetrics,
    OutputSpan,
    StreamPlace,
    TrainMetrics,
    TrainRollout,
    VersionSpan,
    WeightGroup,
    WeightOwner,
)
from specrl.trainer.backend import TrainerBackend
from specrl.trainer.checkpointing import checkpoints
from specrl.weights import files
from specrl.weights.group import BroadcastGroup
from specrl.weights.stream import receive_version

VOCAB = 264
GROUP = WeightGroup("epoch-1", "127.0.0.1", 0, 0, 2, 20.0, "gloo")

Make = Callable[..., TrainerBackend]


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("tiny"), shape=Shape(layers=2, vocab=VOCAB), sharpness=4.0)


@pytest.fixture(scope="module")
def cheap_process() -> Iterator[None]:
    """Exclude the 3,000 imported modules from garbage collection, which would take half a second each time."""
    import specrl.trainer.megatron_backend  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["stand_in", "megatron"])
def make(request: pytest.FixtureRequest, tiny_policy: Path, cheap_process: None) -> Iterator[Make]:
    """A factory of backends. One exists at a time, as in a trainer process."""
    made: list[TrainerBackend] = []

    def one(*, has_drafter: bool = True) -> TrainerBackend:
        while made:
            made.pop().close()
        if request.param == "stand_in":
            made.append(StandInBackend(VOCAB, has_drafter=has_drafter))
        else:
            from specrl.trainer.megatron_backend import MegatronBackend

            speculation = {"eagle3": {}} if has_drafter else {"none": {}}
            made.append(MegatronBackend(a_spec(tiny_policy, speculation=speculation)))
        return made[-1]

    yield one
    while made:
        made.pop().close()
    gc.collect()  # a model is a reference cycle and holds process groups, which have many threads


@pytest.fixture
def backend(make: Make) -> TrainerBackend:
    """A backend with the initial model and a new drafter."""
    one = make()
    one.load_model(None)
    return one


def rollouts(step: int = 1, count: int = 6) -> tuple[TrainRollout, ...]:
    generator = np.random.default_rng([3, step])
    return tuple(a_rollout(generator, index, VOCAB, step - 1) for index in range(count))


def scores(backend: TrainerBackend) -> np.ndarray:
    return np.concatenate(backend.score_rollouts(rollouts()))


def without_seconds(metrics: TrainMetrics) -> TrainMetrics:
    drafter = replace(metrics.drafter, seconds=0.0) if metrics.drafter else None
    return metrics.model_copy(update={"logprob_seconds": 0.0, "train_seconds": 0.0, "drafter": drafter})


def test_new_backend_is_at_step_0(backend: TrainerBackend) -> None:
    status = backend.get_status()
    assert (status.step, status.checkpoint_step, status.is_drafter_initialised) == (0, 0, False)
    assert status.world_size == 1


def test_training_a_step_makes_its_version(backend: TrainerBackend) -> None:
    before = scores(backend)
    metrics = backend.train_step(Batch(1, rollouts()))
    assert backend.get_status().step == 1
    assert metrics.tokens == sum(item.rollout.total_length for item in rollouts())
    assert metrics.grad_norm > 0
    assert metrics.drafter is not None
    assert not np.array_equal(scores(backend), before)


def test_training_makes_rewarded_tokens_more_likely(backend: TrainerBackend) -> None:
    liked = tuple(replace(item, advantage=1.0) for item in rollouts())
    before = scores(backend).mean()
    for step in (1, 2, 3):
        backend.train_step(Batch(step, liked))
    assert scores(backend).mean() > before


def test_a_step_without_rollouts_makes_a_version_with_the_same_weights(backend: TrainerBackend) -> None:
    backend.train_step(Batch(1, rollouts()))
    before = scores(backend)
    drafter = backend.evaluate_drafter(rollouts())
    metrics = backend.train_step(Batch(2, ()))
    assert backend.get_status().step == 2
    assert (metrics.tokens, metrics.loss, metrics.grad_norm, metrics.drafter) == (0, 0, 0, None)
    assert np.array_equal(scores(backend), before)
    assert replace(backend.evaluate_drafter(rollouts()), seconds=0.0) == replace(drafter, seconds=0.0)
    backend.train_step(Batch(3, rollouts(3)))
    assert backend.get_status().step == 3
    assert not np.array_equal(scores(backend), before)


@pytest.mark.parametrize("step", [0, 2, 5])
def test_step_out_of_order_is_rejected_and_changes_nothing(backend: TrainerBackend, step: int) -> None:
    before = scores(backend)
    with pytest.raises(VersionConflict, match=f"step={step}"):
        backend.train_step(Batch(step, rollouts()))
    assert backend.get_status().step == 0
    assert np.array_equal(scores(backend), before)


def test_poisoned_batches_are_rejected_and_change_nothing(backend: TrainerBackend) -> None:
    before = scores(backend)
    good = rollouts()[0]
    logprobs_T = good.rollout.sampler_logprobs_T.copy()
    logprobs_T[0] = np.nan
    ids_T = good.rollout.token_ids_T.copy()
    ids_T[-1] = VOCAB
    for rollout in (
        replace(good.rollout, sampler_logprobs_T=logprobs_T),
        replace(good.rollout, token_ids_T=ids_T),
        replace(good.rollout, token_ids_T=ids_T[:0], sampler_logprobs_T=logprobs_T[:0], versions=()),
    ):
        with pytest.raises(RecordInvalid):
            backend.train_step(Batch(1, (replace(good, rollout=rollout),)))
    assert np.array_equal(scores(backend), before)


def with_a_tool() -> tuple[tuple[TrainRollout, ...], tuple[TrainRollout, ...]]:
    """Make rollouts of three turns, and the same turns as single rollouts, each with everything before it as prompt."""
    whole = []
    apart = []
    for item in [item for item in rollouts(count=16) if item.rollout.total_length > 8]:
        outputs = (OutputSpan(2, 5), OutputSpan(7, 8))
        logprobs_T = item.rollout.sampler_logprobs_T.copy()
        for span in outputs:
            logprobs_T[span.first : span.end] = 0
        versions = tuple(VersionSpan(0, first, end) for first, end in replace(item.rollout, outputs=outputs).turn_spans)
        rollout = replace(item.rollout, outputs=outputs, versions=versions, sampler_logprobs_T=logprobs_T)
        rollout.check(rollout.total_length)
        whole.append(replace(item, rollout=rollout))
        for first, end in rollout.turn_spans:
            turn = replace(
                item.rollout,
                rollout_id=f"{rollout.rollout_id}-{first}",
                token_ids_T=rollout.token_ids_T[first:end],
                sampler_logprobs_T=logprobs_T[first:end],
                versions=(VersionSpan(0, 0, end - first),),
            )
            before = (*item.prompt_token_ids, *rollout.token_ids_T[:first].tolist())
            apart.append(replace(item, prompt_token_ids=before, rollout=turn))
    return tuple(whole), tuple(apart)


def test_rollouts_with_tools_train_as_their_turns_do_one_by_one(make: Make) -> None:
    found = []
    for items in with_a_tool():
        backend = make()
        backend.load_model(None)
        metrics = backend.train_step(Batch(1, items))
        found.append((metrics, np.concatenate(backend.score_rollouts(items))))
    (whole, scores_whole), (apart, scores_apart) = found
    assert whole.tokens == apart.tokens == len(scores_whole) == len(scores_apart)
    np.testing.assert_allclose(scores_whole, scores_apart, atol=2e-5)
    for name in ("loss", "grad_norm", "entropy", "mismatch_mean_abs", "mismatch_kl", "importance_weight_mean"):
        assert getattr(whole, name) == pytest.approx(getattr(apart, name), rel=1e-4, abs=1e-6), name
    assert whole.mismatch_tokens == apart.mismatch_tokens == whole.tokens


def test_a_drafter_learns_from_turns_and_not_from_what_a_tool_wrote(backend: TrainerBackend) -> None:
    whole, apart = with_a_tool()
    one = backend.evaluate_drafter(whole)
    other = backend.evaluate_drafter(apart)
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert one.acceptance_per_position == pytest.approx(other.acceptance_per_position, rel=1e-5)
    as_a_completion = backend.evaluate_drafter(
        [
            replace(
                item,
                rollout=replace(item.rollout, outputs=(), versions=(VersionSpan(0, 0, item.rollout.total_length),)),
            )
            for item in whole
        ]
    )
    assert one.loss != pytest.approx(as_a_completion.loss, rel=1e-5)


def test_scores_are_log_probabilities_in_the_order_of_the_rollouts(backend: TrainerBackend) -> None:
    items = rollouts()
    found = backend.score_rollouts(items)
    assert [len(logprobs_T) for logprobs_T in found] == [item.rollout.total_length for item in items]
    assert all(logprobs_T.dtype == np.float32 and (logprobs_T <= 0).all() for logprobs_T in found)
    again = backend.score_rollouts(items[::-1])
    for one, other in zip(found, reversed(again), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_same_batches_give_the_same_bits(make: Make) -> None:
    seen = []
    for _ in range(2):
        backend = make()
        backend.load_model(None)
        metrics = [without_seconds(backend.train_step(Batch(step, rollouts(step)))) for step in (1, 2)]
        seen.append((metrics, scores(backend)))
    assert seen[0][0] == seen[1][0]
    assert np.array_equal(seen[0][1], seen[1][1])


def test_drafter_learns_while_the_policy_does_not_change(backend: TrainerBackend, tmp_path: Path) -> None:
    before = scores(backend)
    epochs = backend.train_drafter(rollouts(count=12), rollouts(step=2), plan_epochs(12, 3), tmp_path / "progress")
    assert [item.epoch for item in epochs] == plan_epochs(12, 3)
    assert epochs[-1].trained.loss < epochs[0].trained.loss
    measured = backend.evaluate_drafter(rollouts(step=2))
    assert epochs[-1].held_out is not None
    assert replace(epochs[-1].held_out, seconds=0.0) == replace(measured, seconds=0.0)
    assert backend.get_status().is_drafter_initialised
    assert backend.get_status().step == 0
    assert np.array_equal(scores(backend), before)


def drafter_bits(backend: TrainerBackend, folder: Path) -> bytes:
    """Return the bytes of the exported drafter's weights."""
    drafter = backend.export_model(folder)[1]
    assert drafter is not None
    return b"".join(file.read_bytes() for file in sorted(drafter.iterdir()) if file.suffix != ".json")


def test_interrupted_initialisation_resumes_after_its_last_epoch(make: Make, tmp_path: Path) -> None:
    whole = make()
    whole.load_model(None)
    plan = plan_epochs(12, 3, first=6)
    items, held_out = rollouts(count=12), rollouts(step=2)
    progress, copied = tmp_path / "progress", tmp_path / "copied"
    for count in (1, 2, 3):  # one call for each epoch, the first on fewer answers
        expected = whole.train_drafter(items[: plan[count - 1].rollouts], held_out, plan[:count], progress)
        if count == 2:
            shutil.copy(progress, copied)
    bits = drafter_bits(whole, tmp_path / "a")

    # Killed after the second epoch. The coordinator, which was restarted too, begins with the first answers and epoch.
    fresh = make()
    fresh.load_model(None)
    assert fresh.train_drafter(items[:6], held_out, plan[:1], copied) == expected[:1]
    resumed = fresh.train_drafter(items, held_out, plan[:2], copied)
    assert resumed == expected[:2]  # equal times, too: no epoch was trained again
    assert fresh.get_status().is_drafter_initialised
    last = fresh.train_drafter(items, held_out, plan, copied)[-1]
    assert without_times(last) == without_times(expected[-1])
    assert drafter_bits(fresh, tmp_path / "b") == bits
    # Other answers are trained from the start.
    other = fresh.train_drafter(rollouts(step=3, count=12), held_out, plan[:1], copied)
    assert len(other) == 1
    assert other[0].trained != expected[0].trained


def without_times(item: DrafterEpochMetrics) -> DrafterEpochMetrics:
    """The metrics of an epoch without its durations."""
    held_out = replace(item.held_out, seconds=0.0) if item.held_out is not None else None
    return replace(item, trained=replace(item.trained, seconds=0.0), held_out=held_out)


def test_measuring_the_drafter_changes_nothing(backend: TrainerBackend, tmp_path: Path) -> None:
    backend.train_drafter(rollouts(count=12), (), plan_epochs(12, 2), tmp_path / "progress")
    before = drafter_bits(backend, tmp_path / "a")
    first, second = (backend.evaluate_drafter(rollouts(step=2)) for _ in range(2))
    assert replace(first, seconds=0.0) == replace(second, seconds=0.0)
    assert first.loss > 0
    assert first.grad_norm in {0.0, 1.0}
    assert 1 <= first.acceptance_length <= 4
    assert drafter_bits(backend, tmp_path / "b") == before


def test_poisoned_held_out_rollout_is_rejected_before_the_drafter_learns(
    backend: TrainerBackend, tmp_path: Path
) -> None:
    """The stand-in trained an epoch before it looked at them (`make fuzz SEED=34001`)."""
    before = drafter_bits(backend, tmp_path / "a")
    good = rollouts(step=2)[0]
    poisoned = replace(good, rollout=replace(good.rollout, token_ids_T=good.rollout.token_ids_T + VOCAB))
    with pytest.raises(RecordInvalid):
        backend.train_drafter(rollouts(), (good, poisoned), plan_epochs(6, 1), tmp_path / "progress")
    assert drafter_bits(backend, tmp_path / "b") == before
    assert not backend.get_status().is_drafter_initialised
    assert not (tmp_path / "progress").exists()


def test_run_without_a_drafter_trains_none(make: Make, tmp_path: Path) -> None:
    backend = make(has_drafter=False)
    backend.load_model(None)
    assert backend.train_step(Batch(1, rollouts())).drafter is None
    assert all(meta.owner is WeightOwner.POLICY for meta in backend.describe_weights().tensors)
    with pytest.raises(CheckpointInvalid):
        backend.train_drafter(rollouts(), (), plan_epochs(2, 1), tmp_path / "progress")


def test_checkpoint_restores_everything(make: Make, tmp_path: Path) -> None:
    first = make()
    first.load_model(None)
    first.train_drafter(rollouts(), (), plan_epochs(2, 1), tmp_path / "progress")
    first.train_step(Batch(1, rollouts()))
    target = checkpoints.step_directory(tmp_path, 1)
    place = StreamPlace(7, 40, "0f3a")
    first.save_checkpoint(target, place).result()
    assert first.get_status().checkpoint_step == 1
    assert first.get_status().stream == checkpoints.read_stream_place(target) == place
    expected = (without_seconds(first.train_step(Batch(2, rollouts(2)))), scores(first))
    second = make()
    second.load_model(target)
    assert (second.get_status().step, second.get_status().checkpoint_step) == (1, 1)
    assert second.get_status().stream == place
    assert second.get_status().is_drafter_initialised
    found = (without_seconds(second.train_step(Batch(2, rollouts(2)))), scores(second))
    assert found[0] == expected[0]
    assert np.array_equal(found[1], expected[1])


def test_step_0_is_saved_again_with_the_drafter_that_was_initialised_since(make: Make, tmp_path: Path) -> None:
    """The first save made the optimizer look as if it had moments, and the second one failed as they were missing."""
    backend = make()
    backend.load_model(None)
    target = checkpoints.step_directory(tmp_path, 0)
    backend.save_checkpoint(target).result()
    backend.train_drafter(rollouts(), (), plan_epochs(2, 1), tmp_path / "progress")
    backend.save_checkpoint(target).result()
    again = make()
    again.load_model(target)
    assert again.get_status().is_drafter_initialised


def test_missing_checkpoint_is_an_error(make: Make, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid):
        make().load_model(tmp_path / "step-000001")


def receive_once(backend: TrainerBackend, group: WeightGroup) -> tuple[int, ...]:
    """Join the group as a replica, in a thread beside the backend's, and receive once."""
    joined = BroadcastGroup(replace(group, rank=1))
    try:
        return receive_version(joined, backend.describe_weights()).checksums
    finally:
        joined.close()


def test_broadcast_sends_what_is_described(backend: TrainerBackend) -> None:
    manifest = backend.describe_weights()
    assert {meta.owner for meta in manifest.tensors} == {WeightOwner.POLICY, WeightOwner.DRAFTER}
    port = backend.open_weight_group(GROUP)
    with ThreadPoolExecutor(1) as replica:
        received = replica.submit(receive_once, backend, replace(GROUP, port=port))
        sent = backend.broadcast_weights(GROUP.group_id)
        assert received.result(timeout=30) == sent.checksums
    assert sent.policy_version == 0


def test_written_weights_equal_broadcast_weights(backend: TrainerBackend, tmp_path: Path) -> None:
    backend.train_step(Batch(1, rollouts()))
    written = backend.write_weights(tmp_path / "weights" / "version")
    assert (
        files.read_version(tmp_path / "weights" / "version", backend.describe_weights()).checksums == written.checksums
    )
    port = backend.open_weight_group(GROUP)
    with ThreadPoolExecutor(1) as replica:
        received = replica.submit(receive_once, backend, replace(GROUP, port=port))
        assert backend.broadcast_weights(GROUP.group_id) == written
        assert received.result(timeout=30) == written.checksums
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version"], "nothing half-written is left"


def test_weights_that_cannot_be_written_raise_store_failed(backend: TrainerBackend, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file where a folder should be")
    with pytest.raises(StoreFailed, match="could not write weights to"):
        backend.write_weights(tmp_path / "weights" / "version")


def test_broadcast_to_another_group_is_rejected(backend: TrainerBackend) -> None:
    with pytest.raises(VersionConflict):
        backend.broadcast_weights("epoch-1")
    backend.open_weight_group(GROUP)
    with pytest.raises(VersionConflict):
        backend.broadcast_weights("epoch-2")


def test_broadcast_without_the_replica_fails_in_time_and_a_new_group_works(backend: TrainerBackend) -> None:
    backend.open_weight_group(replace(GROUP, timeout_s=1.0))
    with pytest.raises(SpecrlError) as failure:
        backend.broadcast_weights(GROUP.group_id)
    assert failure.value.retryable
    test_broadcast_sends_what_is_described(backend)


def test_export_returns_both_folders(backend: TrainerBackend, tmp_path: Path) -> None:
    policy, drafter = backend.export_model(tmp_path)
    assert policy is not None
    assert drafter is not None
    assert policy == tmp_path / "policy"
    assert drafter == tmp_path / "drafter"
    assert any(policy.iterdir())
    assert any(drafter.iterdir())
    assert backend.export_model(tmp_path / "alone", drafter_only=True) == (None, tmp_path / "alone" / "drafter")
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["drafter"]
