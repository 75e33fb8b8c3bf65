"""Builds the commands of a run's programs for the supervisor: coordinator, trainer, and replicas gen-0 to gen-(n-1)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from specrl.coordinator.members.trainer_link import CHECKPOINT_DEADLINE_S, STEP_DEADLINE_S
from specrl.launcher.processes import environment
from specrl.launcher.processes.ports import HOST, find_free_port
from specrl.launcher.processes.supervisor import Program, Rank
from specrl.launcher.run_directory import RunDirectory
from specrl.machine import assign_gpus, visible_gpus
from specrl.spec import RunSpec

# Grace period of the coordinator, which saves the run when it is stopped. The trainer finishes its step first, however
# long that takes, and then writes a checkpoint. Both calls have deadlines, so a coordinator that takes longer hangs.
SAVE_S = STEP_DEADLINE_S + CHECKPOINT_DEADLINE_S + 60.0

TRAINER_GRACE_S = 30.0  # as in a pod; the trainer's own waits are shorter together


def build_programs(spec: RunSpec, directory: RunDirectory, grpc_port: int, http_port: int) -> list[Program]:
    """Return every program of the run, the coordinator first.

    The coordinator also stops first, because it saves the run while the others still answer.
    """
    world_size = spec.trainer.parallelism.world_size
    coordinator = f"{HOST}:{grpc_port}"
    trainer_gpus = assign_gpus(visible_gpus(), [world_size])[0]

    def coordinator_rank() -> Sequence[Rank]:
        arguments = (
            *(_console_script("coordinator"), "--run-directory", str(directory.path)),
            *("--host", HOST, "--port", str(grpc_port), "--http-port", str(http_port)),
        )
        return [Rank(arguments, environment.base_environment(threads=1), directory.logs_folder / "coordinator.log")]

    def trainer_ranks() -> Sequence[Rank]:
        """Return the trainer's ranks with a fresh rendezvous port; killed ranks may still occupy the previous one."""
        master_port = find_free_port()
        arguments = (
            *(_console_script("trainer"), "--spec", str(directory.run_file)),
            *("--run-directory", str(directory.path), "--coordinator", coordinator, "--metrics-port", "0"),
            *("--token-file", str(directory.token_file)),
        )
        return [
            Rank(
                arguments,
                environment.rank_environment(spec.trainer.threads, rank, world_size, master_port, trainer_gpus),
                directory.logs_folder / ("trainer.log" if rank == 0 else f"trainer-rank{rank}.log"),
            )
            for rank in range(world_size)
        ]

    return [
        # stop_order 0: all others have the default 1, so they outlive the coordinator and its last requests.
        Program("coordinator", coordinator_rank, stop_order=0, grace_s=SAVE_S, ends_run=True),
        Program("trainer", trainer_ranks, grace_s=TRAINER_GRACE_S),
        *(build_replica_program(spec, directory, grpc_port, number) for number in range(spec.generation.replicas)),
    ]


def build_replica_program(spec: RunSpec, directory: RunDirectory, grpc_port: int, number: int) -> Program:
    """Return the program of replica gen-`number`.

    Its GPUs follow those of the trainer and of the replicas before it.
    """
    name = f"gen-{number}"
    each = spec.generation.tensor_parallel
    wanted = [spec.trainer.parallelism.world_size, *([each] * (number + 1))]
    gpus = assign_gpus(visible_gpus(), wanted)[-1]
    arguments = (
        *(_console_script("generation"), "--spec", str(directory.run_file)),
        *("--replica-id", name, "--coordinator", f"{HOST}:{grpc_port}", "--port", "0"),
        *("--metrics-port", "0", "--token-file", str(directory.token_file)),
    )
    variables = environment.replica_environment(spec.generation.threads, gpus)
    # may_leave: a replica exits with 0 after it was retired and has drained.
    return Program(name, lambda: [Rank(arguments, variables, directory.logs_folder / f"{name}.log")], may_leave=True)


def _console_script(process: str) -> str:
    """Return the console script of this installation, regardless of the user's PATH."""
    return str(Path(sys.executable).with_name(f"specrl-{process}"))
