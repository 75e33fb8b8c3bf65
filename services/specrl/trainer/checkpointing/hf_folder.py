"""Writes a policy as a Hugging Face folder: new weights, everything else copied from the folder that it came from.

Heads for multi-token prediction that were not trained are copied, too, and README.md says so
(`models/native_heads.py`).
Called by the backend's `weight_sender.py` and `checkpoint.py`, and by `checkpoint_export`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from specrl.files import write_folder
from specrl.models.native_heads import NativeHeads, find_native_heads, lower_head_counts
from specrl.tensor_files import INDEX, FolderReader, copy_all_but_weights, save_tensors

SHARD_BYTES = 4 << 30  # size of a weight file, and so of the host memory that writing one needs
README = "README.md"
_HEADS_TITLE = "## Heads for multi-token prediction (written by specrl)"


def write_policy_folder(target: Path, source: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write the policy into `target` atomically. An existing folder is replaced.

    source: the folder whose config, tokenizer and other files are copied. tensors: (Hugging Face name, full tensor);
    consumed one at a time. Raises OSError, SafetensorError, CheckpointInvalid.
    """
    with write_folder(target) as scratch:
        copy_all_but_weights(source, scratch)
        config = json.loads((scratch / "config.json").read_text(encoding="utf-8"))
        reader = FolderReader(source)
        heads = find_native_heads(config, reader.list_names())
        copies = ((name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in tensors)
        kept = list[str]()
        shards = write_shards(scratch, "model", _add_heads(copies, heads, reader, kept), SHARD_BYTES)
        files = set(shards.places.values())
        if len(files) == 1:
            (scratch / files.pop()).rename(scratch / "model.safetensors")
        else:
            write_index(scratch, shards.places, shards.size_bytes)
        _describe_heads(scratch / README, heads, is_kept=bool(kept))
        if heads.missing:
            config = lower_head_counts(config, heads.present)
        config.pop("torch_dtype", None)  # the older name of the field
        config["dtype"] = shards.dtype
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)


def _add_heads(
    tensors: Iterable[tuple[str, torch.Tensor]], heads: NativeHeads, reader: FolderReader, kept: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `tensors`, then the tensors of heads that were not among them, from the source, in the policy's dtype.

    kept: gets the names of the latter.
    """
    written = set[str]()
    dtype = torch.float32
    for name, tensor in tensors:
        written.add(name)
        dtype = tensor.dtype
        yield name, tensor
    for name in heads.names:
        if name not in written:
            kept.append(name)
            yield name, reader.read_tensor(name).to(dtype)


def _describe_heads(readme: Path, heads: NativeHeads, *, is_kept: bool) -> None:
    """Write what became of the heads into README.md, in place of what an earlier export wrote."""
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.exists() else ""
    before, title, _ = text.partition(_HEADS_TITLE)
    said = [heads.describe_kept()] if is_kept else []
    said += [heads.describe_dropped()] if heads.missing else []
    if said or title:
        parts = [before.rstrip(), *([_HEADS_TITLE, *(f"{line}." for line in said)] if said else [])]
        readme.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class WrittenShards:
    """Tensors in files of one folder. places: the file of each tensor, by name. size_bytes: of all of them."""

    places: dict[str, str]
    size_bytes: int
    dtype: str


def write_shards(
    folder: Path, stem: str, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int
) -> WrittenShards:
    """Write files STEM-00001.safetensors and so on. Each has at most `shard_bytes`, or a single larger tensor.

    tensors: on the host, contiguous, none sharing memory with another, as safetensors requires.
    """
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    files = 0
    total = 0
    dtype = "float32"

    def write_shard() -> None:
        file = f"{stem}-{files:05d}.safetensors"
        save_tensors(shard, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in tensors:
        if not shard or sum(kept.nbytes for kept in shard.values()) + tensor.nbytes > shard_bytes:
            if shard:
                write_shard()
            files += 1
        shard[name] = tensor
        total = total + tensor.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
    if shard:
        write_shard()
    return WrittenShards(places, total, dtype)


def write_index(folder: Path, places: Mapping[str, str], size_bytes: int) -> None:
    """Write the index that says which file each tensor is in, in Hugging Face's format."""
    index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(places)}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
