"""The interface of a model that drafts, as the trainer sees it. `kind.py` says where such a model comes from.

    inputs            what it reads of the policy's forward pass
    draft_logits      its logits in each pass, at the starts that `packing.py` laid out
    collect_tensors   its tensors, for replicas, checkpoints and exports

Loss, budget, updates and acceptance are common to all drafters: `online.py`, `budget.py` and `criteria.py`.

A drafter never changes the policy's gradients: its inputs are detached, and it has an optimizer of its own.

Shapes: R packed rows, W tokens of a row, M starts, H hidden size of the policy, E starts that count in a pass,
V vocabulary of the policy, K draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from specrl.drafting.packing import PackedRows, PassLimits
from specrl.drafting.vocabulary import WHOLE, PolicyOutput, VocabularyShard
from specrl.records import WeightOwner


@dataclass(frozen=True)
class DrafterInputs:
    """States of the policy's forward pass that a drafter reads, besides token ids. The trainer keeps no others.

    aux_layers: the states after so many layers; 0 is the embedding. `PackedRows.aux_RWA` has them side by side.
    embedding: whether it reads the embedded tokens, `PackedRows.embedding_RWH`.
    normed: whether it reads the final norm's output, `PackedRows.normed_RWH`.
    """

    aux_layers: tuple[int, ...] = ()
    embedding: bool = False
    normed: bool = False


class Drafter(nn.Module, ABC):
    """A model that drafts. Every rank holds a replica of its parameters, and trains all of them.

    owner: POLICY if its tensors are part of the policy's version and folder; DRAFTER if it has its own.
    inputs: what it reads of the policy's forward pass.
    draft_ids_K: the policy's token ids that it can draft, ascending.
    is_vocabulary_sharded: whether it drafts by the policy's output layer, `connect_output`. Its logits then have the
    columns of this tensor rank, those of `vocabulary`, and only the last stage's ranks train it.
    limits: of one forward pass. relative_speed: operations per second, as a share of the policy's.
    """

    is_vocabulary_sharded: ClassVar[bool] = False

    owner: ClassVar[WeightOwner]
    inputs: DrafterInputs
    draft_ids_K: torch.Tensor
    vocabulary: VocabularyShard = WHOLE
    limits: PassLimits = PassLimits()
    relative_speed: ClassVar[float] = 1.0

    @abstractmethod
    def draft_logits(self, rows: PackedRows, passes: int) -> Iterator[torch.Tensor]:
        """Yield the logits [E, K] of pass 0, 1, ... at the starts that count in it: `rows.select_starts(j)`.

        Pass j at a start t drafts x_{t+2+j}, from the states up to t and the tokens up to x_{t+1+j}. The caller takes
        at most `passes`, and no pass without starts. Differentiable in the drafter's parameters alone.
        """

    @abstractmethod
    def estimate_forward_flops(self, passes: int, context: int, starts: int) -> float:
        """Count the floating-point operations of `draft_logits` at the last `starts` starts of `context` tokens."""

    @abstractmethod
    def collect_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Collect the tensors to broadcast or save, in a fixed order, under the names that vLLM's loader expects."""

    @abstractmethod
    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load tensors as `collect_tensors` returns them. Raises CheckpointInvalid if names or shapes differ."""

    @abstractmethod
    def write_folder(self, directory: Path, dtype: torch.dtype) -> None:
        """Write a folder that the engine loads. Called only if the drafter owns its tensors."""

    def connect_output(self, read_output: Callable[[], PolicyOutput]) -> None:
        """Give the drafter the policy's output layer, as it is at each call. Called once, before any other method."""
        self.vocabulary = read_output().shard

    @property
    def is_reduced(self) -> bool:
        """Whether it can draft only a part of the policy's vocabulary."""
        return False

    def begin_initialisation(self, counts_V: torch.Tensor, dtype: torch.dtype) -> None:
        """Prepare a fresh drafter for the training of an initialisation. Does nothing by default.

        counts_V: how often each token was generated in its rollouts. dtype: the policy's precision.
        """

    def map_to_draft_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map token ids to indices of the draft vocabulary; -1 for a token that the drafter cannot draft."""
        if not self.is_reduced:
            return token_ids
        index = torch.searchsorted(self.draft_ids_K, token_ids).clamp(max=len(self.draft_ids_K) - 1)
        return index.where(self.draft_ids_K[index] == token_ids, -1)


def list_misfits(mine: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> list[str]:
    """List the names of tensors that only one side has, then name and shape of given ones with another shape."""
    return sorted(mine.keys() ^ given.keys()) + [
        f"{name} {tuple(given[name].shape)}"
        for name, tensor in mine.items()
        if name in given and given[name].shape != tensor.shape
    ]
