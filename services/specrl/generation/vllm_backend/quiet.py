"""Silences three lines that every replica's log had and that no user can act on. Nothing else is hidden.

    FutureWarning of torch    vLLM reads an attribute of every object in every module, among them a deprecated one of
                              torch (vllm/triton_utils/dispatcher.py)
    "Triton is installed..."  vLLM finds Triton, a dependency of torch, on a machine without GPUs, where none is needed
                              (vllm/triton_utils/importing.py); at import, before VLLM_LOGGING_LEVEL has an effect
    "NUMA binding..."         vLLM binds its memory to the only memory node (extensions/cpu_repair.py)

`generation.main` calls `silence_known_lines` at its import, so that the processes that vLLM spawns call it as well:
they import that module first. `plugin` calls `cpu_repair.skip_needless_binding`.
"""

from __future__ import annotations

import logging
import re
import warnings

from specrl.machine import visible_gpus

_DEPRECATED = "`torch.distributed.reduce_op` is deprecated"
_TRITON_LOGGER = "vllm.triton_utils.importing"
_TRITON_LINES = ("Triton is installed", "Triton not installed")


def silence_known_lines() -> None:
    """Silence the first two. On a machine with GPUs, what vLLM says of Triton matters and stays. Idempotent."""
    warnings.filterwarnings("ignore", re.escape(_DEPRECATED), FutureWarning)
    if not visible_gpus():
        logging.getLogger(_TRITON_LOGGER).addFilter(_is_no_line_of_triton)


def _is_no_line_of_triton(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_TRITON_LINES)
