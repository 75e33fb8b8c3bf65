"""Reads the header of a GGUF file: its metadata, and type, shape and place of every tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The reader of the
package gguf is not used: it loops as often as a count in the file says, also beyond the file's end (0.19.0,
`_get_field_parts`). Here every count is compared with the bytes that are left before it is believed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from specrl.files import open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 1 had counts of 32 bits, and is no longer written

HEADER_BYTES = 256 << 20
"""Limit of metadata and tensor table. The largest tokenizers take 10 MB, and a tensor's entry about 80 bytes."""

MOST_ENTRIES = 1 << 20
"""Limit of metadata keys, and of tensors. Files have tens of keys and at most some thousand tensors."""

MOST_DIMENSIONS = 4
"""As GGML_MAX_DIMS of ggml."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_SHORTEST_STRING = 8  # bytes of its length

DOWNLOAD_AGAIN = "download the file again"


class GgufInvalid(ValueError):
    """A GGUF file that cannot be converted. remedy: what to do."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's entry. shape: rows first, as in PyTorch. offset: of its first byte in the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The content of a GGUF file without its tensors' values."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Read and check a header, and that the file has every tensor whole. Raises OSError and GgufInvalid."""
    with open_regular(path) as file:
        return _HeaderReader(file, path.stat().st_size).read()


class _HeaderReader:
    """Reads a file from its start. Every read checks the bytes that are left."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._at = 0

    def read(self) -> GgufHeader:
        if self._take(len(MAGIC), "its magic") != MAGIC:
            raise GgufInvalid("it does not begin with GGUF", f"{DOWNLOAD_AGAIN} (a Git LFS pointer needs git lfs pull)")
        version = self._number("I", "its version")
        if version & 0xFFFF == 0:
            raise GgufInvalid("it is big-endian", "use the file for little-endian machines")
        if version not in VERSIONS:
            raise GgufInvalid(f"it has version {version}, and known are 2 and 3", "use a file of another version")
        num_tensors = self._count(_SHORTEST_STRING, "the number of tensors")
        num_keys = self._count(_SHORTEST_STRING, "the number of metadata keys")
        metadata = dict[str, Any]()
        for _ in range(num_keys):
            key = self._text("a metadata key")
            if key in metadata:
                raise GgufInvalid(f"it has {key} twice", DOWNLOAD_AGAIN)
            metadata[key] = self._value(self._number("I", key), key)
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise GgufInvalid(f"general.alignment must be a power of two, got {alignment!r}", DOWNLOAD_AGAIN)
        start = -(-self._at // alignment) * alignment
        tensors = [self._place_tensor(entry, start) for entry in entries]
        self._check_places(tensors)
        return GgufHeader(metadata, {tensor.name: tensor for tensor in tensors})

    def _take(self, count: int, what: str) -> bytes:
        if count > self._size - self._at:
            raise GgufInvalid(f"it is cut short: it has {self._size} bytes, and {what} ends later", DOWNLOAD_AGAIN)
        if self._at + count > HEADER_BYTES:
            raise GgufInvalid(
                f"its header is larger than {HEADER_BYTES >> 20} MiB", "use another file, or the original model"
            )
        self._at += count
        content = self._file.read(count)
        if len(content) != count:  # another program is cutting it right now
            raise GgufInvalid(f"it is cut short in {what}", DOWNLOAD_AGAIN)
        return content

    def _number(self, code: str, what: str) -> Any:
        found = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}"), what))[0]
        # The shortest decimal that stands for the same float32: 1e-05 instead of 9.999999747378752e-06.
        return float(str(np.float32(found))) if code == "f" else found

    def _count(self, item_bytes: int, what: str, most: int = MOST_ENTRIES) -> int:
        count: int = self._number("Q", what)
        if count * item_bytes > self._size - self._at:
            raise GgufInvalid(f"it is cut short: {what} is {count}, for which it has too few bytes", DOWNLOAD_AGAIN)
        if count > most:
            raise GgufInvalid(f"{what} is {count}, more than {most}", "use another file, or the original model")
        return count

    def _text(self, what: str) -> str:
        content = self._take(self._count(1, f"the length of {what}", HEADER_BYTES), what)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GgufInvalid(f"{what} is not UTF-8", DOWNLOAD_AGAIN) from error

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], key)
        if kind != _ARRAY:
            raise GgufInvalid(f"{key} is of the unknown type {kind}", "use another file, or the original model")
        item = self._number("I", key)
        if item == _STRING:
            return [self._text(key) for _ in range(self._count(_SHORTEST_STRING, f"the length of {key}"))]
        if item not in _SCALARS:  # lists of lists are in no file of the families that are converted
            raise GgufInvalid(f"{key} is a list of the type {item}", "use another file, or the original model")
        item_bytes = struct.calcsize(f"<{_SCALARS[item]}")
        count = self._count(item_bytes, f"the length of {key}", HEADER_BYTES)
        return [*struct.unpack(f"<{count}{_SCALARS[item]}", self._take(count * item_bytes, key))]

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read name, shape, type and offset of a tensor."""
        name = self._text("a tensor's name")
        num_dimensions = self._number("I", name)
        if not 1 <= num_dimensions <= MOST_DIMENSIONS:
            raise GgufInvalid(f"{name} has {num_dimensions} dimensions", DOWNLOAD_AGAIN)
        dimensions = tuple(self._number("Q", name) for _ in range(num_dimensions))
        return name, dimensions[::-1], self._number("I", name), self._number("Q", name)

    def _place_tensor(self, entry: tuple[str, tuple[int, ...], int, int], start: int) -> GgufTensor:
        """Check type, shape and place of a tensor. start: of all tensors in the file."""
        name, shape, number, offset = entry
        if number not in {int(kind) for kind in GGMLQuantizationType}:
            raise GgufInvalid(f"{name} is of the unknown type {number}", "use a file of another quantisation")
        kind = GGMLQuantizationType(number)
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        num_values = math.prod(shape)
        if num_values == 0 or shape[-1] % block_size:
            raise GgufInvalid(f"{name} of type {kind.name} has the shape {list(shape)}", DOWNLOAD_AGAIN)
        tensor = GgufTensor(name, kind, shape, start + offset, num_values // block_size * block_bytes)
        if tensor.offset + tensor.num_bytes > self._size:
            raise GgufInvalid(f"it is cut short: it has {self._size} bytes, and {name} ends later", DOWNLOAD_AGAIN)
        return tensor

    @staticmethod
    def _check_places(tensors: list[GgufTensor]) -> None:
        """Refuse tensors that share a name or bytes. A small file could otherwise stand for any number of bytes."""
        names = set[str]()
        end = 0
        for tensor in sorted(tensors, key=lambda it: it.offset):
            if tensor.name in names or tensor.offset < end:
                raise GgufInvalid(f"it has {tensor.name} twice, or within another tensor", DOWNLOAD_AGAIN)
            names.add(tensor.name)
            end = tensor.offset + tensor.num_bytes
