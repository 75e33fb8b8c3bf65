"""A run's programs as the supervisor starts them: coordinator, replicas gen-0 to gen-(n-1), trainer ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from specrl.launcher import environment
from specrl.launcher.ports import HOST, free_port
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.supervisor import Program, Rank
from specrl.spec import RunSpec

SAVE_S = 60.0  # what a coordinator may take to save a run that is stopped


def programs_of(spec: RunSpec, directory: RunDirectory, grpc_port: int, http_port: int) -> list[Program]:
    """Every program of the run. The coordinator stops first: it saves the run while the others still answer."""
    world_size, coordinator = spec.trainer.parallelism.world_size, f"{HOST}:{grpc_port}"
    trainer_gpus = environment.deal_gpus(environment.visible_gpus(), [world_size])[0]

    def coordinator_rank() -> Sequence[Rank]:
        arguments = (
            *(_script("coordinator"), "--run-directory", str(directory.path)),
            *("--host", HOST, "--port", str(grpc_port), "--http-port", str(http_port)),
        )
        return [Rank(arguments, environment.base_environment(threads=1), directory.logs / "coordinator.log")]

    def trainer_ranks() -> Sequence[Rank]:
        """The ranks meet at a fresh port at every start: the one before may still be in use by what was killed."""
        master_port = free_port()
        arguments = (
            *(_script("trainer"), "--spec", str(directory.run_file)),
            *("--run-directory", str(directory.path), "--coordinator", coordinator, "--metrics-port", "0"),
        )
        return [
            Rank(
                arguments,
                environment.rank_environment(spec.trainer.threads, rank, world_size, master_port, trainer_gpus),
                directory.logs / ("trainer.log" if rank == 0 else f"trainer-rank{rank}.log"),
            )
            for rank in range(world_size)
        ]

    return [
        Program("coordinator", coordinator_rank, stop_order=0, grace_s=SAVE_S, ends_run=True),
        Program("trainer", trainer_ranks),
        *(replica(spec, directory, grpc_port, number) for number in range(spec.generation.replicas)),
    ]


def replica(spec: RunSpec, directory: RunDirectory, grpc_port: int, number: int) -> Program:
    """The replica gen-`number`, with the GPUs after those of the trainer and of the replicas before it."""
    name, each = f"gen-{number}", spec.generation.tensor_parallel
    wanted = [spec.trainer.parallelism.world_size, *([each] * (number + 1))]
    gpus = environment.deal_gpus(environment.visible_gpus(), wanted)[-1]
    arguments = (
        *(_script("generation"), "--spec", str(directory.run_file)),
        *("--replica-id", name, "--coordinator", f"{HOST}:{grpc_port}", "--port", "0"),
        *("--metrics-port", "0"),
    )
    variables = environment.replica_environment(spec.generation.threads, gpus)
    return Program(name, lambda: [Rank(arguments, variables, directory.logs / f"{name}.log")], may_leave=True)


def _script(process: str) -> str:
    """A console script of this installation, wherever the user's PATH leads."""
    return str(Path(sys.executable).with_name(f"specrl-{process}"))
