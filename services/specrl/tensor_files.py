"""Shapes of the tensors in a safetensors file, without reading the tensors and without torch.

Called before a run by the launcher and at its start by the engine, so both refuse the same files: what is cut, too long
or empty, a Git LFS pointer, and a header that contradicts itself or the file's length.
"""

from __future__ import annotations

from pathlib import Path

from specrl.errors import CheckpointInvalid


def read_tensor_shapes(file: Path, owner: str) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor by its name. `owner` names the model in the error.

    Raises CheckpointInvalid for a file that is not there, not whole or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open  # here, since a run that reads no model needs no NumPy either

    try:
        with safe_open(file, framework="np") as tensors:  # checks the header against the file's length
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except OSError as error:
        raise CheckpointInvalid(
            f"{owner} must have all its weight files, got {file}: {error.strerror or error}; fetch the model again"
        ) from error
    except SafetensorError as error:
        raise CheckpointInvalid(
            f"{owner} must have whole safetensors files, got {file} of {file.stat().st_size} bytes: {error}; "
            "fetch the model again (a Git LFS pointer needs `git lfs pull`)"
        ) from error
