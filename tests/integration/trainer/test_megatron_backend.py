"""The Megatron backend against transformers and torch, on one, two and four ranks in many layouts."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from tests.integration.trainer import reference
from tests.integration.trainer.conftest import DEEP, FOUR_RANKS, LONG, TWO_RANKS, VOCAB
from tests.integration.trainer.runs import STEPS, TEMPERATURE, a_batch, a_spec
from tests.integration.trainer.worker_group import ALONE
from transformers import AutoModelForCausalLM

from specrl.drafting.eagle3.head import choose_auxiliary_layers
from specrl.models.policy_config import read_policy_config
from specrl.records import DrafterEpoch, DrafterEpochMetrics, DrafterMetrics
from specrl.trainer.checkpointing import checkpoint_export, checkpoints
from specrl.trainer.megatron_backend.model.gpt_model import compute_padded_vocabulary
from specrl.trainer.megatron_backend.training.initialisation import (
    MAX_PER_UPDATE,
    UPDATES_PER_EPOCH,
    DrafterInitialiser,
    _FinishedEpoch,
    _Lessons,
    split_rollouts,
)
from specrl.trainer.megatron_backend.training.models import RankModels

LAYOUTS = [
    ("single", ALONE),
    *(("two_ranks", name) for name in TWO_RANKS),
    *(("four_ranks", name) for name in FOUR_RANKS),
]


def parameters(quick: Callable[[str], bool]) -> Any:
    """Return all layouts as parameters. Those that are not `quick` are for deep tests alone."""
    marks = [[] if quick(name) else [pytest.mark.deep] for _, name in LAYOUTS]
    return [pytest.param(found, id="-".join(found), marks=mark) for found, mark in zip(LAYOUTS, marks, strict=True)]


def folder(request: pytest.FixtureRequest) -> Path:
    launch, name = request.param
    found: Path = request.getfixturevalue(launch)
    return found if name == ALONE else found / name


@pytest.fixture(params=parameters(lambda name: name not in DEEP))
def layout(request: pytest.FixtureRequest) -> Path:
    """The folder of every layout."""
    return folder(request)


@pytest.fixture(params=parameters(LONG.__contains__))
def long_layout(request: pytest.FixtureRequest) -> Path:
    """The folder of every layout that continued after too many skipped steps."""
    return folder(request)


@pytest.fixture
def source(layout: Path, policy: Path, tied_policy: Path) -> Path:
    """The policy that the layout has trained."""
    return tied_policy if layout.name in FOUR_RANKS else policy


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.deep] if name in DEEP else []) for name in TWO_RANKS])
def other(request: pytest.FixtureRequest, two_ranks: Path) -> Path:
    """The folder of every layout with two ranks."""
    found: Path = two_ranks / request.param
    return found


def seen(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "seen.json").read_text())
    return found


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two sets of tensors with the same names."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def policy_only(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("drafter.")}


@functools.cache
def expected_scores(source: Path) -> list[torch.Tensor]:
    model = reference.load(source)
    with torch.no_grad():
        return [reference.logprobs(model, item) for item in a_batch(1, VOCAB).rollouts]


def test_log_probabilities_equal_transformers(layout: Path, source: Path) -> None:
    scores = load_file(layout / "scores.safetensors")
    for i, expected_T in enumerate(expected_scores(source)):
        assert (scores[str(i)] - expected_T).abs().max() <= 1e-5


def test_packing_changes_no_log_probability(layout: Path) -> None:
    assert seen(layout)["packing"] <= 1e-5


def test_logits_in_chunks_give_the_bits_of_the_whole(layout: Path) -> None:
    assert seen(layout)["chunks"] == dict.fromkeys(seen(layout)["chunks"], True)
    assert len(seen(layout)["chunks"]) == 4


def test_exported_tensors_are_the_ones_that_were_loaded(layout: Path, source: Path) -> None:
    initial = policy_only(load_file(layout / "initial.safetensors"))
    assert list(initial) == list(load_file(source / "model.safetensors"))
    assert furthest(initial, load_file(source / "model.safetensors")) == 0


@functools.cache
def trained(source: Path) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """The reference after the same steps: weights, and loss and gradient norm of each step."""
    model = reference.load(source)
    seen = reference.train(model, [a_batch(step, VOCAB) for step in range(1, STEPS + 1)])
    return dict(model.state_dict()), seen


def test_loss_gradient_norm_and_weights_equal_a_plain_training(layout: Path, source: Path) -> None:
    weights, expected = trained(source)
    for metrics, (loss, norm) in zip(seen(layout)["metrics"], expected, strict=True):
        assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    found = policy_only(load_file(layout / "trained.safetensors"))
    assert furthest(found, {name: weights[name] for name in found}) <= 2e-6


@functools.cache
def trained_by_gspo(source: Path) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """As `trained`, after two steps of GSPO's loss."""
    model = reference.load(source)
    seen = reference.train_gspo(model, [a_batch(step, VOCAB) for step in (1, 2)])
    return dict(model.state_dict()), seen


def test_two_updates_of_gspo_equal_a_plain_training(layout: Path, source: Path) -> None:
    """The divergence is subtracted from the rewards, and the trainer computes the advantages from these."""
    weights, expected = trained_by_gspo(source)
    for metrics, (loss, norm) in zip(seen(layout)["gspo"]["metrics"], expected, strict=True):
        assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["updates"] == 2
    assert 0 < seen(layout)["gspo"]["metrics"][1]["clip_fraction"] < 1
    assert seen(layout)["gspo"]["metrics"][1]["reference_kl"] > 0
    found = load_file(layout / "gspo.safetensors")
    assert furthest(found, {name: weights[name] for name in found}) <= 4e-6


def test_step_whose_gradients_are_not_finite_is_skipped_and_leaves_the_policy(layout: Path) -> None:
    assert seen(layout)["gspo"]["skipped"] == [True, 0, 0.0, 0.0, 3]
    assert furthest(load_file(layout / "skipped.safetensors"), load_file(layout / "gspo.safetensors")) == 0


def test_too_many_skipped_steps_in_a_row_are_an_error_that_names_the_step(long_layout: Path) -> None:
    for when in ("too many", "too many after a restart"):
        assert "step 4" in seen(long_layout)["gspo"][when]
        assert "maxSkippedSteps=1" in seen(long_layout)["gspo"][when]


def test_checkpoint_counts_the_updates_that_were_made(long_layout: Path) -> None:
    """There are four updates in three steps. AdamW's bias correction depends on their number."""
    ends = [load_file(long_layout / f"goes-on-{name}.safetensors") for name in (False, True)]
    assert furthest(*ends) == 0


def test_metrics_do_not_depend_on_the_layout(other: Path, single: Path) -> None:
    apart = {"logprob_seconds", "train_seconds", "drafter", "reference_kl"}
    for mine, others in zip(seen(other)["metrics"], seen(single)["metrics"], strict=True):
        assert mine["reference_kl"] is others["reference_kl"] is None, "this run has no reference"
        for name in mine.keys() - apart:
            if others[name] is None:  # not measured, as the size of the sampling sets without top-p and top-k
                assert mine[name] is None, name
            else:
                assert mine[name] == pytest.approx(others[name], rel=2e-4, abs=1e-6), name
        for name in ("loss", "grad_norm"):
            assert mine["drafter"][name] == pytest.approx(others["drafter"][name], rel=1e-3), name


def test_drafter_does_not_depend_on_the_layout(other: Path, single: Path) -> None:
    assert furthest(load_file(other / "trained.safetensors"), load_file(single / "trained.safetensors")) <= 1e-5


def test_drafter_by_the_output_layer_does_not_depend_on_the_layout(other: Path, single: Path) -> None:
    """Each tensor rank has its columns of the output layer. Only the last stage learns, and all ranks get the same."""
    mine, theirs = (json.loads((path / "seen.json").read_text())["probe"] for path in (other, single))
    for one, two in zip(mine, theirs, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
        assert one["acceptance_per_position"] == pytest.approx(two["acceptance_per_position"], rel=1e-3, abs=1e-6)
    expected = load_file(single / "probe-0.safetensors")
    ranks = [load_file(file) for file in sorted(other.glob("probe-*.safetensors"))]
    assert ranks
    assert all(furthest(ranks[0], rank) == 0 for rank in ranks)
    assert furthest(ranks[0], expected) <= 2e-4


def test_learning_rate_rises_over_the_warm_up(single: Path) -> None:
    assert [item["learning_rate"] for item in seen(single)["metrics"]] == pytest.approx([5e-4, 1e-3])


def test_refused_batches_leave_the_trainer_usable(layout: Path) -> None:
    assert seen(layout)["ways_to_refuse"] == ["VersionConflict", "RecordInvalid"]


def test_same_seed_and_batches_give_the_same_bits(single: Path) -> None:
    assert furthest(load_file(single / "repeated.safetensors"), load_file(single / "trained.safetensors")) == 0


@pytest.mark.parametrize("way", ["without-drafter", "not-adapted", "share-of-operations", "total-variation"])
def test_training_the_drafter_leaves_the_policy_as_it_would_be_without(way: str, single: Path) -> None:
    """The steps give the same bits, whatever the drafter learns from and by which loss."""
    with_drafter = policy_only(load_file(single / "trained.safetensors"))
    assert furthest(with_drafter, policy_only(load_file(single / f"{way}.safetensors"))) == 0


def test_recomputing_layers_changes_no_bit(single: Path) -> None:
    assert furthest(load_file(single / "recomputed.safetensors"), load_file(single / "trained.safetensors")) == 0


def test_bf16_is_trained_through_float32_masters(single: Path, policy: Path) -> None:
    masters = load_file(single / "bf16.safetensors")
    assert furthest(masters, trained(policy)[0]) <= 7e-3
    assert any((tensor != tensor.bfloat16()).any() for tensor in masters.values())
    assert furthest(load_file(single / "bf16-resumed.safetensors"), masters) == 0


def test_drafter_moves_unless_it_is_not_adapted(single: Path) -> None:
    def drafter(name: str) -> dict[str, torch.Tensor]:
        tensors = load_file(single / f"{name}.safetensors")
        return {key: tensor for key, tensor in tensors.items() if key.startswith("drafter.")}

    assert furthest(drafter("not-adapted"), drafter("initial")) == 0
    for name in ("trained", "share-of-operations", "total-variation"):
        assert furthest(drafter(name), drafter("initial")) > 1e-5


@pytest.mark.parametrize("count", [1, 31, 32, 33, 144, 5000])
def test_an_epoch_of_the_initialisation_has_each_rollout_once_in_an_order_of_its_own(count: int) -> None:
    parts = split_rollouts(count, seed=3)
    places = [place for part in parts for place in part]
    assert sorted(places) == list(range(count))
    assert max(map(len, parts)) <= MAX_PER_UPDATE
    assert len(parts) <= UPDATES_PER_EPOCH or len(parts[0]) == MAX_PER_UPDATE
    assert count == 1 or places != sorted(places)


def an_epoch(lessons: _Lessons, rollouts: int) -> _FinishedEpoch:
    epoch = DrafterEpoch(rollouts, 1.0, 0.5)
    return _FinishedEpoch(
        lessons.compute_identity(epoch), DrafterEpochMetrics(epoch, DrafterMetrics(1.0, 1.0, (), 2.0))
    )


def test_finished_epochs_of_other_answers_do_not_count() -> None:
    rollouts = a_batch(1, VOCAB).rollouts
    lessons = _Lessons(rollouts, rollouts[:1], seed=1)
    finished = [an_epoch(lessons, 1), an_epoch(lessons, 2)]
    assert lessons.count_matching(finished) == 2
    assert _Lessons(rollouts[:1], rollouts[:1], seed=1).count_matching(finished) == 1  # the second needs more answers
    for other in (
        _Lessons(rollouts[::-1], rollouts[:1], seed=1),
        _Lessons(rollouts, rollouts[1:2], seed=1),
        _Lessons(rollouts, rollouts[:1], seed=2),
    ):
        assert other.count_matching(finished) == 0


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"\x02\0\0\0\0\0\0\0{}", b"\x20\0\0\0\0\0\0\0{"], ids=repr)
def test_progress_of_an_initialisation_that_cannot_be_read_is_passed_over_in_words(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "progress").write_bytes(content)
    initialiser = DrafterInitialiser(cast("RankModels", None), tmp_path / "progress")
    with capture_logs() as logs:
        assert initialiser._read_progress() == ([], {})
    assert [item["event"] for item in logs] == ["drafter_progress_passed_over"]
    assert logs[0]["reason"]


@functools.cache
def expected_states(source: Path, token_ids_S: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return transformers' states of the auxiliary layers, side by side, its embeddings and its log-probabilities."""
    model = model_of(source)
    inputs = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, arguments: inputs.append(arguments[0]))
    with torch.no_grad():
        found = model(torch.tensor([token_ids_S]), output_hidden_states=True)
    hook.remove()
    # transformers' last entry is after the final norm; vLLM's, and ours, is before it.
    states = (*found.hidden_states[:-1], inputs[-1])
    aux = choose_auxiliary_layers(model.config.num_hidden_layers)
    return torch.cat([states[index] for index in aux], -1)[0], states[0][0], found.logits[0].log_softmax(-1)


model_of = functools.cache(reference.load)


def check_lessons(files: list[Path], source: Path) -> int:
    """Check that states, embeddings and targets of lessons equal transformers'. Returns the number of starts."""
    starts = 0
    for file in files:
        kept = load_file(file)
        target = 0
        for row, (prompt, length) in enumerate(zip(kept["prompt_lengths_B"], kept["lengths_B"], strict=True)):
            token_ids_S = tuple(kept["token_ids_BS"][row, :length].tolist())
            aux_SA, embedding_SH, logprobs_SV = expected_states(source, token_ids_S)
            assert (kept["aux_BSA"][row, :length] - aux_SA).abs().max() <= 1e-5
            assert (kept["embedding_BSH"][row, :length] - embedding_SH).abs().max() <= 1e-6
            count = int(length - prompt) - 1
            mine = kept["target_NK"][target : target + count].log_softmax(-1)
            assert (mine - logprobs_SV[prompt : length - 1]).abs().max() <= 1e-4
            target += count
        assert target == len(kept["target_NK"])
        starts += target
    return starts


def test_drafter_learns_from_what_the_training_pass_computed(layout: Path, source: Path) -> None:
    """In the lessons of the first step. Every start is at one rank."""
    starts = check_lessons(sorted(layout.glob("lessons-*.safetensors")), source)
    assert starts == a_spec(source).trainer.drafter.token_budget


def test_another_data_rank_learns_from_the_same(two_ranks: Path, policy: Path) -> None:
    starts = check_lessons(sorted((two_ranks / "data=2").glob("moved-*.safetensors")), policy)
    assert starts == a_spec(policy).trainer.drafter.token_budget


def test_reduced_vocabulary_keeps_its_columns_and_the_normaliser(two_ranks: Path, policy: Path) -> None:
    """At two tensor ranks, which have some of the columns each."""
    starts = 0
    for file in (two_ranks / "tensor=2").glob("reduced-*.safetensors"):
        kept = load_file(file)
        target = 0
        for row, (prompt, length) in enumerate(zip(kept["prompt_lengths_B"], kept["lengths_B"], strict=True)):
            *_, logprobs_SV = expected_states(policy, tuple(kept["token_ids_BS"][row, :length].tolist()))
            rows = slice(target, target := target + int(length - prompt) - 1)
            mine = kept["target_NK"][rows] / TEMPERATURE - kept["normaliser_N1"][rows]
            theirs = (logprobs_SV[prompt : length - 1] / TEMPERATURE).log_softmax(-1)[:, 0:256:4]
            assert (mine - theirs).abs().max() <= 1e-4
        starts += target
    assert starts == a_spec(policy).trainer.drafter.token_budget


def test_no_rank_holds_the_output_layer_or_the_embedding(two_ranks: Path, policy: Path) -> None:
    hidden = read_policy_config(policy).hidden_size
    padded = compute_padded_vocabulary(read_policy_config(policy), 2)
    for rank in (0, 1):
        shapes = {tuple(shape) for shape in json.loads((two_ranks / "tensor=2" / f"shapes-{rank}.json").read_text())}
        assert (padded // 2, hidden) in shapes
        whole = {shape for shape in shapes if sorted(shape[-2:]) in ([hidden, VOCAB], [hidden, padded])}
        assert not whole


def test_divided_columns_give_the_losses_and_gradients_of_whole_rows(two_ranks: Path) -> None:
    for rank in (0, 1):
        found = json.loads((two_ranks / "tensor=2" / f"columns-{rank}.json").read_text())
        assert found.keys() == {"loss", "gradient", "accepted", "stays"}
        assert max(found.values()) <= 1e-5, found


def test_broadcast_arrives_as_it_was_sent(layout: Path) -> None:
    sent, received = (json.loads((layout / name).read_text()) for name in ("sent.json", "received.json"))
    assert sent == received
    assert furthest(load_file(layout / "received.safetensors"), load_file(layout / "trained.safetensors")) == 0


def test_broadcast_that_nobody_joins_is_an_error_at_rank_0_alone(layout: Path) -> None:
    assert (layout / "lonely").read_text() in {"DeadlineExceeded", "PeerUnavailable", "CollectiveFailed"}


def test_export_of_a_checkpoint_is_what_the_backend_had_when_it_was_saved(
    layout: Path, source: Path, tmp_path: Path
) -> None:
    checkpoint = checkpoints.find_newest(layout)
    assert checkpoint is not None
    checkpoint_export.export_checkpoint(a_spec(source), checkpoint, tmp_path / "out")
    drafter = load_file(tmp_path / "out" / "drafter" / "model.safetensors")
    found = load_file(tmp_path / "out" / "policy" / "model.safetensors")
    found |= {f"drafter.{name}": tensor for name, tensor in drafter.items()}
    expected = load_file(layout / "saved.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in found)


def test_exported_folder_is_a_model_of_transformers(layout: Path, source: Path) -> None:
    found = AutoModelForCausalLM.from_pretrained(layout / "export" / "policy", dtype=torch.float32).state_dict()
    kept = policy_only(load_file(layout / "trained.safetensors"))
    assert furthest(kept, {name: found[name] for name in kept}) == 0
    assert (layout / "export" / "policy" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_checkpoint_resumes_to_the_same_bits(single: Path) -> None:
    assert furthest(load_file(single / "same-layout.safetensors"), load_file(single / "trained.safetensors")) == 0


def test_checkpoint_resumes_on_another_layout(other: Path, single: Path) -> None:
    assert seen(other)["resumed_at"] == STEPS - 1
    assert furthest(load_file(other / "resumed.safetensors"), load_file(single / "trained.safetensors")) <= 2e-6


def test_death_in_the_middle_of_a_checkpoint_leaves_the_one_before(single: Path) -> None:
    # The fixture has checked the worker's exit code, which says that it died while writing the checkpoint.
    assert (single / "checkpoints" / f".step-{STEPS:06d}.tmp" / "policy").is_dir()
    assert checkpoints.list_complete(single) == [(STEPS - 1, checkpoints.step_directory(single, STEPS - 1))]
