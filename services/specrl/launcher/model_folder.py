"""What a Hugging Face folder says of itself, read without loading it: JSON files and the headers of safetensors.

A folder that passes is whole: every file is there, every weight file has all its bytes. Called by preflight alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.errors import CheckpointInvalid
from specrl.files import read_object
from specrl.tensor_files import read_tensor_shapes


@dataclass(frozen=True)
class ModelSummary:
    """What preflight checks and estimates memory from.

    tokenizer_size: None where the folder has no tokenizer (a drafter uses the policy's).
    """

    path: Path
    config: dict[str, Any]
    parameters: int
    tokenizer_size: int | None

    def number(self, field: str) -> int | None:
        """A whole number of the config, of its text part, or of the layer that a speculators head is made of."""
        for part in (self.config, *(self.config.get(key) for key in ("text_config", "transformer_layer_config"))):
            if isinstance(part, dict) and isinstance(part.get(field), int):
                return int(part[field])
        return None


def read_model_folder(path: Path, field: str) -> ModelSummary:
    """Check a folder and describe it; `field` is where the run file names it. Raises CheckpointInvalid."""
    if not path.is_dir():
        raise CheckpointInvalid(
            f"{field} must be a Hugging Face folder, got {field}={path}; nothing is downloaded: fetch the model first"
        )
    config = _read_json(path / "config.json", field)
    return ModelSummary(path, config, _count_parameters(path, field), _tokenizer_size(path, field))


def _read_json(path: Path, field: str) -> dict[str, Any]:
    try:
        content = read_object(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not a JSON object ({error})"
        raise CheckpointInvalid(
            f"{field} must have a readable {path.name}, got {path}: {reason}; fetch the model again"
        ) from error
    return content


def _count_parameters(path: Path, field: str) -> int:
    """Numbers in all safetensors of the folder, each file checked against its own header."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        named = _read_json(index, field).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise CheckpointInvalid(f"{field} must have a weight_map of names, got another in {index}; fetch it again")
        files = sorted({path / name for name in named.values()})
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointInvalid(
            f"{field} must have its weights as safetensors, got none in {path}; convert or fetch the model again"
        )
    return sum(math.prod(shape) for file in files for shape in read_tensor_shapes(file, field).values())


def _tokenizer_size(path: Path, field: str) -> int | None:
    """1 + the greatest token id of tokenizer.json (a mapping, or a list of pieces); None without that file."""
    if not (path / "tokenizer.json").exists():
        return None
    content = _read_json(path / "tokenizer.json", field)
    try:
        vocabulary = content.get("model", {}).get("vocab", {})
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in content.get("added_tokens") or []]
    except (AttributeError, TypeError, KeyError) as error:
        raise CheckpointInvalid(
            f"{field} must have a tokenizer with a vocabulary, got another tokenizer.json in {path}: {error!r}; "
            "fetch the model again"
        ) from error
    return 1 + max((number for number in ids if isinstance(number, int)), default=-1)
