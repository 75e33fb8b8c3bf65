"""What vLLM loads in each of its processes (front end, engine core, workers) before it binds its kernels.

Entry point `vllm.general_plugins: specrl`. vLLM logs and swallows an exception while a plugin is imported, but not one
that `register` raises; and a plugin may be switched off (`VLLM_PLUGINS`) or not be installed at all. So this is not
the last line of defence: `sampling_check` tries the samplers that were bound, and the engine refuses to start.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

from specrl.errors import EngineFailed
from specrl.generation.vllm_backend import cpu_kernels, cpu_repair, routed_experts
from specrl.seams.versions import check_versions


def register() -> None:
    """Repair and offer kernels, open the way to the scheduler, tie child processes to the life of the replica.

    Raises RunInvalid in a vLLM or torch that was not read, whoever starts it; EngineFailed where a seam is missing.
    """
    check_versions("vllm", "torch")
    try:
        cpu_repair.repair_if_needed()
        cpu_repair.let_top_k_pass_without_drafts()
        cpu_kernels.register()
        routed_experts.permit()
        _let_front_end_reach_the_scheduler()
        _do_not_fetch_drafts_at_rest()
    except (ImportError, AttributeError) as error:
        raise EngineFailed(
            f"vLLM must have all of specrl.seams.table, got {type(error).__name__}: {error}; install a version that "
            "specrl was read with"
        ) from error
    _die_with_parent()


def _let_front_end_reach_the_scheduler() -> None:
    """Add the utility call `specrl_drafting(name, *args)`, which runs `drafting_<name>` of `scheduler.py`.

    vLLM 0.32 looks utility calls up by name on its EngineCore, and offers no other way from the front end to a
    scheduler of one's own.
    """
    from vllm.v1.engine.core import EngineCore

    def specrl_drafting(self: Any, name: str, *args: Any) -> Any:
        return getattr(self.scheduler, f"drafting_{name}")(*args)

    EngineCore.specrl_drafting = specrl_drafting  # type: ignore[attr-defined]  # that is the point


def _do_not_fetch_drafts_at_rest() -> None:
    """Spare steps that make no drafts the call to the workers by which vLLM 0.32 fetches them after each step."""
    from vllm.v1.engine.core import EngineCore

    post_step = EngineCore.post_step

    def post_step_with_drafts(self: Any, model_executed: bool) -> None:
        if not getattr(self.scheduler, "rests", False):
            post_step(self, model_executed)

    EngineCore.post_step = post_step_with_drafts  # type: ignore[method-assign]


def _die_with_parent() -> None:
    """End this process when its parent is gone.

    vLLM 0.32 leaves the engine core running, with its memory, when the front end is killed outright. The thread is
    woken by the closing of a pipe that the parent holds, so it costs nothing until then.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="die-with-parent", daemon=True).start()
