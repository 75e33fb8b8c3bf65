"""Every family of policies, and every way of stretching positions, against transformers and torch: on one rank.

What does not depend on the family (layouts, drafter, broadcast, checkpoints) is in test_megatron_backend.py.
"""

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
from tests.tiny_models import Shape, make_policy
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specrl.drafting.rotary import compute_attention_factor, compute_inverse_frequencies
from specrl.models.policy_config import read_policy_config
from specrl.records import Batch

GROUPED = Shape(heads=4, groups=2, vocab=VOCAB)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}  # rollouts have up to 52 tokens
SHAPES = {
    "llama": Shape(heads=4, groups=2, vocab=VOCAB, family="llama"),
    "llama, tied, stretched": Shape(heads=4, groups=1, vocab=VOCAB, family="llama", is_tied=True, rope=LLAMA3),
    # vLLM computes head_dim for these, so it is hidden / heads.
    "qwen2": Shape(heads=2, groups=1, vocab=VOCAB, family="qwen2"),
    "mimo, tied, YaRN": Shape(heads=2, groups=1, vocab=VOCAB, family="mimo", is_tied=True, max_length=64, rope=YARN),
    "qwen3_moe": Shape(heads=4, groups=2, vocab=VOCAB, family="qwen3_moe"),
    "qwen3, YaRN": Shape(heads=4, groups=2, vocab=VOCAB, max_length=64, rope=YARN),
}


@dataclass(frozen=True)
class Trained:
    """A tiny policy, and what the backend made of it in three steps."""

    policy: Path
    batches: list[Batch]
    scores: list[torch.Tensor]
    initial: dict[str, torch.Tensor]
    metrics: list[tuple[float, float]]
    weights: dict[str, torch.Tensor]
    exported: Path


@pytest.fixture(scope="module", params=SHAPES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    from specrl.trainer.megatron_backend import MegatronBackend

    folder = tmp_path_factory.mktemp("family")
    policy = make_policy(folder / "policy", seed=5, sharpness=4.0, shape=SHAPES[request.param])
    batches = [a_batch(step, VOCAB) for step in (1, 2, 3)]
    backend = MegatronBackend(a_spec(policy, speculation={"none": {}}))
    backend.load_model(None)
    scores = [torch.from_numpy(item) for item in backend.score_rollouts(batches[0].rollouts)]
    initial = {name: tensor.clone() for name, tensor in backend.models.policy.gather_tensors()}
    metrics = [(item.loss, item.grad_norm) for item in map(backend.train_step, batches)]
    weights = {name: tensor.clone() for name, tensor in backend.models.policy.gather_tensors()}
    exported, _ = backend.export_model(folder / "export")
    assert exported is not None
    backend.close()
    return Trained(policy, batches, scores, initial, metrics, weights, exported)


def test_log_probabilities_equal_transformers(trained: Trained) -> None:
    model = reference.load(trained.policy)
    assert max(len(item.prompt_token_ids) + item.rollout.total_length for item in trained.batches[0].rollouts) > 40
    with torch.no_grad():
        for found_T, item in zip(trained.scores, trained.batches[0].rollouts, strict=True):
            assert (found_T - reference.logprobs(model, item)).abs().max() <= 1e-5


def test_loaded_weights_are_exported_bit_for_bit(trained: Trained) -> None:
    stored = load_file(trained.policy / "model.safetensors")
    assert trained.initial.keys() == stored.keys()
    assert all(torch.equal(trained.initial[name], tensor) for name, tensor in stored.items())


def test_three_steps_equal_a_plain_training(trained: Trained, tmp_path: Path) -> None:
    model = reference.load(trained.policy)
    expected = reference.train(model, trained.batches)
    for found, wanted in zip(trained.metrics, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    plain = reference.as_stored(model, tmp_path)
    assert plain.keys() == trained.weights.keys()
    for name, tensor in plain.items():
        assert (trained.weights[name] - tensor).abs().max() <= 2e-6, name
    assert any((trained.weights[name] - trained.initial[name]).abs().max() > 1e-4 for name in trained.weights)


def test_exported_folder_is_a_model_of_transformers(trained: Trained, tmp_path: Path) -> None:
    found = reference.as_stored(reference.load(trained.exported), tmp_path)
    assert found.keys() == trained.weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.weights.items())


@pytest.mark.parametrize(
    "rope",
    [
        {},
        LLAMA3,
        {**LLAMA3, "factor": 8.0, "low_freq_factor": 2.0, "original_max_position_embeddings": 8192},
        {**YARN, "original_max_position_embeddings": 4096},
        {**YARN, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN, "original_max_position_embeddings": 4096, "attention_factor": 1.5},
        {**YARN, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.5},
    ],
    ids=str,
)
def test_rotary_frequencies_are_those_of_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    kind = rope.get("rope_type", "default")
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": kind, "rope_theta": 5e5, **rope},
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    mine = read_policy_config(tmp_path)
    if kind == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config)
    assert torch.equal(compute_inverse_frequencies(mine.head_dim, mine.rope_theta, mine.rope_scaling), expected)
    assert compute_attention_factor(mine.rope_scaling) == pytest.approx(factor, rel=1e-12)
