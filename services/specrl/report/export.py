"""Makes the figures of one run, or of two, as records for programs. `specrl report --json` prints them."""

from __future__ import annotations

from collections import Counter

from pydantic.alias_generators import to_camel

from specrl.formats.run_report import ComparisonReport, EdgeFigures, PhaseFigures, RunReport, SpeedFigures
from specrl.report.comparison import build_comparison, compare_tasks, measure_ratio
from specrl.report.figures import all_validations
from specrl.report.learning import compare_sources
from specrl.report.reading import LoadedRun
from specrl.report.sections import list_notices


def export_run(run: LoadedRun) -> RunReport:
    """Return all figures of one run."""
    found = run.figures
    status = run.status
    errors: Counter[str] = Counter()
    for report in run.steps:
        errors.update(report.verifier_errors)
    has_steps = bool(run.steps)  # means per step are undefined without one
    return RunReport(
        run=run.name,
        path=run.path,
        state=run.run_state,
        error=run.error,
        notices=list_notices(run),
        steps=found.step_count,
        steps_wanted=run.spec.schedule.steps,
        wall_seconds=found.wall_s,
        step_seconds=found.step_s if has_steps else None,
        phases={
            phase.name: PhaseFigures(seconds=phase.mean_s, share=phase.share)
            for phase in (found.phase_times if has_steps else ())
        },
        exposed_generation_share=found.exposed_share,
        exposed_generation=found.exposed_s,
        generation_under_way=found.under_way_s,
        hidden_generation=found.hidden_s,
        exposed_by_cause=found.exposed_by_cause,
        weight_sync=found.weight_sync_s if has_steps else {},
        rollouts=found.rollout_count,
        rollouts_per_second=found.rollouts_per_s,
        tokens=found.token_count,
        tokens_per_second=found.tokens_per_s,
        mean_length=found.mean_length,
        speculation=run.spec.generation.speculation.kind,
        acceptance_length=found.acceptance_length,
        accepted_per_position=list(found.accepted_per_position) if found.acceptance_length is not None else [],
        draft_length=found.draft_length,
        speculation_gain=found.speculation_gain,
        speed_ups=[
            SpeedFigures(mechanism=it.mechanism, batch=it.batch, speed=it.speed, speed_low=it.low, speed_high=it.high)
            for it in run.speed_ups
        ],
        first_reward=found.reward_edges.first,
        last_reward=found.reward_edges.last,
        reward_steps=found.reward_edges.steps,
        sources={name: EdgeFigures(first=it.first, last=it.last) for name, it in compare_sources(run.steps).items()},
        validations=all_validations(run.steps, run.validations, 0),
        verdicts=sum(report.verdicts for report in run.steps),
        no_answer=sum(report.no_answer for report in run.steps),
        verifier_errors=dict(errors),
        ungraded=sum(report.ungraded for report in run.steps),
        groups=sum(report.groups for report in run.steps),
        groups_without_signal=sum(report.groups_without_signal for report in run.steps),
        policy_lags=list(found.policy_lags),
        policy_lag_max=found.policy_lag_max if has_steps else 0,
        policy_lag_mean=found.policy_lag_mean,
        mismatch_kl=found.mismatch_kl,
        training={
            to_camel(name): EdgeFigures(first=it.first, last=it.last) for name, it in found.training_edges.items()
        },
        counters=status.counters if status is not None else {},
        verdict_failures=status.verdict_failures if status is not None else {},
        given_up=status.given_up if status is not None else {},
        replicas_given_up=status.replicas_given_up if status is not None else {},
        replica_transitions=status.replica_transitions if status is not None else {},
        origin=run.origin,
        run_file=run.spec.model_dump(mode="json", by_alias=True),
    )


def export_comparison(first: LoadedRun, second: LoadedRun) -> ComparisonReport:
    """Return the figures of two runs. Raises RunInvalid when one of them trained no step."""
    document = build_comparison(first, second)
    differences, task = compare_tasks(first, second)
    pairs = zip(
        (*first.figures.phase_times, first.figures.whole_step),
        (*second.figures.phase_times, second.figures.whole_step),
        strict=True,
    )
    ratios = {before.name: measure_ratio(before.mean_s, after.mean_s) for before, after in pairs}
    return ComparisonReport(
        runs=[export_run(first), export_run(second)],
        is_comparable=not task,
        speed_ups=ratios if not task else {},
        differences={path: list(values) for path, values in differences.items()},
        notices=list(document.notices),
    )
