"""What vLLM loads in each of its processes (front end, engine core, workers) before it binds its kernels.

Entry point `vllm.general_plugins: specrl`. vLLM logs and swallows an exception while a plugin is imported, but not one
that `register` raises; and a plugin may be switched off (`VLLM_PLUGINS`) or not be installed at all. So this is not
the last line of defence: `worker.specrl_inspect` tries the kernel that was bound, and the engine refuses to start.
"""

from __future__ import annotations

import multiprocessing
import os
import threading

from specrl.generation.vllm_backend import cpu_repair


def register() -> None:
    """Repair what must be repaired, and tie vLLM's child processes to the life of the replica."""
    cpu_repair.repair_if_needed()
    _die_with_parent()


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
