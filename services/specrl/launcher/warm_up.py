"""A supervised warm-up on this machine: what it is made of, checked before it starts; its ranks; what they report.

    OUT-sft/          run.yaml, sft.json (what was asked for), metrics.jsonl, checkpoints/, logs/: `trainer/sft.py`
    OUT               the policy, by one rename, when the last step is trained

Nothing runs on its own: the ranks end when their parent does (leash.py), and are ended together.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from specrl.errors import RunInvalid, TrainerFailed
from specrl.files import Follow, parse_object, read_object
from specrl.installation import require_engines
from specrl.launcher import environment, leash, preflight
from specrl.launcher.ports import free_port
from specrl.spec import RunSpec, dump
from specrl.spec.base import Empty
from specrl.spec.data import FieldMapping, FileSource, PromptSource
from specrl.spec.generation import Speculation

TURN_S = 0.2
GRACE_S = 120.0
"""What rank 0 may take to end a step and write a checkpoint when it is told to stop."""


@dataclass(frozen=True)
class Wish:
    """What a user asks for beside the run file. data: JSONL with the columns prompt and completion; None: the run's own
    problems, with the reference as the completion. steps: None: as many as `epochs` take."""

    data: Path | None
    steps: int | None
    epochs: Decimal
    batch_size: int
    learning_rate: Decimal | None
    held_out: Decimal


def plan(spec: RunSpec, wish: Wish) -> RunSpec:
    """The run file of the warm-up, when all of it is sound: the run's, on these examples, without generation.

    Raises RunInvalid, DatasetInvalid with file and line, CheckpointInvalid, SpecInvalid.
    """
    require_engines("torch", "megatron")
    source = spec.prompts.source
    if wish.data is not None:
        columns = FieldMapping(question="prompt", answer="completion")
        source = PromptSource(jsonl=FileSource(path=str(wish.data.absolute()), fields=columns))
    elif source.generated is not None:
        raise RunInvalid(
            "sft must have completions, got prompts.source.generated, which has answers alone; give --data FILE"
        )
    optimizer = spec.trainer.optimizer
    if wish.learning_rate is not None:
        optimizer = optimizer.model_copy(update={"learning_rate": wish.learning_rate})
    sampling = spec.generation.sampling.model_copy(update={"temperature": Decimal(1)})
    changed = spec.model_copy(
        update={
            "prompts": spec.prompts.model_copy(update={"source": source}),
            "generation": spec.generation.model_copy(
                update={"sampling": sampling, "speculation": Speculation(none=Empty())}
            ),
            "trainer": spec.trainer.model_copy(update={"optimizer": optimizer}),
            "schedule": spec.schedule.model_copy(update={"prompts_per_step": wish.batch_size}),
            "checkpoint": spec.checkpoint.model_copy(update={"mirror": None}),
            "validation": None,
        }
    )
    policy = preflight.check_policy(changed)
    preflight.check_parallelism(changed, policy)
    steps = wish.steps or math.ceil(_count(changed, wish.held_out) * wish.epochs / wish.batch_size)
    return changed.model_copy(update={"schedule": changed.schedule.model_copy(update={"steps": steps})})


def _count(spec: RunSpec, held_out: Decimal) -> int:
    """Examples of an epoch; all of them are read and checked for it."""
    from specrl.prompts import load_prompts

    count = len(load_prompts(spec).source)
    return count - int(count * held_out)


class WarmUp:
    """One warm-up in its folder. Begun, or gone on with: what was asked for must be the same."""

    def __init__(self, spec: RunSpec, wish: Wish, out: Path) -> None:
        """Make the folder, or take the one that is there. Raises RunInvalid."""
        self.out, self.folder = out.absolute(), out.absolute().with_name(f"{out.name}-sft")
        self._spec, self._wish = spec, wish
        asked = {name: str(value) for name, value in asdict(wish).items()} | {"run": dump(spec)}
        file = self.folder / "sft.json"
        try:
            self.is_resumed = file.exists()
            if self.is_resumed and read_object(file) != asked:
                raise RunInvalid(
                    f"{self.folder} must be of the same warm-up, got one with other settings or another run file; "
                    "delete it to begin anew, or name another --out"
                )
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            (self.folder / "run.yaml").write_text(dump(spec), encoding="utf-8")
            file.write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            if isinstance(error, RunInvalid):
                raise
            raise RunInvalid(f"{self.folder} must be a writable folder, got {error}; name another --out") from error

    def run(self, show: Callable[[dict[str, Any]], None]) -> bool:
        """Train to the end, giving each new line of metrics to `show`. Returns False when it was interrupted.

        Raises TrainerFailed with the last words of the rank that ended first.
        """
        shown = Follow(self.folder / "metrics.jsonl")
        with self._ranks() as ranks:
            try:
                while any(rank.poll() is None for rank in ranks):
                    if any(rank.poll() for rank in ranks):
                        break  # the others wait for it
                    for line in _new(shown):
                        show(line)
                    time.sleep(TURN_S)
            except KeyboardInterrupt:
                ranks[0].terminate()
                _wait(ranks, GRACE_S)
                return False
        for line in _new(shown):
            show(line)
        failed = [number for number, rank in enumerate(ranks) if rank.returncode]
        if failed:
            # What a rank says itself comes before what those that we killed cannot say.
            first = min(failed, key=lambda number: (ranks[number].returncode < 0, number))
            raise TrainerFailed(f"{self._last_words(first)}\n  logs: {self.folder / 'logs'}")
        policy = self.folder / "export" / "policy"
        policy.rename(self.out)
        return True

    @contextmanager
    def _ranks(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        world_size, threads = self._spec.trainer.parallelism.world_size, self._spec.trainer.threads
        gpus, port = environment.visible_gpus(), free_port()
        command = (sys.executable, "-m", "specrl.trainer.sft")
        arguments = (*command, "--folder", str(self.folder), "--held-out", str(self._wish.held_out))
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                with self._log(rank).open("wb") as log:
                    started.append(
                        subprocess.Popen(
                            [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *arguments],
                            env=environment.rank_environment(threads, rank, world_size, port, gpus),
                            stdout=log,
                            stderr=log,
                            start_new_session=True,  # Ctrl-C is for this process, which tells rank 0
                        )
                    )
            yield started
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
            _wait(started, GRACE_S)

    def _log(self, rank: int) -> Path:
        return self.folder / "logs" / f"rank-{rank}.log"

    def _last_words(self, rank: int) -> str:
        lines = self._log(rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"rank {rank} must come to the end, got killed; look at the machine's memory"


def _new(file: Follow) -> Iterator[dict[str, Any]]:
    """What can be read of the lines that it has gained: they are only shown."""
    with suppress(OSError):
        while lines := file.lines():
            for line in lines:
                with suppress(ValueError):
                    yield parse_object(line)


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
