"""Writes a policy as an ordinary Hugging Face folder: weights anew, everything else copied from where it came from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
    config["dtype"] = dtype
    (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)


@dataclass(frozen=True)
class Shards:
    """Tensors in files of one folder: the file of each, and their size."""

    places: dict[str, str]
    size_bytes: int
    dtype: str


def write_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> str:
    """Write one file, or shards with an index. Returns the dtype."""
    copies = ((name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in tensors)
    shards = write_shards(folder, "model", copies, shard_bytes)
    files = set(shards.places.values())
    if len(files) == 1:
        (folder / files.pop()).rename(folder / "model.safetensors")
    else:
        write_index(folder, shards.places, shards.size_bytes)
    return shards.dtype


def write_shards(folder: Path, stem: str, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> Shards:
    """Write files STEM-00001.safetensors and so on, of at most `shard_bytes`, or one larger tensor.

    tensors: contiguous on the host, each with memory of its own, which stay as they are.
    """
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    files, total, dtype = 0, 0, "float32"

    def flush() -> None:
        file = f"{stem}-{files:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in tensors:
        if not shard or sum(kept.nbytes for kept in shard.values()) + tensor.nbytes > shard_bytes:
            if shard:
                flush()
            files += 1
        shard[name] = tensor
        total, dtype = total + tensor.nbytes, str(tensor.dtype).removeprefix("torch.")
    if shard:
        flush()
    return Shards(places, total, dtype)


def write_index(folder: Path, places: Mapping[str, str], size_bytes: int) -> None:
    """Say which file each tensor is in, as Hugging Face does."""
    index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(places)}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
