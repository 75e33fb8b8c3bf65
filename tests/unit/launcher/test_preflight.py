"""Preflight refuses invalid runs before they start, with clear messages."""

from __future__ import annotations

import json
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from structlog.testing import capture_logs
from tests.run_files import a_model_folder, a_run, a_run_file
from tests.tiny_models import make_tokenizer
from tests.unit.spec.test_load import RULES
from typer.testing import CliRunner

from specrl import agent_tools
from specrl import models as models_package
from specrl.cli import app
from specrl.drafting import preflight as drafting
from specrl.drafting.kind import TARGET_BYTES
from specrl.errors import MemoryTooSmall, PortTaken, SpecInvalid, SpecProblem
from specrl.generation.vllm_backend import preflight as generation_preflight
from specrl.launcher import preflight
from specrl.launcher.disk import check_disk, estimate_disk
from specrl.launcher.memory import GIB, check_memory, estimate_memory
from specrl.launcher.processes.ports import choose_ports
from specrl.models import RunModels, read_model_folder, read_models
from specrl.prompts import templates
from specrl.spec import RunSpec, parse_spec
from specrl.spec.run import Dtype
from specrl.trainer import preflight as trainer

UNIONS = (
    "prompts.source",
    "rewards",
    "generation.speculation",
    "store",
    "store.redis.password",
    "store.redis.sentinel.password",
)


def a_spec(folder: Path, **changes: Any) -> RunSpec:
    return parse_spec(a_run(folder, **changes))


def a_speculating_run(folder: Path, **eagle3: Any) -> RunSpec:
    return a_spec(folder, generation={"sampling": {"maxTokens": 16}, "speculation": {"eagle3": eagle3}})


def test_a_valid_run_passes_and_gets_two_ports(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    ready = preflight.check_run(a_spec(tmp_path), available_bytes=lambda: 64 * GIB)
    assert 0 < ready.grpc_port != ready.http_port > 0


def test_a_model_by_name_becomes_the_folder_of_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is in the cache, so nothing asks the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    commit = "ab" * 20
    folder = a_model_folder(tmp_path / "hub/models--team--tiny/snapshots" / commit)
    listing = tmp_path / "hub/models--team--tiny/specrl" / f"{commit}.json"
    listing.parent.mkdir()
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    listing.write_text(json.dumps({"commit": commit, "sizes": sizes}))
    model = {"path": "team/tiny", "revision": commit, "dtype": "float32", "maxLength": 128}
    ready = preflight.check_run(a_spec(tmp_path, model=model), available_bytes=lambda: 64 * GIB)
    assert (ready.spec.model.path, ready.spec.model.revision) == (str(folder), None)
    assert [(it.field, it.name, it.commit) for it in ready.sources] == [("model.path", "team/tiny", commit)]
    assert ready.notices[0] == f"model.path: team/tiny at commit {commit[:12]}, in {folder}"
    with pytest.raises(SpecInvalid, match=r"team/tiny must fit into the memory, got .* GiB of weights") as caught:
        preflight.check_run(a_spec(tmp_path, model=model), available_bytes=lambda: 1)
    assert len(caught.value.problems) == 1


def said_of(problems: Iterable[SpecProblem]) -> set[str]:
    """Return the fields that the problems are about."""
    return {re.split(":? must ", str(problem))[0] for problem in problems}


def test_all_problems_are_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user needs one run of the command, not one per problem."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    a_model_folder(tmp_path / "model", max_position_embeddings=100)
    spec = a_spec(
        tmp_path,
        prompts={"source": {"jsonl": {"path": "none.jsonl"}}, "maxTokens": 80},
        generation={"sampling": {"maxTokens": 16}, "tensorParallel": 4, "speculation": {"eagle3": {"path": "none"}}},
        trainer={"optimizer": {"learningRate": "1e-3"}, "parallelism": {"tensor": 3}},
        telemetry={"httpPort": 7777, "grpcPort": 7777, "sinks": {"mlflow": {}}},
    )
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(SpecInvalid) as caught:
        preflight.check_run(spec, available_bytes=lambda: GIB)
    assert said_of(caught.value.problems) >= {
        "generation.speculation.eagle3.path",
        "model.maxLength",
        "generation.tensorParallel",
        "trainer.parallelism.tensor",
        "telemetry.sinks.mlflow.trackingUri",
        "telemetry.grpcPort",
        "none.jsonl",
        "available memory",
    }


def test_data_are_read_even_without_a_model(tmp_path: Path) -> None:
    spec = a_spec(tmp_path, prompts={"source": {"jsonl": {"path": "none.jsonl"}}, "maxTokens": 80})
    with pytest.raises(SpecInvalid) as caught:
        preflight.check_run(spec)
    assert said_of(caught.value.problems) == {"model.path", "none.jsonl"}


def test_broken_rules_and_failed_checks_are_reported_together(tmp_path: Path) -> None:
    file = a_run_file(tmp_path, model={"path": "model", "maxLength": 20}, store={"redis": {"addresses": ["nobody"]}})
    with pytest.raises(SpecInvalid) as caught:
        preflight.load_run(file, [])
    found = [problem.path for problem in caught.value.problems]
    assert found[:2] == ["model.maxLength", "store.redis.addresses"]
    assert "model.path" in said_of(caught.value.problems)


def test_malformed_fields_are_reported_before_anything_else(tmp_path: Path) -> None:
    file = a_run_file(tmp_path, store={"redis": {}}, schedule={"steps": "x", "promptsPerStep": 0, "groupSize": 2})
    with pytest.raises(SpecInvalid) as caught:
        preflight.load_run(file, [])
    assert [problem.path for problem in caught.value.problems] == ["schedule.steps", "schedule.promptsPerStep"]


def test_a_section_with_two_members_is_reported_with_broken_rules_only(tmp_path: Path) -> None:
    file = a_run_file(tmp_path, rewards={"exact": {}, "math": {}}, model={"path": "model", "maxLength": 20})
    with pytest.raises(SpecInvalid) as caught:
        preflight.load_run(file, [])
    assert [problem.path for problem in caught.value.problems] == ["rewards", "model.maxLength"]


@pytest.mark.parametrize("path", [path for path in RULES if path not in UNIONS])
def test_checks_cope_with_every_broken_rule(tmp_path: Path, path: str) -> None:
    """The checks see invalid runs, which no process ever sees."""
    a_model_folder(tmp_path / "policy")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(RULES[path]))
    with pytest.raises(SpecInvalid) as caught:
        preflight.load_run(file, [])
    assert caught.value.problems[0].path == path


def found_in(spec: RunSpec, package: Any) -> list[tuple[str, str]]:
    """Return the paths and rules of a package's findings."""
    return [(problem.path, problem.rule) for problem in package.check(spec, read_models(spec))]


def test_unsupported_architecture_is_refused(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model", architectures=["MistralForCausalLM"], model_type="mistral")
    ((_, rule),) = found_in(a_spec(tmp_path), trainer)
    assert rule.startswith(str(tmp_path / "model/config.json"))
    assert "model_type must be one of qwen3, qwen2, mimo, llama, qwen3_moe, got 'mistral'" in rule


def check_drafter(tmp_path: Path, **config: Any) -> str:
    a_model_folder(tmp_path / "model")
    folder = a_model_folder(tmp_path / "drafter", architectures=["LlamaForCausalLMEagle3"], **config)
    spec = a_speculating_run(tmp_path, path=str(folder))
    return "\n".join(map(str, drafting.check(spec, read_models(spec))))


def test_native_heads_are_checked_before_a_run(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model", model_type="mimo", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    spec = a_spec(tmp_path, generation={"sampling": {"maxTokens": 16}, "speculation": {"mtp": {}}})
    with pytest.raises(SpecInvalid, match=r"model\.path: must have the num_nextn_predict_layers=1 heads that its"):
        preflight.check_run(spec)


def test_draft_model_is_checked_and_counted(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    folder = a_model_folder(tmp_path / "small")
    generation = {"sampling": {"maxTokens": 16}, "speculation": {"draftModel": {"path": str(folder)}}}
    spec = a_spec(tmp_path, generation=generation)
    models = read_models(spec)
    assert generation_preflight.check(spec, models) == []
    assert models.draft_model is not None
    parameters = models.draft_model.num_parameters
    assert parameters == 264 * 64
    trained = estimate_memory(spec, models)
    trainer = {"optimizer": {"learningRate": "1e-3"}, "microBatchTokens": 1024, "drafter": {"online": False}}
    of_frozen = a_spec(tmp_path, generation=generation, trainer=trainer)
    frozen = estimate_memory(of_frozen, models)
    without = estimate_memory(of_frozen, RunModels(models.policy))
    assert frozen.replica_bytes - without.replica_bytes == 4 * parameters
    assert trained.replica_bytes - without.replica_bytes == 2 * 4 * parameters
    assert frozen.trainer_bytes == without.trainer_bytes
    assert trained.trainer_bytes - frozen.trainer_bytes >= (16 + 12) * parameters
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    ((path, rule),) = found_in(spec, generation_preflight)
    assert path == "generation.speculation.draftModel.path"
    assert "vocab_size, got 300" in rule


def test_a_matching_drafter_passes(tmp_path: Path) -> None:
    assert check_drafter(tmp_path) == ""


def test_drafter_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    said = check_drafter(tmp_path, vocab_size=300)
    assert re.search(r"vocab_size=300 .* and 264 in", said)
    assert f"{tmp_path}/drafter" in said
    assert f"{tmp_path}/model" in said


def test_drafter_of_another_width_is_refused_by_its_target(tmp_path: Path) -> None:
    assert "hidden_size=96" in check_drafter(tmp_path, target_hidden_size=96)


def test_drafter_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    assert "vocab_size=None" in check_drafter(tmp_path, vocab_size=None)


def test_vocabulary_inside_a_speculators_config_is_read(tmp_path: Path) -> None:
    said = check_drafter(tmp_path, vocab_size=None, transformer_layer_config={"vocab_size": 300})
    assert "vocab_size=300" in said


def test_drafter_with_another_tokenizer_names_both(tmp_path: Path) -> None:
    """A tokenizer of the same size used to be found only by the engine."""
    assert check_drafter(tmp_path) == ""
    file = tmp_path / "drafter/tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    spec = a_speculating_run(tmp_path, path=str(tmp_path / "drafter"))
    ((path, rule),) = found_in(spec, drafting)
    assert path == "generation.speculation.eagle3.path"
    assert re.search(f"{tmp_path}/drafter.*{tmp_path}/model", rule)


def test_missing_drafter_is_refused_under_its_own_name(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    ((_, rule),) = found_in(a_speculating_run(tmp_path, path=str(tmp_path / "none")), models_package)
    assert rule.startswith("generation.speculation.eagle3.path must be a Hugging Face folder")


def test_draft_vocabulary_larger_than_the_policys_is_refused(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    ((path, rule),) = found_in(a_speculating_run(tmp_path, draftVocabSize=265), drafting)
    assert path == "generation.speculation.eagle3.draftVocabSize"
    assert rule.startswith("must be <= 264")


def test_reference_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    reference = a_model_folder(tmp_path / "reference", vocab_size=300)
    loss = {"referenceKl": {"coefficient": "0.1", "path": str(reference)}}
    spec = a_spec(tmp_path, trainer={"optimizer": {"learningRate": "1e-3"}, "loss": loss})
    ((_, rule),) = found_in(spec, trainer)
    assert rule.startswith("trainer.loss.referenceKl.path must have the policy's vocabulary of 264, got vocab_size=300")


def test_every_number_that_does_not_divide_the_model_is_listed(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    spec = a_spec(
        tmp_path,
        generation={"sampling": {"maxTokens": 16}, "tensorParallel": 4},
        trainer={
            "optimizer": {"learningRate": "1e-3"},
            "parallelism": {"tensor": 3, "pipeline": 2, "virtualStages": 3},
        },
    )
    assert [*found_in(spec, trainer), *found_in(spec, generation_preflight)] == [
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
def test_experts_that_cannot_be_divided_among_ranks_are_refused(
    tmp_path: Path, config: dict[str, Any], refused: str | None
) -> None:
    if config:
        config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **config}
    a_model_folder(tmp_path / "model", **config)
    layout = {"tensor": 2, "data": 2, "expert": 4}
    spec = a_spec(tmp_path, trainer={"optimizer": {"learningRate": "1e-3"}, "parallelism": layout})
    assert found_in(spec, trainer) == ([] if refused is None else [("trainer.parallelism.expert", refused)])


def test_routing_of_a_dense_model_cannot_be_replayed(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    spec = a_spec(tmp_path, trainer={"optimizer": {"learningRate": "1e-3"}, "routing": "Replay"})
    assert found_in(spec, trainer) == [
        ("trainer.routing", "must be Anew, since the model's layers have no experts, got Replay")
    ]


def test_malformed_line_is_named_by_file_and_line(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    data = tmp_path / "train.jsonl"
    data.write_text('{"question": "1+1?", "answer": "2"}\n{"question": \n')
    spec = a_spec(tmp_path, prompts={"source": {"jsonl": {"path": str(data)}}, "maxTokens": 80})
    with pytest.raises(SpecInvalid, match=r"train\.jsonl:2"):
        preflight.check_run(spec, available_bytes=lambda: 64 * GIB)


def test_the_user_learns_of_lines_that_are_left_out(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    data = tmp_path / "train.jsonl"
    sound = '{"question": "1+1?", "answer": "2"}\n'
    data.write_text(f'{sound}{{\n{sound}{{"question": "{"x" * 90}", "answer": "1"}}\n')
    source = {"jsonl": {"path": str(data), "onBadLine": "Skip"}}
    spec = a_spec(tmp_path, prompts={"source": source, "maxTokens": 80})
    skipped, repeated = preflight.check_run(spec, available_bytes=lambda: 64 * GIB).notices
    assert skipped.startswith("2 problems are left out")
    assert "train.jsonl:2: must be a JSON object" in skipped
    assert "1 problem repeats" in repeated


def test_a_disk_that_is_too_small_for_the_checkpoints_is_refused(tmp_path: Path) -> None:
    """A run of a 135M model ended after hours, when its third checkpoint found no room."""
    a_model_folder(tmp_path / "model")
    schedule = {"steps": 60, "promptsPerStep": 2, "groupSize": 2}
    spec = a_spec(tmp_path, schedule=schedule, checkpoint={"keep": 2, "milestoneEverySteps": 30, "keepBest": False})
    found = read_models(spec)
    assert found.policy is not None
    need = estimate_disk(spec, found)
    assert (need.checkpoint_bytes, need.checkpoints) == (12 * found.policy.num_parameters, 5)
    assert estimate_disk(spec, found, existing=5).checkpoints == 1, "the next one still needs room"
    short = a_spec(tmp_path, schedule={**schedule, "steps": 10})
    assert estimate_disk(short, found).checkpoints == 1
    check_disk(need, tmp_path / "runs", lambda _: need.total_bytes)
    with pytest.raises(SpecInvalid, match=r"--runs: must be on a disk with .* free \(5 x 0\.0 GiB of checkpoints"):
        check_disk(need, tmp_path / "runs", lambda _: need.total_bytes - 1)
    assert preflight.check_run(spec, available_bytes=lambda: 64 * GIB).disk_need == need


def test_a_batch_larger_than_the_data_is_noted() -> None:
    """It was accepted without a word, and a step trained on a problem twice."""
    spec = parse_spec(a_run(Path("/none"), schedule={"steps": 1, "promptsPerStep": 5, "groupSize": 2}))
    (notice,) = preflight.list_batch_notices(spec, 4)
    assert notice.startswith("schedule.promptsPerStep is 5, and there are 4 problems")
    assert not list(preflight.list_batch_notices(spec, 5))


def test_what_is_left_out_is_told_once(tmp_path: Path) -> None:
    """The terminal had a line of the log and a notice about the same records."""
    a_model_folder(tmp_path / "model")
    data = tmp_path / "train.jsonl"
    held_out = tmp_path / "test.jsonl"
    data.write_text('{"question": "1+1?", "answer": "2"}\n{\n')
    held_out.write_text('{"question": "1+2?", "answer": "3"}\n\n{\n{\n')
    training, validation = ({"jsonl": {"path": str(path), "onBadLine": "Skip"}} for path in (data, held_out))
    spec = a_spec(tmp_path, prompts={"source": training, "maxTokens": 80}, validation={"source": validation})
    with capture_logs() as logged:
        notices = preflight.check_run(spec, available_bytes=lambda: 64 * GIB).notices
    first, second = (notice for notice in notices if "left out" in notice)
    assert first.startswith(f"1 problem is left out (onBadLine: Skip): {data}:2: must be a JSON object")
    assert second.startswith(f"2 problems are left out (onBadLine: Skip); the first is {held_out}:3: ")
    assert [entry["event"] for entry in logged] == []


def test_an_unusable_reference_is_named_by_file_and_line(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    data = tmp_path / "train.jsonl"
    data.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "1+2?", "answer": "three ####"}\n')
    spec = a_spec(tmp_path, prompts={"source": {"jsonl": {"path": str(data)}}, "maxTokens": 80})
    with pytest.raises(SpecInvalid, match=r"train\.jsonl:2"):
        preflight.check_run(spec, available_bytes=lambda: 64 * GIB)


def test_problems_of_data_and_verifier_are_reported_together(tmp_path: Path) -> None:
    """A module that cannot be imported used to be reported only when the data were valid."""
    a_model_folder(tmp_path / "model")
    (tmp_path / "my_rewards.py").write_text("import json\n\ndef grade(reference, completion:\n")
    data = tmp_path / "train.jsonl"
    data.write_text('{"question": "1+1?", "answer": "2"}\n{"question": \n')
    changes: dict[str, Any] = {
        "prompts": {"source": {"jsonl": {"path": str(data)}}, "maxTokens": 80},
        "rewards": {"python": {"function": "my_rewards:grade", "folder": str(tmp_path)}},
    }
    with pytest.raises(SpecInvalid) as caught:
        preflight.check_run(a_spec(tmp_path, **changes), available_bytes=lambda: 64 * GIB)
    assert "got SyntaxError at " in str(caught.value)
    assert "my_rewards.py:3: " in str(caught.value)
    assert "train.jsonl:2: must be a JSON object" in str(caught.value)


def test_a_function_that_fails_for_every_made_up_completion_is_refused(tmp_path: Path) -> None:
    """Such a run used to train on nothing and end as finished."""
    a_model_folder(tmp_path / "model")
    (tmp_path / "lists.py").write_text("def grade(reference, completion):\n    return [1.0]\n")
    rewards = {"python": {"function": "lists:grade", "folder": str(tmp_path)}}
    with pytest.raises(SpecInvalid, match=r"rewards\.python\.function: must grade made-up completions.*got list"):
        preflight.check_run(a_spec(tmp_path, rewards=rewards), available_bytes=lambda: 64 * GIB)


def test_spec_check_shows_what_a_run_would_warn_of(tmp_path: Path) -> None:
    """`spec check --preflight` said only that a file is valid where `run` warned of its reward function."""
    a_model_folder(tmp_path / "model")
    (tmp_path / "picky.py").write_text("def grade(reference, completion):\n    return float(completion[0] == '7')\n")
    rewards = {"python": {"function": "picky:grade", "folder": str(tmp_path)}}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(a_run(tmp_path, rewards=rewards)))
    found = CliRunner().invoke(app, ["spec", "check", "--preflight", str(file)])
    assert found.exit_code == 0
    assert "is valid" in found.stdout
    assert "warning: the verifier failed in a trial before the run: IndexError at picky.py:2" in found.stderr


def test_a_port_in_use_is_refused_with_its_field(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken, match=f"telemetry.httpPort must be a free port, got telemetry.httpPort={port}"):
            choose_ports(a_spec(tmp_path, telemetry={"httpPort": port}))


def test_one_port_for_both_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PortTaken, match="must differ"):
        choose_ports(a_spec(tmp_path, telemetry={"httpPort": 7777, "grpcPort": 7777}))


def test_too_little_memory_reports_the_need_of_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    a_model_folder(tmp_path / "model")
    with pytest.raises(SpecInvalid, match=r"available memory must be >= .* got 1\.0 GiB.*generation\.replicas"):
        preflight.check_run(a_spec(tmp_path), available_bytes=lambda: GIB)


def test_memory_grows_with_replicas_and_ranks(tmp_path: Path) -> None:
    policy = read_model_folder(a_model_folder(tmp_path / "model"), "model.path")
    one = estimate_memory(a_spec(tmp_path), RunModels(policy))
    replicated = a_spec(tmp_path, generation={"sampling": {"maxTokens": 16}, "replicas": 2})
    two = estimate_memory(replicated, RunModels(policy))
    assert two.total_bytes == one.total_bytes + one.replica_bytes
    check_memory(two, two.total_bytes)
    with pytest.raises(MemoryTooSmall):
        check_memory(two, two.total_bytes - 1)


def test_memory_has_the_targets_of_a_drafter_up_to_their_bound(tmp_path: Path) -> None:
    policy = read_model_folder(a_model_folder(tmp_path / "model"), "model.path")

    def trainer_bytes(token_budget: int, **eagle3: int) -> int:
        generation = {"sampling": {"maxTokens": 16}, "speculation": {"eagle3": eagle3}}
        schedule = {"steps": 1, "promptsPerStep": 1 << 20, "groupSize": 8}
        spec = a_spec(tmp_path, generation=generation, trainer=a_trainer(token_budget), schedule=schedule)
        return estimate_memory(spec, RunModels(policy=policy)).trainer_bytes

    def a_trainer(token_budget: int) -> dict[str, Any]:
        return {"optimizer": {"learningRate": "1e-5"}, "drafter": {"tokenBudget": token_budget}}

    spec = a_spec(tmp_path)
    item_bytes = 4 if spec.model.dtype is Dtype.FLOAT32 else 2
    vocabulary = policy.config_number("vocab_size") or 0
    # 100 starts more are three slices more. Each may need the states of a whole prompt and completion.
    slice_bytes = 4 * (policy.config_number("hidden_size") or 0) * item_bytes * (spec.prompts.max_tokens + 16)
    more = trainer_bytes(1100) - trainer_bytes(1000)
    assert more == 100 * vocabulary * item_bytes + 3 * slice_bytes
    more = trainer_bytes(1100, draftVocabSize=8) - trainer_bytes(1000, draftVocabSize=8)
    assert more == 100 * 8 * item_bytes + 3 * slice_bytes
    most = -(-TARGET_BYTES // (vocabulary * item_bytes))
    assert trainer_bytes(most + 1000) == trainer_bytes(most)


def test_muon_keeps_one_moment_in_layers_and_shares_none_out(tmp_path: Path) -> None:
    policy = read_model_folder(a_model_folder(tmp_path / "model"), "model.path")

    def trainer_bytes(kind: str, ranks: int) -> int:
        optimizer = {"learningRate": "1e-5", "kind": kind}
        spec = a_spec(tmp_path, trainer={"optimizer": optimizer, "parallelism": {"data": ranks}})
        return estimate_memory(spec, RunModels(policy)).trainer_bytes

    assert trainer_bytes("Muon", 1) < trainer_bytes("AdamW", 1)
    assert trainer_bytes("Muon", 8) > trainer_bytes("AdamW", 8)


def test_demo_sized_run_fits_a_small_laptop(tmp_path: Path) -> None:
    """Two replicas and a trainer were measured to fit easily (1.7 GB per replica)."""
    policy = read_model_folder(a_model_folder(tmp_path / "model"), "model.path")
    spec = a_spec(tmp_path, generation={"sampling": {"maxTokens": 16}, "replicas": 2})
    assert estimate_memory(spec, RunModels(policy)).total_bytes < 7 * GIB


def test_a_verifier_that_cannot_work_here_is_refused(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    spec = a_spec(tmp_path, rewards={"python": {"function": "no_such_module:grade", "folder": str(tmp_path)}})
    with pytest.raises(SpecInvalid, match=r"rewards\.python\.function: must be importable, got ModuleNotFoundError"):
        preflight.check_run(spec, available_bytes=lambda: 64 * GIB)


def test_a_tool_that_cannot_be_called_or_cannot_answer_is_refused(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    make_tokenizer(tmp_path / "model", 264)
    nobody = {"answeredBy": {"python": {"function": "nobodys_tools:answer"}}, "maxOutputTokens": 4}
    unspeakable, missing = found_in(a_spec(tmp_path, tools=nobody | {"callEnd": "<|im_end|>"}), agent_tools)
    assert unspeakable[0] == "tools.callEnd"
    assert unspeakable[1].startswith("must be text that the policy's tokenizer can encode")
    assert missing[0] == "tools.answeredBy.python.function"
    assert missing[1].startswith("must be importable")
    assert found_in(a_spec(tmp_path, tools=nobody), agent_tools) == [missing]


def test_nccl_without_gpus_is_refused(tmp_path: Path) -> None:
    """The trainer refused it every two seconds, in the log alone, and the run waited."""
    a_model_folder(tmp_path / "model")
    spec = parse_spec(a_run(tmp_path, weights={"transport": "Nccl"}))
    with pytest.raises(
        SpecInvalid, match=r"weights\.transport: must be one of Auto, Gloo, Checkpoint on a machine without GPUs"
    ):
        preflight.check_run(spec, available_bytes=lambda: 64 * GIB)


def test_a_scratch_folder_whose_path_is_too_long_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator crashed six times with `BrokenProcessPool`: schedulers of clusters set such folders."""
    short = Path(tempfile.mkdtemp(dir="/tmp"))  # tmp_path is a long one itself
    try:
        assert not list(preflight.find_socket_problems(short))
        assert not list(short.iterdir())
        long = short / ("x" * 60)
        long.mkdir()
        (problem,) = preflight.find_socket_problems(long)
        assert problem.path == "TMPDIR"
        assert "AF_UNIX path too long" in problem.rule
        (problem,) = preflight.find_socket_problems(short / "none")
        assert "No such file" in problem.rule
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        a_model_folder(tmp_path / "model")
        with pytest.raises(SpecInvalid, match="TMPDIR: must be a folder in which sockets can be opened"):
            preflight.check_run(a_spec(tmp_path), available_bytes=lambda: 64 * GIB)
    finally:
        shutil.rmtree(short)


def test_a_stop_string_with_more_than_a_special_token_is_refused(tmp_path: Path) -> None:
    """The engine looks for it in text without special tokens, so every completion would have maxTokens.

    A special token alone becomes an end token.
    """
    folder = a_model_folder(tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        {"id": 256 + number, "content": text, "special": True, **flags} for number, text in enumerate(("<s>", "<end>"))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"})
    )
    sampling = {"maxTokens": 16, "stop": ["Q:", "<end>", "x<s>", "<s>"]}
    spec = parse_spec(a_run(tmp_path, model={"path": str(folder)}, generation={"sampling": sampling}))
    (problem,) = templates.check(spec, RunModels(policy=read_model_folder(folder, "model.path")))
    assert problem.path == "generation.sampling.stop[2]"
    assert "must be a special token alone or have none" in problem.rule
