"""Injects faults into whole runs until a CPU budget is spent, and checks each run's promises. See docs/chaos.md.

    python -m tests.chaos [--seed N] [--minutes M] [--rounds R] [--faults F] [--only FAULT]... [--steps S] [--ranks K]
                          [--folder DIR]

A round is one whole run of real processes that has some faults and must then finish. Rounds alternate between SQLite
and Redis, and between maxPolicyLag 0, 1 and 2.

With maxPolicyLag 0 the trained policy must equal that of a run without faults, bit by bit. Rollouts are computed one at
a time (maxLiveRollouts 1), so that an engine's result depends on the rollout alone: not on the replica, nor on how
often it was started. One replica is therefore enough for the run without faults.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.chaos import network
from tests.chaos.field import Field, NotThere
from tests.chaos.plan import Fault, Possible, faults
from tests.chaos.promises import evidence, violations
from tests.integration.box_runs import a_synchronous_run, make_box_policy, write_questions
from tests.integration.runs import checksums
from tests.redis_servers import RedisProcess

CHECKPOINT_STEPS = 5
END_S = 1200.0
"""How long a run may take to begin, and to its end after its last fault. A busy machine is slow, not wrong."""
RESUMES = 10
"""Of one run by its user: what kills the launcher, or what the launcher gives up on, may happen so often."""
USERS_TURN = ("times in a row", "make room", "free space")
"""Ends of a launch after which its user goes on with --resume: a program that was killed too often, a full disk."""


@dataclass(frozen=True)
class Terrain:
    """In what kind of run a round takes place."""

    is_on_redis: bool
    lag: int

    def __str__(self) -> str:
        return f"{'Redis' if self.is_on_redis else 'SQLite'}, maxPolicyLag {self.lag}"


TERRAINS = (
    Terrain(is_on_redis=False, lag=0),
    Terrain(is_on_redis=True, lag=1),
    Terrain(is_on_redis=True, lag=0),
    Terrain(is_on_redis=False, lag=2),
)


class Violated(Exception):
    """A promise was broken."""


@dataclass(frozen=True)
class Size:
    """Of every run: its steps, and the ranks of its trainer."""

    steps: int
    ranks: int


def a_run(policy: Path, terrain: Terrain, redis: RedisProcess | None, size: Size, replicas: int) -> dict[str, Any]:
    """Replicas with speculation, trainer ranks; seconds a step, and deadlines that faults outlast."""
    run: dict[str, Any] = a_synchronous_run(policy, Path("boxes.jsonl"))
    run["name"] = "chaos"
    run["generation"] |= {"maxLiveRollouts": 1 if terrain.lag == 0 else 8, "replicas": replicas}
    run["trainer"] |= {"parallelism": {"data": size.ranks}}
    run["schedule"] |= {"steps": size.steps, "maxPolicyLag": terrain.lag}
    return run | {
        "rewardPool": {"workers": 2, "timeoutS": 60 if terrain.lag == 0 else 10},
        "weights": {"timeoutS": 10},
        "checkpoint": {"everySteps": CHECKPOINT_STEPS},
        "telemetry": {"heartbeatS": 1},
        "store": {"redis": {"addresses": [redis.address], "timeoutS": 1}} if redis else {"sqlite": {}},
    }


class Chaos:
    """All rounds of one seed."""

    def __init__(self, options: argparse.Namespace, folder: Path, has_namespace: bool) -> None:
        self._options = options
        self._folder = folder
        self._has_namespace = has_namespace
        self._began = time.monotonic()
        self._size = Size(options.steps, options.ranks)
        self._done: Counter[str] = Counter()
        self._history: list[str] = []
        self._policy = folder / "policy"
        self._decks: dict[Terrain, Iterator[Fault]] = {}
        for terrain in TERRAINS:
            possible = Possible(terrain.is_on_redis, terrain.lag == 0, has_namespace, tuple(options.only))
            self._decks[terrain] = faults(f"{options.seed}/{terrain}", possible)

    def go_on(self) -> None:
        """Every round. Raises Violated."""
        make_box_policy(self._policy)
        self.say(f"a run without faults, to compare with; {self._size.steps} steps")
        undisturbed = self._round("undisturbed", TERRAINS[0], 0, replicas=1)
        rounds = itertools.count(1) if self._options.rounds is None else range(1, self._options.rounds + 1)
        for number in rounds:
            terrain = TERRAINS[(number - 1) % len(TERRAINS)]
            self.say(f"round {number}: {terrain}")
            from_step = 1 - (number - 1) // len(TERRAINS) % 2
            found = self._round(f"round-{number}", terrain, self._options.faults, from_step)
            if terrain.lag == 0:
                self._compare(undisturbed, found)
            spent_minutes = cpu_seconds() / 60
            self.say(f"round {number} kept its promises; {spent_minutes:.1f} minutes of CPU so far")
            if self._options.rounds is None and spent_minutes >= self._options.minutes:
                break
        self.say(f"kept through {sum(self._done.values())} faults, {cpu_seconds() / 60:.1f} minutes of CPU")
        for name, count in sorted(self._done.items()):
            self.say(f"  {count:3} {name}")

    def say(self, words: str) -> None:
        """One line of progress."""
        seconds = time.monotonic() - self._began
        sys.stdout.write(f"{seconds:7.1f} s  {words}\n")
        sys.stdout.flush()

    def history(self) -> str:
        """The faults so far."""
        return "\n".join(self._history)

    # -- one round -----------------------------------------------------------------------------------------------

    def _round(
        self, name: str, terrain: Terrain, count: int, from_step: int = 0, replicas: int = 2
    ) -> Mapping[str, str]:
        """One run with `count` faults, the first when `from_step` is trained; returns its tensors' checksums."""
        folder = self._folder / name
        folder.mkdir()
        write_questions(folder)
        redis = RedisProcess(folder / "redis") if terrain.is_on_redis else None
        run = a_run(self._policy, terrain, redis, self._size, replicas)
        field = Field(folder, run, redis, self._has_namespace)
        try:
            self._until(field, lambda: field.step() >= from_step, "begin")
            self._befall(field, terrain, count)
            self._until(field, lambda: field.run.process.poll() == 0, "come to its end")
            self._hold_to_promises(field)
            return checksums(field.run.directory, self._size.steps)
        finally:
            field.clear()

    def _befall(self, field: Field, terrain: Terrain, count: int) -> None:
        done = 0
        while done < count:
            fault = next(self._decks[terrain])
            self._rest(field, fault.wait_s)
            if field.run.process.poll() == 0:
                return
            step = field.step()
            at = datetime.now().astimezone().strftime("%H:%M:%S")
            try:
                outcome = field.strike(fault)
            except NotThere as reason:
                self.say(f"  step {step:2}  skipped: {fault}: {reason}")
                continue
            done += 1
            self._done[f"{fault.kind} {fault.target}"] += 1
            self._history.append(f"{at} {field.folder.name} step {step}: {fault}: {outcome}")
            self.say(f"  step {step:2}  {fault}: {outcome}")

    def _rest(self, field: Field, seconds: float) -> None:
        """Let the run go on; its launcher is started again if it ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look_after(field)
            time.sleep(0.1)

    def _until(self, field: Field, is_so: Callable[[], bool], goal: str) -> None:
        """Let the run go on until something is so. Raises Violated when it takes too long."""
        deadline = time.monotonic() + END_S
        shown = -5
        while not is_so():
            self._look_after(field)
            if field.step() >= shown + 5:
                shown = field.step()
                self.say(f"  step {shown:2} of {self._size.steps}")
            if time.monotonic() > deadline:
                raise Violated(f"the run must {goal} in {END_S:g} s, got no further than step {field.step()}")
            time.sleep(0.2)

    def _look_after(self, field: Field) -> None:
        """Do what its user would do: resume what was killed or given up. Any other end is a violation."""
        code = field.run.process.poll()
        if code in {None, 0}:
            return
        last = "killed" if code == -signal.SIGKILL else field.last_words()
        if last != "killed" and not any(words in last for words in USERS_TURN):
            raise Violated(f"the run ended with exit code {code}: {last}")
        if field.launches > RESUMES:
            raise Violated(f"the run must come to its end, got {field.launches} launches: {last}")
        self.say(f"  launch {field.launches} ended, and is resumed: {' '.join(last.split())[-200:]}")
        field.resume()

    def _hold_to_promises(self, field: Field) -> None:
        found = evidence(field.run.directory, field.ledger)
        wrong = violations(found)
        if wrong:
            raise Violated("\n".join(wrong))
        steps = len({batch.step for batch in found.trained})
        lag = max((max(batch.policy_lags, default=0) for batch in found.trained), default=0)
        prompts = self._size.steps * found.spec.schedule.prompts_per_step
        self.say(f"  {prompts} prompts settled once each, {len(found.failed)} of them failed with a reason")
        self.say(
            f"  {steps} steps, {len(found.trained) - steps} trained again alike; largest lag {lag}; none discarded"
        )

    def _compare(self, undisturbed: Mapping[str, str], found: Mapping[str, str]) -> None:
        different = [name for name in undisturbed if found.get(name) != undisturbed[name]]
        if different:
            raise Violated(f"tensors must be those of the run without faults, got others in {', '.join(different)}")
        self.say(f"  {len(undisturbed)} files of tensors, bit for bit those of the run without faults")


def cpu_seconds() -> float:
    """Of all processes of finished runs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Runs under faults.")
    parser.add_argument("--seed", type=int, help="of a run of this program that is to be repeated")
    parser.add_argument("--minutes", type=float, default=30.0, help="of CPU time, at least; whole rounds are made")
    parser.add_argument("--rounds", type=int, help="so many, whatever time they take")
    parser.add_argument("--faults", type=int, default=8, help="in each round")
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--ranks", type=int, default=2, help="of each run's trainer")
    parser.add_argument("--only", action="append", default=[], help="faults that begin like this; may be repeated")
    parser.add_argument("--folder", type=Path, help="where runs and logs are kept; must not exist")
    parser.add_argument("--is-inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.is_inside:
        options.seed = int.from_bytes(os.urandom(3), "big") if options.seed is None else options.seed
        network.enter("tests.chaos", [*sys.argv[1:], "--seed", str(options.seed), "--is-inside"])
        sys.stdout.write("no network namespaces here: unproven are cut networks and full disks\n")
    else:
        network.prepare()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="specrl-chaos-"))
    folder.mkdir(parents=True, exist_ok=options.folder is None)
    sys.stdout.write(f"seed {options.seed}, runs and logs in {folder}\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what runs is stopped, as after Ctrl-C
    chaos = Chaos(options, folder.resolve(), options.is_inside)
    try:
        chaos.go_on()
    except Violated as broken:
        sys.stdout.write(f"VIOLATED with seed {options.seed}\n{broken}\nfaults so far:\n{chaos.history()}\n")
        runs = "kept" if options.is_inside else "runs"
        sys.stdout.write(f"logs: {folder}/ROUND/{runs}/chaos-1/logs, output: {folder}/ROUND/output.txt\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
