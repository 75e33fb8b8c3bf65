"""A small drafter by the policy's own output layer, to test what such drafters get on every layout.

`install` puts it in the place of n-gram look-up, which the trainer has nothing to do with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from specrl.drafting.drafter import Drafter, DrafterInputs
from specrl.drafting.kind import DrafterKind
from specrl.drafting.packing import PackedRows
from specrl.drafting.registry import KINDS
from specrl.drafting.vocabulary import PolicyOutput
from specrl.errors import SpecProblem
from specrl.models import RunModels
from specrl.models.policy_config import PolicyConfig
from specrl.records import WeightOwner
from specrl.spec import RunSpec

SPECULATION = {"ngram": {}}


class ProbeDrafter(Drafter):
    """One linear layer on the last state and the embedding of the token before the drafted one."""

    owner = WeightOwner.DRAFTER
    inputs = DrafterInputs(embedding=True, normed=True)
    is_vocabulary_sharded = True

    def __init__(self, policy: PolicyConfig) -> None:
        super().__init__()
        width = policy.hidden_size
        self.linear = nn.Linear(2 * width, width, bias=False)
        drawn = torch.randn(self.linear.weight.shape, generator=torch.Generator().manual_seed(4))
        self.linear.weight.data.copy_(drawn / width**0.5)
        self.register_buffer("draft_ids_K", torch.arange(policy.vocab_size), persistent=False)

    def connect_output(self, read_output: Callable[[], PolicyOutput]) -> None:
        super().connect_output(read_output)
        self.read_output = read_output

    def draft_logits(self, rows: PackedRows, passes: int) -> Iterator[torch.Tensor]:
        weight = self.read_output().weight
        assert weight is not None, "only the last stage learns"
        for j in range(passes):
            inputs = rows.gather_starts(rows.embedding_RWH, 1 + j), rows.gather_starts(rows.normed_RWH)
            hidden_EH = self.linear(torch.cat(inputs, -1)[rows.select_starts(j)])
            yield self.vocabulary.share_input(hidden_EH) @ weight.T

    def estimate_forward_flops(self, passes: int, context: int, starts: int) -> float:
        return float(passes * starts)

    def collect_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {"linear.weight": self.linear.weight.detach().to(dtype)}

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.linear.weight.data.copy_(tensors["linear.weight"])

    def write_folder(self, directory: Path, dtype: torch.dtype) -> None:
        raise NotImplementedError


def load_drafter(_spec: RunSpec, policy: PolicyConfig) -> ProbeDrafter:
    return ProbeDrafter(policy)


class ProbeKind(DrafterKind):
    loader = f"{__name__}:load_drafter"

    def is_fresh(self, _spec: RunSpec) -> bool:
        return False

    def check(self, _spec: RunSpec, _models: RunModels) -> list[SpecProblem]:
        return []

    def count_parameters(self, _spec: RunSpec, _models: RunModels) -> int:
        return 0


def install() -> None:
    """Put the drafter into the registry of this process."""
    KINDS["ngram"] = ProbeKind()
