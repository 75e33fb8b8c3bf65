"""Checks that draft model, policy and weight manifest fit each other, before vLLM loads a weight.

The checks read only headers and JSON. vLLM's own errors come late, as tracebacks of another process. Some mismatches it
does not reject at all: a tensor that is missing from an update keeps its old value, with only a warning.

Called by preflight and by the engine, at its start and for each new manifest.
"""

from __future__ import annotations

from collections.abc import Iterator

from specrl.errors import EngineFailed, SpecProblem
from specrl.files import JSON_BYTES, read_bytes
from specrl.models import ModelFolder
from specrl.models.model_folder import Shape
from specrl.models.native_heads import find_native_heads
from specrl.records import WeightManifest, WeightOwner

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
# Tensors that a head's folder may contain and an update does not: the inverse of d2t, and the policy's embedding.
DERIVED = {"t2d", "embed_tokens.weight"}
COMPUTED = ".rotary_emb.inv_freq"  # ends the names of buffers that old Llama folders contain, and no update


def find_draft_model_problems(model: ModelFolder, policy: ModelFolder, max_length: int) -> Iterator[SpecProblem]:
    """Report a draft model whose vocabulary, tokenizer or context length does not fit the policy and the run."""
    mine = model.config_number("vocab_size")
    theirs = policy.config_number("vocab_size")
    if mine != theirs:
        yield SpecProblem(
            model.field,
            f"must have the policy's vocab_size, got {mine} in {model.path} and {theirs} in {policy.path}",
            "use a smaller model of the policy's family",
        )
    yield from _find_tokenizer_problems(model, policy)
    longest = model.config_number("max_position_embeddings")
    if longest is not None and longest < max_length:
        yield SpecProblem(
            "model.maxLength",
            f"must be at most the draft model's max_position_embeddings of {longest}, got {max_length}",
            "lower it or use another draft model",
        )


def _find_tokenizer_problems(model: ModelFolder, policy: ModelFolder) -> Iterator[SpecProblem]:
    """Report a draft model with another tokenizer.

    It would draft nonsense, or token ids that the policy does not have.
    """
    if model.vocabulary is not None and policy.vocabulary is not None:
        if model.vocabulary != policy.vocabulary:
            yield SpecProblem(
                model.field,
                "must have the same tokenizer as the policy, got different vocabularies in "
                f"{model.path / 'tokenizer.json'} and {policy.path / 'tokenizer.json'}",
                "use a draft model that was made for this policy",
            )
        return
    # Without tokenizer.json in both folders, compare the files of other tokenizer formats byte by byte.
    both = [name for name in TOKENIZER_FILES if (model.path / name).is_file() and (policy.path / name).is_file()]
    if not any(
        read_bytes(model.path / name, JSON_BYTES) == read_bytes(policy.path / name, JSON_BYTES) for name in both
    ):
        yield SpecProblem(
            model.field,
            f"must come with the policy's tokenizer, got none in {model.path} that equals that of {policy.path}",
            "copy it there if the model was trained with it, else use another model",
        )


def check_manifest(
    manifest: WeightManifest, policy: ModelFolder, drafter: ModelFolder | None, *, uses_heads: bool = False
) -> None:
    """Raise EngineFailed unless the manifest has exactly the tensors that the engine started with.

    drafter: folder of the drafter that the run trains; None if it trains none, or the policy's own heads. uses_heads:
    the replica drafts with the policy's own heads. Otherwise they need not be sent.
    """
    given = {
        owner: {_normalise_layer_name(meta.name): meta.shape for meta in manifest.tensors if meta.owner is owner}
        for owner in WeightOwner
    }
    optional = set() if uses_heads else set(find_native_heads(policy.config, policy.shapes).names)
    _check_shapes("the policy", policy, given[WeightOwner.POLICY], optional)
    if drafter is not None:
        _check_shapes("the drafter", drafter, given[WeightOwner.DRAFTER], DERIVED)
    elif given[WeightOwner.DRAFTER]:
        raise EngineFailed(
            f"the weight manifest has {len(given[WeightOwner.DRAFTER])} tensors of a drafter, but this replica runs "
            "without one that is trained; start trainer and replicas with the same run file"
        )


def _check_shapes(what: str, folder: ModelFolder, given: dict[str, Shape], optional: set[str]) -> None:
    # Some folders store a tied output layer a second time.
    optional = optional | {"lm_head.weight"} if folder.is_tied else optional
    shapes = {name: shape for name, shape in folder.shapes.items() if not name.endswith(COMPUTED)}
    mine = {_normalise_layer_name(name): shape for name, shape in shapes.items()}
    wrong = [
        f"{name} {given.get(name, 'missing')}"
        for name in sorted(mine.keys() | given.keys())
        if mine.get(name) != given.get(name) and name not in optional
    ]
    if wrong:
        raise EngineFailed(
            f"{len(wrong)} tensors of {what} in the weight manifest differ from {folder.path}: {', '.join(wrong[:3])}; "
            "start trainer and replicas from the same folder"
        )


def _normalise_layer_name(name: str) -> str:
    """Normalise the name of a head's layer, which different folders spell `midlayer` or `layers.0`."""
    return name.replace("midlayer.", "layers.0.") if name.startswith("midlayer.") else name
