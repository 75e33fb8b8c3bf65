"""Converts a GGUF file to an ordinary model folder.

Matrices of float32, float16 and bfloat16 keep their values and their type. Quantised ones become float32: the values
that the file stands for, which are not those of the model before it was quantised. Called by `hub/gguf_models.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGMLQuantizationType, dequantize
from safetensors import TensorSpec, serialize_file

from specrl.errors import CheckpointInvalid
from specrl.files import open_regular
from specrl.models.gguf_files.architecture import (
    ROPE_FACTORS,
    PlannedTensor,
    build_config,
    describe_kinds,
    plan_tensors,
    restore_rows,
)
from specrl.models.gguf_files.header import DOWNLOAD_AGAIN, GgufHeader, GgufInvalid, GgufTensor, read_header
from specrl.models.gguf_files.tokenizer_files import TokenizerFiles, build_tokenizer
from specrl.models.policy_config import parse_policy_config
from specrl.tensor_files import INDEX

FILE_BYTES = 2 << 30
"""About the size of a file of weights. So many bytes are in memory at once."""

# Types whose values are kept as they are: their name in safetensors, and numpy's type for their bytes.
_KEPT: dict[GGMLQuantizationType, tuple[str, np.dtype[Any]]] = {
    GGMLQuantizationType.F32: ("float32", np.dtype("<f4")),
    GGMLQuantizationType.F16: ("float16", np.dtype("<f2")),
    GGMLQuantizationType.BF16: ("bfloat16", np.dtype("<u2")),  # numpy has no bfloat16
}


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file that has been checked. Nothing of its weights has been read. kinds: types of its matrices."""

    path: Path
    kinds: str
    config: dict[str, Any]
    tokenizer: TokenizerFiles
    tensors: tuple[PlannedTensor, ...]
    num_bytes: int


def read_gguf(path: Path, field: str) -> GgufModel:
    """Check a GGUF file. field: names it in messages.

    Raises CheckpointInvalid for a file that cannot be converted, or that holds a model that specrl cannot train.
    """
    try:
        header = read_header(path)
        config = build_config(header, _read_rope_factors(path, header))
        planned = plan_tensors(header, config)
        _check_kinds(planned)
        config["dtype"] = _choose_dtype(planned)
        tokenizer = build_tokenizer(header.metadata, config["vocab_size"])
    except GgufInvalid as error:
        raise CheckpointInvalid(
            f"{field} must be a GGUF file that specrl can convert, got {path}: {error}; {error.remedy}"
        ) from error
    except OSError as error:
        raise CheckpointInvalid(
            f"{field} must be a readable GGUF file, got {path}: {error.strerror or error}; check the path"
        ) from error
    config |= tokenizer.numbers
    parse_policy_config(config, path)
    size = sum(_output_bytes(it) for it in planned)
    return GgufModel(path, describe_kinds(header), config, tokenizer, tuple(planned), size)


def write_small_files(model: GgufModel, folder: Path) -> None:
    """Write config and tokenizer. Raises OSError."""
    contents = {
        "config.json": model.config,
        "tokenizer_config.json": model.tokenizer.tokenizer_config,
        "generation_config.json": model.tokenizer.generation_config,
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(model.tokenizer.tokenizer, encoding="utf-8")


def write_weights(model: GgufModel, folder: Path, on_bytes: Callable[[int], None]) -> None:
    """Write the weights, and an index if there are several files.

    on_bytes: is called with the number of bytes of the GGUF file that have been read since. Raises OSError, and
    CheckpointInvalid if the file has become shorter.
    """
    groups = [*_group_tensors(model.tensors)]
    index = dict[str, str]()
    with open_regular(model.path) as file:
        for number, group in enumerate(groups, 1):
            name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            values = dict[str, tuple[str, np.ndarray]]()
            for planned in group:
                values |= _convert_tensor(file, planned, model.path)
                on_bytes(planned.source.num_bytes)
            _write_file(folder / name, values)
            index |= dict.fromkeys(values, name)
    if len(groups) > 1:
        content = {"metadata": {"total_size": model.num_bytes}, "weight_map": index}
        (folder / INDEX).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _read_rope_factors(path: Path, header: GgufHeader) -> np.ndarray | None:
    """Read Llama 3's divisors of rotary frequencies; None if the file has none."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.kind is not GGMLQuantizationType.F32 or len(tensor.shape) != 1:
        raise GgufInvalid(f"{ROPE_FACTORS} must be a list of float32", DOWNLOAD_AGAIN)
    with open_regular(path) as file:
        factors = _read_values(file, tensor).view("<f4")
    if not np.all(np.isfinite(factors)) or not np.all(factors >= 1):
        raise GgufInvalid(f"{ROPE_FACTORS} must have numbers of at least 1", DOWNLOAD_AGAIN)
    return factors


def _check_kinds(planned: list[PlannedTensor]) -> None:
    """Raise GgufInvalid for a quantisation that the package gguf cannot undo."""
    for kind in dict.fromkeys(it.source.kind for it in planned):
        example = next(it.source for it in planned if it.source.kind is kind)
        # One row of zeros has the bytes of a real one.
        row = np.zeros((1, example.num_bytes * example.shape[-1] // _num_values(example)), np.uint8)
        try:
            dequantize(row, kind)
        except NotImplementedError as error:
            raise GgufInvalid(
                f"{example.name} is of the type {kind.name}, which cannot be read", "use another quantisation"
            ) from error


def _num_values(tensor: GgufTensor) -> int:
    return math.prod(tensor.shape)


def _choose_dtype(planned: list[PlannedTensor]) -> str:
    """Choose config.json's dtype: that of the matrices if they all have one, else float32."""
    kinds = {it.source.kind for it in planned if len(it.source.shape) > 1}
    only = kinds.pop() if len(kinds) == 1 else None
    return _KEPT[only][0] if only in _KEPT else "float32"


def _output_bytes(planned: PlannedTensor) -> int:
    """Return the size of a tensor in the folder."""
    itemsize = _KEPT[planned.source.kind][1].itemsize if planned.source.kind in _KEPT else 4
    return _num_values(planned.source) * itemsize


def _group_tensors(tensors: tuple[PlannedTensor, ...]) -> Iterator[list[PlannedTensor]]:
    """Yield the tensors of each file."""
    group = list[PlannedTensor]()
    size = 0
    for tensor in tensors:
        if group and size + _output_bytes(tensor) > FILE_BYTES:
            yield group
            group = []
            size = 0
        group.append(tensor)
        size += _output_bytes(tensor)
    yield group


def _read_values(file: BinaryIO, tensor: GgufTensor) -> np.ndarray:
    """Read the bytes of a tensor."""
    file.seek(tensor.offset)
    content = np.fromfile(file, np.uint8, tensor.num_bytes)
    if len(content) != tensor.num_bytes:
        raise GgufInvalid(f"it is cut short in {tensor.name}", DOWNLOAD_AGAIN)
    return content


def _convert_tensor(file: BinaryIO, planned: PlannedTensor, path: Path) -> Iterator[tuple[str, tuple[str, np.ndarray]]]:
    """Yield name, type in safetensors and values of each tensor that a tensor of the file becomes."""
    source = planned.source
    try:
        content = _read_values(file, source)
    except GgufInvalid as error:
        raise CheckpointInvalid(f"{path} must not change while it is converted: {error}; {error.remedy}") from error
    if source.kind in _KEPT:
        dtype, number_type = _KEPT[source.kind]
        values = content.view(number_type).reshape(source.shape)
    else:
        dtype = "float32"
        rows = content.reshape(*source.shape[:-1], -1)
        with np.errstate(all="ignore"):  # a damaged file may have scales that are no numbers, as any weights may
            values = dequantize(rows, source.kind).reshape(source.shape)
    if planned.heads:
        values = restore_rows(values, planned.heads)
    # A layer's experts are one tensor in the file, and one each in the folder.
    parts: Iterable[np.ndarray] = values if len(planned.shape) < len(source.shape) else [values]
    for name, part in zip(planned.names, parts, strict=True):
        yield name, (dtype, np.ascontiguousarray(part))


def _write_file(path: Path, values: dict[str, tuple[str, np.ndarray]]) -> None:
    """Write a safetensors file. safetensors' own function for numpy does not know bfloat16."""
    specs = {
        name: TensorSpec(dtype=dtype, shape=list(part.shape), data_ptr=part.ctypes.data, data_len=part.nbytes)
        for name, (dtype, part) in values.items()
    }
    path.touch()
    mode = path.stat().st_mode  # by the process's umask
    serialize_file(specs, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors makes files that only their owner can read
