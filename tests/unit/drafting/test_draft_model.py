"""A draft model's logits are those of drafting token by token, in any family, and its folder stays the engine's."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.run_files import a_run
from tests.tiny_models import Shape, edit_config, make_policy
from transformers import AutoModelForCausalLM

from specrl.drafting import preflight
from specrl.drafting.budget import estimate_drafter_flops
from specrl.drafting.draft_model import model as draft_model
from specrl.drafting.draft_model.model import DraftModel, describe_obstacle, load_draft_model
from specrl.drafting.packing import LessonBatch, PackedRows, PassLimits, lay_out_rows, pack_rows, split_passes
from specrl.drafting.registry import find_kind
from specrl.errors import CheckpointInvalid
from specrl.models import read_model_folder, read_models
from specrl.spec import parse_spec

PASSES = 3
VOCAB = 264
PROMPTS = [6, 4, 2, 11, 3]
LENGTHS = [20, 9, 7, 12, 5]  # the fourth has no start: its completion is one token
SMALL = {"layers": 2, "intermediate": 64, "heads": 4, "groups": 2}
FAMILIES = {
    "qwen3": Shape(**SMALL),
    "qwen2, biases and tied": Shape(**SMALL, family="qwen2", is_tied=True),
    "llama": Shape(**SMALL, family="llama"),
    "gemma2, capped scores and scaled embeddings": Shape(**SMALL, family="gemma2", is_tied=True),
    "granite, scaled logits": Shape(**SMALL, family="granite"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("draft-model"), seed=1, shape=FAMILIES["qwen2, biases and tied"])


def some_lessons(prompts: list[int], lengths: list[int], seed: int = 2) -> LessonBatch:
    """Random tokens. The policy's states and logits are not needed here."""
    generator = torch.Generator().manual_seed(seed)
    token_ids_BS = torch.randint(4, VOCAB, (len(lengths), max(lengths)), generator=generator)
    nothing_BS0 = torch.zeros(*token_ids_BS.shape, 0)
    targets = sum(max(0, length - prompt - 1) for prompt, length in zip(prompts, lengths, strict=True))
    return LessonBatch(
        token_ids_BS=token_ids_BS,
        aux_BSA=nothing_BS0,
        embedding_BSH=nothing_BS0,
        normed_BSH=nothing_BS0,
        target_NK=torch.zeros(targets, VOCAB),
        normaliser_N1=torch.zeros(targets, 0),
        prompt_lengths_B=torch.tensor(prompts),
        lengths_B=torch.tensor(lengths),
    )


def draft_token_by_token(folder: Path, batch: LessonBatch, bins: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits [E, V] of each pass, one sequence at a time and up to the last token read, by transformers."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found: list[list[torch.Tensor]] = [[] for _ in range(PASSES)]
    for row in [number for some in bins for number in some]:
        length = int(batch.lengths_B[row])
        for start in range(int(batch.prompt_lengths_B[row]) - 1, length - 2):
            for step in range(min(PASSES, length - start - 2)):
                with torch.no_grad():  # the drafter has read x_0 .. x_{start + 1 + step}
                    logits_1SV = reference(batch.token_ids_BS[row : row + 1, : start + 2 + step]).logits
                found[step].append(logits_1SV[0, -1])
    return [torch.stack(logits) for logits in found]


@pytest.mark.parametrize("shape", FAMILIES.values(), ids=FAMILIES)
def test_logits_are_those_of_drafting_token_by_token(shape: Shape, tmp_path: Path) -> None:
    folder = make_policy(tmp_path, seed=1, shape=shape)
    batch = some_lessons(PROMPTS, LENGTHS)
    drafter = load_draft_model(folder)
    for bins in ([[0], [3, 4], [1, 2]], [[2, 0], [1, 3, 4]], [[row] for row in range(5)]):
        rows = lay_out_rows(batch, bins)
        expected = draft_token_by_token(folder, batch, bins)
        for found_EV, expected_EV in zip(drafter.draft_logits(rows, PASSES), expected, strict=True):
            torch.testing.assert_close(found_EV.detach(), expected_EV, rtol=1e-5, atol=1e-5)


def compute_gradients(drafter: DraftModel, rows: PackedRows) -> list[torch.Tensor]:
    logits = torch.cat(list(drafter.draft_logits(rows, PASSES)))
    return list(torch.autograd.grad((logits**2).sum(), list(drafter.parameters())))


def test_long_sequences_are_computed_again_to_the_same_gradients(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = load_draft_model(folder)
    rows = pack_rows(some_lessons(PROMPTS, LENGTHS))
    calls: list[int] = []
    drafter.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    kept = compute_gradients(drafter, rows)
    assert len(calls) == 1
    monkeypatch.setattr(draft_model, "LONG_TOKENS", 8)
    for one, other in zip(kept, compute_gradients(drafter, rows), strict=True):
        assert one.equal(other)
    assert len(calls) == 3


@pytest.mark.parametrize("limits", [PassLimits(), PassLimits(24), PassLimits(None, 9), PassLimits(1, 1)])
def test_passes_within_limits_have_each_sequence_once(limits: PassLimits) -> None:
    batch = some_lessons(PROMPTS, LENGTHS)
    passes = split_passes(batch, limits)
    assert sorted(index for some in passes for index in some) == list(range(5))
    for some in passes:
        tokens = max(LENGTHS[i] for i in some) * len(some)
        starts = sum(LENGTHS[i] - PROMPTS[i] - 1 for i in some)
        assert len(some) == 1 or (tokens <= (limits.tokens or tokens) and starts <= (limits.starts or starts))


def test_all_tensors_return_under_the_names_of_the_folder(folder: Path, tmp_path: Path) -> None:
    """The tied output layer is no tensor of its own."""
    drafter = load_draft_model(folder)
    stored = load_file(folder / "model.safetensors")
    found = drafter.collect_tensors(torch.float32)
    assert found.keys() == stored.keys()
    assert all(found[name].equal(tensor) for name, tensor in stored.items())
    drafter.load_tensors({name: tensor + 1 for name, tensor in stored.items()})
    drafter.write_folder(tmp_path / "out", torch.bfloat16)
    again = load_draft_model(tmp_path / "out").collect_tensors(torch.bfloat16)
    assert all(again[name].equal((tensor + 1).bfloat16()) for name, tensor in stored.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(CheckpointInvalid, match=r"model\.norm\.weight missing"):
        drafter.load_tensors({name: tensor for name, tensor in stored.items() if name != "model.norm.weight"})


def test_gradients_reach_the_draft_model_alone_and_every_part_of_it(folder: Path) -> None:
    drafter = load_draft_model(folder)
    assert not drafter.inputs.aux_layers
    assert all(bool(gradient.any()) for gradient in compute_gradients(drafter, pack_rows(some_lessons([3], [9]))))


def test_operations_count_four_times_against_the_budget(folder: Path) -> None:
    """A narrow model makes fewer operations per second than the policy."""
    drafter = load_draft_model(folder)
    matrices = sum(weight.numel() for weight in drafter.model.model.layers.parameters())
    output = VOCAB * 64
    forward = 2 * ((matrices + 64 + 2 * 4 * 32 * 100 / 2 * 2) * 100 + output * 30)
    assert drafter.estimate_forward_flops(3, 100, 30) == forward == drafter.estimate_forward_flops(1, 100, 30)
    assert estimate_drafter_flops(drafter, 3, 100, 30) == 4 * 3 * forward


def copy_with(folder: Path, target: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """Copy a model folder with other tensors and fields."""
    shutil.copytree(folder, target)
    save_file(load_file(folder / "model.safetensors") | tensors, target / "model.safetensors", {"format": "pt"})
    edit_config(target, **config)
    return target


def test_a_folder_may_repeat_what_follows_from_other_tensors(folder: Path, tmp_path: Path) -> None:
    """Old Llama folders have rotary frequencies, and some folders store a tied output layer again."""
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    extra = {"lm_head.weight": embedding, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    found = read_model_folder(copy_with(folder, tmp_path / "extra", extra), "model.path")
    assert describe_obstacle(found) is None


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        ({}, {"model_type": "unheard-of"}, "a family that transformers knows.*'unheard-of'"),
        ({}, {"intermediate_size": 65}, r"must have the tensors of transformers' Qwen2.*mlp\.down_proj\.weight"),
        ({"model.visual.weight": torch.ones(1)}, {}, r"model\.visual\.weight unknown"),
    ],
    ids=["family", "sizes", "unknown tensor"],
)
def test_a_model_that_cannot_be_trained_is_refused_without_reading_weights(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], reason: str, folder: Path, tmp_path: Path
) -> None:
    changed = read_model_folder(copy_with(folder, tmp_path / "changed", tensors, **config), "model.path")
    said = describe_obstacle(changed)
    assert said is not None
    assert re.search(reason, said)
    with pytest.raises(CheckpointInvalid, match=r"set trainer\.drafter\.online: false"):
        load_draft_model(changed.path)


def test_a_draft_model_in_files_that_transformers_does_not_read_is_refused(folder: Path, tmp_path: Path) -> None:
    """Preflight and the engine accepted shards without an index. Then the trainer ended with a traceback."""
    shutil.copytree(folder, tmp_path / "shards")
    (tmp_path / "shards/model.safetensors").rename(tmp_path / "shards/model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"must have model\.safetensors or model\.safetensors\.index\.json, of"):
        load_draft_model(tmp_path / "shards")


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    """transformers joins the experts' tensors, whose names the engine does not know."""
    folder = make_policy(tmp_path / "mixture", shape=Shape(**SMALL, family="qwen3_moe"))
    said = describe_obstacle(read_model_folder(folder, "model.path"))
    assert said is not None
    assert "named otherwise in mixtures of experts" in said


def test_preflight_refuses_what_cannot_be_trained_unless_it_is_frozen(folder: Path, tmp_path: Path) -> None:
    quantised = copy_with(folder, tmp_path / "quantised", {}, quantization_config={"quant_method": "gptq"})
    for path, expected in ((folder, []), (quantised, ["must not be quantised to be trained"])):
        speculation = {"draftModel": {"path": str(path)}}
        generation = {"sampling": {"maxTokens": 16}, "speculation": speculation}
        run = a_run(tmp_path, model={"path": str(folder), "dtype": "float32", "maxLength": 128}, generation=generation)
        spec = parse_spec(run)
        problems = preflight.check(spec, read_models(spec))
        assert [problem.rule.partition(",")[0] for problem in problems] == expected
        frozen = parse_spec(run | {"trainer": run["trainer"] | {"drafter": {"online": False}}})
        assert preflight.check(frozen, read_models(frozen)) == []
        assert find_kind(frozen) is None


def test_only_a_run_without_steps_initialises_a_draft_model(folder: Path, tmp_path: Path) -> None:
    generation = {"sampling": {"maxTokens": 16}, "speculation": {"draftModel": {"path": str(folder)}}}
    run = a_run(tmp_path, generation=generation)
    for steps in (0, 3):
        spec = parse_spec(run | {"schedule": run["schedule"] | {"steps": steps}})
        kind = find_kind(spec)
        assert kind is not None
        assert kind.is_fresh(spec) == (steps == 0)
        assert kind.count_passes(spec) == 3
