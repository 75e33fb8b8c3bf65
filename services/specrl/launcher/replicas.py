"""How many replicas a local run has, while it goes on: those that are wanted are started, the last ones are sent away.

The coordinator says how many (`specrl scale` asks it); it has written the number into the run file before it says so.
One that is sent away finishes what it has, for generation.drainS at most, as a pod that a cluster takes away.
"""

from __future__ import annotations

from collections.abc import Callable

from specrl.launcher.programs import replica
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.supervisor import Supervisor
from specrl.launcher.view import View
from specrl.machine import available_memory_bytes
from specrl.spec import RunSpec

ENDING_S = 15.0
"""For a replica to end once it has drained."""
GIB = 1 << 30


class Replicas:
    """The replicas gen-0 to gen-(n-1) of one launch. replica_bytes: memory of one; 0: not known, as with GPUs."""

    def __init__(
        self,
        spec: RunSpec,
        directory: RunDirectory,
        grpc_port: int,
        replica_bytes: int = 0,
        available_bytes: Callable[[], int] = available_memory_bytes,
    ) -> None:
        self._spec, self._directory, self._grpc_port = spec, directory, grpc_port
        self._replica_bytes, self._available_bytes = replica_bytes, available_bytes
        self._count = self._asked = spec.generation.replicas

    def keep(self, wanted: int, supervisor: Supervisor, view: View) -> None:
        """Have `wanted` of them, and say so, or that there is no memory for them. Asked for as many again: nothing.

        Those that have left for another reason come back with the next change.
        """
        if wanted == self._asked:
            return
        self._asked = wanted
        added = max(0, wanted - self._count)
        if added * self._replica_bytes > self._available_bytes():
            needed, available = added * self._replica_bytes / GIB, self._available_bytes() / GIB
            view.message(
                f"available memory must be >= {needed:.1f} GiB for {added} more replicas, got {available:.1f} GiB; "
                f"there are {self._count} still"
            )
            return
        for number in range(wanted):
            supervisor.want(replica(self._spec, self._directory, self._grpc_port, number))
        for number in range(wanted, self._count):
            supervisor.retire(f"gen-{number}", self._spec.generation.drain_s + ENDING_S)
        view.message(f"scaled from {self._count} replicas to {wanted}")
        self._count = wanted
