"""`specrl sft`: supervised warm-up of a policy, by the trainer of its run."""

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

from specrl.cli.drafter import refuse_existing
from specrl.cli.endings import INTERRUPTED_CODE, complain
from specrl.cli.options import Overrides, Plain, RunFile
from specrl.launcher.warm_up import WarmUp, Wish, plan
from specrl.spec import load_spec

PLAIN_LINES = 50
"""Most steps that have a line where there is no terminal; all are in metrics.jsonl."""


def _positive(text: str | Decimal) -> Decimal:
    """Typer gives an option's default here, too."""
    try:
        value = Decimal(str(text))
    except InvalidOperation:
        value = Decimal(0)
    if not value.is_finite() or value <= 0:
        raise typer.BadParameter(f"must be a number > 0, got {text!r}")
    return value


def _share(text: str | Decimal) -> Decimal:
    value = Decimal(0) if str(text).strip(" 0.") == "" else _positive(text)
    if value >= 1:
        raise typer.BadParameter(f"must be >= 0 and < 1, got {text!r}")
    return value


def sft(  # noqa: PLR0913, PLR0917 - one argument per option
    file: RunFile,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write the policy to; must not exist.")],
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL of prompt and completion. Default: the run's own problems."),
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Optimizer steps, instead of --epochs.")] = None,
    epochs: Annotated[Decimal, typer.Option(metavar="X", parser=_positive, help="Passes over the data.")] = Decimal(1),
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Examples of a step.")] = 32,
    learning_rate: Annotated[
        Decimal | None,
        typer.Option(metavar="X", parser=_positive, help="Default: the run file's trainer.optimizer.learningRate."),
    ] = None,
    held_out: Annotated[
        Decimal,
        typer.Option(metavar="SHARE", parser=_share, help="Share of the examples that is only measured."),
    ] = Decimal("0.05"),
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    plain: Plain = False,
) -> None:
    """Train the policy of a run file on prompts with completions, and write it to DIR as a Hugging Face folder.

    Model, template, optimizer, parallel layout and precision are the run file's; nothing is generated. The loss of
    every step, and of held-out examples at every checkpoint, is in DIR-sft/metrics.jsonl. After Ctrl-C or a crash the
    same command goes on from the newest checkpoint. Then: `specrl run -f FILE --set model.path=DIR`.
    """
    refuse_existing(out)
    wish = Wish(data, steps, epochs, batch_size, learning_rate, held_out)
    spec = plan(load_spec(file, overrides), wish)
    work = WarmUp(spec, wish, out)
    typer.echo(
        f"{spec.schedule.steps} steps of {batch_size} examples{', going on' if work.is_resumed else ''}: {work.folder}"
    )
    console = Console()
    with _shown(console, spec.schedule.steps, is_plain=plain or not console.is_terminal) as show:
        is_done = work.run(show)
    if not is_done:
        complain("stopped; the same command goes on")
        raise typer.Exit(INTERRUPTED_CODE)
    typer.echo(f"policy written to {out}; its curves and checkpoints are in {work.folder}")


@contextmanager
def _shown(console: Console, steps: int, *, is_plain: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar on a terminal; elsewhere lines of steps at equal distances, and of every one with a held-out loss."""
    if is_plain:
        distance = math.ceil(steps / PLAIN_LINES)

        def say(line: dict[str, Any]) -> None:
            if line["step"] % distance == 0 or line["step"] == steps or line.get("heldOutLoss") is not None:
                typer.echo(_text(line, steps))

        yield say
        return
    bar = (TextColumn("sft"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    columns = (*bar, TextColumn("{task.fields[loss]}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("sft", total=steps, loss="")
        held_out = ""

        def show(line: dict[str, Any]) -> None:
            nonlocal held_out
            if line.get("heldOutLoss") is not None:
                held_out = f", held out {line['heldOutLoss']:.3f}"
            progress.update(task, completed=line["step"], loss=f"loss {line['loss']:.3f}{held_out}")

        yield show


def _text(line: dict[str, Any], steps: int) -> str:
    held_out = line.get("heldOutLoss")
    return (
        f"step {line['step']}/{steps} loss {line['loss']:.4f} "
        + (f"held out {held_out:.4f} " if held_out is not None else "")
        + f"gradient {line['gradNorm']:.2f} tokens {line['tokens']} {line['seconds']:.2f} s"
    )
