"""Changes the number of replicas of an active local run: starts missing ones and retires the last ones.

The coordinator's status says how many there should be (`specrl scale` sets it). It has then already written the number
into the run file. A retired replica finishes its rollouts, for at most generation.drainS, like a pod that a cluster
deletes. Called by `launcher.local_run`.
"""

from __future__ import annotations

from collections.abc import Callable

from specrl.errors import MemoryTooSmall
from specrl.launcher.gpu_checks import GpuNeed, check_scaling
from specrl.launcher.memory import MemoryNeed, format_gib
from specrl.launcher.processes.programs import build_replica_program
from specrl.launcher.processes.supervisor import Supervisor
from specrl.launcher.run_directory import RunDirectory
from specrl.machine import available_memory_bytes
from specrl.spec import RunSpec

# Time for a replica to exit after it has drained.
EXIT_GRACE_S = 15.0


class ReplicaScaler:
    """Scales the replicas gen-0 to gen-(n-1) of one launch.

    need: what a replica needs: MemoryNeed on CPUs, GpuNeed on GPUs. None: unknown, so every number is accepted.
    """

    def __init__(
        self,
        spec: RunSpec,
        directory: RunDirectory,
        grpc_port: int,
        need: MemoryNeed | GpuNeed | None = None,
        available_bytes: Callable[[], int] = available_memory_bytes,
    ) -> None:
        self._spec = spec
        self._directory = directory
        self._grpc_port = grpc_port
        self._need = need
        self._available_bytes = available_bytes
        self._count = self._asked = spec.generation.replicas

    def scale_to(self, wanted: int, supervisor: Supervisor) -> str | None:
        """Start or retire replicas until there are `wanted`. Returns a message about the change or why it is refused.

        Idempotent: repeating the last number changes nothing and returns None. A replica that left for another reason
        comes back with the next change.
        """
        if wanted == self._asked:
            return None
        self._asked = wanted
        if wanted > self._count:
            # Refuse rather than let a process of the run end for lack of memory.
            try:
                self._check_memory(wanted)
            except MemoryTooSmall as error:
                # The run file has the number already, so that `--resume` could be refused for it.
                return (
                    f"{error}; keeping {self._count}; `specrl scale {self._directory.path} -n {self._count}` takes the "
                    "number out of the run file again"
                )
        # From 0, not from the old number: a replica that left for another reason is started again, too.
        for number in range(wanted):
            supervisor.keep_running(build_replica_program(self._spec, self._directory, self._grpc_port, number))
        for number in range(wanted, self._count):
            supervisor.retire_program(f"gen-{number}", self._spec.generation.drain_s + EXIT_GRACE_S)
        before = self._count
        self._count = wanted
        return f"scaled from {before} replicas to {wanted}"

    def _check_memory(self, wanted: int) -> None:
        """Raise MemoryTooSmall if so many replicas do not fit beside what runs."""
        if isinstance(self._need, GpuNeed):
            generation = self._spec.generation.model_copy(update={"replicas": wanted})
            check_scaling(self._spec.model_copy(update={"generation": generation}), self._need)
        elif self._need is not None:
            added = wanted - self._count
            needed = added * self._need.replica_bytes
            available = self._available_bytes()
            if needed > available:
                raise MemoryTooSmall(
                    f"available memory must be >= {format_gib(needed)} for {added} more replicas, got "
                    f"{format_gib(available)}"
                )
