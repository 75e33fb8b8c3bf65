"""Describes one Hugging Face model folder from its JSON files and safetensors headers. No weight is loaded.

Reading a folder also checks that it is complete. Every file must exist, every weight file must have all its bytes, and
every tensor of the index must be in one of the weight files.

Called by `run_models`, and by a replica for the untrained head that it writes at its start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specrl.errors import CheckpointInvalid
from specrl.files import read_object
from specrl.models.policy_config import PolicyConfig, parse_policy_config
from specrl.tensor_files import check_folder, locate_tensors, read_tensor_shapes

Shape = tuple[int, ...]
# Config fields with the number of heads for multi-token prediction; model families name it differently.
HEADS_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer.json.

    pieces: the base vocabulary, either a mapping from text to token id or a list in id order.
    added: (id, text) of each added token, sorted by id.
    """

    pieces: Mapping[str, int] | list[Any]
    added: tuple[tuple[int, str], ...]

    @property
    def size(self) -> int:
        """One more than the greatest token id; 0 for an empty vocabulary."""
        # Not the number of tokens: ids may have gaps, and the embedding must have a row for the greatest of them.
        ids = self.pieces.values() if isinstance(self.pieces, Mapping) else range(len(self.pieces))
        return 1 + max((it for it in (*ids, *(it for it, _ in self.added)) if isinstance(it, int)), default=-1)


@dataclass(frozen=True)
class ModelFolder:
    """One model on disk, described without its weights.

    field: the run file's field that names the folder, for error messages.
    config: the content of config.json. shapes: each tensor's shape, by tensor name.
    vocabulary: None if the folder has no tokenizer.json, as is usual for an EAGLE-3 drafter.
    """

    path: Path
    field: str
    config: dict[str, Any]
    shapes: Mapping[str, Shape]
    vocabulary: Vocabulary | None

    @property
    def num_parameters(self) -> int:
        """Number of parameters in all tensors. A tied output layer is not stored, so it is not counted."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def is_tied(self) -> bool:
        """Whether the output layer shares the embedding's tensor."""
        return bool(self.config.get("tie_word_embeddings", False))

    @property
    def num_mtp_heads(self) -> int:
        """Number of heads for multi-token prediction that config.json names, of any family; 0 without such a field."""
        return next(filter(None, map(self.config_number, HEADS_FIELDS)), 0)

    @cached_property
    def policy_config(self) -> PolicyConfig:
        """The config as the trainer needs it. Raises CheckpointInvalid for a model that the trainer cannot train."""
        return parse_policy_config(self.config, self.path)

    def config_number(self, name: str) -> int | None:
        """Look up an integer field of config.json; None if it is absent.

        Multimodal models nest their language model's fields in `text_config`. Heads in the speculators layout nest
        their decoder layer's in `transformer_layer_config`.
        """
        for part in (self.config, *(self.config.get(key) for key in ("text_config", "transformer_layer_config"))):
            if isinstance(part, dict) and isinstance(part.get(name), int):
                return int(part[name])
        return None


def read_model_folder(path: Path, field: str) -> ModelFolder:
    """Check a folder and describe it. Raises CheckpointInvalid if it is missing, incomplete or malformed.

    field: the run file's field that names the folder.
    """
    if not path.is_dir():
        raise CheckpointInvalid(
            f"{field} must be a Hugging Face folder, got {path}; name an existing one, or fetch a model "
            "on the hub with `specrl fetch OWNER/NAME` or convert a GGUF file with `specrl fetch FILE` (docs/hub.md)"
        )
    check_folder(path, field)
    config = _read_json(path / "config.json", field)
    return ModelFolder(path, field, config, _read_shapes(path, field), _read_vocabulary(path, field))


def has_chat_template(folder: Path) -> bool:
    """Whether the folder's tokenizer has a chat template."""
    if (folder / "chat_template.jinja").exists():
        return True
    try:
        return "chat_template" in read_object(folder / "tokenizer_config.json")
    except (OSError, ValueError):  # none, or a broken one, which the tokenizer's loader reports
        return False


def _read_json(path: Path, field: str) -> dict[str, Any]:
    try:
        content = read_object(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not a JSON object ({error})"
        raise CheckpointInvalid(
            f"{field} must have a readable {path.name}, got {path}: {reason}; fetch the model again"
        ) from error
    return content


def _read_shapes(path: Path, field: str) -> dict[str, Shape]:
    """Read the shape of every tensor. Checks each file's size against its header, and all files against the index."""
    places = locate_tensors(path, field)
    shapes: dict[str, Shape] = {}
    for file in sorted(set(places.values())):
        shapes |= read_tensor_shapes(path / file, field)
    missing = sorted(places.keys() - shapes.keys())
    if missing:
        raise CheckpointInvalid(
            f"{field} must have every tensor of its index, got {len(missing)} missing in {path}, {missing[0]} among "
            "them; fetch the model again"
        )
    return shapes


def _read_vocabulary(path: Path, field: str) -> Vocabulary | None:
    if not (path / "tokenizer.json").exists():
        return None
    content = _read_json(path / "tokenizer.json", field)
    try:
        # WordPiece and BPE store a mapping, Unigram a list of [text, score].
        pieces = content.get("model", {}).get("vocab", {})
        if not isinstance(pieces, dict | list):
            raise TypeError(f"vocab is a {type(pieces).__name__}")
        added = sorted((token["id"], token["content"]) for token in content.get("added_tokens") or [])
    except (AttributeError, TypeError, KeyError) as error:
        raise CheckpointInvalid(
            f"{field} must have a tokenizer with a vocabulary, got a malformed tokenizer.json in {path}: {error!r}; "
            "fetch the model again"
        ) from error
    return Vocabulary(pieces, tuple(added))
