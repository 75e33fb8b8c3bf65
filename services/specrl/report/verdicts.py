"""How completions were judged: verdicts on no answer, what verifiers raised, and what stayed without a verdict."""

from __future__ import annotations

from collections import Counter

from specrl.report.document import Section, Table
from specrl.report.reading import Reading
from specrl.report.words import percent


def verdicts(run: Reading) -> Section:
    """Shares over all steps and of the worst step, and the errors by type and place."""
    steps = run.steps
    total = sum(report.verdicts for report in steps)
    if not total:
        return Section("Verdicts", ("The run's reports do not count its verdicts.",))
    ungraded = sum(report.ungraded for report in steps)
    errors: Counter[str] = Counter()
    for report in steps:
        errors.update(report.verifier_errors)
    rows = tuple(
        (words, str(count), percent(count / of), percent(max(shares)))
        for words, count, of, shares in (
            (
                "no answer was found",
                sum(report.no_answer for report in steps),
                total,
                [report.no_answer_share for report in steps],
            ),
            (
                "the verifier raised, or was ended",
                errors.total(),
                total,
                [report.verifier_error_share for report in steps],
            ),
            ("no verdict; sampled again", ungraded, total + ungraded, [report.ungraded_share for report in steps]),
        )
    )
    tables = [Table(f"Of {total} rollouts", ("", "rollouts", "share", "highest in a step"), rows)]
    if errors:
        found = tuple((error, str(count)) for error, count in errors.most_common())
        tables.append(Table("Errors of the verifier", ("", "rollouts"), found))
    text = "A completion without an answer, and one on which the verifier raised, has a reward of 0."
    return Section("Verdicts", (text,), tuple(tables))
