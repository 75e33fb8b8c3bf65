"""Low-rank updates on one rank: trained as in plain PyTorch, merged as in peft, saved in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.trainer import reference
from tests.integration.trainer.conftest import VOCAB
from tests.integration.trainer.runs import a_batch, a_spec
from tests.tiny_models import Shape, add_heads, make_policy

from specrl.trainer.checkpointing import checkpoint_export, checkpoints

RANK = 4
ALPHA = 8
HEADS = "model.mtp_layers.0."
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """Factors and policy after three steps, the same after resuming before the third, and the export."""

    policy: Path
    first: Tensors
    factors: Tensors
    metrics: list[tuple[float, float]]
    weights: Tensors
    resumed: Tensors
    exported: Tensors
    moments: set[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    from specrl.trainer.megatron_backend import MegatronBackend

    folder = tmp_path_factory.mktemp("lora")
    shape = Shape(heads=4, groups=2, vocab=VOCAB, family="llama", is_tied=True)
    policy = make_policy(folder / "policy", seed=5, sharpness=4.0, shape=shape)
    add_heads(policy, HEADS, num_nextn_predict_layers=1)
    spec = a_spec(policy, speculation={"none": {}}, lora={"rank": RANK, "alpha": str(ALPHA)})

    def kept(backend: Any, kind: str = "weights") -> Tensors:
        return {name: tensor.clone() for name, tensor in backend.models.policy.gather_state()[kind]}

    backend = MegatronBackend(spec)
    backend.load_model(None)
    first = kept(backend)
    metrics = []
    for step in (1, 2, 3):
        found = backend.train_step(a_batch(step, VOCAB))
        metrics.append((found.loss, found.grad_norm))
        if step > 1:
            backend.save_checkpoint(checkpoints.step_directory(folder, step)).result()
    factors = kept(backend)
    moments = set(kept(backend, "exp_avg"))
    weights = {name: tensor.clone() for name, tensor in backend.models.policy.gather_tensors()}
    backend.close()
    again = MegatronBackend(spec)
    again.load_model(checkpoints.step_directory(folder, 2))
    again.train_step(a_batch(3, VOCAB))
    resumed = kept(again)
    again.close()
    checkpoint_export.export_checkpoint(spec, checkpoints.step_directory(folder, 3), folder / "exported")
    exported = load_file(folder / "exported" / "policy" / "model.safetensors")
    return Trained(policy, first, factors, metrics, weights, resumed, exported, moments)


def test_updates_are_zero_at_first(trained: Trained) -> None:
    for name, tensor in trained.first.items():
        is_up = name.endswith("lora_B.weight")
        assert (tensor.abs().max() == 0) == is_up, name
        assert is_up or tensor.abs().max() <= tensor.shape[1] ** -0.5
    assert len(trained.first) == 2 * len(TARGETS) * 4


def test_factors_after_three_steps_equal_a_plain_training(trained: Trained) -> None:
    model, layers = reference.adapted(trained.policy, trained.first, ALPHA / RANK)
    expected = reference.train(model, [a_batch(step, VOCAB) for step in (1, 2, 3)])
    for found, wanted in zip(trained.metrics, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    for stem, layer in layers.items():
        assert (trained.factors[f"{stem}.lora_A.weight"] - layer.down).abs().max() <= 2e-6, stem
        assert (trained.factors[f"{stem}.lora_B.weight"] - layer.up).abs().max() <= 2e-6, stem
        assert layer.up.abs().max() > 1e-4
    assert trained.moments == trained.factors.keys()


def test_sent_weights_are_the_merged_policy_and_the_rest_does_not_change(trained: Trained) -> None:
    read = load_file(trained.policy / "model.safetensors")
    stored = {name: tensor for name, tensor in read.items() if not name.startswith(HEADS)}  # heads are not sent
    assert trained.weights.keys() == stored.keys()
    for name, tensor in stored.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in trained.factors:
            down, up = (trained.factors[f"{stem}.lora_{part}.weight"].double() for part in "AB")
            assert (trained.weights[name] - (tensor.double() + ALPHA / RANK * up @ down)).abs().max() <= 1e-7
        else:
            assert torch.equal(trained.weights[name], tensor), name


def test_checkpoint_resumes_to_the_same_bits(trained: Trained) -> None:
    assert trained.resumed.keys() == trained.factors.keys()
    assert all(torch.equal(trained.resumed[name], tensor) for name, tensor in trained.factors.items())


def test_checkpoint_is_exported_as_the_merged_policy(trained: Trained) -> None:
    """With heads for multi-token prediction, which are not trained."""
    heads = {name: x for name, x in load_file(trained.policy / "model.safetensors").items() if name.startswith(HEADS)}
    assert heads
    assert trained.exported.keys() == trained.weights.keys() | heads.keys()
    assert all(torch.equal(trained.exported[name], tensor) for name, tensor in heads.items())
    readme = trained.policy.parent / "exported" / "policy" / "README.md"
    assert "are not trained" in readme.read_text(encoding="utf-8")
    assert all(torch.equal(trained.exported[name], tensor) for name, tensor in trained.weights.items())
