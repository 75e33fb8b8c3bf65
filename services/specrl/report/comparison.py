"""Two runs side by side: ratios of the second to the first, and whether they may be compared at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specrl.errors import RunInvalid
from specrl.report import charts
from specrl.report.charts import Line
from specrl.report.document import Chart, Document, Section, Table
from specrl.report.figures import STAGES, Figures, all_validations, figures
from specrl.report.learning import reward_change
from specrl.report.reading import Reading
from specrl.report.sections import notices, workload
from specrl.report.words import NOTHING, number, percent, seconds, times

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
"""What decides how much work a step is: runs that differ here have no speed-up."""

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
"""How much computes. A ratio of runs that differ here is of machines as well."""

NAMES = ("name",)
"""Different without meaning anything."""


def document(first: Reading, second: Reading) -> Document:
    """The report of two runs. Ratios above 1: the second is faster. Raises RunInvalid when one trained no step."""
    for run in (first, second):
        if not run.steps:
            raise RunInvalid(
                f"a run must have trained a step to be compared, got {run.name}, which is {run.standing} and has none; "
                "report it alone"
            )
    a, b = figures(first.steps), figures(second.steps)
    differing = differences(
        first.spec.model_dump(mode="json", by_alias=True), second.spec.model_dump(mode="json", by_alias=True)
    )
    task = [path for path in differing if _is_below(path, TASK)]
    return Document(
        title=f"{first.name} and {second.name}",
        subtitle=f"{first.name}: {workload(first)}; {second.name}: {workload(second)}",
        headline=() if task else _headline(a, b),
        notices=(*_warnings(first, second, differing, task), *_each(first), *_each(second)),
        sections=(
            _stages(first, second, a, b, is_comparable=not task),
            _rest(first, second, a, b),
            _curves(first, second),
            Section("How they differ", (), (_differences(first, second, differing),)),
        ),
    )


def differences(first: Any, second: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Fields of two run files that are not the same, by path."""
    if isinstance(first, dict) and isinstance(second, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for name in dict.fromkeys([*first, *second]):
            found |= differences(first.get(name), second.get(name), f"{path}.{name}".removeprefix("."))
        return found
    return {} if first == second else {path: (first, second)}


def _is_below(path: str, sections: Sequence[str]) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)


def _warnings(first: Reading, second: Reading, differing: dict[str, Any], task: Sequence[str]) -> list[str]:
    said = []
    if task:
        said.append(f"Not comparable: a step is other work in each, by {', '.join(task)}. Ratios are left out.")
    machine = [path for path in differing if _is_below(path, MACHINE)]
    hardware = [name for name in ("processor", "cores") if first.origin.get(name) != second.origin.get(name)]
    if machine or (hardware and first.origin and second.origin):
        said.append(f"Not of like machines: {', '.join([*machine, *hardware])} differ, so that ratios are of both.")
    return said


def _each(run: Reading) -> list[str]:
    return [f"{run.name}: {notice}" for notice in notices(run)]


def _headline(a: Figures, b: Figures) -> tuple[tuple[str, str], ...]:
    return (
        (f"{percent(a.exposed_share)} → {percent(b.exposed_share)}", "exposed generation"),
        (_ratio(a.step_s, b.step_s), "a step"),
        (_ratio(b.tokens_per_s, a.tokens_per_s), "tokens a second"),
    )


def _ratio(slower: float, faster: float) -> str:
    """How many times faster; above a hundred nothing is left to compare with."""
    return times(slower / faster) if faster > 0 and slower / faster < 100 else NOTHING


def _stages(first: Reading, second: Reading, a: Figures, b: Figures, is_comparable: bool) -> Section:
    """The paper's Table 1: seconds by stage of both, and the speed-up."""

    def row(name: str, before: float, after: float, shares: tuple[float, float]) -> tuple[str, ...]:
        ratio = (_ratio(before, after),) if is_comparable else ()
        return (name, seconds(before), percent(shares[0]), seconds(after), percent(shares[1]), *ratio)

    rows = [
        row(name, a.stage(name).mean_s, b.stage(name).mean_s, (a.stage(name).share, b.stage(name).share))
        for name in STAGES
    ]
    waited = [
        stage for stage in a.stages if stage.name not in STAGES and stage.mean_s + b.stage(stage.name).mean_s >= 0.001
    ]
    rows += [row(s.name, s.mean_s, b.stage(s.name).mean_s, (s.share, b.stage(s.name).share)) for s in waited]
    rows.append(row("step", a.step_s, b.step_s, (1.0, 1.0)))
    head = ("stage", first.name, "share", second.name, "share", *(["speed-up"] if is_comparable else []))
    text = "Mean wall seconds of a step."
    if is_comparable:
        text += f" Speed-up: {first.name} over {second.name}; above 1 {second.name} is faster."
    return Section("Where the time went", (text,), (Table("Stages of a step", head, tuple(rows), accent=2),))


def _rest(first: Reading, second: Reading, a: Figures, b: Figures) -> Section:
    shown: list[tuple[str, Callable[[Figures], str]]] = [
        ("steps", lambda f: str(f.steps)),
        ("exposed generation", lambda f: percent(f.exposed_share)),
        ("rollouts a second", lambda f: number(f.rollouts_per_s, 2)),
        ("tokens a second", lambda f: number(f.tokens_per_s, 0)),
        ("mean tokens of a rollout", lambda f: number(f.mean_length, 1)),
        ("acceptance length", lambda f: number(f.acceptance_length, 2)),
        ("draft length chosen", lambda f: number(f.draft_length, 2)),
        ("accepted by position", lambda f: ", ".join(map(percent, f.accepted_per_position)) or NOTHING),
        ("measured gain of speculation", lambda f: times(f.speculation_gain) if f.speculation_gain else NOTHING),
        ("largest policy lag", lambda f: str(f.policy_lag_max)),
        ("mean policy lag", lambda f: number(f.policy_lag_mean, 2)),
        ("reward, from the first to the last steps", reward_change),
    ]
    rows = [(name, words(a), words(b)) for name, words in shown]
    last = [_last_validation(run) for run in (first, second)]
    rows.append(("mean reward of the last validation", last[0], last[1]))
    return Section("Everything else", (), (Table("Figures", ("", first.name, second.name), tuple(rows)),))


def _last_validation(run: Reading) -> str:
    found = all_validations(run.steps, run.validations, 0)
    return number(found[-1].reward, 3) if found else NOTHING


def _curves(first: Reading, second: Reading) -> Section:
    styles = (("data", first), ("train", second))
    rewards = [
        Line(run.name, style, [(float(r.step), r.reward) for r in run.steps if r.reward is not None])
        for style, run in styles
    ]
    exposed = [
        Line(run.name, style, [(float(r.step), r.exposed_generation / (r.stages.total or 1) * 100) for r in run.steps])
        for style, run in styles
    ]
    key = tuple((line.style, line.name) for line in rewards)
    rewarded, waiting = "Mean reward of each step of both runs.", "Exposed generation of each step of both, in percent."
    return Section(
        "Side by side",
        (),
        (),
        (
            Chart("Share of exposed generation", charts.lines(exposed, waiting, " %"), waiting, key),
            Chart("Reward", charts.lines(rewards, rewarded), rewarded, key),
        ),
    )


def _differences(first: Reading, second: Reading, differing: dict[str, tuple[Any, Any]]) -> Table:
    rows = tuple(
        (path, _words(before), _words(after)) for path, (before, after) in differing.items() if path not in NAMES
    )
    return Table(
        "Fields of the run file",
        ("field", first.name, second.name),
        rows or (("none", NOTHING, NOTHING),),
        is_text=True,
    )


def _words(value: Any) -> str:
    return "null" if value is None else str(value)
