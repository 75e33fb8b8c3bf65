"""What is refused before a run starts, and with which words."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.run_files import a_model_folder, a_run, write_safetensors
from tests.tiny_models import make_tokenizer

from specrl.errors import CheckpointInvalid, DatasetInvalid, MemoryTooSmall, PortTaken, SpecInvalid
from specrl.launcher import preflight
from specrl.launcher.memory import GIB, check_memory, estimate_memory
from specrl.launcher.model_folder import read_model_folder
from specrl.launcher.ports import choose_ports
from specrl.spec import RunSpec, parse_spec


def a_spec(folder: Path, **changes: Any) -> RunSpec:
    return parse_spec(a_run(folder, **changes))


def a_speculating_run(folder: Path, **eagle3: Any) -> RunSpec:
    return a_spec(folder, generation={"sampling": {"maxTokens": 16}, "speculation": {"eagle3": eagle3}})


def test_sound_run_passes_and_gets_two_ports(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    ready = preflight.check(a_spec(tmp_path), available_bytes=lambda: 64 * GIB)
    assert 0 < ready.grpc_port != ready.http_port > 0


def test_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=r"model\.path must be a Hugging Face folder"):
        preflight.check_policy(a_spec(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "readable config.json"),
        ("model.safetensors", "weights as safetensors"),
        ("tokenizer.json", "must have a tokenizer"),
    ],
)
def test_incomplete_model_names_what_is_missing(tmp_path: Path, name: str, message: str) -> None:
    (a_model_folder(tmp_path / "model") / name).unlink()
    with pytest.raises(CheckpointInvalid, match=message):
        preflight.check_policy(a_spec(tmp_path))


def test_half_downloaded_weights_are_refused(tmp_path: Path) -> None:
    weights = a_model_folder(tmp_path / "model") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointInvalid, match=f"model.path must have whole safetensors files, got {weights} of"):
        preflight.check_policy(a_spec(tmp_path))


def test_weights_with_bytes_that_no_tensor_has_are_refused(tmp_path: Path) -> None:
    """The engine refused such a file and preflight did not, so the run failed after its start."""
    weights = a_model_folder(tmp_path / "model") / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"\0")
    with pytest.raises(CheckpointInvalid, match=f"model.path must have whole safetensors files, got {weights} of"):
        preflight.check_policy(a_spec(tmp_path))


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", b"\xff" * 64])
def test_weights_that_are_no_safetensors_are_refused(tmp_path: Path, content: bytes) -> None:
    (a_model_folder(tmp_path / "model") / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointInvalid, match="must have whole safetensors files"):
        preflight.check_policy(a_spec(tmp_path))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = a_model_folder(tmp_path / "model")
    write_safetensors(folder / "model-1.safetensors", {"a": (2, 3)})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointInvalid, match=r"model-2\.safetensors: No such file"):
        preflight.check_policy(a_spec(tmp_path))


def test_shards_are_counted_by_the_index(tmp_path: Path) -> None:
    folder = a_model_folder(tmp_path / "model")
    write_safetensors(folder / "model-1.safetensors", {"a": (2, 3), "b": (4, 5)})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys("ab", "model-1.safetensors")})
    )
    assert read_model_folder(folder, "model.path").parameters == 26


def test_unsupported_architecture_is_refused(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model", architectures=["MistralForCausalLM"], model_type="mistral")
    with pytest.raises(CheckpointInvalid, match=r"model_type must be one of qwen3, llama, qwen3_moe, got .mistral."):
        preflight.check_policy(a_spec(tmp_path))


def test_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model", vocab_size=200)
    with pytest.raises(CheckpointInvalid, match="got 256 tokens for vocab_size=200"):
        preflight.check_policy(a_spec(tmp_path))


def test_run_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model", max_position_embeddings=100)
    with pytest.raises(CheckpointInvalid, match="maxLength must be <= 100"):
        preflight.check_policy(a_spec(tmp_path))


def check_drafter(tmp_path: Path, **config: Any) -> None:
    policy = a_model_folder(tmp_path / "model")
    folder = a_model_folder(tmp_path / "drafter", architectures=["LlamaForCausalLMEagle3"], **config)
    spec = a_speculating_run(tmp_path, path=str(folder))
    preflight.check_drafter(spec, read_model_folder(policy, "model.path"))


def test_native_heads_are_refused_in_a_run(tmp_path: Path) -> None:
    spec = a_spec(tmp_path, generation={"sampling": {"maxTokens": 16}, "speculation": {"mtp": {}}})
    with pytest.raises(SpecInvalid, match=r"generation\.speculation\.mtp: must not be used in a run: the trainer"):
        preflight.check(spec)


def test_draft_model_is_checked_and_counted(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    folder = a_model_folder(tmp_path / "small")
    generation = {"sampling": {"maxTokens": 16}, "speculation": {"draftModel": {"path": str(folder)}}}
    spec = a_spec(tmp_path, generation=generation)
    assert preflight.check_draft_model(spec) == 264 * 64
    policy = preflight.check_policy(spec)
    more = estimate_memory(spec, policy, 1 << 20).replica_bytes - estimate_memory(spec, policy).replica_bytes
    assert more == 4 << 20
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(CheckpointInvalid, match="vocab_size, got 300"):
        preflight.check_draft_model(spec)


def test_fitting_drafter_passes(tmp_path: Path) -> None:
    check_drafter(tmp_path)


def test_drafter_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=r"vocab_size=300 .* and 264 in"):
        check_drafter(tmp_path, vocab_size=300)


def test_drafter_of_another_width_is_refused_by_its_target(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="hidden_size=96"):
        check_drafter(tmp_path, target_hidden_size=96)


def test_vocabulary_inside_a_speculators_config_is_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="vocab_size=300"):
        check_drafter(tmp_path, vocab_size=None, transformer_layer_config={"vocab_size": 300})


def test_missing_drafter_is_refused_under_its_own_name(tmp_path: Path) -> None:
    policy = read_model_folder(a_model_folder(tmp_path / "model"), "model.path")
    with pytest.raises(CheckpointInvalid, match=r"generation\.speculation\.eagle3\.path must be a Hugging Face folder"):
        preflight.check_drafter(a_speculating_run(tmp_path, path=str(tmp_path / "none")), policy)


def test_draft_vocabulary_larger_than_the_policys_is_refused(tmp_path: Path) -> None:
    policy = read_model_folder(a_model_folder(tmp_path / "model"), "model.path")
    with pytest.raises(SpecInvalid, match="must be <= 264"):
        preflight.check_drafter(a_speculating_run(tmp_path, draftVocabSize=265), policy)


def test_every_number_that_does_not_divide_the_model_is_listed(tmp_path: Path) -> None:
    policy = read_model_folder(a_model_folder(tmp_path / "model"), "model.path")
    spec = a_spec(
        tmp_path,
        generation={"sampling": {"maxTokens": 16}, "tensorParallel": 4},
        trainer={
            "optimizer": {"learningRate": "1e-3"},
            "parallelism": {"tensor": 3, "pipeline": 2, "virtualStages": 3},
        },
    )
    with pytest.raises(SpecInvalid) as caught:
        preflight.check_parallelism(spec, policy)
    assert [(problem.path, problem.rule) for problem in caught.value.problems] == [
        ("trainer.parallelism.tensor", "must divide the model's num_key_value_heads=2, got 3"),
        ("trainer.parallelism.tensor", "must divide the model's intermediate_size=128, got 3"),
        (
            "trainer.parallelism.pipeline",
            "times virtualStages must divide the model's num_hidden_layers=2, got 2 x 3 stages",
        ),
        ("generation.tensorParallel", "must divide the model's num_attention_heads=6, got 4"),
        ("generation.tensorParallel", "must divide the model's num_key_value_heads=2, got 4"),
    ]


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({}, "must be 1, since the model's layers have no experts, got 4"),
        (
            {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            "must divide the model's num_experts=6, got 4",
        ),
        # Nothing but heads is cut: 128 columns of an MLP that a mixture does not have are no hindrance.
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 33, "intermediate_size": 127}, None),
    ],
)
def test_experts_that_cannot_be_dealt_out_are_refused(
    tmp_path: Path, config: dict[str, Any], refused: str | None
) -> None:
    if config:
        config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **config}
    policy = read_model_folder(a_model_folder(tmp_path / "model", **config), "model.path")
    layout = {"tensor": 2, "data": 2, "expert": 4}
    spec = a_spec(tmp_path, trainer={"optimizer": {"learningRate": "1e-3"}, "parallelism": layout})
    if refused is None:
        preflight.check_parallelism(spec, policy)
        return
    with pytest.raises(SpecInvalid) as caught:
        preflight.check_parallelism(spec, policy)
    assert [(problem.path, problem.rule) for problem in caught.value.problems] == [
        ("trainer.parallelism.expert", refused)
    ]


def test_routing_of_a_dense_model_cannot_be_replayed(tmp_path: Path) -> None:
    policy = read_model_folder(a_model_folder(tmp_path / "model"), "model.path")
    spec = a_spec(tmp_path, trainer={"optimizer": {"learningRate": "1e-3"}, "routing": "Replay"})
    with pytest.raises(SpecInvalid) as caught:
        preflight.check_parallelism(spec, policy)
    assert [(problem.path, problem.rule) for problem in caught.value.problems] == [
        ("trainer.routing", "must be Anew, since the model's layers have no experts, got Replay")
    ]


def test_malformed_line_is_named_by_file_and_line(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    data = tmp_path / "train.jsonl"
    data.write_text('{"question": "1+1?", "answer": "2"}\n{"question": \n')
    with pytest.raises(DatasetInvalid, match=r"train\.jsonl:2"):
        preflight.check_data(a_spec(tmp_path, prompts={"source": {"jsonl": {"path": str(data)}}, "maxTokens": 80}))


def test_lines_that_are_left_out_are_told_to_the_user(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    data = tmp_path / "train.jsonl"
    sound = '{"question": "1+1?", "answer": "2"}\n'
    data.write_text(f'{sound}{{\n{sound}{{"question": "{"x" * 90}", "answer": "1"}}\n')
    source = {"jsonl": {"path": str(data), "onBadLine": "Skip"}}
    spec = a_spec(tmp_path, prompts={"source": source, "maxTokens": 80})
    skipped, repeated = preflight.data_notices(preflight.check_data(spec))
    assert skipped.startswith("2 problems are left out")
    assert "train.jsonl:2: must be a JSON object" in skipped
    assert repeated.startswith("1 problems ask")


def test_answer_that_the_verifier_cannot_compare_with_is_named_by_file_and_line(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    data = tmp_path / "train.jsonl"
    data.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "1+2?", "answer": "three ####"}\n')
    with pytest.raises(DatasetInvalid, match=r"train\.jsonl:2"):
        preflight.check_data(a_spec(tmp_path, prompts={"source": {"jsonl": {"path": str(data)}}, "maxTokens": 80}))


def test_what_is_wrong_with_data_and_verifier_is_reported_at_once(tmp_path: Path) -> None:
    """A module that cannot be imported was found only when the data were sound."""
    a_model_folder(tmp_path / "model")
    (tmp_path / "my_rewards.py").write_text("import json\n\ndef grade(reference, completion:\n")
    data = tmp_path / "train.jsonl"
    data.write_text('{"question": "1+1?", "answer": "2"}\n{"question": \n')
    changes: dict[str, Any] = {
        "prompts": {"source": {"jsonl": {"path": str(data)}}, "maxTokens": 80},
        "rewards": {"python": {"function": "my_rewards:grade", "folder": str(tmp_path)}},
    }
    with pytest.raises(DatasetInvalid) as caught:
        preflight.check_data(a_spec(tmp_path, **changes))
    assert "got SyntaxError at " in str(caught.value)
    assert "my_rewards.py:3: " in str(caught.value)
    assert "train.jsonl:2: must be a JSON object" in str(caught.value)


def test_a_function_that_fails_for_every_made_up_completion_is_refused(tmp_path: Path) -> None:
    """It trained nothing, and the run was called finished."""
    a_model_folder(tmp_path / "model")
    (tmp_path / "lists.py").write_text("def grade(reference, completion):\n    return [1.0]\n")
    rewards = {"python": {"function": "lists:grade", "folder": str(tmp_path)}}
    with pytest.raises(SpecInvalid, match=r"rewards\.python\.function: must grade made-up completions.*got list"):
        preflight.check_data(a_spec(tmp_path, rewards=rewards))


def test_port_in_use_is_refused_by_its_field(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken, match=f"telemetry.httpPort must be a free port, got telemetry.httpPort={port}"):
            choose_ports(a_spec(tmp_path, telemetry={"httpPort": port}))


def test_one_port_for_both_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PortTaken, match="must differ"):
        choose_ports(a_spec(tmp_path, telemetry={"httpPort": 7777, "grpcPort": 7777}))


def test_too_little_memory_says_who_needs_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    a_model_folder(tmp_path / "model")
    with pytest.raises(MemoryTooSmall, match=r"available memory must be >= .* got 1\.0 GiB; .*generation\.replicas"):
        preflight.check(a_spec(tmp_path), available_bytes=lambda: GIB)


def test_memory_grows_with_replicas_and_ranks(tmp_path: Path) -> None:
    policy = read_model_folder(a_model_folder(tmp_path / "model"), "model.path")
    one = estimate_memory(a_spec(tmp_path), policy)
    two = estimate_memory(a_spec(tmp_path, generation={"sampling": {"maxTokens": 16}, "replicas": 2}), policy)
    assert two.total_bytes == one.total_bytes + one.replica_bytes
    check_memory(two, two.total_bytes)
    with pytest.raises(MemoryTooSmall):
        check_memory(two, two.total_bytes - 1)


def test_demo_sized_run_fits_a_small_laptop(tmp_path: Path) -> None:
    """Two replicas and a trainer were measured to fit easily (notes: 1.7 GB a replica)."""
    policy = read_model_folder(a_model_folder(tmp_path / "model"), "model.path")
    spec = a_spec(tmp_path, generation={"sampling": {"maxTokens": 16}, "replicas": 2})
    assert estimate_memory(spec, policy).total_bytes < 7 * GIB


def test_a_verifier_that_cannot_work_here_is_refused(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    spec = a_spec(tmp_path, rewards={"python": {"function": "no_such_module:grade", "folder": str(tmp_path)}})
    with pytest.raises(SpecInvalid, match=r"rewards\.python\.function: must be importable, got ModuleNotFoundError"):
        preflight.check(spec, available_bytes=lambda: 64 * GIB)


def test_a_tool_that_cannot_be_called_or_cannot_answer_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model", 264)
    nobody = {"answeredBy": {"python": {"function": "nobodys_tools:answer"}}, "maxOutputTokens": 4}
    with pytest.raises(SpecInvalid, match=r"tools\.callEnd: must be text that the policy's tokenizer can say"):
        preflight.check_tools(a_spec(tmp_path, tools=nobody | {"callEnd": "<|im_end|>"}))
    with pytest.raises(SpecInvalid, match=r"tools\.answeredBy\.python\.function: must be importable"):
        preflight.check_tools(a_spec(tmp_path, tools=nobody))
