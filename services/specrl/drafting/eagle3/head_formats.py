"""Reads published EAGLE-3 heads into our module, checks them against the policy, and writes their layouts.

    eagle3        the EAGLE authors, SpecForge, vLLM: LlamaForCausalLMEagle3; midlayer.* or layers.0.*; also as .bin
    speculators   the vLLM project's library: speculators_model_type eagle3, transformer_layer_config; layers.0.*

A head reads the policy's hidden states and embedding, so it fits exactly one policy. A head that our module would
compute differently from how it was trained is rejected; the error lists every mismatch.

Called by `convert.py`, which `specrl drafter import` and `export` run. Layouts as of speculators 0.9.0 and vLLM 0.32.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from specrl.drafting.eagle3.head import (
    ARCHITECTURE,
    CONFIG,
    WEIGHTS,
    Eagle3Head,
    HeadConfig,
    build_folder_config,
    read_head_config,
    write_folder,
)
from specrl.errors import CheckpointInvalid, SpecrlError
from specrl.files import check_regular, read_object
from specrl.models.policy_config import PolicyConfig, find_rope_problems
from specrl.tensor_files import FolderReader, load_tensors

PICKLED = "pytorch_model.bin"
_ARCHITECTURES = ([ARCHITECTURE], ["Eagle3LlamaForCausalLM"])  # two names of one module
SPECULATORS_VERSION = "0.9.0"
_REMEDY = "use a head of this policy, or initialise a fresh one with `specrl drafter init`"


@dataclass(frozen=True)
class PublishedHead:
    """The content of a published head's folder.

    layer: config of the decoder layer. fields: config of the head; the same as `layer` in the eagle3 layout.
    tensors: by the names of our module.
    """

    layer: dict[str, Any]
    fields: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def read_published_head(directory: Path, policy: PolicyConfig) -> tuple[Eagle3Head, torch.dtype]:
    """Read a published head; returns our module and the head's stored precision.

    Raises CheckpointInvalid with every mismatch between head and policy.
    """
    found = _read_folder(directory)
    config = read_head_config(found.fields, found.layer, policy)
    wrong = list(_find_mismatches(found, config))
    if wrong:
        raise CheckpointInvalid(f"the drafter must fit its policy, got {directory}: {'; '.join(wrong)}; {_REMEDY}")
    head = Eagle3Head(config)
    tensors = {name: tensor for name, tensor in found.tensors.items() if name not in _DERIVED}
    if not config.is_reduced:
        tensors.pop("d2t", None)  # the identity, where a head stores it
    head.load_tensors(tensors)
    return head, found.tensors["fc.weight"].dtype


# Tensors that follow from others or belong to the policy.
_DERIVED = {"t2d", "embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}


def _read_folder(directory: Path) -> PublishedHead:
    try:
        raw = read_object(directory / CONFIG)
        tensors = {_our_name(name): tensor for name, tensor in _load_tensors(directory)}
    except SpecrlError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        raise CheckpointInvalid(
            f"the drafter must be a folder with {CONFIG} and safetensors or {PICKLED}, got {directory}: {error}; "
            "specrl downloads nothing: fetch the head first"
        ) from error
    if raw.get("speculators_model_type") is not None:
        return PublishedHead(raw.get("transformer_layer_config") or {}, raw, tensors)
    return PublishedHead(raw, raw, tensors)


def _load_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if (directory / WEIGHTS).is_file():
        yield from load_tensors(directory / WEIGHTS).items()
        return
    if (directory / PICKLED).exists() or not any(directory.glob("*.safetensors")):
        check_regular(directory / PICKLED)
        # weights_only: a pickle from the internet must not run code.
        yield from torch.load(directory / PICKLED, map_location="cpu", weights_only=True).items()
        return
    yield from FolderReader(directory, "the drafter").read_all().items()


def _our_name(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")


def _find_mismatches(found: PublishedHead, config: HeadConfig) -> Iterator[str]:
    """Describe everything about a head that does not fit the policy or that our module cannot compute."""
    yield from _find_unsupported_fields(found)
    policy = config.policy
    layer = found.layer
    tensors = found.tensors
    for key, mine in (("hidden_size", policy.hidden_size), ("vocab_size", policy.vocab_size)):
        if layer.get(key) not in (None, mine):
            yield f"{key} must be the policy's {mine}, got {layer[key]}"
    target = found.fields.get("target_hidden_size")
    if target not in (None, policy.hidden_size):
        yield f"target_hidden_size must be the policy's {policy.hidden_size}, got {target}"
    aux = config.aux_layers
    if list(aux) != sorted(set(aux)) or not aux or min(aux) < 0 or max(aux) > policy.num_layers:
        yield f"auxiliary layers must be distinct, ascending and at most the policy's {policy.num_layers}, got {aux}"
    width = len(aux) * policy.hidden_size
    if "fc.weight" not in tensors:
        yield "fc.weight must be given, got none"
    elif tensors["fc.weight"].shape[1] != width:
        yield f"fc must take {len(aux)} x {policy.hidden_size} columns, got {tensors['fc.weight'].shape[1]}"
    yield from _find_vocabulary_mismatches(tensors, config.draft_vocab_size, policy.vocab_size)
    embedding = tensors.get("embed_tokens.weight")
    if embedding is not None and not _equals_policy_tensor(embedding, "model.embed_tokens.weight", policy):
        yield "embed_tokens must be the policy's embedding, got another one"
    lm_head = tensors.get("lm_head.weight")
    theirs = "model.embed_tokens.weight" if policy.is_tied else "lm_head.weight"
    if lm_head is not None and _equals_policy_tensor(lm_head, theirs, policy):
        # Otherwise the first drafter update would overwrite the policy's output layer.
        yield "lm_head must be the head's own, got the policy's, which vLLM would share with it"


def _find_unsupported_fields(found: PublishedHead) -> Iterator[str]:
    fields = found.fields
    layer = found.layer
    kind = fields.get("speculators_model_type")
    named = fields.get("architectures")
    # The EAGLE authors name the family of the layer, and sometimes the policy's depth. The tensors say what it is.
    is_authors = kind is None and named == ["LlamaForCausalLM"] and _is_head(found)
    checks: list[tuple[str, object, bool, str]] = [
        ("speculators_model_type", kind, kind in (None, "eagle3"), "eagle3"),
        ("architectures", named, kind is not None or is_authors or named in _ARCHITECTURES, ARCHITECTURE),
        ("model_type", layer.get("model_type"), layer.get("model_type", "llama") == "llama", "llama"),
        (
            "num_hidden_layers",
            layer.get("num_hidden_layers"),
            is_authors or layer.get("num_hidden_layers", 1) == 1,
            "1",
        ),
        ("hidden_act", layer.get("hidden_act"), layer.get("hidden_act", "silu") == "silu", "silu"),
        ("sliding_window", layer.get("sliding_window"), not layer.get("use_sliding_window"), "null"),
    ]
    for flag in ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias"):
        value = fields.get(flag) or layer.get(flag) or (fields.get("eagle_config") or {}).get(flag)
        checks.append((flag, value, not value, "false"))
    if kind is not None and "norm_before_residual" not in fields:
        # The two libraries disagree on the default, so the folder alone does not say how the head was trained.
        yield "norm_before_residual must be given (speculators defaults to false, vLLM to true), got none"
    for name, value, is_right, rule in checks:
        if not is_right:
            yield f"{name} must be {rule}, got {value}"
    yield from find_rope_problems(layer)


def _is_head(found: PublishedHead) -> bool:
    """Whether the tensors are those of one decoder layer that reads auxiliary hidden states, and of nothing else."""
    layers = {name.split(".")[1] for name in found.tensors if name.startswith("layers.")}  # ours are `midlayer.`
    return "fc.weight" in found.tensors and "midlayer.hidden_norm.weight" in found.tensors and not layers


def _find_vocabulary_mismatches(tensors: Mapping[str, torch.Tensor], size: int, policy_size: int) -> Iterator[str]:
    """size: of the draft vocabulary."""
    if size > policy_size:
        yield f"draft_vocab_size must be at most the policy's vocabulary of {policy_size}, got {size}"
        return
    offset = tensors.get("d2t")
    if offset is None:
        if size != policy_size:
            yield f"d2t must map the {size} draft tokens to the policy's, got none"
        return
    ids = offset.long() + torch.arange(len(offset))
    if len(ids) != size or not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0 or int(ids[-1]) >= policy_size:
        yield f"d2t must map to {size} ascending token ids below {policy_size}, got {len(ids)} that do not"
        return
    mask = tensors.get("t2d")
    if mask is not None and not torch.equal(mask.bool().nonzero()[:, 0], ids):
        yield "t2d must mark the tokens that d2t maps to, got others"


def _equals_policy_tensor(tensor: torch.Tensor, name: str, policy: PolicyConfig) -> bool:
    """Whether a tensor equals the policy's tensor `name`, compared in the lower precision of the two."""
    theirs = FolderReader(policy.path).read_tensor(name)
    if theirs.shape != tensor.shape:
        return False
    coarse = min(tensor.dtype, theirs.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    return torch.equal(tensor.to(coarse), theirs.to(coarse))


# -- writing ----------------------------------------------------------------------------------------------------------


def write_eagle3(directory: Path, head: Eagle3Head, dtype: torch.dtype) -> None:
    """Write the layout of the EAGLE authors and SpecForge.

    It is our layout plus the tensor `t2d` and the config keys of older versions: `rope_theta` and `torch_dtype`.
    """
    config = build_folder_config(head.config, dtype) | {"rope_theta": head.config.decoder_shape.rope_theta}
    config["torch_dtype"] = config["dtype"]
    write_folder(directory, config, _tensors_with_mask(head, dtype))


def write_speculators(directory: Path, head: Eagle3Head, dtype: torch.dtype, drafts: int) -> None:
    """Write the layout of the speculators library, with the policy as the verifier.

    drafts: number of draft tokens per step that the folder recommends.

    The folder includes the policy's embedding, as those that the library writes. Without it, speculators 0.9.0 computes
    on uninitialised memory.
    """
    policy = head.config.policy
    embedding = FolderReader(policy.path).read_tensor("model.embed_tokens.weight")
    architectures = read_object(policy.path / CONFIG).get("architectures") or []
    layer = build_folder_config(head.config, dtype)
    for key in ("architectures", "draft_vocab_size", "norm_before_residual", "eagle_config"):
        del layer[key]  # fields of the head, not of its layer
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": drafts,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": str(policy.path.resolve()), "architectures": architectures},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": head.config.draft_vocab_size,
        "norm_before_residual": head.config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(head.config.aux_layers),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": layer["dtype"],
    }
    own = _tensors_with_mask(head, dtype)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in own.items()}
    tensors["embed_tokens.weight"] = embedding.to(dtype)
    write_folder(directory, config, tensors)


def _tensors_with_mask(head: Eagle3Head, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = head.collect_tensors(dtype)
    if head.config.is_reduced:
        tensors["t2d"] = torch.zeros(head.config.policy.vocab_size, dtype=torch.bool)
        tensors["t2d"][head.draft_ids_K.cpu()] = True
    return tensors


def derive_policy_config(head_folder: Path) -> PolicyConfig:
    """Derive a policy config from a head's folder alone: enough to convert the head, not to train it.

    Raises CheckpointInvalid unless specrl wrote the folder.
    """
    try:
        raw = read_object(head_folder / CONFIG)
        eagle = raw.get("eagle_config") or {}
        return PolicyConfig(
            path=head_folder,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            # The real number is unknown; the auxiliary layers must not exceed it.
            num_layers=max(eagle["eagle_aux_hidden_state_layer_ids"]),
            num_heads=raw["num_attention_heads"],
            num_groups=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            max_length=raw["max_position_embeddings"],
            norm_epsilon=raw["rms_norm_eps"],
            rope_theta=float(raw["rope_parameters"]["rope_theta"]),
            is_tied=False,  # unknown as well
        )
    except (OSError, ValueError, OverflowError, KeyError, TypeError) as error:
        raise CheckpointInvalid(
            f"the drafter must be a folder that specrl wrote, got {head_folder}: {error!r}; "
            "convert others with `specrl drafter import` first"
        ) from error
