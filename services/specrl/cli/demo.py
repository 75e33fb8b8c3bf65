"""`specrl demo`: makes a tiny policy and trains it on this machine with every component running."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specrl.cli.command_exit import report_outcome
from specrl.cli.options import RUNS, Plain
from specrl.errors import CheckpointInvalid
from specrl.installation import EXAMPLES, require_engines
from specrl.launcher import launch
from specrl.launcher.processes.environment import replica_environment
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.terminal.view import QUIET_S, choose_view
from specrl.machine import visible_gpus
from specrl.spec import RunSpec, load_spec
from specrl.spec.yaml_input import quote_yaml

# Live rollouts at which rollouts with and without speculation are compared.
COMPARED_BATCHES = "8,64"
STOP_S = 20.0
"""How long a comparison may take to close its engines after Ctrl-C, before it is killed."""
DEMO = EXAMPLES / "demo"


def run_demo(  # noqa: PLR0913, PLR0917 - one argument per option
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the policy and the run.")] = RUNS,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps. Default: the run file's.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the policy and the run. Default: their own defaults.")
    ] = None,
    keep_policy: Annotated[
        bool, typer.Option("--keep-policy", help="Reuse the policy that an earlier demo left in DIR, if any.")
    ] = False,
    compare: Annotated[
        bool, typer.Option(help="At the end, compare rollouts with and without speculation. Takes some minutes.")
    ] = True,
    plain: Plain = False,
) -> None:
    """Train a tiny model on this machine's CPU: make a base policy with `specrl sft`, then run examples/demo/run.yaml.

    Nothing is downloaded. The summary shows what improved. At the end, rollouts with and without speculation are
    compared.
    """
    require_engines("torch", "megatron", "vllm")
    # A policy per seed, so that --keep-policy never reuses that of another seed.
    policy = (out / ("demo-policy" if seed is None else f"demo-policy-{seed}")).absolute()
    overrides = [f"model.path={quote_yaml(policy)}"]
    overrides += [] if steps is None else [f"schedule.steps={steps}"]
    overrides += [] if seed is None else [f"schedule.seed={seed}"]
    spec = load_spec(DEMO / "run.yaml", overrides)
    if not (keep_policy and policy.exists()):
        options = [] if seed is None else ["--seed", str(seed)]
        make_policy(DEMO / "make_policy.py", policy, [*options, *(["--plain"] if plain else [])])
    view = choose_view(Console(), plain)
    launched = launch.start_run(spec, out, view)
    report_outcome(launched, view)
    if compare:
        compare_speculation(launched.directory, spec)


def make_policy(script: Path, policy: Path, arguments: Sequence[str]) -> None:
    """Make the policy in a separate process, since that needs torch. Raises CheckpointInvalid when the script fails.

    An existing policy is replaced only by a complete one.
    """
    # In the same folder as the policy, so that the rename below stays within one file system.
    fresh = policy.with_name(f".{policy.name}-fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    done = subprocess.run([sys.executable, str(script), "--out", str(fresh), *arguments], check=False)
    if done.returncode != 0:
        raise CheckpointInvalid(
            f"making the demo's policy failed with exit code {done.returncode}; the lines above say why"
        )
    shutil.rmtree(policy, ignore_errors=True)
    fresh.rename(policy)


def compare_speculation(run: RunDirectory, spec: RunSpec) -> None:
    """Measure the finished run's policy with and without its drafter, and print the figures.

    This happens in a separate process, since it needs vLLM. A failed comparison does not fail the command: the run
    itself has finished.
    """
    typer.echo(
        f"the run is finished, and its results are in {run.path}. Next, rollouts with and without speculation are "
        "compared, which takes some minutes; Ctrl-C ends the comparison and loses nothing of the run"
    )
    result = run.path / "comparison.json"
    progress = run.path / ".comparison-progress"
    log = run.logs_folder / "comparison.log"
    arguments = [
        *(sys.executable, "-m", "specrl.generation.compare", "--spec", str(run.run_file)),
        *("--policy", str(run.path / "export" / "policy"), "--drafter", str(run.path / "export" / "drafter")),
        # Without speculation, with the run's own draft length, and with a draft length chosen per batch.
        *("--mechanism", "none", "--mechanism", f"eagle3:{spec.generation.speculation.num_draft_tokens}"),
        *("--mechanism", "eagle3"),
        *("--batches", COMPARED_BATCHES, "--json", str(result)),
        *("--progress", str(progress)),
    ]
    try:
        exit_code = run_with_progress(arguments, log, progress)
    except KeyboardInterrupt:
        typer.echo(f"the comparison was stopped; the run itself is finished, and its results are in {run.path}")
        return
    finally:
        progress.unlink(missing_ok=True)
    if exit_code != 0:
        typer.echo(f"the comparison failed with exit code {exit_code}; see {log}")
        return
    for row in json.loads(result.read_text(encoding="utf-8")):
        if row["mechanism"] != "none":
            length = row["acceptanceLength"]
            typer.echo(
                f"  {_describe_mechanism(row['mechanism'])}, {row['batch']} live rollouts: "
                f"{row['speed']:.2f}x the tokens per second without speculation "
                f"({row['speedLow']:.2f} to {row['speedHigh']:.2f}), "
                + ("nothing drafted" if length is None else f"acceptance length {length:.2f}")
            )


def run_with_progress(arguments: Sequence[str], log: Path, progress: Path) -> int:
    """Run the comparison and return its exit code. Prints its present activity every QUIET_S seconds.

    log: gets its output. progress: the file in which it keeps its activity. It has no limit of time: Ctrl-C ends it.
    """
    began_s = time.monotonic()
    environment = replica_environment(1, visible_gpus())
    with log.open("wb") as file, subprocess.Popen(arguments, stdout=file, stderr=file, env=environment) as process:
        try:
            while True:
                try:
                    return process.wait(QUIET_S)
                except subprocess.TimeoutExpired:
                    activity = progress.read_text(encoding="utf-8") if progress.exists() else "starting"
                    typer.echo(f"  comparison: {activity} ({time.monotonic() - began_s:.0f} s)")
        except KeyboardInterrupt:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            raise


def _describe_mechanism(mechanism: str) -> str:
    """Describe a row's mechanism: its kind, and its draft length k."""
    kind, _, length = mechanism.partition(":")
    return f"{kind}, k = {length}" if length else f"{kind}, k chosen per batch"
