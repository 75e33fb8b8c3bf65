"""`specrl run --dry-run`: shows what a run would do first, and starts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import typer
from rich.console import Console

from specrl.errors import SpecrlError
from specrl.hub.fetching import measure_free_bytes
from specrl.launcher.dry_run import GradedExample, RunPlan, plan_run
from specrl.launcher.memory import format_gib
from specrl.launcher.run_directory import RUN_FILE, RunDirectory
from specrl.launcher.terminal.check_progress import CheckProgress, open_fetch_display
from specrl.launcher.terminal.rows import make_printable
from specrl.launcher.terminal.view import choose_view
from specrl.report.comparison import is_same_work
from specrl.report.reading import LoadedRun, load_run
from specrl.spec import RunSpec, digest_spec, dump_spec

MAX_EARLIER = 20
"""Most runs that are read in search of one with the same work."""
INDENT = "    "


def show_plan(spec: RunSpec, runs: Path, checkpoint: Path | None) -> None:
    """Check the run, and print its resolved run file and what it would do first. Raises SpecInvalid."""
    view = choose_view(Console(stderr=True), is_plain=False)
    with open_fetch_display(view) as display:
        plan = plan_run(spec, runs, checkpoint, CheckProgress(view), display)
    for line in render_plan(plan, runs):
        typer.echo(line)


def render_plan(plan: RunPlan, runs: Path) -> Iterator[str]:
    """Render the plan as lines of text. What others wrote has no control characters."""
    spec = plan.spec
    data = plan.ready.data
    assert data is not None
    yield "# The run file with all defaults"
    yield from dump_spec(spec).splitlines()
    yield ""
    for notice in plan.ready.notices:
        yield f"note: {make_printable(notice)}"
    yield f"precision: {plan.ready.precision}"
    yield f"run: {spec.name}, digest {digest_spec(spec)[:12]}; nothing was started or written"
    needed = spec.schedule.steps * spec.schedule.prompts_per_step
    epochs = needed / len(data.stream)
    yield f"data: {len(data.stream)} problems; {spec.schedule.steps} steps take {needed} prompts, {epochs:.1f} epochs"
    if spec.validation is not None:
        yield f"validation: {len(data.validation)} problems every {spec.validation.every_steps} steps"
    prompt = plan.first_prompt
    yield f"first prompt, as the policy reads it: {len(prompt.token_ids)} tokens of {spec.prompts.max_tokens}"
    yield from _indent(prompt.text)
    yield "its reference:"
    yield from _indent(prompt.answer)
    yield "made-up completions, graded:"
    for example in plan.examples:
        yield f"{INDENT}{example.made_from}: {_describe_verdict(example)}"
    yield f"memory: {_describe_memory(plan)}"
    need = plan.ready.disk_need
    if need is not None:
        yield (
            f"disk: about {format_gib(need.total_bytes)} in {runs}: {need.checkpoints} x "
            f"{format_gib(need.checkpoint_bytes)} of checkpoints, {format_gib(need.export_bytes)} for the export; "
            f"{format_gib(measure_free_bytes(runs))} free"
        )
    yield f"time: {_describe_time(spec, runs)}"


def _indent(text: str) -> Iterator[str]:
    for line in text.splitlines() or [""]:
        yield INDENT + make_printable(line)


def _describe_verdict(example: GradedExample) -> str:
    reward = example.reward
    if reward.value is None:
        return f"not graded: {make_printable(reward.failure)}"
    why = reward.reason or ("no answer found" if reward.lacks_answer else "")
    return f"reward {reward.value:g}" + (f" ({make_printable(why)})" if why else "")


def _describe_memory(plan: RunPlan) -> str:
    gpus = plan.ready.gpu_need
    if gpus is not None:
        return (
            f"about {format_gib(gpus.trainer_bytes)} of GPU memory for a trainer's rank, "
            f"{format_gib(gpus.replica_bytes)} for a replica's rank without its KV cache; a GPU has "
            f"{format_gib(gpus.card_bytes)}"
        )
    need = plan.ready.memory_need
    if need is None:
        return "not estimated: generation.gpuMemoryUtilization is given, or the GPUs' memory is not known"
    return (
        f"about {format_gib(need.total_bytes)}: coordinator {format_gib(need.coordinator_bytes)}, "
        f"replicas {need.replicas} x {format_gib(need.replica_bytes)}, trainer {format_gib(need.trainer_bytes)}; "
        f"{format_gib(plan.ready.available_bytes)} available"
    )


def _describe_time(spec: RunSpec, runs: Path) -> str:
    """Describe the expected time. Only an earlier run of the same work can tell: a guess would be off by factors."""
    earlier = find_same_work(spec, runs)
    if earlier is None:
        return f"not known; no run in {runs} has trained with these settings. Its first steps will show it"
    step_s = median(report.phases.wall_seconds for report in earlier.steps)
    minutes = spec.schedule.steps * step_s / 60
    processor = earlier.origin.get("processor")
    where = f" on {make_printable(processor)}" if processor else ""
    return (
        f"about {minutes:.0f} minutes without the start, at {step_s:.1f} s a step, the median of "
        f"{len(earlier.steps)} steps of {earlier.name}{where}"
    )


def find_same_work(spec: RunSpec, runs: Path) -> LoadedRun | None:
    """Find the newest run whose steps were the same work on the same number of processes. None if there is none."""
    files = sorted(runs.glob(f"[!.]*/{RUN_FILE}"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in files[:MAX_EARLIER]:
        try:
            found = load_run(RunDirectory(file.parent))
        except SpecrlError:  # of another version, or without a step
            continue
        if found.steps and is_same_work(found.spec, spec):
            return found
    return None
