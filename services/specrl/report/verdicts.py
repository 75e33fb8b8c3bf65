"""The report's section on verdicts: completions without an answer, verifier errors, and ungraded rollouts."""

from __future__ import annotations

from collections import Counter

from specrl.report.document import ReportSection, ReportTable
from specrl.report.reading import LoadedRun
from specrl.report.words import format_percent


def verdicts_section(run: LoadedRun) -> ReportSection:
    """Make the section: shares over all steps and in the worst step, and verifier errors by exception and place."""
    steps = run.steps
    total = sum(report.verdicts for report in steps)
    if not total:
        return ReportSection("Verdicts", ["No step of this run has a verdict."])
    unanswered = sum(report.no_answer for report in steps)
    ungraded = sum(report.ungraded for report in steps)
    errors: Counter[str] = Counter()
    for report in steps:
        errors.update(report.verifier_errors)
    failed = errors.total()
    rows = [
        (words, str(count), format_percent(count / of), format_percent(share))
        for words, count, of, share in (
            ("no answer found", unanswered, total, max(it.no_answer_share for it in steps)),
            ("verifier raised, crashed or timed out", failed, total, max(it.verifier_error_share for it in steps)),
            # Ungraded rollouts have no verdict, so they are not part of `total`.
            ("ungraded; sampled again", ungraded, total + ungraded, max(it.ungraded_share for it in steps)),
        )
    ]
    tables = [ReportTable(f"{total} graded rollouts", ("", "rollouts", "share", "highest in a step"), rows)]
    if errors:
        found = [(error, str(count)) for error, count in errors.most_common()]
        tables.append(ReportTable("Verifier errors", ("", "rollouts"), found))
    text = "The reward is 0 if no answer is found, and if the verifier raises, crashes or times out on an answer."
    return ReportSection("Verdicts", [text], tables)
