"""The layouts of published EAGLE-3 heads: read into our module, checked against the policy, and written.

    eagle3        the EAGLE authors, SpecForge, vLLM: LlamaForCausalLMEagle3; midlayer.* or layers.0.*; also as .bin
    speculators   the vLLM project's library: speculators_model_type eagle3, transformer_layer_config; layers.0.*

A head drafts from the policy's hidden states and with its embedding, so most of what may differ between two heads is
wrong for one of the two policies: whatever this version would compute otherwise than the head was trained is refused
by name. Called by `convert.py`, which `specrl drafter import` and `export` run. Layouts as of speculators 0.9.0 and
vLLM 0.32.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from specrl.drafting.head import (
    ARCHITECTURE,
    CONFIG,
    WEIGHTS,
    Eagle3Head,
    HeadConfig,
    auxiliary_layers,
    folder_config,
    layer_shape,
)
from specrl.drafting.policy_config import PolicyConfig
from specrl.errors import CheckpointInvalid
from specrl.files import read_object

PICKLED = "pytorch_model.bin"
SPECULATORS_VERSION = "0.9.0"
_REMEDY = "use a head of this policy, or initialise a fresh one with `specrl drafter init`"


@dataclass(frozen=True)
class Published:
    """A head's folder as it is: the layer's config, the head's own fields, tensors by our names."""

    path: Path
    layer: dict[str, Any]
    fields: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def read_published(directory: Path, policy: PolicyConfig) -> tuple[Eagle3Head, torch.dtype]:
    """A published head as our module, and its stored precision. Raises CheckpointInvalid with all that is wrong."""
    found = _read(directory)
    wrong = list(_misfits(found, policy))
    if wrong:
        raise CheckpointInvalid(f"the drafter must fit its policy, got {directory}: {'; '.join(wrong)}; {_REMEDY}")
    config = HeadConfig(
        policy,
        _draft_vocab_size(found, policy),
        _aux_layers(found, policy),
        layer_shape(found.layer, policy),
        bool(found.fields.get("norm_before_residual")),
    )
    head = Eagle3Head(config)
    tensors = {name: tensor for name, tensor in found.tensors.items() if name not in _DERIVED}
    if not config.is_reduced:
        tensors.pop("d2t", None)
    head.load_tensors(tensors)
    return head, found.tensors["fc.weight"].dtype


_DERIVED = {"t2d", "embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}


def _read(directory: Path) -> Published:
    try:
        raw = read_object(directory / CONFIG)
        tensors = {_our_name(name): tensor for name, tensor in _tensors(directory)}
    except (OSError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        raise CheckpointInvalid(
            f"the drafter must be a folder with {CONFIG} and {WEIGHTS} or {PICKLED}, got {directory}: {error}; "
            "nothing is downloaded: fetch the head first"
        ) from error
    if raw.get("speculators_model_type") is not None:
        return Published(directory, raw.get("transformer_layer_config") or {}, raw, tensors)
    return Published(directory, raw, raw, tensors)


def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if (directory / WEIGHTS).is_file():
        yield from load_file(directory / WEIGHTS).items()
        return
    yield from torch.load(directory / PICKLED, map_location="cpu", weights_only=True).items()


def _our_name(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")


def _aux_layers(found: Published, policy: PolicyConfig) -> tuple[int, ...]:
    eagle = found.fields.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    return tuple(eagle.get(key) or found.fields.get(key) or auxiliary_layers(policy.num_layers))


def _draft_vocab_size(found: Published, policy: PolicyConfig) -> int:
    return int(found.fields.get("draft_vocab_size") or policy.vocab_size)


def _misfits(found: Published, policy: PolicyConfig) -> Iterator[str]:
    """Everything about a head that does not fit the policy or that this version cannot compute, in words."""
    yield from _unsupported(found)
    layer, tensors = found.layer, found.tensors
    for key, mine in (("hidden_size", policy.hidden_size), ("vocab_size", policy.vocab_size)):
        if layer.get(key) not in (None, mine):
            yield f"{key} must be the policy's {mine}, got {layer[key]}"
    target = found.fields.get("target_hidden_size")
    if target not in (None, policy.hidden_size):
        yield f"target_hidden_size must be the policy's {policy.hidden_size}, got {target}"
    aux = _aux_layers(found, policy)
    if list(aux) != sorted(set(aux)) or not aux or min(aux) < 0 or max(aux) > policy.num_layers:
        yield f"auxiliary layers must be distinct, ascending and at most the policy's {policy.num_layers}, got {aux}"
    width = len(aux) * policy.hidden_size
    if "fc.weight" not in tensors:
        yield "fc.weight must be given, got none"
    elif tensors["fc.weight"].shape[1] != width:
        yield f"fc must take {len(aux)} x {policy.hidden_size} columns, got {tensors['fc.weight'].shape[1]}"
    yield from _vocabulary_misfits(found, policy)
    embedding = tensors.get("embed_tokens.weight")
    if embedding is not None and not _is_policys(embedding, "model.embed_tokens.weight", policy):
        yield "embed_tokens must be the policy's embedding, got another one"
    lm_head = tensors.get("lm_head.weight")
    theirs = "model.embed_tokens.weight" if policy.is_tied else "lm_head.weight"
    if lm_head is not None and _is_policys(lm_head, theirs, policy):
        yield "lm_head must be the head's own, got the policy's, which vLLM would share with it"


def _unsupported(found: Published) -> Iterator[str]:
    fields, layer = found.fields, found.layer
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = fields.get("speculators_model_type")
    checks: list[tuple[str, object, bool, str]] = [
        ("speculators_model_type", kind, kind in (None, "eagle3"), "eagle3"),
        ("architectures", fields.get("architectures"), kind is not None or _is_eagle3(fields), ARCHITECTURE),
        ("model_type", layer.get("model_type"), layer.get("model_type", "llama") == "llama", "llama"),
        ("num_hidden_layers", layer.get("num_hidden_layers"), layer.get("num_hidden_layers", 1) == 1, "1"),
        ("hidden_act", layer.get("hidden_act"), layer.get("hidden_act", "silu") == "silu", "silu"),
        (
            "rope type",
            rope.get("rope_type"),
            rope.get("rope_type", rope.get("type", "default")) == "default",
            "default",
        ),
        ("sliding_window", layer.get("sliding_window"), not layer.get("use_sliding_window"), "null"),
    ]
    for flag in ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias"):
        value = fields.get(flag) or layer.get(flag) or (fields.get("eagle_config") or {}).get(flag)
        checks.append((flag, value, not value, "false"))
    if kind is not None and "norm_before_residual" not in fields:
        yield "norm_before_residual must be given (speculators takes false for it, vLLM true), got none"
    for name, value, is_right, rule in checks:
        if not is_right:
            yield f"{name} must be {rule}, got {value}"


def _is_eagle3(fields: Mapping[str, Any]) -> bool:
    return fields.get("architectures") in ([ARCHITECTURE], ["Eagle3LlamaForCausalLM"])


def _vocabulary_misfits(found: Published, policy: PolicyConfig) -> Iterator[str]:
    size, tensors = _draft_vocab_size(found, policy), found.tensors
    if size > policy.vocab_size:
        yield f"draft_vocab_size must be at most the policy's vocabulary of {policy.vocab_size}, got {size}"
        return
    offset = tensors.get("d2t")
    if offset is None:
        if size != policy.vocab_size:
            yield f"d2t must map the {size} draft tokens to the policy's, got none"
        return
    ids = offset.long() + torch.arange(len(offset))
    if len(ids) != size or not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0 or int(ids[-1]) >= policy.vocab_size:
        yield f"d2t must lead to {size} ascending tokens below {policy.vocab_size}, got {len(ids)} that do not"
        return
    mask = tensors.get("t2d")
    if mask is not None and not torch.equal(mask.bool().nonzero()[:, 0], ids):
        yield "t2d must name the tokens that d2t leads to, got others"


def _is_policys(tensor: torch.Tensor, name: str, policy: PolicyConfig) -> bool:
    """Whether a tensor is the policy's, up to the precision that the coarser of the two is stored in."""
    theirs = policy_tensor(policy.path, name)
    if theirs.shape != tensor.shape:
        return False
    coarse = min(tensor.dtype, theirs.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    return torch.equal(tensor.to(coarse), theirs.to(coarse))


def policy_tensor(folder: Path, name: str) -> torch.Tensor:
    """One tensor of the policy. Raises CheckpointInvalid when no file has it."""
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as content:
                if name in content.keys():  # noqa: SIM118 - no mapping
                    found: torch.Tensor = content.get_tensor(name)
                    return found
    except SafetensorError as error:
        raise CheckpointInvalid(f"the policy must have whole weight files, got {folder}: {error}") from error
    raise CheckpointInvalid(f"the policy must have a tensor {name}, got none in {folder}; check --policy")


# -- writing ----------------------------------------------------------------------------------------------------------


def write_eagle3(directory: Path, head: Eagle3Head, dtype: torch.dtype) -> None:
    """Write the EAGLE authors' and SpecForge's layout: ours, with `t2d` and the rotary base under its old name too."""
    config = folder_config(head.config, dtype) | {"rope_theta": head.config.shape.rope_theta}
    config["torch_dtype"] = config["dtype"]
    _write(directory, config, _with_mask(head, dtype))


def write_speculators(directory: Path, head: Eagle3Head, dtype: torch.dtype, drafts: int) -> None:
    """Write the speculators library's layout, the policy as its verifier. drafts: tokens that the folder recommends.

    With the policy's embedding, as the library's own folders: without it, version 0.9.0 computes on arbitrary memory.
    """
    policy = head.config.policy
    embedding = policy_tensor(policy.path, "model.embed_tokens.weight")
    architectures = read_object(policy.path / CONFIG).get("architectures") or []
    layer = folder_config(head.config, dtype)
    own = {key: layer.pop(key) for key in ("architectures", "draft_vocab_size", "norm_before_residual", "eagle_config")}
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
        "draft_vocab_size": own["draft_vocab_size"],
        "norm_before_residual": own["norm_before_residual"],
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(head.config.aux_layers),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": layer["dtype"],
    }
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in _with_mask(head, dtype).items()}
    tensors["embed_tokens.weight"] = embedding.to(dtype)
    _write(directory, config, tensors)


def _with_mask(head: Eagle3Head, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = head.tensors(dtype)
    if head.config.is_reduced:
        tensors["t2d"] = torch.zeros(head.config.policy.vocab_size, dtype=torch.bool)
        tensors["t2d"][head.draft_ids_K.cpu()] = True
    return tensors


def _write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def named_policy(head_folder: Path) -> PolicyConfig:
    """What our folder says of the policy it drafts for: enough to write it in another layout, not to train it."""
    try:
        raw = read_object(head_folder / CONFIG)
        eagle = raw.get("eagle_config") or {}
        return PolicyConfig(
            path=head_folder,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=max(eagle["eagle_aux_hidden_state_layer_ids"]),
            num_heads=raw["num_attention_heads"],
            num_groups=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            max_length=raw["max_position_embeddings"],
            norm_epsilon=raw["rms_norm_eps"],
            rope_theta=float(raw["rope_parameters"]["rope_theta"]),
            is_tied=False,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointInvalid(
            f"the drafter must be a folder that specrl wrote, got {head_folder}: {error!r}; "
            "bring others in with `specrl drafter import` first"
        ) from error
