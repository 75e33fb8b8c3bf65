"""The trainer backend on Megatron-Core: the only package that imports megatron."""

import logging
import warnings

# Megatron says at every import, as warnings and in the log, that Apex and Transformer Engine are absent. Nobody who
# runs a training can act on it; the lines would bury our own.
logging.getLogger("megatron").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", module=r"megatron\.")

from specrl.trainer.megatron_backend import cpu_shim  # noqa: E402 - after the filters

with cpu_shim.without_compilation():
    from specrl.trainer.megatron_backend.backend import MegatronBackend

__all__ = ["MegatronBackend"]
