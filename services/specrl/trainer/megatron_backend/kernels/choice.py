"""Chooses the fast kernels of a policy: those that the GPU kit has found right on such a card.

`records.json` has a record for each kernel that passed, with the card's name and the version of torch. The kit writes
it from benchmarks/gpu/results, and it is part of the wheel.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import structlog
import torch

from specrl.files import read_object
from specrl.installation import package_folder
from specrl.spec.trainer import Kernels

RECORDS = package_folder("trainer") / "megatron_backend" / "kernels" / "records.json"
RECORDED_DTYPE = torch.bfloat16
"""The only data type in which the kit compares kernels."""

log = structlog.get_logger(__name__)


class Kernel(StrEnum):
    """A fast kernel. The value is the name of the kit's part that compares it."""

    VARLEN_ATTENTION = "varlenAttention"
    FUSED_SWIGLU = "fusedSwiglu"


def choose_kernels(wanted: Kernels, dtype: torch.dtype, file: Path | None = None) -> frozenset[Kernel]:
    """Choose the kernels for this process's card and version of torch. file: for tests. Raises CheckpointInvalid."""
    if wanted is Kernels.REFERENCE or dtype != RECORDED_DTYPE:
        return frozenset()
    device = name_device()
    place = {"device": device, "torch": torch.__version__}
    passed = [record for record in read_object(file or RECORDS)["passed"] if record.items() >= place.items()]
    found = frozenset(kernel for kernel in Kernel if any(record["kernel"] == kernel for record in passed))
    if found:
        log.info("kernels_chosen", kernels=sorted(found), device=device, torch=torch.__version__)
    return found


def name_device() -> str:
    """Return the name of this process's card; "cpu" without CUDA."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
