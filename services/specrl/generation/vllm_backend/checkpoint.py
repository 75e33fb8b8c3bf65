"""Do policy, drafter and manifest fit each other? Answered from headers and JSON, before vLLM reads a weight.

vLLM's own answers come late, from another process, as a traceback; and some misfits it does not see at all: a tensor
that is missing from an update keeps its old value with a warning. Called by the engine at its start and on each update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.errors import CheckpointInvalid, EngineFailed
from specrl.files import read_object
from specrl.records import WeightManifest, WeightOwner
from specrl.records.weights import ITEM_BYTES
from specrl.tensor_files import read_tensor_shapes

Shape = tuple[int, ...]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
DERIVED = {"t2d", "embed_tokens.weight"}  # of a head: the inverse of d2t, and the policy's own embedding


@dataclass(frozen=True)
class EngineModel:
    """A model that the engine loads: the config and the tensor shapes of its folder. `what` names it in messages."""

    what: str
    path: Path
    config: dict[str, Any]
    shapes: dict[str, Shape]

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all tensors when held in `dtype`."""
        return sum(math.prod(shape) for shape in self.shapes.values()) * ITEM_BYTES[dtype]

    @property
    def is_tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return bool(self.config.get("tie_word_embeddings", False))


def read_policy(path: Path, max_length: int) -> EngineModel:
    """Read the policy's folder. Raises CheckpointInvalid when it is missing or broken, or too short for the run."""
    folder = read_folder("the policy", path, "model.path")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointInvalid(f"the policy must come with its tokenizer, got none in {path}; copy it there")
    longest = folder.config.get("max_position_embeddings")
    if isinstance(longest, int) and longest < max_length:
        raise CheckpointInvalid(
            f"model.maxLength must be at most the policy's max_position_embeddings of {longest}, got {max_length}; "
            "lower it"
        )
    return folder


def read_head(path: Path, policy: EngineModel) -> EngineModel:
    """Read the drafter's folder. Raises CheckpointInvalid when it is broken or belongs to another policy."""
    head = read_folder("the drafter", path, "generation.speculation.eagle3.path")
    for key in ("vocab_size", "hidden_size"):
        mine, theirs = head.config.get(key), policy.config.get(key)
        if key == "hidden_size":
            mine = head.config.get("target_hidden_size", mine)
        if mine != theirs:
            raise CheckpointInvalid(
                f"the drafter must have its policy's {key}, got {mine} in {path} and {theirs} in {policy.path}; "
                "use a head of this policy or initialise a fresh one"
            )
    _check_same_tokenizer(head, policy)
    return head


def read_draft_model(path: Path, policy: EngineModel, max_length: int) -> EngineModel:
    """Read a draft model's folder. Raises CheckpointInvalid unless it speaks the policy's tokens, as far as the run."""
    model = read_folder("the draft model", path, "generation.speculation.draftModel.path")
    mine, theirs = model.config.get("vocab_size"), policy.config.get("vocab_size")
    if mine != theirs:
        raise CheckpointInvalid(
            f"the draft model must have the policy's vocab_size, got {mine} in {path} and {theirs} in {policy.path}; "
            "use a smaller model of the policy's family"
        )
    _require_same_tokenizer(model, policy)
    longest = model.config.get("max_position_embeddings")
    if isinstance(longest, int) and longest < max_length:
        raise CheckpointInvalid(
            f"model.maxLength must be at most the draft model's max_position_embeddings of {longest}, got "
            f"{max_length}; lower it or use another draft model"
        )
    return model


def _require_same_tokenizer(model: EngineModel, policy: EngineModel) -> None:
    """A model that was trained with another tokenizer drafts nonsense, or token ids that the policy does not have."""
    if (model.path / "tokenizer.json").is_file() and (policy.path / "tokenizer.json").is_file():
        _check_same_tokenizer(model, policy)
        return
    both = [name for name in TOKENIZER_FILES if (model.path / name).is_file() and (policy.path / name).is_file()]
    if not any((model.path / name).read_bytes() == (policy.path / name).read_bytes() for name in both):
        raise CheckpointInvalid(
            f"the draft model must come with the policy's tokenizer, got none in {model.path} that equals that of "
            f"{policy.path}; copy it there if the model was trained with it, else use another model"
        )


def _check_same_tokenizer(head: EngineModel, policy: EngineModel) -> None:
    """A head may come without a tokenizer; with one, it must map text to the same ids."""
    mine, theirs = head.path / "tokenizer.json", policy.path / "tokenizer.json"
    if mine.is_file() and theirs.is_file() and _vocabulary(mine) != _vocabulary(theirs):
        raise CheckpointInvalid(
            f"drafter and policy must have the same tokenizer, got different vocabularies in {mine} and {theirs}; "
            "use a drafter that was made for this policy"
        )


def _vocabulary(path: Path) -> tuple[Any, Any]:
    try:
        raw = read_object(path)
        added = [(token["id"], token["content"]) for token in raw.get("added_tokens", [])]
        return raw["model"]["vocab"], sorted(added)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointInvalid(f"a tokenizer must be readable, got {path}: {error}; copy it again") from error


def read_folder(what: str, path: Path, field: str) -> EngineModel:
    """Config and tensor shapes of a Hugging Face folder. Raises CheckpointInvalid; `field` is where to mend it."""
    if not path.is_dir():
        raise CheckpointInvalid(f"{what} must be a Hugging Face folder, got no folder at {path}; check {field}")
    try:
        config = read_object(path / "config.json")
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(
            f"{what} must have a readable config.json, got {path / 'config.json'}: {error}; check {field}"
        ) from error
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointInvalid(f"{what} must have safetensors, got none in {path}; check {field}")
    shapes: dict[str, Shape] = {}
    for file in files:
        shapes.update(read_tensor_shapes(file, what))
    _check_index(what, path, shapes)
    return EngineModel(what, path, config, shapes)


def _check_index(what: str, path: Path, shapes: dict[str, Shape]) -> None:
    """A sharded checkpoint lists its tensors; one that lacks a shard is incomplete."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        listed = read_object(index)["weight_map"].keys()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointInvalid(f"{what} must have a readable index, got {index}: {error}; copy it again") from error
    missing = sorted(listed - shapes.keys())
    if missing:
        raise CheckpointInvalid(
            f"{what} must have every tensor of its index, got {len(missing)} missing in {path}, {missing[0]} among "
            "them; copy the folder again"
        )


def check_manifest(manifest: WeightManifest, policy: EngineModel, head: EngineModel | None) -> None:
    """Raise EngineFailed unless the manifest has exactly the tensors that the engine was started with."""
    given = {
        owner: {_plain(meta.name): meta.shape for meta in manifest.tensors if meta.owner is owner}
        for owner in WeightOwner
    }
    _check_shapes(policy, given[WeightOwner.POLICY], {"lm_head.weight"} if policy.is_tied else set())
    if head is not None:
        _check_shapes(head, given[WeightOwner.DRAFTER], DERIVED)
    elif given[WeightOwner.DRAFTER]:
        raise EngineFailed(
            f"an update must hold no drafter but one of speculation by eagle3, got {len(given[WeightOwner.DRAFTER])} "
            "tensors; trainer and replicas must run the same run file"
        )


def _check_shapes(folder: EngineModel, given: dict[str, Shape], optional: set[str]) -> None:
    mine = {_plain(name): shape for name, shape in folder.shapes.items()}
    wrong = [
        f"{name} {given.get(name, 'missing')}"
        for name in sorted(mine.keys() | given.keys())
        if mine.get(name) != given.get(name) and name not in optional
    ]
    if wrong:
        raise EngineFailed(
            f"an update must hold {folder.what}'s tensors as in {folder.path}, got {len(wrong)} that differ: "
            f"{', '.join(wrong[:3])}; trainer and replicas must start from the same folder"
        )


def _plain(name: str) -> str:
    """One name for the layer of a head, which folders write in two ways."""
    return name.replace("midlayer.", "layers.0.") if name.startswith("midlayer.") else name
