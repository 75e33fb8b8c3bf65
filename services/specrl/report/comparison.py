"""Makes the report that compares two runs, and decides whether their speeds are comparable at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specrl.errors import RunInvalid
from specrl.report import charts
from specrl.report.charts import ChartLine
from specrl.report.document import ReportDocument, ReportSection, ReportTable
from specrl.report.figures import OTHERS, RunFigures, all_validations
from specrl.report.learning import format_reward_change
from specrl.report.reading import LoadedRun
from specrl.report.sections import describe_workload, list_notices
from specrl.report.words import NOTHING, format_number, format_percent, format_seconds, format_times
from specrl.spec import RunSpec
from specrl.spec.load import find_differences

TASK = (
    "model",
    "prompts",
    "rewards",
    "tools",
    "generation.sampling",
    "schedule.promptsPerStep",
    "schedule.groupSize",
    "trainer.loss",
    "trainer.optimizer",
)
"""Fields of the run file that determine how much work a step is. If runs differ in one, no speed-up is shown."""

MACHINE = (
    "generation.replicas",
    "generation.tensorParallel",
    "generation.threads",
    "generation.gpusPerReplica",
    "generation.autoscaling",
    "trainer.parallelism",
    "trainer.threads",
    "trainer.numNodes",
    "trainer.gpusPerNode",
)
"""Fields that determine the hardware. If runs differ in one, speed-ups are shown with a warning."""

NOTICED_S = 0.001
"""Seconds of both runs together below which a phase that is not in the paper's table is not shown."""

NAMES = ("name",)
"""Fields whose difference has no meaning."""


def build_comparison(first: LoadedRun, second: LoadedRun) -> ReportDocument:
    """Make the report of two runs. A ratio above 1 means that the second is faster.

    Raises RunInvalid when one of them trained no step.
    """
    for run in (first, second):
        if not run.steps:
            raise RunInvalid(
                f"a run must have trained a step to be compared, got {run.name}, which is {run.run_state} and has "
                "none; report it alone"
            )
    differing, task = compare_tasks(first, second)
    # Ratios of steps with different work would mislead, so they are omitted everywhere.
    return ReportDocument(
        title=f"{first.name} and {second.name}",
        subtitle=f"{first.name}: {describe_workload(first)}; {second.name}: {describe_workload(second)}",
        headline=() if task else _make_headline(first.figures, second.figures),
        notices=[
            *_list_warnings(first, second, differing, task),
            *(f"{run.name}: {notice}" for run in (first, second) for notice in list_notices(run)),
        ],
        sections=[
            _phases_section(first, second, is_comparable=not task),
            _figures_section(first, second),
            _curves_section(first, second),
            ReportSection("How they differ", tables=[_differences_table(first, second, differing)]),
        ],
    )


def is_same_work(first: RunSpec, second: RunSpec) -> bool:
    """Whether a step of both takes about the same time on one machine: same task, resources, generation and trainer."""
    mine, theirs = (spec.model_dump(mode="json", by_alias=True) for spec in (first, second))
    deciding = (*TASK, "generation", "trainer", "schedule.maxPolicyLag")
    return not any(_is_below(path, deciding) for path in find_differences(mine, theirs))


def compare_tasks(first: LoadedRun, second: LoadedRun) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """Return the fields in which two run files differ, and those of them that make a step different work."""
    differing = find_differences(
        first.spec.model_dump(mode="json", by_alias=True), second.spec.model_dump(mode="json", by_alias=True)
    )
    return differing, [path for path in differing if _is_below(path, TASK)]


def _is_below(path: str, sections: Sequence[str]) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)


def _list_warnings(first: LoadedRun, second: LoadedRun, differing: dict[str, Any], task: Sequence[str]) -> list[str]:
    warnings = []
    if task:
        warnings.append(f"Not comparable: the runs differ in {', '.join(task)}, so their steps are different work.")
    machine = [path for path in differing if _is_below(path, MACHINE)]
    hardware = [name for name in ("processor", "cores") if first.origin.get(name) != second.origin.get(name)]
    # Without origin.json of both runs, different hardware cannot be told from a missing record.
    if machine or (hardware and first.origin and second.origin):
        warnings.append(
            f"Different resources: the runs differ in {', '.join([*machine, *hardware])}, which affects ratios."
        )
    return warnings


def _make_headline(a: RunFigures, b: RunFigures) -> tuple[tuple[str, str], ...]:
    return (
        (f"{format_percent(a.exposed_share)} → {format_percent(b.exposed_share)}", "exposed generation"),
        (_format_ratio(a.step_s, b.step_s), "speed-up of a step"),
        (_format_ratio(b.tokens_per_s, a.tokens_per_s), "tokens per second"),
    )


def measure_ratio(slower: float, faster: float) -> float | None:
    """Return slower / faster. None if that is 100 or more: the faster one is then too small to measure."""
    return slower / faster if faster > 0 and slower / faster < 100 else None


def _format_ratio(slower: float, faster: float) -> str:
    ratio = measure_ratio(slower, faster)
    return NOTHING if ratio is None else format_times(ratio)


def _phases_section(first: LoadedRun, second: LoadedRun, is_comparable: bool) -> ReportSection:
    """Make the section with seconds by phase of both runs and the speed-up, as in the paper's Table 1."""
    # The phases of every run have the same order, so they can be paired by position.
    pairs = zip(
        (*first.figures.phase_times, first.figures.whole_step),
        (*second.figures.phase_times, second.figures.whole_step),
        strict=True,
    )
    rows = []
    for before, after in pairs:
        if before.name in OTHERS and before.mean_s + after.mean_s < NOTICED_S:
            continue
        cells = [
            before.name,
            *(format_seconds(before.mean_s), format_percent(before.share)),
            *(format_seconds(after.mean_s), format_percent(after.share)),
        ]
        rows.append([*cells, _format_ratio(before.mean_s, after.mean_s)] if is_comparable else cells)
    head = ["phase", first.name, "share", second.name, "share"]
    text = "Mean wall seconds per step."
    if is_comparable:
        head.append("speed-up")
        text += f" Speed-up is {first.name} divided by {second.name}. Above 1, {second.name} is faster."
    return ReportSection("Time per step", [text], [ReportTable("Phases of a step", head, rows, accent=2)])


def _figures_section(first: LoadedRun, second: LoadedRun) -> ReportSection:
    shown: list[tuple[str, Callable[[RunFigures], str]]] = [
        ("steps", lambda f: str(f.step_count)),
        ("exposed generation", lambda f: format_percent(f.exposed_share)),
        ("exposed generation per step", lambda f: format_seconds(f.exposed_s / f.step_count)),
        ("hidden generation per step", lambda f: format_seconds(f.hidden_s / f.step_count)),
        ("generation under way per step", lambda f: format_seconds(f.under_way_s / f.step_count)),
        ("rollouts per second", lambda f: format_number(f.rollouts_per_s, 2)),
        ("tokens per second", lambda f: format_number(f.tokens_per_s, 0)),
        ("mean tokens per rollout", lambda f: format_number(f.mean_length, 1)),
        ("acceptance length", lambda f: format_number(f.acceptance_length, 2)),
        ("draft length", lambda f: format_number(f.draft_length, 2)),
        ("accepted by position", lambda f: ", ".join(map(format_percent, f.accepted_per_position)) or NOTHING),
        ("measured gain of speculation", lambda f: format_times(f.speculation_gain) if f.speculation_gain else NOTHING),
        ("largest policy lag", lambda f: str(f.policy_lag_max)),
        ("mean policy lag", lambda f: format_number(f.policy_lag_mean, 2)),
        ("reward, first to last steps", format_reward_change),
    ]
    rows = [(name, words(first.figures), words(second.figures)) for name, words in shown]
    rows.append(("mean reward of the last validation", _last_validation(first), _last_validation(second)))
    return ReportSection("Further figures", tables=[ReportTable("Figures", ("", first.name, second.name), rows)])


def _last_validation(run: LoadedRun) -> str:
    found = all_validations(run.steps, run.validations, 0)
    return format_number(found[-1].reward, 3) if found else NOTHING


def _curves_section(first: LoadedRun, second: LoadedRun) -> ReportSection:
    styles = (("data", first), ("train", second))
    rewards = [
        ChartLine(run.name, style, [(float(r.step), r.reward) for r in run.steps if r.reward is not None])
        for style, run in styles
    ]
    exposed = [
        ChartLine(run.name, style, [(float(r.step), r.phases.exposed_share * 100) for r in run.steps])
        for style, run in styles
    ]
    waiting = "Exposed generation of each step of both runs, in percent."
    drawn = [
        charts.draw_lines("Share of exposed generation", exposed, waiting, " %"),
        charts.draw_lines("Reward", rewards, "Mean reward of each step of both runs."),
    ]
    return ReportSection("Side by side", charts=drawn)


def _differences_table(first: LoadedRun, second: LoadedRun, differing: dict[str, tuple[Any, Any]]) -> ReportTable:
    rows = [
        (path, *("null" if value is None else str(value) for value in values))
        for path, values in differing.items()
        if path not in NAMES
    ]
    head = ("field", first.name, second.name)
    return ReportTable("Different fields of the run file", head, rows or [("none", NOTHING, NOTHING)], is_text=True)
