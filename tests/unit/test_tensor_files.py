"""Every file that is not whole is refused, by name, with what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specrl.errors import CheckpointInvalid
from specrl.tensor_files import read_tensor_shapes


def a_file(folder: Path, header: object, data_bytes: int) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(data_bytes))
    return path


def a_tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_shapes_of_every_dtype_are_read_without_torch(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "float": a_tensor([2, 3], 0, 24),
        "scalar": a_tensor([], 24, 28),
        "nothing": a_tensor([0, 4], 28, 28),
        "bfloat": a_tensor([2], 28, 32, "BF16"),
        "float8": a_tensor([4], 32, 36, "F8_E4M3"),
    }
    file = a_file(tmp_path, header, 36)
    shapes = {"float": (2, 3), "scalar": (), "nothing": (0, 4), "bfloat": (2,), "float8": (4,)}
    assert read_tensor_shapes(file, "the policy") == shapes
    script = (
        "import sys; from pathlib import Path; from specrl.tensor_files import read_tensor_shapes\n"
        f"read_tensor_shapes(Path({str(file)!r}), 'the policy'); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("header", "data_bytes"),
    [
        ({"a": a_tensor([2, 3], 0, 24)}, 23),
        ({"a": a_tensor([2, 3], 0, 24)}, 0),
        ({"a": a_tensor([2, 3], 0, 24)}, 25),
        ({}, 1),
        ({"a": a_tensor([2, 4], 0, 24)}, 24),
        ({"a": a_tensor([2, 3], 0, 24, "F16")}, 24),
        ({"a": a_tensor([2, 3], 8, 32)}, 32),
        ({"a": a_tensor([2, 3], 0, 24), "b": a_tensor([2, 3], 0, 24)}, 24),
        ({"a": a_tensor([-2, -3], 0, 24)}, 24),
        ({"a": a_tensor([2**40, 2**40], 0, 24)}, 24),
        ({"a": a_tensor([2, 3], 24, 0)}, 24),
        ({"a": a_tensor([2, 3], 0, 24, "X9")}, 24),
        ({"a": {"dtype": "F32", "shape": [6]}}, 24),
        ({"a": None}, 0),
        (b"[]", 0),
        (b"no json", 0),
        (b"\xff\xfe", 0),
        (b'{"a":' + b"[" * 10**5, 0),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: object, data_bytes: int) -> None:
    """The shapes, the offsets and the file's length must agree."""
    file = a_file(tmp_path, header, data_bytes)
    with pytest.raises(CheckpointInvalid) as caught:
        read_tensor_shapes(file, "the policy")
    assert str(caught.value).startswith(
        f"the policy must have whole safetensors files, got {file} of {file.stat().st_size} bytes: "
    )
    assert str(caught.value).endswith("; fetch the model again (a Git LFS pointer needs `git lfs pull`)")
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 7, b"\0" * 8, b"\xff" * 64, (10**17).to_bytes(8, "little") + b"{}",
     b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"],
)  # fmt: skip
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointInvalid, match=r"model\.path must have whole safetensors files, got .*git lfs pull"):
        read_tensor_shapes(file, "model.path")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointInvalid, match=r"model\.path must have all its weight files, got .*none\.safetensors: No"
    ):
        read_tensor_shapes(tmp_path / "none.safetensors", "model.path")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(CheckpointInvalid, match="must have all its weight files"):
        read_tensor_shapes(tmp_path / "folder.safetensors", "model.path")
