"""The probe of `specrl doctor` for a run file: is it valid, and does its store answer?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from specrl.coordinator.ledger import check_store_server
from specrl.errors import SpecInvalid, StoreFailed, StoreInvalid
from specrl.formats.doctor_report import Finding, FindingState
from specrl.spec import load_spec


def probe_run_file(file: Path | None) -> Iterator[Finding]:
    """Yield whether the run file can be read, and whether its store can be used. None: nothing is checked."""
    if file is None:
        value = "not checked: no run file was named, and the default, SQLite, has no server"
        yield Finding(name="store", state=FindingState.OK, value=value)
        return
    try:
        spec = load_spec(file)
    except SpecInvalid as error:
        remedy = "correct the file; `specrl spec check --preflight` checks it against this machine, too"
        yield Finding(name="run file", state=FindingState.PROBLEM, value=str(error), remedy=remedy)
        return
    yield Finding(name="run file", state=FindingState.OK, value=f"{file} is valid")
    if spec.redis is None:
        yield Finding(name="store", state=FindingState.OK, value="SQLite in the run's folder")
        return
    try:
        check_store_server(spec)
    except (StoreFailed, StoreInvalid) as error:
        remedy = "start the server, or correct `store.redis` of the run file (docs/store.md)"
        yield Finding(name="store", state=FindingState.PROBLEM, value=str(error), remedy=remedy)
    else:
        yield Finding(name="store", state=FindingState.OK, value="Redis answers, and is as durable as the run demands")
