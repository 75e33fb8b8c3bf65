"""`specrl demo`: make a tiny policy on the spot and train it here, with every part running."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specrl.cli.endings import conclude
from specrl.cli.options import RUNS, Plain
from specrl.errors import CheckpointInvalid
from specrl.installation import EXAMPLES, require_engines
from specrl.launcher import launch
from specrl.launcher.environment import replica_environment, visible_gpus
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.view import view_for
from specrl.spec import RunSpec, load_spec

COMPARED_BATCHES = "8,64"
DEMO = EXAMPLES / "demo"


def demo(  # noqa: PLR0913, PLR0917 - one argument per option
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the policy and the run.")] = RUNS,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps, other than the run file's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of policy and run, other than the defaults.")] = None,
    keep_policy: Annotated[
        bool, typer.Option("--keep-policy", help="Use the policy that an earlier demo left in DIR, if there is one.")
    ] = False,
    compare: Annotated[
        bool, typer.Option(help="Measure rollouts with and without speculation at the end: minutes more.")
    ] = True,
    plain: Plain = False,
) -> None:
    """Train a tiny model on this machine's CPU: make a base policy by `specrl sft`, then run examples/demo/run.yaml.

    Nothing is downloaded. The summary says what improved, and compares with rollouts without speculation.
    """
    require_engines("torch", "megatron", "vllm")
    policy = (out / ("demo-policy" if seed is None else f"demo-policy-{seed}")).absolute()
    overrides = [f"model.path={json.dumps(str(policy))}"]  # JSON text is YAML text, whatever the path holds
    overrides += [] if steps is None else [f"schedule.steps={steps}"]
    overrides += [] if seed is None else [f"schedule.seed={seed}"]
    spec = load_spec(DEMO / "run.yaml", overrides)
    if not (keep_policy and policy.exists()):
        options = [] if seed is None else ["--seed", str(seed)]
        make_policy(DEMO / "make_policy.py", policy, [*options, *(["--plain"] if plain else [])])
    view = view_for(Console(), plain)
    launched = launch.begin(spec, out, view)
    conclude(launched, view)
    if compare:
        compare_speculation(launched.directory, spec)


def make_policy(script: Path, policy: Path, arguments: Sequence[str]) -> None:
    """Make the policy in a process of its own, which needs torch. An older one stays until the new one is whole."""
    fresh = policy.with_name(f".{policy.name}-fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    done = subprocess.run([sys.executable, str(script), "--out", str(fresh), *arguments], check=False)
    if done.returncode != 0:
        raise CheckpointInvalid(f"the demo's policy must be made, got exit code {done.returncode}; see the lines above")
    shutil.rmtree(policy, ignore_errors=True)
    fresh.rename(policy)


def compare_speculation(run: RunDirectory, spec: RunSpec) -> None:
    """Measure the finished run's policy with and without its drafter, side by side, and show the figures.

    In a process of its own, which needs vLLM. A comparison that fails costs nothing but itself: the run is done.
    """
    typer.echo("speculation against none, same prompts, same sampling, measured in turns (some minutes) ...")
    result, log = run.path / "comparison.json", run.logs / "comparison.log"
    arguments = [
        *(sys.executable, "-m", "specrl.generation.compare", "--spec", str(run.run_file)),
        *("--policy", str(run.path / "export" / "policy"), "--drafter", str(run.path / "export" / "drafter")),
        *("--mechanism", "none", "--mechanism", f"eagle3:{spec.generation.speculation.num_draft_tokens}"),
        *("--mechanism", "eagle3"),
        *("--batches", COMPARED_BATCHES, "--json", str(result)),
    ]
    with log.open("wb") as file:
        done = subprocess.run(
            arguments, check=False, stdout=file, stderr=file, env=replica_environment(1, visible_gpus())
        )
    if done.returncode != 0:
        typer.echo(f"the comparison could not be measured; {log} says why")
        return
    for row in json.loads(result.read_text(encoding="utf-8")):
        if row["mechanism"] != "none":
            length = row["acceptanceLength"]
            typer.echo(
                f"  {_named(row['mechanism'])}, {row['batch']} live: {row['speed']:.2f}x the tokens per second of none "
                f"({row['speedLow']:.2f}-{row['speedHigh']:.2f}), "
                + ("nothing drafted" if length is None else f"acceptance length {length:.2f}")
            )


def _named(mechanism: str) -> str:
    """A row's mechanism for people: kind, and k or that it is chosen."""
    kind, _, length = mechanism.partition(":")
    return f"{kind}, k = {length}" if length else f"{kind}, k chosen for each batch"
