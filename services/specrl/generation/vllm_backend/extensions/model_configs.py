"""Makes transformers read the configs of models that it does not know, without the remote code of their folders.

vLLM 0.32 serves MiMo, but its config class comes only as a Python file in the model's folder, which vLLM does not run
without `trust_remote_code`. Called by `plugin.register`.
"""

from __future__ import annotations


def register_configs() -> None:
    """Let MiMo's config be read as Qwen2's. MiMo is a Qwen2 with heads for multi-token prediction."""
    from transformers import CONFIG_MAPPING, AutoConfig, Qwen2Config

    class MiMoConfig(Qwen2Config):  # type: ignore[no-untyped-call]  # its __init_subclass__
        model_type = "mimo"

    # A newer transformers, or this process, may have a class of its own.
    if "mimo" not in CONFIG_MAPPING:
        AutoConfig.register("mimo", MiMoConfig)
