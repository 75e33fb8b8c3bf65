"""The report's sections on time: seconds of a step by phase, exposed generation, and the gain by speculation."""

from __future__ import annotations

from specrl.report import charts
from specrl.report.charts import BarStack, ChartLine
from specrl.report.document import ReportSection, ReportTable
from specrl.report.figures import CAUSES, OTHERS, PHASES, RunFigures
from specrl.report.reading import LoadedRun
from specrl.report.words import format_number, format_percent, format_seconds, format_times
from specrl.spec.generation import DraftLength

# Classes of the style sheet for the positions of a draft. Further positions share the last.
POSITION_STYLES = ("train", "logprob", "prepare", "data")
MAX_POSITIONS = 8
"""Most positions of a draft with a curve of their own."""
NOTICED_S = 0.0005
"""Mean seconds below which a phase that is not in the paper's table (validation, checkpoint) is not shown."""


def time_section(run: LoadedRun) -> ReportSection:
    """Make the section on the time per step: phases, throughput, exposed generation by cause, and charts by step."""
    found = run.figures
    shown = [phase for phase in found.phase_times if phase.name in PHASES or phase.mean_s >= NOTICED_S]
    rows = [(it.name, format_seconds(it.mean_s), format_percent(it.share)) for it in (*shown, found.whole_step)]
    throughput = [
        ("wall time of all steps", format_seconds(found.wall_s)),
        ("trained rollouts", f"{found.rollout_count}"),
        ("rollouts per second", format_number(found.rollouts_per_s, 2)),
        ("tokens per second", format_number(found.tokens_per_s, 0)),
        ("mean tokens per rollout", format_number(found.mean_length, 1)),
        *((f"weight sync: {name}", format_seconds(spent)) for name, spent in found.weight_sync_s.items()),
    ]
    generation = found.find_phase("generation")
    alternative = (
        f"Seconds of each step by phase. On average {format_seconds(found.step_s)}, of which generation "
        f"{format_seconds(generation.mean_s)} ({format_percent(generation.share)})."
    )
    exposed = [(float(report.step), report.phases.exposed_share * 100) for report in run.steps]
    share = (
        f"Exposed generation of each step, in percent of its wall time: {format_percent(found.exposed_share)} overall, "
        f"{format_seconds(generation.mean_s)} per step."
    )
    return ReportSection(
        "Time per step",
        [
            "Mean wall seconds of a step by phase. Phases do not overlap and sum to the step. Generation is exposed "
            "generation: seconds in which the trainer was idle because it had no batch. Prepare is weight sync, and no "
            "part of it."
        ],
        [
            ReportTable("Phases of a step", ("phase", "seconds per step", "share"), rows, accent=2),
            ReportTable("Throughput", ("", "whole run"), throughput),
            *_generation_tables(found),
            *_cause_tables(found),
        ],
        [
            charts.draw_stacked_bars(
                "Seconds per step", _stack_phases(run, [phase.name for phase in shown]), alternative, " s"
            ),
            charts.draw_lines(
                "Share of exposed generation", [ChartLine("exposed", "generation", exposed)], share, " %"
            ),
        ],
    )


def _stack_phases(run: LoadedRun, names: list[str]) -> BarStack:
    # Parts of a bar from the bottom up. Exposed generation, which has the accent colour, is on top.
    order = [name for name in (*PHASES, *OTHERS) if name in names and name != "generation"] + ["generation"]
    most = charts.MAX_POINTS // 2  # a bar needs twice the width of a point
    places = charts.average_neighbours([float(report.step) for report in run.steps], most)
    values = [charts.average_neighbours([getattr(report.phases, name) for report in run.steps], most) for name in order]
    return BarStack(order, places, values)


def _generation_tables(found: RunFigures) -> list[ReportTable]:
    """Make the table of exposed and hidden generation. Runs of older releases did not measure what is under way."""
    if not found.under_way_s:
        return []
    says = {
        "exposed": "the trainer waits for rollouts",
        "hidden": "rollouts are in flight, and the trainer does not wait",
        "under way": "rollouts are in flight",
    }
    rows = [
        (f"{it.name}: {says[it.name]}", format_seconds(it.mean_s), format_percent(it.share))
        for it in found.generation_times
    ]
    return [ReportTable("Generation", ("", "seconds per step", "share"), rows)]


def _cause_tables(found: RunFigures) -> list[ReportTable]:
    if not found.exposed_by_cause:
        return []
    rows = [
        (
            f"{name}: {CAUSES[name]}" if name in CAUSES else name,
            format_seconds(spent),
            format_percent(spent / found.wall_s if found.wall_s else 0.0),
        )
        for name, spent in found.exposed_by_cause.items()
    ]
    return [ReportTable("Exposed generation by cause", ("cause", "seconds, whole run", "share"), rows)]


def _count_drafting_steps(run: LoadedRun) -> str:
    """Say how many steps drafted, if not all did. Drafting was off in the others, or their rollouts were old."""
    drafted = sum(report.acceptance_length is not None for report in run.steps)
    return "" if drafted == len(run.steps) else f", over the {drafted} of {len(run.steps)} steps that drafted"


def speculation_section(run: LoadedRun) -> ReportSection:
    """Make the section on speculation: gain, acceptance and draft length, with charts by step."""
    mechanism = run.spec.generation.speculation
    found = run.figures
    if found.acceptance_length is None:
        why = (
            "The run did not use speculation"
            if mechanism.kind == "none"
            else f"No step reports drafts, although speculation is {mechanism.kind}"
        )
        return ReportSection("Speculation", [f"{why}."])
    drafted = [report for report in run.steps if report.acceptance_length is not None]
    length = [(float(r.step), r.acceptance_length or 0.0) for r in drafted]
    chosen = [(float(r.step), r.draft_length) for r in drafted if r.draft_length is not None]
    positions = [
        ChartLine(
            f"position {place + 1}",
            POSITION_STYLES[min(place, len(POSITION_STYLES) - 1)],
            [(float(r.step), r.accepted_per_position[place]) for r in drafted if place < len(r.accepted_per_position)],
        )
        for place in range(min(len(found.accepted_per_position), MAX_POSITIONS))
    ]
    by_step = f"Acceptance length by step: {format_number(length[0][1], 2)}"
    by_step += f" at first, {format_number(length[-1][1], 2)} at last." if len(length) > 1 else ", from a single step."
    shares = ", ".join(map(format_percent, found.accepted_per_position))
    by_place = f"Share of drafts accepted at each position: {shares}"
    series = [ChartLine("acceptance length", "train", length), ChartLine("draft length", "prepare", chosen)]
    drafts = [
        ("acceptance length (tokens per verification)", format_number(found.acceptance_length, 2)),
        ("draft length (tokens)", format_number(found.draft_length, 2)),
        *(
            (f"accepted at position {place}", format_percent(share))
            for place, share in enumerate(found.accepted_per_position, 1)
        ),
    ]
    return ReportSection(
        "Speculation",
        _explain_gain(run),
        [ReportTable(f"Drafts{_count_drafting_steps(run)}", ("", "mean"), drafts), *_speed_up_tables(run)],
        [
            charts.draw_lines("Tokens", series, by_step),
            charts.draw_lines("Share of drafts accepted", positions, by_place, top=1.0),
        ],
    )


def _explain_gain(run: LoadedRun) -> list[str]:
    """Say how much speculation gained, as far as the run's own measurements tell."""
    found = run.figures
    gain = found.speculation_gain
    if gain is None and run.speed_ups:
        return ["The gain over no speculation was measured after the run, on its policy and drafter."]
    if gain is None:
        is_fixed = run.spec.generation.draft_length is DraftLength.FIXED
        why = "With a fixed draft length replicas" if is_fixed else "The replicas"
        return [
            f"The gain by speculation is not known. {why} did not measure decoding without drafts. To measure it, "
            "run again with speculation none and compare both runs: specrl report A B."
        ]
    speed = f"Generation ran {format_times(gain)} as fast as measured without drafts (median of the steps)."
    if run.spec.schedule.max_policy_lag > 0:
        return [
            speed,
            "With a policy lag above 0 generation overlaps training. The gain of a whole step then needs a second run.",
        ]
    # With policy lag 0 all of generation is exposed, so without drafts it alone would have taken `gain` times as long.
    whole = (found.step_s + (gain - 1) * found.find_phase("generation").mean_s) / found.step_s
    return [
        speed,
        f"Without speculation a step would have taken {format_times(whole)} as long, everything else being equal.",
    ]


def _speed_up_tables(run: LoadedRun) -> list[ReportTable]:
    rows = [
        (
            f"{it.mechanism}, {it.batch} live",
            format_times(it.speed),
            f"{format_times(it.low)} to {format_times(it.high)}",
        )
        for it in run.speed_ups
    ]
    head = ("mechanism", "median", "range")
    return [ReportTable("Generation speed relative to no speculation", head, rows)] if rows else []
