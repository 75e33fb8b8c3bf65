"""Makes the report of one run: time per step, speculation, rewards, verdicts, policy lag, failures and settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specrl.formats.counters import count_events
from specrl.formats.reports import StepReport
from specrl.launcher.terminal.rows import describe_missing_signal
from specrl.report.costs import speculation_section, time_section
from specrl.report.document import ReportDocument, ReportSection, ReportTable
from specrl.report.figures import PHASES, RunFigures
from specrl.report.learning import format_reward_change, policy_lag_section, rewards_section
from specrl.report.reading import LoadedRun
from specrl.report.verdicts import verdicts_section
from specrl.report.words import format_number, format_percent, format_seconds
from specrl.spec import RunSpec, dump_spec
from specrl.telemetry.training_figures import FIGURES

MAX_ROWS = 120
"""Most rows of the table of steps. In longer runs each row is the mean of consecutive steps."""


def build_run_report(run: LoadedRun) -> ReportDocument:
    """Make the report of one run. A run that failed before its first step has no figures, only the reason."""
    schedule = run.spec.schedule
    if not run.steps:
        sections = [rewards_section(run), _failures_section(run), _settings_section(run)]
    else:
        sections = [
            time_section(run),
            speculation_section(run),
            rewards_section(run),
            verdicts_section(run),
            policy_lag_section(run),
            _failures_section(run),
            _data_section(run.steps),
            _settings_section(run),
        ]
    return ReportDocument(
        title=run.name,
        subtitle=f"{run.run_state} after {len(run.steps)} of {schedule.steps} steps · {describe_workload(run)}",
        headline=choose_headline(run.figures) if run.steps else (),
        notices=list_notices(run),
        sections=sections,
    )


def choose_headline(found: RunFigures) -> list[tuple[str, str]]:
    """Return the most important figures, exposed generation first."""
    shown = [
        (format_percent(found.exposed_share), "of wall time is exposed generation"),
        (format_seconds(found.find_phase("generation").mean_s), "exposed generation per step"),
        (format_seconds(found.step_s), "per step"),
    ]
    if found.acceptance_length:
        shown.append((format_number(found.acceptance_length, 2), "tokens per verification"))
    if found.reward_edges.last is not None:
        shown.append((format_reward_change(found), "reward"))
    return shown


def describe_workload(run: LoadedRun) -> str:
    """Describe the run's workload in one line."""
    schedule = run.spec.schedule
    mechanism = run.spec.generation.speculation
    drafts = mechanism.kind if mechanism.kind == "none" else f"{mechanism.kind}, k ≤ {mechanism.num_draft_tokens}"
    return (
        f"{schedule.prompts_per_step} prompts x {schedule.group_size} rollouts per step · "
        f"policy lag ≤ {schedule.max_policy_lag} · speculation {drafts}"
    )


def list_notices(run: LoadedRun) -> list[str]:
    """Return warnings about the run that a reader must see before any figure."""
    warnings = []
    if run.run_state == "in progress":
        warnings.append("The run is in progress. These are its figures so far.")
    if run.run_state == "interrupted":
        warnings.append("The run was interrupted. These are the figures of its trained steps. It can be resumed.")
    if run.run_state == "failed" and run.status is not None:
        warnings.append(f"The run failed: {run.error or run.status.detail}")
    if run.unreadable:
        warnings.append(f"{run.unreadable} lines of its files could not be read and are ignored.")
    groups = sum(report.groups for report in run.steps)
    silent = sum(report.groups_without_signal for report in run.steps)
    if groups and silent == groups:
        warnings.append(f"{describe_missing_signal(silent, groups)}.")
    if all(report.reward is None for report in run.steps):
        warnings.append("No rollout was graded, so nothing was learned.")
    # Steps are numbered from 1 without gaps, so the last number says how many lines there should be.
    missing = run.steps[-1].step - len(run.steps) if run.steps else 0
    if missing > 0:
        warnings.append(f"{missing} steps before the last one have no line. The figures are those of the others.")
    return warnings


def _failures_section(run: LoadedRun) -> ReportSection:
    status = run.status
    if status is None:
        return ReportSection("Failures and retries", ["The run's folder has no status.json."])
    events = [(words, count) for _, words, count in count_events(status.counters)]
    moves = [(name.replace("->", "→"), count) for name, count in sorted(status.replica_transitions.items())]
    counts = (
        ("Events", "", events),
        ("Failed verdicts by reason", "reason", status.verdict_failures.items()),
        ("Prompts given up, by reason", "reason", status.given_up.items()),
        ("State transitions of replicas", "transition", moves),
    )
    tables = [
        ReportTable(caption, (what, "times"), [(name, str(count)) for name, count in found], is_folded=found is moves)
        for caption, what, found in counts
        if found
    ]
    if status.replicas_given_up:
        given_up = sorted(status.replicas_given_up.items())
        tables.append(ReportTable("Replicas given up", ("replica", "reason"), given_up))
    texts = [] if events or status.verdict_failures else ["No failures and no retries."]
    if run.figures.mismatch_kl is not None:
        texts.append(f"Mean KL divergence between sampler and trainer: {run.figures.mismatch_kl:.2g} nats.")
    texts.append(f"The run had {len(status.replicas)} replicas at its end.")
    if events or moves:
        texts[-1] += " Counts are since the coordinator's last start."
    return ReportSection("Failures and retries", texts, tables)


def _data_section(steps: Sequence[StepReport]) -> ReportSection:
    """Make the section with the data of the charts, in at most MAX_ROWS rows."""
    size = -(-len(steps) // MAX_ROWS)  # steps per row, rounded up
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]

    def format_mean(values: Iterable[float | None], digits: int) -> str:
        known = [value for value in values if value is not None]
        return format_number(sum(known) / len(known), digits) if known else "-"

    rows = [
        (
            str(group[0].step) if size == 1 else f"{group[0].step}-{group[-1].step}",
            *(format_mean((getattr(report.phases, name) for report in group), 2) for name in PHASES),
            format_mean((report.reward for report in group), 3),
            format_mean((report.validation_reward for report in group), 3),
            format_mean((report.acceptance_length for report in group), 2),
            format_mean((report.policy_lag_mean for report in group), 2),
        )
        for group in groups
    ]
    caption = "Every step" if size == 1 else f"Means of {size} steps each"
    head = ("step", *PHASES, "reward", "validation", "acceptance", "lag")
    tables = [ReportTable(caption, head, rows, is_folded=True), training_table(steps)]
    return ReportSection("Data of the charts", tables=tables)


def _describe_sources(spec: RunSpec) -> str:
    """Describe where problems come from: `jsonl`, or `math: jsonl x 7, code: parquet x 3` with weights."""
    if spec.prompts.source is not None:
        return spec.prompts.source.kind
    return ", ".join(f"{given.name}: {given.source.kind} x {given.weight}" for given in spec.prompts.sources)


def _describe_rewards(spec: RunSpec) -> str:
    """Name the verifier, or all of several rewards with their weights: `math (answer), tags (format, weight 0.5)`."""
    if spec.rewards.sum is None:
        return spec.rewards.kind
    named = [f"{term.verifier.kind} ({term.name}, weight {term.weight})" for term in spec.rewards.sum.terms]
    return ", ".join(named)


def training_table(steps: Sequence[StepReport]) -> ReportTable:
    """Make a row per figure of training, with its mean over the first and over the last steps that have it."""
    rows = [
        (name, FIGURES[name].unit, _format_figure(edges.first), _format_figure(edges.last), FIGURES[name].help)
        for name, edges in RunFigures(steps).training_edges.items()
    ]
    head = ("figure", "unit", "first steps", "last steps", "meaning")
    return ReportTable("Figures of training", head, rows, is_folded=True)


def _format_figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _read_isolations(run: LoadedRun) -> dict[str, str]:
    """Return the isolation of each sandbox, by its section of the run file."""
    return {} if run.status is None else run.status.isolations


def _settings_section(run: LoadedRun) -> ReportSection:
    """Make the section with model, batch, machine, versions and run file."""
    spec = run.spec
    ranks = spec.trainer.parallelism
    experts = f", experts on {ranks.expert}" if ranks.expert > 1 else ""
    rows = [
        ("model", f"{spec.model.path} ({spec.model.dtype.value})"),
        *(("fetched", source.describe()) for source in run.sources),
        ("prompts", f"{_describe_sources(spec)}, judged by {_describe_rewards(spec)}"),
        *(("isolation", f"{name}: {isolation}") for name, isolation in _read_isolations(run).items()),
        ("batch", describe_workload(run)),
        ("generation", f"{spec.generation.replicas} replicas x {spec.generation.tensor_parallel} ranks"),
        (
            "trainer",
            f"{ranks.data} data x {ranks.pipeline} pipeline x {ranks.context} context x {ranks.tensor} tensor{experts}",
        ),
        *run.origin.items(),
    ]
    if not run.origin:
        rows.append(("versions and machine", "not recorded"))
    lines = [(line,) for line in dump_spec(spec).splitlines()]
    tables = [
        ReportTable("Overview", ("", ""), rows, is_text=True),
        ReportTable("Run file with all defaults", ("run.yaml",), lines, is_text=True, is_folded=True),
    ]
    return ReportSection("Settings", tables=tables)
