"""Exchanges JSON objects and tensors between the ranks of a process group.

torch's `all_gather_object` uses pickle, which can execute code that it receives. Called by `hf_weights.py` for names
and shapes, by `checkpoint.py` for the files that each rank has written, and by `lessons.py` for what a drafter learns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from specrl.files import parse_object
from specrl.trainer.megatron_backend.parallel.groups import GroupPosition


def exchange_objects(mine: dict[str, Any], group: dist.ProcessGroup, device: torch.device) -> list[dict[str, Any]]:
    """Exchange objects. Returns those of all ranks, in rank order, at every rank. A collective of the group.

    mine: what JSON can hold. device: one that the group's backend sends from.

    Raises RuntimeError or DistError when a rank is lost.
    """
    content = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device), group=group)
    # all_gather needs equal sizes, so objects are padded to the longest.
    longest = max(int(size) for size in sizes)
    rows = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(rows, torch.nn.functional.pad(content, (0, longest - len(content))), group=group)
    return [parse_object(row[: int(size)].cpu().numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def exchange_tensors(
    parts: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], position: GroupPosition
) -> list[torch.Tensor]:
    """Send a tensor to each rank of a group, and return what each rank has sent to this one. A collective of it.

    parts: for each rank, in rank order; all of one dtype. shapes: of what each rank sends to this one.
    """
    if position.size == 1:
        return list(parts)
    sent = torch.cat([part.flatten() for part in parts])
    counts = [math.prod(shape) for shape in shapes]
    received = sent.new_empty(sum(counts))
    dist.all_to_all_single(received, sent, counts, [part.numel() for part in parts], group=position.group)
    return [part.view(shape) for part, shape in zip(received.split(counts), shapes, strict=True)]
