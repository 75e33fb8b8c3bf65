"""The trainer backend on Megatron-Core. No other package imports megatron.

    backend        implements TrainerBackend
    checkpoint     writes and reads checkpoints
    weight_sender  sends a version to replicas, writes it as files, exports it
    training       the models of a rank, and what trains them
    policy         the sharded policy: micro-batches, pipeline schedule, optimizer
    model          the GPTModel, and its parameters by Hugging Face names
    kernels        fast kernels of CUDA, and what compares them with their references
    parallel       process groups
    cpu_shim       lets Megatron run without CUDA

Warnings that Megatron 0.19.2 prints in every process are silenced here, one message at a time. Users cannot act on
them, and they would bury our own lines. Its other warnings are logged. Its INFO lines are not: they describe how
Megatron was built, not the run.
"""

import logging
import warnings

# (message, category, module that warns); the comment says where in megatron/core the warning comes from.
for _message, _category, _module in (
    (r"(Transformer Engine and )?Apex (is|are) not installed", UserWarning, r"megatron\."),  # six modules, at import
    ("absl.logging is not installed", UserWarning, r"megatron\."),  # hyper_comm_grid.py:20
    ("MimoModelConfig is experimental", UserWarning, r"megatron\."),  # optimizer/__init__.py:1019 imports it
    ("The following imports from `dynamic_context.py`", DeprecationWarning, r"megatron\."),  # inference/contexts
    ("The .grad attribute of a Tensor that is not a leaf", UserWarning, r"megatron\."),  # optimizer/optimizer.py:68
    ("`sequence_parallel` is set to `True`, but tensor", UserWarning, r"megatron\."),  # of experts, which are not cut
    # From Python's compiler, about a drawing in a docstring, when no bytecode is cached yet.
    ("invalid escape sequence", SyntaxWarning, r".*\bkv_block_allocator"),  # inference/contexts
    # From torch 2.13, about functions that distributed/param_and_grad_buffer.py calls.
    (r"`torch\.distributed\.(reduce_scatter|all_gather_into)_tensor` is deprecated", FutureWarning, r"torch\.dist"),
):
    warnings.filterwarnings("ignore", _message, _category, _module)


def _is_not_succession(record: logging.LogRecord) -> bool:
    """Return False for the line that HybridModel succeeds GPTModel (models/gpt/gpt_model.py:121)."""
    return not record.getMessage().startswith("GPTModel IS DEPRECATED")


logging.getLogger("megatron").setLevel(logging.WARNING)
logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(_is_not_succession)

from specrl.seams.versions import check_versions  # noqa: E402 - after the filters
from specrl.trainer.megatron_backend import cpu_shim  # noqa: E402 - after the filters

check_versions("megatron-core", "torch")

# emerging-optimizers logs at its import by absl, which gives a root logger without handlers one of its own
# (absl/logging/__init__.py, `log`). Every line of ours would then be printed a second time.
_placeholder = logging.NullHandler()
logging.getLogger().addHandler(_placeholder)
with cpu_shim.without_compilation():
    from specrl.trainer.megatron_backend.backend import MegatronBackend
logging.getLogger().removeHandler(_placeholder)

__all__ = ["MegatronBackend"]
