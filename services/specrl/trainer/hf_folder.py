"""Writes a policy as an ordinary Hugging Face folder: weights anew, everything else copied from where it came from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

SHARD_BYTES = 4 << 30
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
INDEX = "model.safetensors.index.json"


def write_policy(target: Path, source: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write `target`, whole or not at all, from tensors that arrive one at a time."""
    scratch = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix not in _NOT_COPIED and path.name != INDEX:
            shutil.copy(path, scratch / path.name)
    dtype = write_weights(scratch, tensors, SHARD_BYTES)
    config = json.loads((scratch / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)


def write_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> torch.dtype:
    """Write one file, or shards of at most `shard_bytes` (or one larger tensor) with an index. Returns the dtype."""
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    total = 0
    dtype = torch.float32

    def flush() -> None:
        shards.append(list(shard))
        save_file(shard, folder / f"model-{len(shards):05d}.safetensors", metadata={"format": "pt"})
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(kept.nbytes for kept in shard.values()) + tensor.nbytes > shard_bytes:
            flush()
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        total, dtype = total + tensor.nbytes, tensor.dtype
    flush()
    if len(shards) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return dtype
    places = {name: f"model-{number:05d}.safetensors" for number, names in enumerate(shards, 1) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return dtype
