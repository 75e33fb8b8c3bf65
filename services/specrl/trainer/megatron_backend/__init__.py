"""The trainer backend on Megatron-Core: the only package that imports megatron."""

import warnings

# Megatron says at every import that Apex and Transformer Engine are absent, and torch that what Megatron uses is old.
# Nobody who runs a training can act on it; the lines would bury our own.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.checkpoint\.")

from specrl.trainer.megatron_backend import cpu_shim  # noqa: E402 - after the filters

with cpu_shim.without_compilation():
    from specrl.trainer.megatron_backend.backend import MegatronBackend

__all__ = ["MegatronBackend"]
