"""The vLLM plugin that installs our patches in each vLLM process, before vLLM binds its kernels.

It is the entry point `vllm.general_plugins: specrl`. vLLM calls it in the front end, the engine core and the workers.

vLLM logs and swallows an exception at a plugin's import, but not one of `register`. A plugin may also be disabled
(`VLLM_PLUGINS`) or not be installed. So the engine does not rely on it: `sampling_check` tests the samplers that vLLM
bound, and the engine does not start if they are wrong.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from typing import Any

from specrl.errors import EngineFailed
from specrl.generation.vllm_backend.extensions import (
    cpu_kernels,
    cpu_repair,
    late_logprobs,
    model_configs,
    routed_experts,
    sampling_sets,
)
from specrl.models.native_heads import is_head_tensor
from specrl.models.policy_config import ARCHITECTURES
from specrl.seams.versions import check_versions


def register() -> None:
    """Install all patches in this process, and make a child process end with its parent.

    Raises RunInvalid for an unsupported version of vLLM or torch, also if another program starts vLLM. Raises
    EngineFailed if vLLM lacks a name that a patch needs.
    """
    check_versions("vllm", "torch")
    try:
        cpu_repair.repair_if_needed()
        cpu_repair.accept_empty_top_k()
        cpu_repair.skip_needless_binding()
        cpu_kernels.register_kernels()
        routed_experts.allow_on_cpus()
        sampling_sets.allow_first_runner()
        model_configs.register_configs()
        late_logprobs.hold_logprobs()
        _add_scheduler_calls()
        _skip_fetching_absent_drafts()
        _skip_native_heads()
    except (ImportError, AttributeError) as error:
        raise EngineFailed(
            f"vLLM must have every name that specrl replaces, got {type(error).__name__}: {error}; install a version "
            "that specrl supports"
        ) from error
    _die_with_parent()


def _add_scheduler_calls() -> None:
    """Add the utility call `specrl_drafting(name, *args)`, which calls `drafting_<name>` of our scheduler.

    vLLM 0.32 looks utility calls up by name on its EngineCore. The front end has no other way to reach a custom
    scheduler.
    """
    from vllm.v1.engine.core import EngineCore

    def specrl_drafting(self: Any, name: str, *args: Any) -> Any:
        return getattr(self.scheduler, f"drafting_{name}")(*args)

    EngineCore.specrl_drafting = specrl_drafting  # type: ignore[attr-defined]  # adds an attribute


def _skip_fetching_absent_drafts() -> None:
    """Skip vLLM's fetching of draft tokens after a step that makes none.

    vLLM 0.32 calls the workers after each step to fetch them.
    """
    from vllm.v1.engine.core import EngineCore

    post_step = EngineCore.post_step

    def post_step_with_drafts(self: Any, model_executed: bool) -> None:
        if not getattr(self.scheduler, "rests", False):
            post_step(self, model_executed)

    EngineCore.post_step = post_step_with_drafts  # type: ignore[method-assign]


def _skip_native_heads() -> None:
    """Do not give a policy the heads for multi-token prediction in its folder, which the trainer keeps but not trains.

    vLLM 0.32's Llama and Qwen3 raise an error for tensors that they do not have. Models that draft get everything.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    get_all_weights = DefaultModelLoader.get_all_weights

    def get_weights_of_policy(self: Any, model_config: Any, model: Any) -> Iterator[Any]:
        found = get_all_weights(self, model_config, model)
        if type(model).__name__ not in ARCHITECTURES:
            return found
        layers = model_config.hf_text_config.num_hidden_layers
        return (each for each in found if not is_head_tensor(each[0], layers))

    DefaultModelLoader.get_all_weights = get_weights_of_policy  # type: ignore[method-assign, assignment]


def _die_with_parent() -> None:
    """End this process when its parent ends.

    vLLM 0.32 leaves the engine core running, with all its memory, when the front end is killed by SIGKILL.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait_for_parent() -> None:
        parent.join()  # returns when the pipe that the parent holds is closed, so the thread uses no CPU before
        os._exit(1)  # sys.exit would end this thread only

    threading.Thread(target=wait_for_parent, name="die-with-parent", daemon=True).start()
