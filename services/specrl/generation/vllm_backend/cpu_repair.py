"""Repairs what is wrong with speculative sampling on CPUs in vLLM 0.32: one kernel, and top-k without drafts.

The rejection sampler spreads each request's temperature (and top-p, top-k) over its draft tokens with a Triton kernel,
`expand_kernel`. On CPUs vLLM 0.32.0 replaces it with a function that converts the output to int64 and fills the
conversion: for any other type the caller's tensor keeps what was in memory before, and sampling at a temperature above
0 draws from a wrong distribution. Greedy decoding never looks at it, which is why a greedy test sees nothing. Upstream:
vllm-project/vllm#55005.

The kernel is tried on a known case and replaced only if it is wrong, so a vLLM that has been fixed is left alone. The
version was compared before (`specrl.seams`).
Called by `plugin.register` in each vLLM process; `sampling_check` tries what was bound in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specrl.errors import EngineFailed

Kernel = Callable[..., None]

# Four requests with 2, 1, 0 and 2 draft tokens; 0 stands for "greedy" and is spread as 1.
_VALUES = (0.7, 0.0, 1.3, 0.5)
_ENDS = (2, 3, 3, 5)
_SPREAD = (0.7, 0.7, 1.0, 0.5, 0.5)


def expand(  # noqa: PLR0913, PLR0917 - the Triton kernel's parameters
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write input_val[r] once per token of request r into `output`, `replace_from` as `replace_to`.

    Parameters as the Triton kernel's. cu_num_tokens holds where each request's tokens end.
    """
    spread = torch.where(input_val == replace_from, replace_to, input_val)
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(spread.repeat_interleave(counts))


def is_wrong(kernel: Kernel) -> bool:
    """Whether an expand kernel fails the known case, for floats (temperature, top-p) or for integers (top-k)."""
    for dtype, scale in ((torch.float32, 1.0), (torch.int32, 10.0)):
        values, ends = (torch.tensor(_VALUES) * scale).to(dtype), torch.tensor(_ENDS, dtype=torch.int32)
        expected = torch.tensor([1.0 if value == 1.0 else value * scale for value in _SPREAD]).to(dtype)
        output = torch.full((len(_SPREAD),), -1, dtype=dtype)
        kernel(output, values, ends, 0, 1, MAX_NUM_TOKENS=8)
        if not torch.equal(output, expected):
            return True
    return False


def repair_if_needed() -> bool:
    """Replace vLLM's CPU kernel if it is wrong. Returns whether it was replaced. Idempotent.

    Raises EngineFailed when the kernel is gone.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu() or HAS_TRITON:
        return False  # the Triton kernel itself runs
    current_platform.import_kernels()
    from vllm.utils import cpu_triton_utils

    return repair(cpu_triton_utils)


def repair(kernels: Any) -> bool:
    """`repair_if_needed` on the module that holds the kernels. `register_triton_kernel_overrides` binds them later."""
    kernel: Kernel | None = getattr(kernels, "_expand_kernel_impl", None)
    if kernel is None:
        raise EngineFailed(
            "vLLM must have vllm.utils.cpu_triton_utils._expand_kernel_impl on a CPU, got no such kernel; speculation "
            "might sample from a wrong distribution (vllm-project/vllm#55005): install a version that specrl was read "
            "with"
        )
    if not is_wrong(kernel):
        return False
    kernels._expand_kernel_impl = expand
    return True


def let_top_k_pass_without_drafts() -> None:
    """Have vLLM's top-k for CPUs return logits of no rows as they are. Idempotent.

    In a step in which no request has a draft left to verify, as at the ends of completions, the rejection sampler
    passes none. vLLM 0.32 takes the maximum of no numbers then, and the engine core dies. GPUs have another version.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    original = topk_topp_sampler.apply_top_k_only
    if getattr(original, "passes_without_rows", False):
        return

    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return original(logits, k) if len(logits) else logits

    apply_top_k_only.passes_without_rows = True  # type: ignore[attr-defined]
    topk_topp_sampler.apply_top_k_only = apply_top_k_only
