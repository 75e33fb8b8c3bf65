"""`specrl simulate` and `specrl plan`: predict what a run would take on a cluster, and find its best layout.

The simulator is imported inside the functions, since it needs the extra `plan`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specrl.cli.command_exit import report_unwritable
from specrl.cli.options import AsJson, Overrides
from specrl.errors import RunInvalid
from specrl.spec import load_spec
from specrl.spec.rljob.manifest import is_rljob

if TYPE_CHECKING:
    from specrl.formats.calibration import RunCalibration
    from specrl.simulator.scenarios.scenario import Scenario

Source = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO|FILE", help="Name of a scenario in examples/plan/, scenario file, run file, or RLJob."
    ),
]
CalibrationFiles = Annotated[
    list[Path],
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="calibration.json of a run: measured costs, acceptance, lengths. May be repeated to combine runs.",
    ),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="YAML with gpu, gpus, usdPerGpuHour, for run files and RLJobs."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Also write a report and JSON to DIR; simulate adds figures."),
]


def print_simulation(  # noqa: PLR0913, PLR0917 - one parameter for each option
    source: Source,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    calibration: CalibrationFiles = [],  # noqa: B006 - the same
    cluster: ClusterFile = None,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Predict the phases of a step, exposed generation, speed-up and GPU-hours. Starts nothing."""
    _require_plan_extra()
    from specrl.simulator.pages import tables
    from specrl.simulator.simulate import simulate_scenario as simulated

    scenario, measured, _ = _read_scenario(source, overrides, calibration, cluster)
    _make_folder(out)
    # Twice: with speculation and without.
    with _progress_bar("simulating", 2 * scenario.schedule.steps) as advance:
        outcome = simulated(scenario, measured, lambda _: advance())
    if out is not None:
        with report_unwritable("--out", out):
            _write_outcome(out, outcome, measured)
    if as_json:
        typer.echo(json.dumps(outcome.as_json()))
        return
    _print_table(f"{scenario.name}, predicted", tables.phase_table(outcome), tables.result_sentences(outcome))


def print_plan(  # noqa: PLR0913, PLR0917 - the same
    source: Source,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    calibration: CalibrationFiles = [],  # noqa: B006 - the same
    cluster: ClusterFile = None,
    max_lag: Annotated[
        int | None,
        typer.Option(
            "--max-lag", metavar="STEPS", min=0, help="Largest policy lag to recommend. Default: the scenario's."
        ),
    ] = None,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Find the best layout of the same cluster: split of GPUs, policy lag, tensor parallelism, and k by live batch."""
    _require_plan_extra()
    from specrl.simulator.pages import tables
    from specrl.simulator.search import find_best_layout

    scenario, measured, is_run = _read_scenario(source, overrides, calibration, cluster)
    _make_folder(out)
    with _progress_bar("searching", None) as advance:
        advice = find_best_layout(scenario, measured, max_lag, lambda _, total: advance(total), can_colocate=not is_run)
    title = f"{scenario.name}, planned"
    table = tables.advice_table(advice)
    told = tables.advice_sentences(advice)
    if out is not None:
        with report_unwritable("--out", out):
            (out / "plan.md").write_text(tables.render_markdown(title, scenario.about, table, told), encoding="utf-8")
            (out / "plan.html").write_text(tables.render_html(title, scenario.about, table, told), encoding="utf-8")
            (out / "plan.json").write_text(json.dumps(advice.as_json(), indent=1) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(advice.as_json()))
        return
    _print_table(title, table, told)


def _make_folder(out: Path | None) -> None:
    """Make the folder of --out before the computation, whose result would otherwise be lost. Raises RunInvalid."""
    if out is not None:
        with report_unwritable("--out", out):
            out.mkdir(parents=True, exist_ok=True)


def _require_plan_extra() -> None:
    """Raise RunInvalid unless the packages of the extra `plan` are installed."""
    missing = [name for name in ("simpy", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise RunInvalid(
            f"the extra `plan` must be installed, got no {' and no '.join(missing)}; install it (docs/install.md)"
        )


def _read_scenario(
    source: str, overrides: list[str], calibrations: list[Path], cluster: Path | None
) -> tuple[Scenario, RunCalibration | None, bool]:
    """Read the scenario and calibration that the arguments name, and tell whether the source is a run file or RLJob.

    Raises SpecInvalid with every problem.
    """
    from specrl.simulator.costs.measured import read_calibrations
    from specrl.simulator.scenarios.from_run import scenario_from_run
    from specrl.simulator.scenarios.scenario_file import find_scenario, parse_scenario, read_mapping

    file = find_scenario(source)
    measured = read_calibrations(calibrations) if calibrations else None
    raw = read_mapping(file)
    # A scenario has no section `trainer`, and every run file has.
    is_run = is_rljob(raw) or "trainer" in raw
    if is_run:
        given = read_mapping(cluster) if cluster is not None else None
        raw = scenario_from_run(load_spec(file), measured, given)
    elif cluster is not None:
        raw["cluster"] = read_mapping(cluster)
    return parse_scenario(raw, overrides), measured, is_run


def _write_outcome(out: Path, outcome: Any, measured: RunCalibration | None) -> None:
    from specrl.simulator.pages import figures, heatmap_values, tables
    from specrl.simulator.search import GENERATION_SHARES

    scenario = outcome.scenario
    # One step per cell of the two heatmaps: 8 chances x 8 lengths, 4 lags x 9 shares.
    with _progress_bar("drawing", 8 * 8 + 4 * 9) as advance:
        by_acceptance = heatmap_values.map_acceptance(scenario, measured, advance)
        by_split = heatmap_values.map_splits(scenario, measured, advance)
    chances = [f"{p:.0%}" for p in heatmap_values.CHANCES]
    shares = [f"{s:.0%}" for s in GENERATION_SHARES]
    lengths = [str(k) for k in heatmap_values.LENGTHS]
    lags = [str(lag) for lag in heatmap_values.LAGS]
    over_k = figures.Heatmap("Speed-up of rollouts", ("k", "token accepted"), lengths, chances, by_acceptance)
    over_lag = figures.Heatmap("Seconds of a step", ("GPUs that generate", "policy lag"), shares, lags, by_split)
    drawn = {
        "timeline.svg": figures.draw_timeline(outcome.trace, scenario.layout.replica_count),
        "acceptance.svg": figures.draw_heatmap(over_k),
        "split.svg": figures.draw_heatmap(over_lag),
    }
    for name, figure in drawn.items():
        (out / name).write_text(figure, encoding="utf-8")
    title = f"{scenario.name}, predicted"
    table = tables.phase_table(outcome)
    told = tables.result_sentences(outcome)
    markdown = tables.render_markdown(title, scenario.about, table, told, list(drawn))
    html = tables.render_html(title, scenario.about, table, told, list(drawn.values()))
    (out / "report.md").write_text(markdown, encoding="utf-8")
    (out / "report.html").write_text(html, encoding="utf-8")
    (out / "report.json").write_text(json.dumps(outcome.as_json(), indent=1) + "\n", encoding="utf-8")


@contextmanager
def _progress_bar(what: str, total: int | None) -> Iterator[Any]:
    """Yield a callback that advances a progress bar on stderr by one; it also takes a new total.

    The bar disappears at the end, so that stdout and the terminal hold only the result.
    """
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance_bar(new_total: int | None = None) -> None:
            bar.update(task, advance=1, total=total if new_total is None else new_total)

        yield advance_bar


def _print_table(title: str, rows: list[Any], sentences: list[str]) -> None:
    head, *body = rows
    table = Table(*head, box=SIMPLE_HEAD, title=title, title_justify="left")
    for row in body:
        table.add_row(*row)
    console = Console()
    # No markup: names from a scenario file may contain brackets.
    console.print(table, markup=False, highlight=False)
    for sentence in sentences:
        console.print(f"- {sentence}", markup=False, highlight=False)
