"""Builds gradient buffers and the optimizer of a rank's shard: AdamW, or Muon with AdamW.

AdamW's masters and moments are shared out over the data and context parallel ranks (ZeRO-1, arXiv:1910.02054).
Muon's are not: an update orthogonalises the momentum of a whole matrix, and Megatron's distributed optimizer cuts
matrices into byte ranges. Its layer-wise optimizer deals whole matrices, but only in bf16 and without experts
(docs/decisions/0037).
Called by `sharded_policy.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from specrl.spec.trainer import Muon, Optimizer, OptimizerKind

# Moonlight, arXiv:2502.16982, equation 4: times 0.2 and the square root of the longer side, Muon's updates have the
# root mean square of AdamW's. Megatron's scale mode "spectral" is that square root.
_UPDATE_RMS = 0.2


def wrap_chunks(chunks: Sequence[torch.nn.Module], kind: OptimizerKind) -> list[torch.nn.Module]:
    """Give each chunk its gradient buffers, and the reduction of gradients over data and context parallel ranks."""
    is_shared = kind is OptimizerKind.ADAMW
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=is_shared
    )
    return [
        DistributedDataParallel(
            chunk.config,
            ddp,
            chunk,
            disable_bucketing=number > 0,
            full_param_layout=_compute_buffer_layout(chunk, ddp) if is_shared else None,
        )
        for number, chunk in enumerate(chunks)
    ]


def build_optimizer(wrapped: Sequence[torch.nn.Module], settings: Optimizer, dtype: torch.dtype) -> Any:
    """Build Megatron's optimizer of the wrapped chunks. In bf16 it copies float32 masters from the current weights."""
    muon = settings.muon or Muon()
    config = OptimizerConfig(
        optimizer="adam" if settings.kind is OptimizerKind.ADAMW else "muon",
        lr=float(settings.learning_rate),
        weight_decay=float(settings.weight_decay),
        adam_beta1=float(settings.beta1),
        adam_beta2=float(settings.beta2),
        adam_eps=float(settings.epsilon),
        clip_grad=float(settings.clip_norm),
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=settings.kind is OptimizerKind.ADAMW,
        muon_momentum=float(muon.momentum),
        muon_scale_mode="spectral",
        muon_extra_scale_factor=_UPDATE_RMS,
        # Tensor parallel ranks gather the matrix. With the default, "blockwise", each orthogonalises its own shard, and
        # another layout trains another model.
        muon_tp_mode="duplicated",
        muon_fp32_matmul_prec="highest",  # the default, "medium", rounds to bf16, differently on each layout
    )
    return get_megatron_optimizer(config, list(wrapped), use_gloo_process_groups=False)


def set_learning_rate(optimizer: Any, settings: Optimizer, learning_rate: float) -> None:
    """Set the rates of the next update. learning_rate: of all parameters but Muon's, whose rate is in proportion."""
    of_matrices = learning_rate
    if settings.muon is not None and settings.muon.learning_rate is not None:
        of_matrices *= float(settings.muon.learning_rate) / float(settings.learning_rate)
    for group in optimizer.param_groups:  # Megatron's own scheduler is not used
        # With Muon, Megatron marks the groups of AdamW (emerging_optimizers.py, default_param_overrides).
        is_matrices = settings.kind is OptimizerKind.MUON and group.get("optimizer") != "adam"
        group["lr"] = of_matrices if is_matrices else learning_rate
        group["weight_decay"] = float(settings.weight_decay) * group.get("wd_mult", 1.0)


def _compute_buffer_layout(chunk: torch.nn.Module, ddp: DistributedDataParallelConfig) -> Any:
    """Compute the layout of a chunk's trained parameters in its gradient buffers."""
    # DistributedDataParallel would compute it, but warns if the caller does not (distributed_data_parallel.py:132).
    return DistributedOptimizer.compute_full_param_layout(
        [parameter for parameter in chunk.parameters() if parameter.requires_grad],
        bucket_size=None,  # one bucket, since the reduction does not overlap with backward passes
        data_parallel_world_size=parallel_state.get_data_parallel_group(with_context_parallel=True).size(),
        ddp_config=ddp,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_group().size(),
    )
