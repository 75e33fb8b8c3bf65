"""One run as a document: where its time went, what it learnt, what went wrong, what it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specrl.coordinator.counters import count_events
from specrl.coordinator.report import StepReport
from specrl.launcher.rows import without_signal
from specrl.report.costs import speculation, time_spent
from specrl.report.document import Document, Section, Table
from specrl.report.figures import STAGES, Figures, figures
from specrl.report.learning import learning, policy_lag, reward_change
from specrl.report.reading import Reading
from specrl.report.verdicts import verdicts
from specrl.report.words import number, percent, seconds
from specrl.spec import dump

MOST_ROWS = 120
"""Of the table of steps: longer runs are shown as means of neighbours."""


def document(run: Reading) -> Document:
    """The report of one run. One that failed before its first step has no figures, and says why it failed."""
    found = figures(run.steps) if run.steps else None
    sections = [learning(run, found)]
    if found is not None:
        sections = [time_spent(run, found), speculation(run, found), *sections, verdicts(run), policy_lag(run, found)]
    numbers = [_every_step(run.steps)] if run.steps else []
    return Document(
        title=run.name,
        subtitle=f"{run.standing} after {len(run.steps)} of {run.spec.schedule.steps} steps · {workload(run)}",
        headline=headline(found) if found is not None else (),
        notices=notices(run),
        sections=(*sections, _events(run, found), *numbers, _setting(run)),
    )


def headline(found: Figures) -> tuple[tuple[str, str], ...]:
    """The figures that matter most, the exposed generation first."""
    shown = [
        (percent(found.exposed_share), "of wall time is exposed generation"),
        (seconds(found.step_s), "a step"),
        (number(found.acceptance_length, 2), "tokens a verification") if found.acceptance_length else None,
        (reward_change(found), "reward") if found.last_reward is not None else None,
    ]
    return tuple(item for item in shown if item is not None)


def workload(run: Reading) -> str:
    """What the run was, in one line."""
    schedule, mechanism = run.spec.schedule, run.spec.generation.speculation
    drafts = mechanism.kind if mechanism.kind == "none" else f"{mechanism.kind}, k ≤ {mechanism.num_draft_tokens}"
    return (
        f"{schedule.prompts_per_step} prompts x {schedule.group_size} rollouts a step · "
        f"policy lag ≤ {schedule.max_policy_lag} · speculation {drafts}"
    )


def notices(run: Reading) -> tuple[str, ...]:
    """What a reader must know before any figure."""
    said = []
    if run.standing == "under way":
        said.append("The run is under way: these are the figures so far.")
    if run.standing == "interrupted":
        said.append("The run was interrupted: these are the figures of the steps that it trained. It can be resumed.")
    if run.standing == "failed" and run.status is not None:
        said.append(f"The run failed: {run.status.error or run.status.detail}")
    if run.unreadable:
        said.append(f"{run.unreadable} lines of its files could not be read and are passed over.")
    groups = sum(report.groups for report in run.steps)
    silent = sum(report.groups_without_signal for report in run.steps)
    if groups and silent == groups:
        said.append(f"{without_signal(silent, groups)}.")
    if all(report.reward is None for report in run.steps):
        said.append("No rollout was graded: nothing was learnt.")
    missing = run.steps[-1].step - len(run.steps) if run.steps else 0
    if missing > 0:
        said.append(f"{missing} steps before the last one have no line: the figures are of the others.")
    return tuple(said)


def _events(run: Reading, found: Figures | None) -> Section:
    status = run.status
    if status is None:
        return Section("What went wrong", ("The run has left no status.",))
    events = [(words, str(count)) for _, words, count in count_events(status.counters)]
    moves = sorted(status.replica_transitions.items())
    text = "Counted since the coordinator's last start." if events or moves else ""
    tables = []
    if events:
        tables.append(Table("Counted", ("", "times"), tuple(events)))
    for caption, reasons in (
        ("Verdicts that failed, by reason", status.verdict_failures),
        ("Prompts given up, by reason", status.given_up),
    ):
        if reasons:
            rows = tuple((reason, str(count)) for reason, count in reasons.items())
            tables.append(Table(caption, ("reason", "times"), rows))
    if moves:
        rows = tuple((name.replace("->", "→"), str(count)) for name, count in moves)
        tables.append(Table("Changes of replicas' states", ("change", "times"), rows, is_folded=True))
    nothing = () if events or status.verdict_failures else ("Nothing was lost, refused or repeated.",)
    replicas = f"{len(status.replicas)} replicas at its end. {text}".strip()
    drift = None if found is None else found.mismatch_kl
    agreement = () if drift is None else (f"Sampler and trainer: KL {drift:.2g} nats, mean.",)
    return Section("What went wrong", (*nothing, *agreement, replicas), tuple(tables))


def _every_step(steps: Sequence[StepReport]) -> Section:
    """The numbers behind the charts."""
    size = -(-len(steps) // MOST_ROWS)
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]

    def mean(values: Iterable[float | None], digits: int) -> str:
        known = [value for value in values if value is not None]
        return number(sum(known) / len(known), digits) if known else "-"

    rows = tuple(
        (
            str(group[0].step) if size == 1 else f"{group[0].step}-{group[-1].step}",
            *(mean((getattr(report.stages, name) for report in group), 2) for name in STAGES),
            mean((report.reward for report in group), 3),
            mean((report.validation_reward for report in group), 3),
            mean((report.acceptance_length for report in group), 2),
            mean((report.policy_lag_mean for report in group), 2),
        )
        for group in groups
    )
    caption = "Every step" if size == 1 else f"Means of {size} steps each"
    head = ("step", *STAGES, "reward", "valid.", "accept.", "lag")
    return Section("The numbers behind the charts", (), (Table(caption, head, rows, is_folded=True),))


def _setting(run: Reading) -> Section:
    """What the run was."""
    spec = run.spec
    ranks = spec.trainer.parallelism
    experts = f", experts on {ranks.expert}" if ranks.expert > 1 else ""
    rows = [
        ("model", f"{spec.model.path} ({spec.model.dtype.value})"),
        ("prompts", f"{spec.prompts.source.kind}, judged by {spec.rewards.kind}"),
        ("batch", workload(run)),
        ("generation", f"{spec.generation.replicas} replicas x {spec.generation.tensor_parallel} ranks"),
        (
            "trainer",
            f"{ranks.data} data x {ranks.pipeline} pipeline x {ranks.context} context x {ranks.tensor} tensor{experts}",
        ),
        *run.origin.items(),
    ]
    if not run.origin:
        rows.append(("versions and machine", "not recorded by this run"))
    lines = tuple((line,) for line in dump(spec).splitlines())
    return Section(
        "What it was",
        (),
        (
            Table("Setting", ("", ""), tuple(rows), is_text=True),
            Table("Run file, with every default", ("run.yaml",), lines, is_text=True, is_folded=True),
        ),
    )
