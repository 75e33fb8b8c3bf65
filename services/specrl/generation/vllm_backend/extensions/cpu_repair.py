"""Works around two bugs of speculative sampling on CPUs in vLLM 0.32: one kernel, and top-k without drafts.

It also skips a binding of memory that does nothing but write a warning.

The kernel. The rejection sampler repeats each request's temperature, top-p and top-k for its draft tokens with a Triton
kernel, `expand_kernel`. On CPUs vLLM 0.32.0 replaces it with a Python function that fills an int64 copy of the output.
For any other type the caller's tensor keeps uninitialised memory, and sampling at a temperature above 0 draws from a
wrong distribution. Greedy decoding does not use the values, so greedy tests do not find the bug. Upstream:
vllm-project/vllm#55005.

The kernel is tested on a known case and replaced only if it is wrong, so a fixed vLLM is left alone.

Called by `plugin.register` in each vLLM process. `sampling_check` tests the samplers that vLLM bound in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specrl.errors import EngineFailed

Kernel = Callable[..., None]

# The known case: four requests with 2, 1, 0 and 2 draft tokens. A temperature of 0 (greedy) is expanded to 1.
_VALUES = (0.7, 0.0, 1.3, 0.5)
_ENDS = (2, 3, 3, 5)
_SPREAD = (0.7, 0.7, 1.0, 0.5, 0.5)


def expand_values(  # noqa: PLR0913, PLR0917 - the Triton kernel's parameters
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write input_val[r] once per token of request r into `output`, with `replace_from` replaced by `replace_to`.

    The parameters are the Triton kernel's. cu_num_tokens: the end of each request's tokens, cumulative.
    """
    spread = torch.where(input_val == replace_from, replace_to, input_val)
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(spread.repeat_interleave(counts))


def is_kernel_wrong(kernel: Kernel) -> bool:
    """Whether a kernel fails the known case, for floats (temperature, top-p) or integers (top-k)."""
    for dtype, scale in ((torch.float32, 1.0), (torch.int32, 10.0)):
        values = (torch.tensor(_VALUES) * scale).to(dtype)
        ends = torch.tensor(_ENDS, dtype=torch.int32)
        expected = torch.tensor([1.0 if value == 1.0 else value * scale for value in _SPREAD]).to(dtype)
        output = torch.full((len(_SPREAD),), -1, dtype=dtype)
        kernel(output, values, ends, 0, 1, MAX_NUM_TOKENS=8)
        if not torch.equal(output, expected):
            return True
    return False


def repair_if_needed() -> bool:
    """Replace vLLM's CPU kernel if it is wrong; returns whether it was replaced. Idempotent.

    Raises EngineFailed if vLLM has no such kernel.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu() or HAS_TRITON:
        return False  # vLLM uses the Triton kernel itself
    current_platform.import_kernels()
    from vllm.utils import cpu_triton_utils

    return repair_kernels(cpu_triton_utils)


def repair_kernels(kernels: Any) -> bool:
    """Do the work of `repair_if_needed` on vLLM's module of kernels.

    This must come before vLLM's `register_triton_kernel_overrides`, which binds them.
    """
    kernel: Kernel | None = getattr(kernels, "_expand_kernel_impl", None)
    if kernel is None:
        raise EngineFailed(
            "vLLM must have vllm.utils.cpu_triton_utils._expand_kernel_impl on a CPU, got no such kernel; speculation "
            "might sample from a wrong distribution (vllm-project/vllm#55005): install a version that specrl supports"
        )
    if not is_kernel_wrong(kernel):
        return False
    kernels._expand_kernel_impl = expand_values
    return True


def accept_empty_top_k() -> None:
    """Make vLLM's top-k for CPUs accept logits without rows. Idempotent.

    If no request of a step has a draft to verify, as at the ends of completions, the rejection sampler passes no rows.
    vLLM 0.32 then takes the maximum of an empty tensor, and the engine core dies. GPUs use other code.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    original = topk_topp_sampler.apply_top_k_only
    if getattr(original, "passes_without_rows", False):
        return

    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return original(logits, k) if len(logits) else logits

    apply_top_k_only.passes_without_rows = True  # type: ignore[attr-defined]
    topk_topp_sampler.apply_top_k_only = apply_top_k_only


def skip_needless_binding(nodes: Path = Path("/sys/devices/system/node")) -> None:
    """Do not bind the worker's memory on a machine with one memory node, where it changes nothing.

    vLLM 0.32 binds it in any case, and its kernel writes a warning that no setting turns off. With several nodes vLLM
    binds, and its warning stays. nodes: the kernel's folder of memory nodes.
    """
    if len(list(nodes.glob("node[0-9]*"))) == 1 and hasattr(torch.ops._C, "init_cpu_memory_env"):
        setattr(torch.ops._C, "init_cpu_memory_env", lambda _nodes: None)  # noqa: B010 - no attribute of its type
