"""What ranks tell each other in words: JSON objects over a process group. Pickles, torch's own way, run what they hold.

Called by `hf_weights.py` for names and shapes, and by `checkpoint.py` for what each rank has written.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from specrl.files import parse_object


def exchange(mine: dict[str, Any], group: dist.ProcessGroup, device: torch.device) -> list[dict[str, Any]]:
    """Every rank's object, at every rank, in the order of ranks. A collective of the group.

    device: one that the group's backend sends from. Raises RuntimeError or DistError when a rank is lost.
    """
    content = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    rows = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(rows, torch.nn.functional.pad(content, (0, longest - len(content))), group=group)
    return [parse_object(row[: int(size)].cpu().numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]
