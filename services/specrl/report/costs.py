"""What a step cost, stage by stage, and what speculation saved of it."""

from __future__ import annotations

from specrl.report import charts
from specrl.report.charts import Line, Stack
from specrl.report.document import Chart, Section, Table
from specrl.report.figures import CAUSES, OTHERS, STAGES, Figures
from specrl.report.reading import Reading
from specrl.report.words import number, percent, seconds, times
from specrl.spec.generation import DraftLength

POSITION_STYLES = ("train", "logprob", "prepare", "data")
NOTICED_S = 0.0005
"""Mean seconds from which on a stage that the paper's table lacks is shown."""


def _stage_rows(found: Figures) -> tuple[tuple[str, ...], ...]:
    """The five stages, what else steps waited for, and their sum."""
    shown = [stage for stage in found.stages if stage.name in STAGES or stage.mean_s >= NOTICED_S]
    rows = [(stage.name, seconds(stage.mean_s), percent(stage.share)) for stage in shown]
    return (*rows, ("step", seconds(found.step_s), percent(1.0)))


def time_spent(run: Reading, found: Figures) -> Section:
    places = [float(report.step) for report in run.steps]
    names = [stage.name for stage in found.stages if stage.name in STAGES or stage.mean_s >= NOTICED_S]
    # From below: what is not exposed generation first, so that the accent crowns the bar.
    order = [name for name in (*STAGES, *OTHERS) if name in names and name != "generation"] + ["generation"]
    most = charts.MOST_POINTS // 2
    values = [charts.thinned([getattr(report.stages, name) for report in run.steps], most) for name in order]
    stack = Stack(order, order, charts.thinned(places, most), values)
    alternative = (
        f"Seconds of each step by stage. On average {seconds(found.step_s)}, of which generation {_stage(found)}."
    )
    exposed = [report.exposed_generation / (report.stages.total or 1.0) * 100 for report in run.steps]
    share = f"Exposed generation of each step, in percent of its wall time: {percent(found.exposed_share)} overall."
    return Section(
        "Where the time went",
        (
            "Mean wall seconds of a step by stage. The stages partition the step. Generation is what is exposed of it: "
            "seconds in which the trainer could have run, but had no batch.",
        ),
        (
            Table("Stages of a step", ("stage", "seconds a step", "share"), _stage_rows(found), accent=2),
            Table(
                "Speed",
                ("", "of the run"),
                (
                    ("wall time of all steps", seconds(found.wall_s)),
                    ("rollouts trained", f"{found.rollouts}"),
                    ("rollouts a second", number(found.rollouts_per_s, 2)),
                    ("tokens a second", number(found.tokens_per_s, 0)),
                    ("mean tokens of a rollout", number(found.mean_length, 1)),
                    *((f"weight sync: {name}", seconds(spent)) for name, spent in found.weight_sync_s.items()),
                ),
            ),
            *_causes(found),
        ),
        (
            Chart(
                "Seconds of a step",
                charts.stacked(stack, alternative, " s"),
                alternative,
                tuple((name, name) for name in reversed(order)),
            ),
            Chart(
                "Share of exposed generation",
                charts.lines([Line("exposed", "generation", list(zip(places, exposed, strict=True)))], share, " %"),
                share,
            ),
        ),
    )


def _causes(found: Figures) -> tuple[Table, ...]:
    if not found.exposed_by_cause:
        return ()
    rows = tuple(
        (
            f"{name}: {CAUSES[name]}" if name in CAUSES else name,
            seconds(spent),
            percent(spent / found.wall_s if found.wall_s else 0.0),
        )
        for name, spent in found.exposed_by_cause.items()
    )
    return (Table("Exposed, by cause", ("cause", "seconds of the run", "share"), rows),)


def _stage(found: Figures) -> str:
    stage = found.stage("generation")
    return f"{seconds(stage.mean_s)} ({percent(stage.share)})"


def speculation(run: Reading, found: Figures) -> Section:
    mechanism = run.spec.generation.speculation
    if found.acceptance_length is None:
        why = "The run drafted nothing" if mechanism.kind == "none" else f"No step reports drafts of {mechanism.kind}"
        return Section("Speculation", (f"{why}.",))
    drafted = [report for report in run.steps if report.acceptance_length is not None]
    length = [(float(r.step), r.acceptance_length or 0.0) for r in drafted]
    chosen = [(float(r.step), r.draft_length) for r in drafted if r.draft_length is not None]
    positions = [
        Line(
            f"position {place + 1}",
            POSITION_STYLES[min(place, 3)],
            [(float(r.step), r.accepted_per_position[place]) for r in drafted if place < len(r.accepted_per_position)],
        )
        for place in range(min(len(found.accepted_per_position), 8))
    ]
    by_step = f"Acceptance length by step: {number(length[0][1], 2)}"
    by_step += f" at first, {number(length[-1][1], 2)} at last." if len(length) > 1 else "; one step alone drafted."
    by_place = "Share of drafts accepted up to each position: " + ", ".join(map(percent, found.accepted_per_position))
    series = [Line("acceptance length", "train", length), Line("draft length", "prepare", chosen)]
    shown = [line for line in series if line.points]
    return Section(
        "Speculation",
        _gain(run, found),
        (
            Table(
                "Drafts",
                ("", "mean"),
                (
                    ("acceptance length (tokens a verification)", number(found.acceptance_length, 2)),
                    ("draft length chosen (tokens)", number(found.draft_length, 2)),
                    *(
                        (f"accepted at position {place}", percent(share))
                        for place, share in enumerate(found.accepted_per_position, 1)
                    ),
                ),
            ),
            *_measured(run),
        ),
        (
            Chart("Tokens", charts.lines(shown, by_step), by_step, tuple((line.style, line.name) for line in shown)),
            Chart(
                "Share of drafts accepted",
                charts.lines(positions, by_place, top=1.0),
                by_place,
                tuple((line.style, line.name) for line in positions[: len(POSITION_STYLES)]),
            ),
        ),
    )


def _gain(run: Reading, found: Figures) -> tuple[str, ...]:
    """What is known of the speed without speculation, and how."""
    gain = found.speculation_gain
    if gain is None and run.speed_ups:
        return ("Speed against none was measured after the run, on its policy and drafter.",)
    if gain is None:
        is_fixed = run.spec.generation.draft_length is DraftLength.FIXED
        why = "the draft length is fixed, so that replicas" if is_fixed else "the replicas"
        return (
            f"How fast it would have been without speculation is not known: {why} measured no cost without drafts. Run "
            "it again with speculation none, and compare: specrl report A B.",
        )
    said = f"Generation ran {times(gain)} as fast as without drafts: measured speed over the calibrated one, median."
    if run.spec.schedule.max_policy_lag > 0:
        return (said, "At a policy lag above 0 generation overlaps training, so that a step's gain needs a second run.")
    whole = (found.step_s + (gain - 1) * found.stage("generation").mean_s) / found.step_s
    return (said, f"A step without it would have taken {times(whole)} as long, everything else being equal.")


def _measured(run: Reading) -> tuple[Table, ...]:
    if not run.speed_ups:
        return ()
    rows = tuple(
        (f"{row.mechanism}, {row.batch} live", times(row.speed), f"{times(row.low)} to {times(row.high)}")
        for row in run.speed_ups
    )
    return (Table("Speed of generation against none", ("mechanism", "median", "range"), rows),)
