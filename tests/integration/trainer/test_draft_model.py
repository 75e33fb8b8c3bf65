"""A draft model that is trained with the policy: what it learns, that it leaves the policy alone, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.fork_server import ForkServer
from tests.integration.trainer.conftest import VOCAB, Launch
from tests.integration.trainer.draft_model_worker import STEPS, a_draft_spec, collect_tensors, train
from tests.integration.trainer.runs import a_batch
from tests.tiny_models import Shape, make_draft_model, make_policy, perturb
from transformers import AutoModelForCausalLM

from specrl.errors import CheckpointInvalid
from specrl.records import WeightOwner
from specrl.spec import RunSpec
from specrl.trainer.checkpointing import checkpoint_export, checkpoints
from specrl.trainer.megatron_backend import MegatronBackend

Tensors = dict[str, torch.Tensor]
LAYOUTS = ["tensor=2", "data=2", "pipeline=2", "context=2"]


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama beside the policy, a Qwen3: families and widths may differ."""
    shape = Shape(hidden=32, layers=2, heads=2, groups=1, intermediate=48, vocab=VOCAB, family="llama", is_tied=True)
    return make_policy(tmp_path_factory.mktemp("draft-model"), seed=8, shape=shape)


@contextmanager
def loaded(spec: RunSpec, checkpoint: Path | None = None) -> Iterator[MegatronBackend]:
    backend = MegatronBackend(spec)
    try:
        backend.load_model(checkpoint)
        yield backend
    finally:
        backend.close()


@pytest.fixture(scope="module")
def trained(policy: Path, draft_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one rank: tensors after three steps, a checkpoint after the second, and the export."""
    out = tmp_path_factory.mktemp("trained")
    with loaded(a_draft_spec(policy, draft_model)) as backend:
        (out / "seen.json").write_text(json.dumps(train(backend, out, 1, STEPS)))
        torch.save(collect_tensors(backend), out / "trained.pt")
        torch.save(backend.describe_weights(), out / "manifest.pt")
        backend.export_model(out / "export")
    return out


def tensors_of(out: Path) -> Tensors:
    found: Tensors = torch.load(out / "trained.pt")
    return found


def furthest(one: Tensors, other: Tensors) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def test_checkpoint_resumes_to_the_same_bits(policy: Path, draft_model: Path, trained: Path, tmp_path: Path) -> None:
    with loaded(a_draft_spec(policy, draft_model), checkpoints.find_newest(trained)) as backend:
        (seen,) = train(backend, tmp_path, STEPS, STEPS)
        found = collect_tensors(backend)
    assert seen["loss"] == json.loads((trained / "seen.json").read_text())[-1]["loss"]
    assert any(name.startswith("drafter.optimizer.exp_avg_sq.") for name in found)
    assert furthest(found, tensors_of(trained)) == 0


def test_checkpoint_of_another_draft_model_is_refused(policy: Path, trained: Path, tmp_path: Path) -> None:
    other = make_draft_model(tmp_path / "other", policy)
    with (
        pytest.raises(CheckpointInvalid, match="the draft model's tensors must be those of"),
        loaded(a_draft_spec(policy, other), checkpoints.find_newest(trained)),
    ):
        pass


def test_manifest_and_export_have_the_names_of_the_folder(trained: Path, draft_model: Path, policy: Path) -> None:
    """The tied output layer is sent once. Config and tokenizer of the export are those of the folder."""
    manifest = torch.load(trained / "manifest.pt", weights_only=False)
    sent = {meta.name: meta.shape for meta in manifest.tensors if meta.owner is WeightOwner.DRAFTER}
    stored = load_file(draft_model / "model.safetensors")
    assert sent == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    export = trained / "export" / "drafter"
    exported = load_file(export / "model.safetensors")
    assert furthest(exported, stored) > 1e-4
    kept = {name.removeprefix("drafter.head."): x for name, x in tensors_of(trained).items() if "drafter.head." in name}
    assert furthest(exported, kept) == 0
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (export / file).read_bytes() == (draft_model / file).read_bytes()
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (export, draft_model))
    assert config == before
    AutoModelForCausalLM.from_pretrained(export)


def test_checkpoint_is_exported_as_the_trainer_would(
    trained: Path, policy: Path, draft_model: Path, tmp_path: Path
) -> None:
    checkpoint = checkpoints.find_newest(trained)
    assert checkpoint is not None
    spec = a_draft_spec(policy, draft_model)
    checkpoint_export.export_checkpoint(spec, checkpoint, tmp_path / "out")
    with loaded(spec, checkpoint) as backend:
        _, drafter = backend.export_model(tmp_path / "again")
    assert drafter is not None
    assert {path.name for path in drafter.iterdir()} == {path.name for path in (tmp_path / "out/drafter").iterdir()}
    for path in drafter.iterdir():
        assert path.read_bytes() == (tmp_path / "out/drafter" / path.name).read_bytes()


def test_training_raises_the_acceptance(tmp_path: Path) -> None:
    """The policy of these random rollouts moves little; the draft model starts from the policy with much noise."""
    policy = make_policy(tmp_path / "policy", seed=1, sharpness=30, bigram=20, shape=Shape(layers=2, vocab=VOCAB))
    draft_model = perturb(tmp_path / "draft-model", policy, scale=0.5, seed=2)
    with loaded(a_draft_spec(policy, draft_model, drafter={"tokenBudget": 1000, "learningRate": "3e-3"})) as backend:
        rollouts = a_batch(99, VOCAB).rollouts
        before = backend.evaluate_drafter(rollouts)
        for step in range(1, 25):
            batch = a_batch(step, VOCAB)
            backend.train_step(replace(batch, rollouts=tuple(replace(x, advantage=0.0) for x in batch.rollouts)))
        after = backend.evaluate_drafter(rollouts)
    print(before, after)  # noqa: T201
    assert after.loss < 0.8 * before.loss
    assert after.acceptance_per_position[0] > 1.2 * before.acceptance_per_position[0]


@pytest.fixture(scope="module")
def two_ranks(ranks: ForkServer, policy: Path, draft_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two") / "out"
    program = ["draft_model_worker", str(out), str(policy), str(draft_model), json.dumps(LAYOUTS)]
    return Launch(ranks, out, LAYOUTS[0], program, []).finish([0, 0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_draft_model_does_not_depend_on_the_layout(layout: str, two_ranks: Path, trained: Path) -> None:
    seen, expected = (json.loads((out / "seen.json").read_text()) for out in (two_ranks / layout, trained))
    for mine, others in zip(seen, expected, strict=True):
        for name in ("loss", "grad_norm", "acceptance_per_position"):
            assert mine[name] == pytest.approx(others[name], rel=1e-3, abs=1e-5), name
    assert furthest(load_file(two_ranks / layout / "trained.safetensors"), tensors_of(trained)) <= 1e-5
