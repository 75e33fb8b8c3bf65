"""A model folder is read if it is complete; otherwise the error names the fault and the run file's field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.run_files import a_model_folder, a_run, write_safetensors

from specrl.errors import CheckpointInvalid
from specrl.models import check, read_model_folder, read_models
from specrl.spec import parse_spec


def read(folder: Path) -> str:
    """Return the problems of `folder`/model as the policy of a run, as text; empty if there is none."""
    spec = parse_spec(a_run(folder))
    return "\n".join(map(str, check(spec, read_models(spec))))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return a_model_folder(tmp_path / "model")


def test_a_complete_folder_is_read(policy: Path) -> None:
    found = read_model_folder(policy, "model.path")
    assert found.shapes == {"model.embed_tokens.weight": (264, 64)}
    assert found.num_parameters == 264 * 64
    assert found.vocabulary is not None
    assert found.vocabulary.size == 256
    assert (found.config_number("vocab_size"), found.is_tied, found.policy_config.num_heads) == (264, False, 6)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert read(tmp_path).startswith(f"model.path must be a Hugging Face folder, got {tmp_path / 'model'};")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "readable config.json"),
        ("model.safetensors", "weights as safetensors"),
        ("tokenizer.json", "must have a tokenizer"),
    ],
)
def test_a_missing_file_is_named(policy: Path, name: str, message: str) -> None:
    (policy / name).unlink()
    assert message in read(policy.parent)


@pytest.mark.parametrize("cut", [4, 100, -1])
def test_half_downloaded_weights_are_refused(policy: Path, cut: int) -> None:
    weights = policy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:cut])
    assert f"model.path must have whole safetensors files, got {weights} of" in read(policy.parent)


def test_weights_with_extra_bytes_are_refused(policy: Path) -> None:
    """Once only the engine refused such a file, so the run failed after its start."""
    weights = policy / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"\0")
    assert f"model.path must have whole safetensors files, got {weights} of" in read(policy.parent)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", b"\xff" * 64])
def test_weights_in_another_format_are_refused(policy: Path, content: bytes) -> None:
    (policy / "model.safetensors").write_bytes(content)
    assert "must have whole safetensors files" in read(policy.parent)


@pytest.mark.parametrize("content", [b"", b"no json", b"[]", b"\xff\xff"])
def test_a_malformed_config_is_refused(policy: Path, content: bytes) -> None:
    (policy / "config.json").write_bytes(content)
    assert "config.json" in read(policy.parent)


def test_a_missing_shard_is_named(policy: Path) -> None:
    write_safetensors(policy / "model-1.safetensors", {"a": (2, 3)})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (policy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-2.safetensors: No such file" in read(policy.parent)


def test_a_missing_tensor_is_named(policy: Path) -> None:
    index = {"weight_map": dict.fromkeys(("model.embed_tokens.weight", "model.layers.9.weight"), "model.safetensors")}
    (policy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "must have every tensor of its index, got 1 missing" in read(policy.parent)
    assert "model.layers.9.weight" in read(policy.parent)


def test_only_files_of_the_index_count(policy: Path) -> None:
    write_safetensors(policy / "model-1.safetensors", {"a": (2, 3), "b": (4, 5)})
    (policy / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys("ab", "model-1.safetensors")})
    )
    assert read_model_folder(policy, "model.path").num_parameters == 26


def test_a_model_that_cannot_be_trained_can_still_be_read(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model", architectures=["MistralForCausalLM"], model_type="mistral")
    assert read(tmp_path) == "", "it can be served"
    models = read_models(parse_spec(a_run(tmp_path)))
    assert models.policy_config is None
    assert models.policy is not None
    with pytest.raises(CheckpointInvalid, match=r"must be one of qwen3, qwen2, mimo, llama, qwen3_moe, got .mistral."):
        _ = models.policy.policy_config


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model", vocab_size=200)
    assert "got 256 tokens for vocab_size=200" in read(tmp_path)


def test_a_run_with_a_longer_context_than_the_model_is_refused(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model", max_position_embeddings=100)
    assert "model.maxLength: must be <= 100" in read(tmp_path)


def test_every_unreadable_folder_is_named(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    generation = {"sampling": {"maxTokens": 16}, "speculation": {"eagle3": {"path": "/none"}}}
    loss = {"referenceKl": {"coefficient": "0.1", "path": "/nobody"}}
    trainer = {"optimizer": {"learningRate": "1e-3"}, "loss": loss}
    models = read_models(parse_spec(a_run(tmp_path, generation=generation, trainer=trainer)))
    assert [str(problem).partition(" must ")[0] for problem in models.problems] == [
        "generation.speculation.eagle3.path",
        "trainer.loss.referenceKl.path",
    ]


def test_files_that_the_engine_would_load_beside_the_model_are_refused(tmp_path: Path) -> None:
    """A left-over adapter: vLLM loaded it, and then refused every update of weights, without an end."""
    folder = a_model_folder(tmp_path / "model")
    write_safetensors(folder / "adapter_model.safetensors", {"lora_A.weight": (4, 4)})
    with pytest.raises(CheckpointInvalid, match=r"beside model.safetensors without an index, got adapter_model"):
        read_model_folder(folder, "model.path")
    index = {"weight_map": {"model.embed_tokens.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(read_model_folder(folder, "model.path").shapes) == {"model.embed_tokens.weight"}
