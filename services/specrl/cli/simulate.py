"""`specrl simulate` and `specrl plan`: what a run would take on a cluster, and which layout of it is best."""

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

from specrl.cli.options import Overrides
from specrl.errors import RunInvalid
from specrl.spec import load_spec
from specrl.spec.rljob import is_rljob

if TYPE_CHECKING:
    from specrl.coordinator.calibration import Calibration
    from specrl.simulator.scenario import Scenario

Source = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO|FILE", help="A scenario of examples/plan/, a scenario file, a run file, or an RLJob."
    ),
]
CalibrationFiles = Annotated[
    list[Path],
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="calibration.json of a run: measured costs, acceptance, lengths. Several: engine steps of all.",
    ),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="YAML with gpu, gpus, usdPerGpuHour; for run files and RLJobs."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Also write Markdown, HTML, JSON and figures there.")
]


def simulate(  # noqa: PLR0913, PLR0917 - one parameter for each option
    source: Source,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    calibration: CalibrationFiles = [],  # noqa: B006 - the same
    cluster: ClusterFile = None,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Predict the stages of a step, exposed generation, speed-up and GPU-hours. Starts nothing."""
    _check_extra()
    from specrl.simulator import pages
    from specrl.simulator.simulate import simulate as simulated

    scenario, measured = _read(source, overrides, calibration, cluster)
    with _progress("simulating", 2 * scenario.schedule.steps) as advance:
        outcome = simulated(scenario, measured, lambda _: advance())
    if out is not None:
        _write_outcome(out, outcome, measured)
    if as_json:
        typer.echo(json.dumps(outcome.as_json()))
        return
    _show(f"{scenario.name}, predicted", pages.stages(outcome), pages.facts(outcome))


def plan(  # noqa: PLR0913, PLR0917 - the same
    source: Source,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    calibration: CalibrationFiles = [],  # noqa: B006 - the same
    cluster: ClusterFile = None,
    max_lag: Annotated[
        int | None,
        typer.Option(
            "--max-lag", metavar="STEPS", min=0, help="Most policy lag to recommend. Default: the scenario's."
        ),
    ] = None,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Find the best layout of the same cluster: k by live batch, generation against training, lag, replicas, width."""
    _check_extra()
    from specrl.simulator import pages
    from specrl.simulator.search import search

    scenario, measured = _read(source, overrides, calibration, cluster)
    with _progress("searching", None) as advance:
        advice = search(scenario, measured, max_lag, lambda _, total: advance(total))
    title, table, told = f"{scenario.name}, planned", pages.advice_rows(advice), pages.advice_facts(advice)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "plan.md").write_text(pages.markdown(title, scenario.about, table, told), encoding="utf-8")
        (out / "plan.html").write_text(pages.html(title, scenario.about, table, told), encoding="utf-8")
        (out / "plan.json").write_text(json.dumps(advice.as_json(), indent=1) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(advice.as_json()))
        return
    _show(title, table, told)


def _check_extra() -> None:
    missing = [name for name in ("simpy", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise RunInvalid(
            f"the extra `plan` must be installed, got no {' and no '.join(missing)}; pip install 'specrl[plan]'"
        )


def _read(
    source: str, overrides: list[str], calibrations: list[Path], cluster: Path | None
) -> tuple[Scenario, Calibration | None]:
    """The scenario that the arguments mean. Raises SpecInvalid with every problem."""
    from specrl.simulator.from_run import scenario_of
    from specrl.simulator.measured import read_calibrations
    from specrl.simulator.scenario_file import find, parse, read_mapping

    file = find(source)
    measured = read_calibrations(calibrations) if calibrations else None
    raw = read_mapping(file)
    if is_rljob(raw) or "trainer" in raw:
        given = read_mapping(cluster) if cluster is not None else None
        raw = scenario_of(load_spec(file), measured, given)
    elif cluster is not None:
        raw["cluster"] = read_mapping(cluster)
    return parse(raw, overrides), measured


def _write_outcome(out: Path, outcome: Any, measured: Calibration | None) -> None:
    from specrl.simulator import figures, maps, pages
    from specrl.simulator.search import SHARES

    scenario = outcome.scenario
    with _progress("drawing", 8 * 8 + 4 * 9) as advance:
        by_acceptance = maps.over_acceptance(scenario, measured, advance)
        by_split = maps.over_splits(scenario, measured, advance)
    chances, shares = [f"{p:.0%}" for p in maps.CHANCES], [f"{s:.0%}" for s in SHARES]
    lengths, lags = [str(k) for k in maps.LENGTHS], [str(lag) for lag in maps.LAGS]
    over_k = figures.Heatmap("Speed-up of rollouts", ("k", "token accepted"), lengths, chances, by_acceptance)
    over_lag = figures.Heatmap("Seconds of a step", ("GPUs that generate", "policy lag"), shares, lags, by_split)
    drawn = {
        "timeline.svg": figures.timeline(outcome.trace, scenario.layout.replicas),
        "acceptance.svg": figures.heatmap(over_k),
        "split.svg": figures.heatmap(over_lag),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        (out / name).write_text(figure, encoding="utf-8")
    title, table, told = f"{scenario.name}, predicted", pages.stages(outcome), pages.facts(outcome)
    (out / "report.md").write_text(pages.markdown(title, scenario.about, table, told, list(drawn)), encoding="utf-8")
    (out / "report.html").write_text(
        pages.html(title, scenario.about, table, told, list(drawn.values())), encoding="utf-8"
    )
    (out / "report.json").write_text(json.dumps(outcome.as_json(), indent=1) + "\n", encoding="utf-8")


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[Any]:
    """A bar on stderr, gone when done. Yields what moves it on by one; it takes a new total."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance(new_total: int | None = None) -> None:
            bar.update(task, advance=1, total=total if new_total is None else new_total)

        yield advance


def _show(title: str, rows: list[Any], sentences: list[str]) -> None:
    head, *body = rows
    table = Table(*head, box=SIMPLE_HEAD, title=title, title_justify="left")
    for row in body:
        table.add_row(*row)
    console = Console()
    console.print(table, markup=False, highlight=False)
    for sentence in sentences:
        console.print(f"- {sentence}", markup=False, highlight=False)
