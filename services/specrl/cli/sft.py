"""`specrl sft`: supervised warm-up of a policy, with the trainer of its run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specrl.cli.command_exit import INTERRUPTED_CODE, print_error
from specrl.cli.options import Overrides, Plain, RunFile, refuse_existing
from specrl.errors import RunFailed
from specrl.hub import read_sources, write_sources
from specrl.launcher.terminal.check_progress import open_fetch_display
from specrl.launcher.terminal.view import choose_view
from specrl.launcher.warm_up import WarmUp, WarmUpOptions, locate_folder, lock_folder, plan_warm_up
from specrl.spec import load_spec

# Without a terminal, at most about this many steps are printed; metrics.jsonl has all of them.
PLAIN_LINES = 50


def _parse_positive(text: str | Decimal) -> Decimal:
    """Parse a number > 0. Typer also passes an option's default through its parser, hence the Decimal."""
    try:
        value = Decimal(str(text))
    except InvalidOperation:
        value = Decimal(0)
    if not value.is_finite() or value <= 0:
        raise typer.BadParameter(f"must be a number > 0, got {text!r}")
    return value


def _parse_share(text: str | Decimal) -> Decimal:
    """Parse a share: >= 0 and < 1."""
    value = Decimal(0) if str(text).strip(" 0.") == "" else _parse_positive(text)
    if value >= 1:
        raise typer.BadParameter(f"must be >= 0 and < 1, got {text!r}")
    return value


def run_sft(  # noqa: PLR0913, PLR0917 - one argument per option
    file: RunFile,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write the policy to; must not exist.")],
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL of prompt and completion. Default: the run's own problems."),
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Optimizer steps; overrides --epochs.")] = None,
    epochs: Annotated[
        Decimal, typer.Option(metavar="X", parser=_parse_positive, help="Passes over the data.")
    ] = Decimal(1),
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Examples per step.")] = 32,
    learning_rate: Annotated[
        Decimal | None,
        typer.Option(
            metavar="X", parser=_parse_positive, help="Default: the run file's trainer.optimizer.learningRate."
        ),
    ] = None,
    held_out: Annotated[
        Decimal,
        typer.Option(
            metavar="SHARE", parser=_parse_share, help="Share of the examples used only for the held-out loss."
        ),
    ] = Decimal("0.05"),
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    plain: Plain = False,
) -> None:
    """Train the policy of a run file on prompts with completions, and write it to DIR as a Hugging Face folder.

    Model, template, optimizer, parallel layout and precision come from the run file; nothing is generated.
    DIR-sft/metrics.jsonl has the loss of every step, and the held-out loss before the first and at every checkpoint.
    After Ctrl-C or a crash, the same command continues from the newest checkpoint. Afterwards: `specrl run -f FILE
    --set model.path=DIR`.
    """
    refuse_existing(out)  # before training, which may take hours
    wish = WarmUpOptions(data, steps, epochs, batch_size, learning_rate, held_out)
    console = Console()
    known = read_sources(locate_folder(out))
    with open_fetch_display(choose_view(console, plain)) as display:
        spec, sources = plan_warm_up(load_spec(file, overrides), wish, known, display)
    with lock_folder(out):
        refuse_existing(out)  # another warm-up may have written it since
        work = WarmUp(spec, wish, out)
        write_sources(work.folder, sources)
        for source in sources:
            typer.echo(source.describe())
        resumed = f", resumed after step {work.trained}" if work.is_resumed else ""
        typer.echo(f"{spec.schedule.steps} steps of {batch_size} examples{resumed}: {work.folder}")
        with _show_progress(console, spec.schedule.steps, is_plain=plain or not console.is_terminal) as show:
            try:
                is_done = work.run(show, print_error)
            except RunFailed as error:
                print_error(f"{error}\n  resume with the same command")
                raise typer.Exit(error.exit_code) from error
    if not is_done:
        print_error("stopped; run the same command to resume")
        raise typer.Exit(INTERRUPTED_CODE)
    typer.echo(f"policy written to {out}; metrics and checkpoints are in {work.folder}")


@contextmanager
def _show_progress(console: Console, steps: int, *, is_plain: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a callback that shows one line of metrics.

    On a terminal it moves a bar. Elsewhere it prints evenly spaced steps, and every step with a held-out loss.
    """
    if is_plain:
        distance = math.ceil(steps / PLAIN_LINES)  # steps between two lines

        def print_step(line: dict[str, Any]) -> None:
            if line["step"] % distance == 0 or line["step"] == steps or line.get("heldOutLoss") is not None:
                typer.echo(_format_step(line, steps))

        yield print_step
        return
    bar = (TextColumn("sft"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    columns = (*bar, TextColumn("{task.fields[loss]}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("sft", total=steps, loss="")
        held_out = ""  # most steps measure no held-out loss, so the bar keeps showing the last one

        def update_bar(line: dict[str, Any]) -> None:
            nonlocal held_out
            if line.get("heldOutLoss") is not None:
                held_out = f", held out {line['heldOutLoss']:.3f}"
            loss = f"loss {line['loss']:.3f}" if "loss" in line else "not trained yet"
            progress.update(task, completed=line["step"], loss=f"{loss}{held_out}")

        yield update_bar


def _format_step(line: dict[str, Any], steps: int) -> str:
    held_out = line.get("heldOutLoss")
    if "loss" not in line:  # of step 0
        return f"before the first step: held out {held_out:.4f}"
    return (
        f"step {line['step']}/{steps} loss {line['loss']:.4f} "
        + (f"held out {held_out:.4f} " if held_out is not None else "")
        + f"gradient {line['gradNorm']:.2f} tokens {line['tokens']} {line['seconds']:.2f} s"
    )
