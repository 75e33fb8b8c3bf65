"""The command line of specrl: console script `specrl`.

    specrl init       write a run file for a policy and a data set
    specrl fetch      fetch a model or a data set on the hub beforehand
    specrl run        start a run on this machine, or resume one
    specrl status     show the progress or the result of a run; -w keeps watching
    specrl pause      start nothing new; `resume` continues, `scale` changes the number of replicas
    specrl checkpoint request a checkpoint; list, verify, export or delete checkpoints
    specrl rollouts   show what the policy answered, with rewards
    specrl report     write the figures of a run, or of two, as a page
    specrl sft        train a policy on prompts with completions, before a run
    specrl drafter    train a drafter on a policy's own rollouts; import or export one
    specrl rewards    try a verifier on completions, or on a run's rollouts
    specrl store      inspect, export or delete a run's state
    specrl families   list the problem families that need no data set
    specrl simulate   predict what a run would take on a cluster
    specrl plan       find the best layout of that cluster
    specrl spec       check or show a run file, or an RLJob
    specrl crd        print the CustomResourceDefinition of RLJob
    specrl demo       make a tiny policy and train it on this machine
    specrl engines    print the commands that install the engines
    specrl doctor     examine this machine and this installation, for bug reports

A SpecrlError becomes one message on stderr and exit code 2, without a traceback. Exit codes: 0 success, 1 the run
failed, 2 it cannot run as asked, 130 interrupted.
"""

from __future__ import annotations

from typing import Annotated

import typer

from specrl.cli import demo, doctor, drafter, engines, fetch, init, rewards, sft, simulate, spec
from specrl.cli.command_exit import ErrorReportingGroup
from specrl.cli.runs import checkpoint, control, report, rollouts, run, status, store
from specrl.version import describe_version

app = typer.Typer(
    name="specrl",
    cls=ErrorReportingGroup,
    help="Reinforcement-learning post-training of language models with lossless speculative rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("init", short_help="Write a run file for a policy and a data set.")(init.write_run_file)
app.command("fetch", short_help="Fetch a model or a data set by its name.", epilog=fetch.EPILOG)(fetch.fetch_by_name)
app.command("run", short_help="Start a run on this machine, or resume one.")(run.start_or_resume)
app.command("status", short_help="Show the progress or the result of a run.")(status.show_run_status)
app.command("pause", short_help="Pause a run: it starts nothing new.")(control.pause_run)
app.command("resume", short_help="Continue a paused run.")(control.unpause_run)
app.command("scale", short_help="Change the number of generation replicas.")(control.scale_run)
app.command("rollouts", short_help="Show what the policy answered, with rewards.")(rollouts.show_rollouts)
app.command("report", short_help="Write the figures of a run, or of two, as a page.")(report.write_report)
app.command("sft", short_help="Train a policy on prompts with completions, before a run.")(sft.run_sft)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(drafter.app, name="drafter")
app.add_typer(store.app, name="store")
app.add_typer(rewards.app, name="rewards")
app.command("families", short_help="List the problem families that need no data set.")(spec.list_families)
app.command("simulate", short_help="Predict what a run would take on a cluster.")(simulate.print_simulation)
app.command("plan", short_help="Find the best layout of a cluster.")(simulate.print_plan)
app.add_typer(spec.app, name="spec")
app.command("crd", short_help="Print the CustomResourceDefinition of RLJob.")(spec.print_crd)
app.command("demo", short_help="Make a tiny policy and train it on this machine.")(demo.run_demo)
app.command("engines", short_help="Print the commands that install the engines.")(engines.print_engine_commands)
app.command("doctor", short_help="Examine this machine and this installation.")(doctor.examine_machine)


def print_version(is_asked: bool) -> None:
    """Print version and commit and exit, if the user asked for them."""
    if is_asked:
        typer.echo(f"specrl {describe_version()}")
        raise typer.Exit


@app.callback()
def accept_global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print version and commit.")
    ] = False,
) -> None:
    """Accept the options that stand before a command's name."""


def main() -> None:
    """Run the command line."""
    app()
