"""The Megatron backend against transformers and torch, on one, two and four ranks in many layouts."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.trainer import reference
from tests.integration.trainer.conftest import DEEP, FOUR_RANKS, LONG, TWO_RANKS, VOCAB
from tests.integration.trainer.runs import a_batch, a_spec
from tests.integration.trainer.worker_group import ALONE
from transformers import AutoModelForCausalLM

from specrl.drafting.head import auxiliary_layers
from specrl.trainer import checkpoint_export, checkpoints
from specrl.trainer.megatron_backend.initialisation import MOST_PER_UPDATE, UPDATES_PER_EPOCH, parts_of

LAYOUTS = [
    ("single", ALONE),
    *(("two_ranks", name) for name in TWO_RANKS),
    *(("four_ranks", name) for name in FOUR_RANKS),
]


def parameters(quick: Callable[[str], bool]) -> Any:
    """All layouts, those that are not `quick` for deep tests alone."""
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
    """The folder of every layout that went on after too many skipped steps."""
    return folder(request)


@pytest.fixture
def source(layout: Path, policy: Path, tied_policy: Path) -> Path:
    """The policy that it has trained."""
    return tied_policy if layout.name in FOUR_RANKS else policy


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.deep] if name in DEEP else []) for name in TWO_RANKS])
def other(request: pytest.FixtureRequest, two_ranks: Path) -> Path:
    """The folder of every layout, but the single rank, that has trained its policy."""
    found: Path = two_ranks / request.param
    return found


def seen(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "seen.json").read_text())
    return found


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference between two sets of tensors, which must have the same names."""
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


def test_exported_tensors_are_the_ones_that_were_loaded(layout: Path, source: Path) -> None:
    initial = policy_only(load_file(layout / "initial.safetensors"))
    assert list(initial) == list(load_file(source / "model.safetensors"))
    assert furthest(initial, load_file(source / "model.safetensors")) == 0


@functools.cache
def trained(source: Path) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """Weights, and loss and gradient norm of each step, of the reference after the same three steps."""
    model = reference.load(source)
    seen = reference.train(model, [a_batch(step, VOCAB) for step in (1, 2, 3)])
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
    """As `trained`, after two steps of the other loss."""
    model = reference.load(source)
    seen = reference.train_gspo(model, [a_batch(step, VOCAB) for step in (1, 2)])
    return dict(model.state_dict()), seen


def test_two_updates_of_gspo_equal_a_plain_training(layout: Path, source: Path) -> None:
    """With the divergence from the start taken off the rewards, and advantages made of that at the trainer."""
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
    """Four of them in three steps; AdamW's bias correction depends on it."""
    ends = [load_file(long_layout / f"goes-on-{name}.safetensors") for name in (False, True)]
    assert furthest(*ends) == 0


def test_metrics_do_not_depend_on_the_layout(other: Path, single: Path) -> None:
    timed = {"logprob_seconds", "train_seconds", "drafter"}
    for mine, others in zip(seen(other)["metrics"], seen(single)["metrics"], strict=True):
        for name in mine.keys() - timed:
            assert mine[name] == pytest.approx(others[name], rel=2e-4, abs=1e-6), name
        for name in ("loss", "grad_norm"):
            assert mine["drafter"][name] == pytest.approx(others["drafter"][name], rel=1e-3), name


def test_drafter_does_not_depend_on_the_layout(other: Path, single: Path) -> None:
    assert furthest(load_file(other / "trained.safetensors"), load_file(single / "trained.safetensors")) <= 1e-5


def test_learning_rate_rises_over_the_warm_up(single: Path) -> None:
    assert [item["learning_rate"] for item in seen(single)["metrics"]] == pytest.approx([5e-4, 1e-3, 1e-3])


def test_refused_batches_leave_the_trainer_usable(layout: Path) -> None:
    assert seen(layout)["ways_to_refuse"] == ["VersionConflict", "RecordInvalid"]


def test_same_seed_and_batches_give_the_same_bits(single: Path) -> None:
    assert furthest(load_file(single / "repeated.safetensors"), load_file(single / "trained.safetensors")) == 0


@pytest.mark.parametrize("way", ["without-drafter", "not-adapted", "share-of-operations", "total-variation"])
def test_training_the_drafter_leaves_the_policy_as_it_would_be_without(way: str, single: Path) -> None:
    """Three steps, bit for bit, whatever the drafter learns from and by which loss."""
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
    parts = parts_of(count, seed=3)
    places = [place for part in parts for place in part]
    assert sorted(places) == list(range(count))
    assert max(map(len, parts)) <= MOST_PER_UPDATE
    assert len(parts) <= UPDATES_PER_EPOCH or len(parts[0]) == MOST_PER_UPDATE
    assert count == 1 or places != sorted(places)


@functools.cache
def expected_states(source: Path, token_ids_S: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of transformers: the concatenated states that a drafter reads, and the last ones."""
    model, inputs = model_of(source), []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, arguments: inputs.append(arguments[0]))
    with torch.no_grad():
        states = model(torch.tensor([token_ids_S]), output_hidden_states=True).hidden_states
    hook.remove()
    # transformers' last entry is behind the final norm; vLLM's, and ours, is before it.
    states = (*states[:-1], inputs[-1])
    aux = auxiliary_layers(model.config.num_hidden_layers)
    return torch.cat([states[index] for index in aux], -1)[0], inputs[-1][0]


model_of = functools.cache(reference.load)


def test_captured_hidden_states_are_those_of_transformers(layout: Path, source: Path) -> None:
    files = sorted(layout.glob("states-*.safetensors"))
    assert files
    for file in files:
        kept = load_file(file)
        for row, length in enumerate(kept["lengths_B"].tolist()):
            aux_SA, last_SH = expected_states(source, tuple(kept["token_ids_BS"][row, :length].tolist()))
            assert (kept["aux_BSA"][row, :length] - aux_SA).abs().max() <= 1e-5
            assert (kept["last_BSH"][row, :length] - last_SH).abs().max() <= 1e-5


def test_broadcast_arrives_as_it_was_sent(layout: Path) -> None:
    sent, received = (json.loads((layout / name).read_text()) for name in ("sent.json", "received.json"))
    assert sent == received
    assert furthest(load_file(layout / "received.safetensors"), load_file(layout / "trained.safetensors")) == 0


def test_broadcast_that_nobody_joins_is_an_error_at_rank_0_alone(layout: Path) -> None:
    assert (layout / "lonely").read_text() in {"DeadlineExceeded", "PeerUnavailable", "CollectiveFailed"}


def test_export_of_a_checkpoint_is_what_the_backend_had_when_it_was_saved(
    layout: Path, source: Path, tmp_path: Path
) -> None:
    checkpoint = checkpoints.newest(layout)
    assert checkpoint is not None
    checkpoint_export.export(a_spec(source), checkpoint, tmp_path / "out")
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
    assert seen(other)["resumed_at"] == 2
    assert furthest(load_file(other / "resumed.safetensors"), load_file(single / "trained.safetensors")) <= 2e-6


def test_death_in_the_middle_of_a_checkpoint_leaves_the_one_before(single: Path) -> None:
    # The worker's own exit code, checked by the fixture, says that it died in there.
    assert (single / "checkpoints" / ".step-000003.tmp" / "policy").is_dir()
    assert checkpoints.complete(single) == [(2, single / "checkpoints" / "step-000002")]
