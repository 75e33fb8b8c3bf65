"""Exports of checkpoints, without a trainer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint_sums import write_checksums
from tests.integration.trainer.runs import a_spec
from tests.tiny_models import Shape, make_policy

from specrl.spec.trainer import Lora
from specrl.tensor_files import INDEX
from specrl.trainer import lora
from specrl.trainer.checkpointing import checkpoints
from specrl.trainer.checkpointing.checkpoint_export import export_checkpoint

CHANGED = "model.layers.0.mlp.up_proj.weight"


def test_low_rank_updates_are_added_to_the_files_of_the_index_alone(tmp_path: Path) -> None:
    """All safetensors of the folder were read. A second copy of the weights took the place of those of the index."""
    policy = make_policy(tmp_path / "policy", shape=Shape(layers=1))
    weights = load_file(policy / "model.safetensors")
    (policy / "model.safetensors").rename(policy / "model-00001.safetensors")
    (policy / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, "model-00001.safetensors")}))
    save_file({name: torch.zeros_like(weight) for name, weight in weights.items()}, policy / "model.safetensors")
    settings = Lora(rank=2)
    checkpoint = checkpoints.step_directory(tmp_path, 1)
    (checkpoint / checkpoints.POLICY / checkpoints.WEIGHTS).mkdir(parents=True)
    outputs, inputs = weights[CHANGED].shape
    factors = [torch.full((2, inputs), 0.5), torch.full((outputs, 2), 0.25)]
    save_file(
        dict(zip(lora.factor_names(CHANGED), factors, strict=True)),
        checkpoint / checkpoints.POLICY / checkpoints.WEIGHTS / "model-0000-00001.safetensors",
    )
    write_checksums(checkpoint)
    spec = a_spec(policy, speculation={"none": {}}, lora=settings.model_dump(mode="json", by_alias=True))
    export_checkpoint(spec, checkpoint, tmp_path / "out")
    found = load_file(tmp_path / "out" / "policy" / "model.safetensors")
    update = lora.compute_update(*factors, lora.compute_scale(settings))
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found[name], weight + update if name == CHANGED else weight), name
