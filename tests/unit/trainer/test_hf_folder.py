"""An export has every head for multi-token prediction that its source has, or says that it has not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specrl.trainer.checkpointing import hf_folder

PREFIXES = ("model.mtp_layers.0.", "model.layers.1.", "mtp.layers.0.")
CARD = "---\nlicense: mit\n---\n# A model\n"


def a_source(folder: Path, prefix: str = "", heads: int = 1) -> Path:
    folder.mkdir()
    tensors = {"model.layers.0.up.weight": torch.zeros(2, 2), "model.norm.weight": torch.zeros(2)}
    if prefix:
        tensors |= {f"{prefix}up.weight": torch.full((2, 2), 0.1), f"{prefix}norm.weight": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors")
    config = {"num_hidden_layers": 1, "num_nextn_predict_layers": heads}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    return folder


def trained(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"model.layers.0.up.weight": torch.ones(2, 2, dtype=dtype), "model.norm.weight": torch.ones(2, dtype=dtype)}


def export(target: Path, source: Path, tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int, str]:
    """Export. Returns the tensors, the number of heads in config.json, and README.md."""
    hf_folder.write_policy_folder(target, source, tensors.items())
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    readme = (target / "README.md").read_text(encoding="utf-8")
    return load_file(target / "model.safetensors"), config["num_nextn_predict_layers"], readme


@pytest.mark.parametrize("prefix", PREFIXES)
def test_heads_that_were_not_trained_are_copied(prefix: str, tmp_path: Path) -> None:
    """They were silently absent, while config.json named them."""
    source = a_source(tmp_path / "source", prefix)
    found, heads, readme = export(tmp_path / "out", source, trained(torch.bfloat16))
    assert torch.equal(found[f"{prefix}up.weight"], torch.full((2, 2), 0.1, dtype=torch.bfloat16))
    assert torch.equal(found["model.norm.weight"], torch.ones(2, dtype=torch.bfloat16))
    assert heads == 1
    assert readme.startswith(CARD)
    assert "they go stale" in readme
    again, _, same = export(tmp_path / "again", tmp_path / "out", trained(torch.bfloat16))
    assert (again.keys(), same) == (found.keys(), readme)


def test_heads_of_a_source_in_parts_are_copied(tmp_path: Path) -> None:
    source = a_source(tmp_path / "source", PREFIXES[0])
    (source / "model.safetensors").rename(source / "part.safetensors")
    names = load_file(source / "part.safetensors")
    hf_folder.write_index(source, dict.fromkeys(names, "part.safetensors"), 1)
    found, _, _ = export(tmp_path / "out", source, trained())
    assert found.keys() == names.keys()


def test_trained_heads_are_not_copied(tmp_path: Path) -> None:
    source = a_source(tmp_path / "source", PREFIXES[0])
    mine = {
        f"{PREFIXES[0]}{name}": torch.full(shape, 7.0) for name, shape in (("up.weight", (2, 2)), ("norm.weight", (2,)))
    }
    found, _, readme = export(tmp_path / "out", source, trained() | mine)
    assert torch.equal(found[f"{PREFIXES[0]}up.weight"], torch.full((2, 2), 7.0))
    assert readme == CARD


def test_named_heads_without_tensors_are_dropped_from_the_config(tmp_path: Path) -> None:
    source = a_source(tmp_path / "source")
    found, heads, readme = export(tmp_path / "out", source, trained())
    assert found.keys() == trained().keys()
    assert heads == 0
    assert "names 0" in readme
