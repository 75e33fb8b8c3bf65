"""The list of mutants fits the present product, so that `make mutants` tries what it says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.mutants.catalog import (
    ATTACKERS,
    BEGIN,
    CASES,
    END,
    ROOT,
    TABLES,
    Mutant,
    MutantInvalid,
    Result,
    load_mutants,
    load_results,
    make_attack_table,
    make_case_table,
    make_table,
)

FEWEST = 2
"""Count the mutants of a package."""
PARTS = (
    *("coordinator/ledger", "coordinator/members", "coordinator/requests", "coordinator/rollouts"),
    *("coordinator/observe/sinks", "coordinator/schedule", "generation/vllm_backend"),
    *("rewards/code", "rewards/math", "rewards/sandbox", "trainer/losses", "trainer/megatron_backend"),
)
"""Folders of packages that are large enough to need mutants of their own."""
MUTANT = Mutant("twice", "a.py", "x = 1", "x = 2", "Nothing.", ("tests/unit",))


def list_packages() -> list[str]:
    """List folders below the source roots that must have mutants. Generated code and links to data need none."""
    folders = [path for path in (ROOT / "services" / "specrl").iterdir() if path.is_dir() and not path.is_symlink()]
    found = [f"specrl/{path.name}" for path in folders if path.name != "api" and any(path.glob("*.py"))]
    return [*sorted(found), *(f"specrl/{part}" for part in PARTS), "specrl_operator"]


def test_every_mutant_is_one_line_of_its_file_and_can_be_compiled() -> None:
    for mutant in load_mutants():
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        changed = mutant.apply(text)
        different = [pair for pair in zip(text.split("\n"), changed.split("\n"), strict=True) if pair[0] != pair[1]]
        assert len(different) == 1, mutant.id
        compile(changed, mutant.file, "exec")


def test_every_mutant_has_a_unique_name_a_sentence_and_existing_tests() -> None:
    mutants = load_mutants()
    assert [name for name, count in Counter(mutant.id for mutant in mutants).items() if count > 1] == []
    for mutant in mutants:
        assert mutant.breaks.endswith("."), mutant.id
        assert mutant.tests, mutant.id
        for test in mutant.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).exists(), f"{mutant.id}: {test}"
            assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), mutant.id


def test_every_package_has_mutants() -> None:
    counts = Counter(
        str(folder) for mutant in load_mutants() for folder in [mutant.package, *list_parents(mutant.package)]
    )
    assert {name: counts[name] for name in list_packages() if counts[name] < FEWEST} == {}


def list_parents(package: str) -> list[str]:
    """List the parent folders."""
    return [str(folder) for folder in Path(package).parents]


@pytest.mark.parametrize("text", ["y = 1\n", "x = 1\n    x = 1\n"])
def test_a_stale_mutant_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(MutantInvalid, match=r"twice: a\.py must have its old line exactly once"):
        MUTANT.apply(text)


def test_a_mutant_of_two_lines_is_refused() -> None:
    with pytest.raises(MutantInvalid, match="twice: a mutant must replace one line"):
        replace(MUTANT, new="x = 2\ny = 3").apply("x = 1\n")


def test_a_line_keeps_its_indentation() -> None:
    assert MUTANT.apply("if y:\n    x = 1\n") == "if y:\n    x = 2\n"


def test_the_table_shows_the_killing_test_and_untried_mutants() -> None:
    mutants = [replace(MUTANT, id=name) for name in ("killed", "survivor", "new")]
    results = {"killed": Result("tests/a.py::test_b[x|y]", 3.6), "survivor": Result("", 9.0)}
    rows = make_table(mutants, results).splitlines()[2:]
    assert r"`tests/a.py::test_b[x\|y]` | 4 |" in rows[0]
    assert "**nothing**" in rows[1]
    assert "not tried" in rows[2]


def test_the_page_shows_the_recorded_results() -> None:
    mutants = load_mutants()
    results = load_results()
    assert set(results) <= {mutant.id for mutant in mutants}
    for page, make in TABLES.items():
        written = page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
        assert written == make(mutants, results), "python -m tools.mutants --write"


def test_every_fix_is_of_an_attack_or_a_reported_case_and_a_test_has_noticed_that_it_was_undone() -> None:
    results = load_results()
    for mutant in load_mutants():
        assert bool(mutant.attacker) + bool(mutant.cases) == bool(mutant.fix), mutant.id
        if mutant.fix:
            assert mutant.attacker in ("", *ATTACKERS), mutant.id
            assert set(mutant.cases) <= set(CASES), mutant.id
            assert results[mutant.id].killed_by, mutant.id


def test_every_reported_case_is_in_the_table() -> None:
    assert {case for mutant in load_mutants() for case in mutant.cases} == set(CASES)


def test_the_table_of_attacks_is_in_the_order_of_the_attackers() -> None:
    attacks = [
        replace(MUTANT, id=attacker, attacker=attacker, fix="a rule", file="services/specrl/a.py")
        for attacker in (ATTACKERS[1], ATTACKERS[0])
    ]
    results = {ATTACKERS[0]: Result("tests/a.py::test_b[x|y]", 3.6)}
    rows = make_attack_table([MUTANT, *attacks], results).splitlines()[2:]
    assert rows == [
        r"| an answer | Nothing. | a rule (`specrl/a.py`) | `tests/a.py::test_b[x\|y]` | an answer |",
        "| a data set | Nothing. | a rule (`specrl/a.py`) | not tried | a data set |",
    ]
    assert make_table(attacks, {}).count("\n") == 1


def test_the_table_of_cases_is_in_the_order_of_the_cases() -> None:
    fixes = [
        replace(MUTANT, id=cases[0], cases=cases, fix="a rule", file="services/specrl/a.py")
        for cases in (("h2", "m4"), ("c07",))
    ]
    rows = make_case_table([MUTANT, *fixes], {}).splitlines()[2:]
    assert rows == [
        "| c07 | Nothing. | a rule (`specrl/a.py`) | not tried | c07 |",
        "| h2, m4 | Nothing. | a rule (`specrl/a.py`) | not tried | h2 |",
    ]
    assert make_table(fixes, {}).count("\n") == 1


def test_the_tests_that_killed_mutants_exist() -> None:
    """After tests were renamed, the tables named tests that were gone."""
    gone = []
    for name, result in load_results().items():
        file, _, test = result.killed_by.partition("::")
        function = test.split("::")[-1].partition("[")[0]
        if file and not ((ROOT / file).is_file() and f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")):
            gone.append(f"{name}: {result.killed_by}")
    assert not gone, "run `python -m tools.mutants --own --only ID`, then --write, for " + ", ".join(gone)
