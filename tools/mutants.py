"""Runs the tests on mutants of the product, each with one wrong line, and records which test fails.

    python -m tools.mutants                  run all mutants of tests/mutants/mutants.toml (`make mutants`)
    python -m tools.mutants --only ID        run this mutant; may be repeated
    python -m tools.mutants --rest           run the mutants without a result
    python -m tools.mutants --own            run only the tests that each mutant names: a quick check of new mutants
    python -m tools.mutants --confirm        run the tests that killed mutants without a mutant: all must pass
    python -m tools.mutants --write          write the tables of results into the docs

The tests that a mutant names run first, up to the first failure. The whole of `make test` runs only if the mutant
survived them. Results are written after each mutant, so that --rest continues an interrupted run.

Invariant: of the working tree only `tests/mutants/results.json` is changed. The tests run in a copy of it, in a
temporary folder, with the packages of .venv. PYTHONPATH puts the copy's sources before those that .venv was installed
from, in every process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.mutants import catalog
from tests.mutants.catalog import ROOT, Mutant, MutantInvalid, Result

SOURCES = ("services", "operators")
OWN_TEST = "tests/unit/test_mutants.py"
"""Left out: it fails on every mutant, because it looks for the line that the mutant replaces."""

# Exit statuses of pytest. Any other one means that the tests did not run.
PASSED = 0
FAILED = 1

STOP_S = 120.0
"""Time for pytest to tear down its fixtures after an interrupt."""


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Yield a clone of the repository with the files of the working tree. It is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="specrl-mutants-") as folder:
        copy = Path(folder) / "specrl"
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(copy)], check=True)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
            source = ROOT / name
            target = copy / name
            if not name or name == ".venv":
                continue
            target.unlink(missing_ok=True)
            if source.is_symlink() or source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        (copy / ".venv").symlink_to(Path(sys.prefix))
        with (copy / ".git" / "info" / "exclude").open("a", encoding="utf-8") as exclude:
            exclude.write(".venv\n")
        yield copy


def make_environment(copy: Path) -> dict[str, str]:
    """Make the tests' environment variables, with the copy's sources first on the path.

    Raises MutantInvalid if Python nevertheless imports other sources.
    """
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(str(copy / source) for source in SOURCES)}
    ask = [sys.executable, "-c", "import specrl, specrl_operator; print(specrl.__file__, specrl_operator.__file__)"]
    said = subprocess.run(ask, cwd="/", env=variables, check=True, capture_output=True, text=True).stdout
    if any(not Path(file).is_relative_to(copy) for file in said.split()):
        raise MutantInvalid(f"Python must import specrl from {copy}, got {said.strip()}")
    return variables


def try_mutant(mutant: Mutant, copy: Path, variables: dict[str, str], *, only_own: bool) -> Result:
    """Run the tests that the mutant names, then all tests, until one fails.

    only_own: do not run all tests, and raise for a mutant that survives its own. Raises MutantInvalid for a mutant that
    does not apply, or whose tests do not run.
    """
    file = copy / mutant.file
    text = file.read_text(encoding="utf-8")
    cpu_s = 0.0
    try:
        file.write_text(mutant.apply(text), encoding="utf-8")
        for tests in (mutant.tests, ("--ignore", OWN_TEST)):
            failed, spent_s = run_tests(mutant.id, ("-x", *tests), copy, variables)
            cpu_s = round(cpu_s + spent_s, 1)
            if failed:
                return Result(failed[0], cpu_s)
            if only_own:
                raise MutantInvalid(
                    f"{mutant.id}: one of the tests that it names must fail, got none; run it without --own"
                )
        return Result("", cpu_s)
    finally:
        file.write_text(text, encoding="utf-8")


def run_tests(name: str, arguments: Sequence[str], copy: Path, variables: dict[str, str]) -> tuple[list[str], float]:
    """Run tests. Returns the tests that failed, and CPU seconds. Raises MutantInvalid if they do not run."""
    cache = copy / ".pytest_cache"
    costs = copy.with_name("costs.json")
    shutil.rmtree(cache, ignore_errors=True)
    costs.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "--costs", str(costs), *arguments]
    with copy.with_name("output.txt").open("w+", encoding="utf-8", errors="replace") as output:
        running = subprocess.Popen(command, cwd=copy, env=variables, stdout=output, stderr=output, process_group=0)
        try:
            status = running.wait()
        except KeyboardInterrupt:
            running.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                running.wait(STOP_S)
            raise
        finally:
            with suppress(ProcessLookupError):  # processes that a broken product left running
                os.killpg(running.pid, signal.SIGKILL)
        output.seek(0)
        said = output.read()
    last = cache / "v" / "cache" / "lastfailed"
    failed = list(json.loads(last.read_text(encoding="utf-8"))) if last.is_file() else []
    if status not in (PASSED, FAILED) or (status == FAILED) != bool(failed):
        raise MutantInvalid(f"{name}: its tests must run, got exit status {status}:\n{said[-2000:]}")
    for line in said.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            print(f"    {line[:300]}")
    spent_s = json.loads(costs.read_text(encoding="utf-8"))["cpu_s"] if costs.is_file() else 0.0
    return failed, spent_s


def confirm_killers(chosen: Sequence[Mutant], mutants: Sequence[Mutant]) -> int:
    """Run the tests that killed the chosen mutants without a mutant. Results of tests that fail then are deleted.

    Returns the exit status.
    """
    results = catalog.load_results()
    killers = {results[it.id].killed_by for it in chosen if it.id in results and results[it.id].killed_by}
    with copied_tree() as copy:
        failed, spent_s = run_tests("without a mutant", sorted(killers), copy, make_environment(copy))
    kept = {name: result for name, result in results.items() if result.killed_by not in failed}
    catalog.write_results(mutants, kept)
    print(f"{len(killers) - len(failed)} of {len(killers)} tests pass without a mutant, {spent_s:.0f} CPU s")
    return 1 if failed else 0


def try_mutants(chosen: Sequence[Mutant], mutants: Sequence[Mutant], *, only_own: bool) -> int:
    """Try the chosen mutants. Returns the exit status: 1 if one survived or could not be tried."""
    results = catalog.load_results()
    bad = 0
    with copied_tree() as copy:
        variables = make_environment(copy)
        for number, mutant in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {mutant.id}", flush=True)
            try:
                result = results[mutant.id] = try_mutant(mutant, copy, variables, only_own=only_own)
            except MutantInvalid as error:
                results.pop(mutant.id, None)
                bad += 1
                print(f"    {error}", flush=True)
            else:
                bad += not result.killed_by
                print(f"    {result.cpu_s:.0f} CPU s, killed by {result.killed_by or 'NOTHING'}", flush=True)
            catalog.write_results(mutants, results)
    print(f"{len(chosen) - bad} of {len(chosen)} mutants were killed")
    return 1 if bad else 0


def main() -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Run the tests on mutants, and record which test kills each.")
    parser.add_argument("--only", metavar="ID", action="append", default=[], help="only this mutant; may be repeated")
    parser.add_argument("--rest", action="store_true", help="only mutants without a result")
    parser.add_argument("--confirm", action="store_true", help="run the tests that killed mutants without a mutant")
    parser.add_argument("--own", action="store_true", help="only the tests that each mutant names")
    pages = ", ".join(str(page.relative_to(ROOT)) for page in catalog.TABLES)
    parser.add_argument("--write", action="store_true", help=f"write the tables into {pages}; run nothing")
    options = parser.parse_args()
    mutants = catalog.load_mutants()
    if options.write:
        catalog.write_tables(mutants, catalog.load_results())
        return 0
    unknown = set(options.only).difference(mutant.id for mutant in mutants)
    if unknown:
        parser.error(f"--only must name mutants of {catalog.MUTANTS.name}, got {', '.join(sorted(unknown))}")
    known = catalog.load_results() if options.rest else {}
    chosen = [it for it in mutants if it.id not in known and (not options.only or it.id in options.only)]
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background job ignores SIGINT, and pytest would inherit that
    try:
        if options.confirm:
            return confirm_killers(chosen, mutants)
        return try_mutants(chosen, mutants, only_own=options.own)
    except KeyboardInterrupt:
        print("interrupted; the results so far are kept, and --rest continues")
        return 130


if __name__ == "__main__":
    sys.exit(main())
