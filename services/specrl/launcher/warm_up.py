"""A supervised warm-up on this machine: checks its inputs, starts its trainer ranks, and relays their metrics.

    OUT-sft/   run.yaml, sources.json, sft.json (the options), metrics.jsonl, checkpoints/, logs/, lock
    OUT        the trained policy; it appears by one rename after the last step

Invariants: no rank outlives this process (child_guard.py), and all ranks end together. One process at a time uses the
folder. The training itself is `trainer/sft`. Called by `specrl sft`.
"""

from __future__ import annotations

import fcntl
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from specrl import models
from specrl.coordinator.members.trainer_link import CHECKPOINT_DEADLINE_S, STEP_DEADLINE_S
from specrl.errors import RunFailed, RunInvalid, RunRefused, raise_problems
from specrl.files import LineFollower, make_private_folder, parse_object, read_object
from specrl.hub import FetchedSource, fetch_run_sources
from specrl.hub.fetching import NO_DISPLAY, FetchDisplay
from specrl.installation import require_engines
from specrl.launcher.gpu_checks import find_trainer_gpu_problems
from specrl.launcher.processes import child_guard, environment
from specrl.launcher.processes.ports import find_free_port
from specrl.machine import read_gpu_machine, visible_gpus
from specrl.models.precision import resolve_dtype
from specrl.spec import RunSpec, dump_spec
from specrl.spec.base import EmptySection
from specrl.spec.data import FieldMapping, FileSource, PromptSource
from specrl.spec.generation import Speculation
from specrl.trainer import preflight as trainer
from specrl.trainer.checkpointing import checkpoints

TURN_S = 0.2

# After SIGTERM, rank 0 finishes its step, however long that takes, and writes a checkpoint. Longer: it hangs.
STOP_S = STEP_DEADLINE_S + CHECKPOINT_DEADLINE_S

# For ranks that were killed.
REAP_S = 120.0


@dataclass(frozen=True)
class WarmUpOptions:
    """The user's options beside the run file.

    data: JSONL with the columns prompt and completion; None: the run's own problems, with the reference as completion.
    steps: optimizer steps; None: as many as `epochs` passes take.
    held_out: share of the examples that is only measured.
    """

    data: Path | None
    steps: int | None
    epochs: Decimal
    batch_size: int
    learning_rate: Decimal | None
    held_out: Decimal


def plan_warm_up(
    spec: RunSpec, wish: WarmUpOptions, known: Sequence[FetchedSource] = (), display: FetchDisplay = NO_DISPLAY
) -> tuple[RunSpec, tuple[FetchedSource, ...]]:
    """Build the run file of the warm-up: the run's own model and trainer on these examples, without generation.

    What it names on the hub is fetched. known: what this warm-up fetched when it began. Returns what it has fetched,
    too. Raises RunInvalid, DatasetInvalid with file and line, CheckpointInvalid, SpecInvalid.
    """
    require_engines("torch", "megatron")
    spec = resolve_dtype(spec)
    prompts = spec.prompts
    if wish.data is not None:
        columns = FieldMapping(question="prompt", answer="completion")
        source = PromptSource(jsonl=FileSource(path=str(wish.data.absolute()), fields=columns))
        prompts = prompts.model_copy(update={"source": source, "sources": ()})
    elif any(given.source.generated is not None for given in prompts.all_sources):
        raise RunInvalid(
            "prompts.source must have completions for sft, got generated, which has only answers; pass --data FILE"
        )
    optimizer = spec.trainer.optimizer
    if wish.learning_rate is not None:
        optimizer = optimizer.model_copy(update={"learning_rate": wish.learning_rate})
    # supervised_step.py computes the loss at temperature 1, whatever the run samples at.
    sampling = spec.generation.sampling.model_copy(update={"temperature": Decimal(1)})
    changed = spec.model_copy(
        update={
            "prompts": prompts,
            "generation": spec.generation.model_copy(
                update={"sampling": sampling, "speculation": Speculation(none=EmptySection())}
            ),
            "trainer": spec.trainer.model_copy(update={"optimizer": optimizer}),
            "schedule": spec.schedule.model_copy(update={"prompts_per_step": wish.batch_size}),
            "checkpoint": spec.checkpoint.model_copy(update={"mirror": None}),
            "validation": None,
        }
    )
    fetched = fetch_run_sources(changed, known, display)
    raise_problems(fetched.problems)
    changed = fetched.spec
    # Only the checks of the packages that a warm-up uses: it generates nothing and grades nothing.
    found = models.read_models(changed)
    of_gpus = find_trainer_gpu_problems(changed, read_gpu_machine())
    raise_problems([*models.check(changed, found), *trainer.check(changed, found), *of_gpus])
    count = _count_examples(changed, wish.held_out)
    steps = wish.steps or math.ceil(count * wish.epochs / wish.batch_size)
    return changed.model_copy(
        update={"schedule": changed.schedule.model_copy(update={"steps": steps})}
    ), fetched.sources


def _count_examples(spec: RunSpec, held_out: Decimal) -> int:
    """Count the examples of an epoch. This reads and checks all of them. Raises DatasetInvalid, CheckpointInvalid."""
    from specrl.trainer.sft.examples import TrainingExamples

    return len(TrainingExamples(spec, held_out))


def locate_folder(out: Path) -> Path:
    """Return the folder of a warm-up that writes the policy to `out`."""
    return out.absolute().with_name(f"{out.name}-sft")


@contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Hold the lock of the folder of a warm-up that writes to `out`, which is made if needed. Raises RunInvalid.

    The kernel releases the lock when this process ends, even if it is killed.
    """
    folder = locate_folder(out)
    with ExitStack() as stack:
        try:
            make_private_folder(folder)
            file = stack.enter_context((folder / "lock").open("a"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunInvalid(
                f"--out must not be the folder of an active warm-up, got {out}, to which another `specrl sft` writes; "
                "wait for its end or stop it, or name another --out"
            ) from error
        except OSError as error:
            raise _describe_unwritable(folder, error) from error
        yield


class WarmUp:
    """One warm-up in its folder, new or resumed. The caller holds the folder's lock.

    A resumed one must have the same options and run file.
    trained: the step of the checkpoint that it resumes from; 0 without one.
    """

    def __init__(self, spec: RunSpec, wish: WarmUpOptions, out: Path) -> None:
        """Write the run file and the options into the folder, or compare them. Raises RunInvalid."""
        self.out = out.absolute()
        self.folder = locate_folder(out)
        self._spec = spec
        self._wish = wish
        # All values as text, since that is how sft.json stores them.
        asked = {name: str(value) for name, value in asdict(wish).items()} | {"run": dump_spec(spec)}
        file = self.folder / "sft.json"
        try:
            self.is_resumed = file.exists()
            if self.is_resumed and (different := _describe_differences(read_object(file), asked)):
                raise RunInvalid(
                    f"{self.folder} must belong to the same warm-up, got {different}; "
                    "delete it to start over, or name another --out"
                )
            (self.folder / "logs").mkdir(exist_ok=True)
            newest = checkpoints.find_newest(self.folder)
            self.trained = 0 if newest is None else checkpoints.check_complete(newest)
            (self.folder / "run.yaml").write_text(dump_spec(spec), encoding="utf-8")
            file.write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            if isinstance(error, RunInvalid):
                raise
            raise _describe_unwritable(self.folder, error) from error

    def run(self, show: Callable[[dict[str, Any]], None], say: Callable[[str], None]) -> bool:
        """Train to the end and pass each new line of metrics to `show`. Returns False after Ctrl-C.

        say: shows a message to the user. A second Ctrl-C raises KeyboardInterrupt and kills the ranks.
        Raises RunFailed with the last log line of the rank that failed first; RunRefused if its user must act first.
        """
        follower = _NewSteps(self.folder / "metrics.jsonl", self.trained)
        with self._start_ranks() as ranks:
            try:
                while any(rank.poll() is None for rank in ranks):
                    if any(rank.poll() for rank in ranks):
                        break  # a rank failed; the others would wait for it
                    for line in follower.read_lines():
                        show(line)
                    time.sleep(TURN_S)
            except KeyboardInterrupt:
                # Rank 0 alone: it stops the other ranks after the step, once the checkpoint is written.
                ranks[0].terminate()
                say("stopping after this step and its checkpoint; press Ctrl-C again to stop at once without saving")
                _wait_for_exit(ranks, STOP_S)
                return False
        for line in follower.read_lines():
            show(line)
        failed = [number for number, rank in enumerate(ranks) if rank.returncode]
        if failed:
            # Prefer a rank that exited by itself: ranks that we killed (negative codes) logged no reason.
            first = min(failed, key=lambda number: (ranks[number].returncode < 0, number))
            ended = RunRefused if ranks[first].returncode == RunRefused.exit_code else RunFailed
            raise ended(f"{self._read_last_line(first)}\n  logs: {self.folder / 'logs'}")
        # The rename is atomic, so OUT is complete whenever it exists.
        policy = self.folder / "export" / "policy"
        policy.rename(self.out)
        return True

    @contextmanager
    def _start_ranks(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        world_size = self._spec.trainer.parallelism.world_size
        threads = self._spec.trainer.threads
        gpus = visible_gpus()
        port = find_free_port()
        command = (sys.executable, "-m", "specrl.trainer.sft")
        arguments = (*command, "--folder", str(self.folder), "--held-out", str(self._wish.held_out))
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                with self._log_file(rank).open("wb") as log:
                    started.append(
                        subprocess.Popen(
                            child_guard.guarded_command(arguments),
                            env=environment.rank_environment(threads, rank, world_size, port, gpus),
                            stdout=log,
                            stderr=log,
                            start_new_session=True,  # Ctrl-C reaches only this process, which stops rank 0
                        )
                    )
            yield started
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
            _wait_for_exit(started, REAP_S)

    def _log_file(self, rank: int) -> Path:
        return self.folder / "logs" / f"rank-{rank}.log"

    def _read_last_line(self, rank: int) -> str:
        lines = self._log_file(rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"rank {rank} was killed without a message; check the machine's free memory"


def _describe_unwritable(folder: Path, error: Exception) -> RunInvalid:
    return RunInvalid(f"{folder} must be a writable folder, got {error}; name another --out")


def _describe_differences(before: Mapping[str, Any], asked: Mapping[str, str]) -> str:
    """Name the options that differ, as in `--steps 10 instead of 7`, or a run file that does. Empty if none does."""
    different = [name for name in asked if before.get(name) != asked[name]]
    # The options change the stored run file, too.
    names = [name for name in different if name != "run"]
    options = [f"--{name.replace('_', '-')} {asked[name]} instead of {before.get(name)}" for name in names]
    return " and ".join(options) or ("another run file" if different else "")


class _NewSteps:
    """The lines of metrics that were not shown yet. A resumed warm-up does not show the steps before its checkpoint."""

    def __init__(self, file: Path, trained: int) -> None:
        """trained: the step of the checkpoint that the warm-up resumes from; 0 for a new one, which shows step 0."""
        self._file = LineFollower(file)
        self._shown = trained or -1

    def read_lines(self) -> Iterator[dict[str, Any]]:
        """Yield new lines. Unreadable files and lines are skipped, since the lines are only shown."""
        with suppress(OSError):
            while lines := self._file.read_lines():
                for line in lines:
                    with suppress(ValueError):
                        found = parse_object(line)
                        step = found.get("step")
                        # The trainer writes the file anew when it resumes, so earlier lines come again.
                        if isinstance(step, int) and step > self._shown:
                            self._shown = step
                            yield found


def _wait_for_exit(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait for every process, `seconds` in total, then kill those that are left."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
