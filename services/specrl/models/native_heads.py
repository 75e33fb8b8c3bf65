"""Finds a policy's own heads for multi-token prediction in its folder, and says what a run does with them.

A run trains them only with `generation.speculation.mtp`, and only those of families that the trainer can train. Heads
that are not trained are copied into every export as they were. They go stale, because the policy changes. Where
config.json names heads that the folder does not have, the config.json of exports names as many as there are.
The launcher, the run's status, the trainer's log and the export's README.md tell the user of both.

Called by `hf_folder` and the trainer's backend, by replicas, and by launcher and coordinator for their notices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrl.models.model_folder import HEADS_FIELDS, ModelFolder
from specrl.spec import RunSpec

# MiMo: model.mtp_layers.0.*; ERNIE: model.mtp_block.0.*, model.mtp_emb_norm.0.*; Qwen3-Next: mtp.fc.*, mtp.layers.0.*.
_NAMED = re.compile(r"(?:.*\.)?mtp(?:_\w+)?\.(?:layers\.)?(?:(\d+)\.)?.*")
# GLM, DeepSeek: layers beyond the last one.
_IN_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")


@dataclass(frozen=True)
class NativeHeads:
    """The heads of one folder.

    fields: the fields of config.json that name their number, if it is above 0. names: of their tensors, sorted.
    present: how many heads have tensors.
    """

    fields: Mapping[str, int]
    names: tuple[str, ...]
    present: int

    @property
    def named(self) -> int:
        """Number of heads that config.json names."""
        return max(self.fields.values(), default=0)

    @property
    def missing(self) -> int:
        """Number of heads that config.json names and the folder does not have."""
        return max(0, self.named - self.present)

    def describe_kept(self) -> str:
        """Describe heads that are exported as they were."""
        return (
            f"the policy's heads for multi-token prediction ({self.present}: {self.names[0]} and {len(self.names) - 1} "
            "other tensors) are not trained: exports have them as they were, and they go stale as the policy changes"
        )

    def describe_dropped(self) -> str:
        """Describe heads that are named but absent, so that exports name fewer."""
        fields = ", ".join(f"{name}={count}" for name, count in self.fields.items())
        return (
            f"config.json names heads for multi-token prediction ({fields}), and the policy's folder has "
            f"{self.present}: the others are dropped, and the config.json of exports names {self.present}"
        )


def is_head_tensor(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to a head for multi-token prediction, by its name. num_layers: of the policy."""
    if _NAMED.fullmatch(name):
        return True
    in_layer = _IN_LAYER.fullmatch(name)
    return in_layer is not None and int(in_layer[1]) >= num_layers


def find_native_heads(config: Mapping[str, Any], names: Iterable[str]) -> NativeHeads:
    """Find the heads of a folder. config: the content of config.json. names: of all tensors."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    layers = next((n for part in parts if type(n := part.get("num_hidden_layers")) is int), None)
    found = [] if layers is None else sorted(name for name in names if is_head_tensor(name, layers))
    numbers = {match[1] for name in found for match in [_NAMED.fullmatch(name) or _IN_LAYER.fullmatch(name)] if match}
    fields = {
        field: count for part in parts for field in HEADS_FIELDS if type(count := part.get(field)) is int and count > 0
    }
    return NativeHeads(fields, tuple(found), max(len(numbers - {None}), 1) if found else 0)


def lower_head_counts(config: Mapping[str, Any], present: int) -> dict[str, Any]:
    """Return config.json's content with numbers of heads of at most `present`."""
    found = dict(config)
    for field in HEADS_FIELDS:
        if type(found.get(field)) is int:
            found[field] = min(found[field], present)
    if isinstance(found.get("text_config"), Mapping):
        found["text_config"] = lower_head_counts(found["text_config"], present)
    return found


def list_head_notices(spec: RunSpec, policy: ModelFolder) -> Sequence[str]:
    """List what a user should know of the policy's heads: heads that the run does not train, and missing ones."""
    heads = find_native_heads(policy.config, policy.shapes)
    is_trained = spec.generation.speculation.mtp is not None and spec.trainer.drafter.online
    found = []
    if heads.names and not is_trained:
        found.append(heads.describe_kept())
    if heads.missing:
        found.append(heads.describe_dropped())
    return found
