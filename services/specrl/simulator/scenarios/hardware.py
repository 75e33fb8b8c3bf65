"""Published figures of GPUs. The share of them that programs reach is in `scenario.Efficiency`.

Sources: the vendor's data sheets. Figures are without sparsity; link bandwidths count one direction.
    GB200   nvidia.com/en-us/data-center/gb200-nvl72: 72 GPUs have 13.4 TB, 576 TB/s, 180 PFLOPS BF16, 360 FP8
    B200    nvidia.com/en-us/data-center/dgx-b200: 8 GPUs have 1.44 TB, 64 TB/s, 18 PFLOPS BF16, 36 FP8
    H200    nvidia.com/en-us/data-center/h200: SXM
    H100    nvidia.com/en-us/data-center/h100: SXM
    A100    nvidia.com/en-us/data-center/a100: 80 GB SXM; it has no FP8
Networks are those of the vendor's reference systems, per GPU: one 400 Gb/s adapter, or 200 Gb/s with A100.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU. Units: bytes, bytes per second, and floating-point operations per second. fp8_flops None: no FP8."""

    name: str
    memory_bytes: float
    memory_bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    nvlink_bandwidth: float
    network_bandwidth: float
    nvlink_gpus: int
    """Most GPUs in one NVLink domain."""
    is_compared: bool = False
    """Whether published runs on this GPU were compared with the simulation (docs/simulator.md).

    If not, its data sheet is all that the simulation knows of it.
    """


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("GB200", 186e9, 8.0e12, 2.5e15, 5.0e15, 0.9e12, 50e9, 72, is_compared=True),
        Gpu("B200", 180e9, 8.0e12, 2.25e15, 4.5e15, 0.9e12, 50e9, 8),
        Gpu("H200", 141e9, 4.8e12, 0.989e15, 1.979e15, 0.45e12, 50e9, 8),
        Gpu("H100", 80e9, 3.35e12, 0.989e15, 1.979e15, 0.45e12, 50e9, 8, is_compared=True),
        Gpu("A100", 80e9, 2.039e12, 0.312e15, None, 0.3e12, 25e9, 8),
    )
}
