"""The trainer backend on Megatron-Core: the only package that imports megatron.

What Megatron 0.19.2 says of itself in every process is silenced here, one message at a time: nobody who runs a training
can act on it, and the lines would bury our own. Its other warnings are logged. Its INFO is not: it says what Megatron
is built on, nothing of the run.
"""

import logging
import warnings

# (message, category, module that warns), each with where it comes from in megatron/core
for _message, _category, _module in (
    (r"(Transformer Engine and )?Apex (is|are) not installed", UserWarning, r"megatron\."),  # six modules, at import
    ("absl.logging is not installed", UserWarning, r"megatron\."),  # hyper_comm_grid.py:20
    ("MimoModelConfig is experimental", UserWarning, r"megatron\."),  # optimizer/__init__.py:1019 imports it
    ("The following imports from `dynamic_context.py`", DeprecationWarning, r"megatron\."),  # inference/contexts
    ("The .grad attribute of a Tensor that is not a leaf", UserWarning, r"megatron\."),  # optimizer/optimizer.py:68
    ("`sequence_parallel` is set to `True`, but tensor", UserWarning, r"megatron\."),  # of experts, which are not cut
    # Said by the compiler, of a drawing in a docstring, where its bytecode is not there yet. It names a file.
    ("invalid escape sequence", SyntaxWarning, r".*\bkv_block_allocator"),  # inference/contexts
    # torch 2.13 says so of names that distributed/param_and_grad_buffer.py calls.
    (r"`torch\.distributed\.(reduce_scatter|all_gather_into)_tensor` is deprecated", FutureWarning, r"torch\.dist"),
):
    warnings.filterwarnings("ignore", _message, _category, _module)


def _is_not_succession(record: logging.LogRecord) -> bool:
    """Whether a line says anything but that HybridModel succeeds GPTModel (models/gpt/gpt_model.py:121)."""
    return not record.getMessage().startswith("GPTModel IS DEPRECATED")


logging.getLogger("megatron").setLevel(logging.WARNING)
logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(_is_not_succession)

from specrl.seams.versions import check_versions  # noqa: E402 - after the filters
from specrl.trainer.megatron_backend import cpu_shim  # noqa: E402 - after the filters

check_versions("megatron-core", "torch")

with cpu_shim.without_compilation():
    from specrl.trainer.megatron_backend.backend import MegatronBackend

__all__ = ["MegatronBackend"]
