"""The command line of specrl: console script `specrl`.

    specrl run        begin a run on this machine, or go on with one
    specrl status     how a run is doing, or did; -w looks on
    specrl pause      begin nothing new; resume: go on; scale: have more replicas, or fewer
    specrl checkpoint have one written; list, check, export or delete them
    specrl report     figures of a run, or of two, as a page to keep
    specrl sft        train a policy on prompts with completions, before a run
    specrl drafter    init: train a drafter on a policy's own rollouts
    specrl rewards    grade: try a verifier on completions, or on a run's rollouts
    specrl store      look into a run's state, copy it out, or delete it
    specrl families   problem families that need no data set
    specrl simulate   what a run would take on a cluster
    specrl plan       the best layout of that cluster
    specrl spec       check or show a run file, or an RLJob's
    specrl crd        what a Kubernetes API server must know of RLJobs
    specrl demo       make a tiny policy and train it here
    specrl engines    the commands that install the engines beside specrl

A SpecrlError is one message on stderr and exit code 2, without a traceback. Exit codes: 0 done, 1 the run failed on its
way, 2 it cannot run as asked, 130 interrupted.
"""

from __future__ import annotations

from typing import Annotated

import typer

from specrl.cli import (
    checkpoint,
    control,
    demo,
    drafter,
    engines,
    report,
    rewards,
    run,
    sft,
    simulate,
    spec,
    status,
    store,
)
from specrl.cli.endings import Reporting
from specrl.version import describe_version

app = typer.Typer(
    name="specrl",
    cls=Reporting,
    help="Reinforcement-learning post-training of language models with lossless speculative rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run", short_help="Begin a run on this machine, or go on with one.")(run.run)
app.command("status", short_help="How a run is doing, or did.")(status.status)
app.command("pause", short_help="Have a run begin nothing new.")(control.pause)
app.command("resume", short_help="Have a paused run go on.")(control.resume)
app.command("scale", short_help="Have more generation replicas, or fewer.")(control.scale)
app.command("report", short_help="Figures of a run, or of two, as a page to keep.")(report.report)
app.command("sft", short_help="Train a policy on prompts with completions, before a run.")(sft.sft)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(drafter.app, name="drafter")
app.add_typer(store.app, name="store")
app.add_typer(rewards.app, name="rewards")
app.command("families", short_help="Problem families that need no data set.")(spec.families)
app.command("simulate", short_help="What a run would take on a cluster.")(simulate.simulate)
app.command("plan", short_help="The best layout of a cluster.")(simulate.plan)
app.add_typer(spec.app, name="spec")
app.command("crd", short_help="Print the CustomResourceDefinition of RLJob.")(spec.crd)
app.command("demo", short_help="Make a tiny policy and train it here.")(demo.demo)
app.command("engines", short_help="Commands that install the engines.")(engines.engines)


def print_version(is_asked: bool) -> None:
    """Print version and commit, and end, if the user asked for them."""
    if is_asked:
        typer.echo(f"specrl {describe_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print version and commit.")
    ] = False,
) -> None:
    """Options before the command's name."""


def main() -> None:
    """Run the command line."""
    app()
