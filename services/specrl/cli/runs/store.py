"""`specrl store`: inspects a run's state, exports it to readable files, or deletes it.

docs/store.md describes the state.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from specrl.cli.command_exit import confirm_deletion
from specrl.cli.options import RUNS, AsJson, Runs
from specrl.coordinator.ledger import Store, make_claim, open_store, open_store_reader
from specrl.coordinator.ledger.ledger import DurableFacts
from specrl.errors import RunInvalid
from specrl.launcher import run_directory
from specrl.launcher.run_directory import RunDirectory
from specrl.records import wire
from specrl.spec import load_spec

app = typer.Typer(help="Inspect a run's state, export it to readable files, or delete it.", no_args_is_help=True)

Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder or name.")]


@app.command("inspect")
def inspect_store(run: Run, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """Show where a run's state is kept and what it contains. Changes nothing; the run may be active."""
    directory = run_directory.find_run(run, runs)
    with closing(_open_for_reading(directory)) as store:
        found = _summarize_store(store)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, value in found.items():
        typer.echo(f"{name:{width}}  {_format_value(value)}")


@app.command("export")
def export_store(
    run: Run,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to; must not exist.")],
    runs: Runs = RUNS,
) -> None:
    """Copy a run's state to files that people and programs can read. Changes nothing; the run may be active.

    DIR gets store.json (the output of `inspect`), facts.json, and batches/STEP.pb (specrl.api.v1.Batch). reports.jsonl
    has one line per trained step. rollouts.jsonl has one line per finished rollout of an untrained step, with its text
    and verdict.
    """
    directory = run_directory.find_run(run, runs)
    with closing(_open_for_reading(directory)) as store:
        try:
            out.mkdir(parents=True)
            written = _write_export(store, out)
        except OSError as error:
            raise RunInvalid(
                f"--out must be a new, writable folder, got {out}: {error.strerror}; name another, or free some space"
            ) from error
    typer.echo(f"{_format_value(written)} written to {out}")


@app.command("reset")
def reset_store(
    run: Run,
    runs: Runs = RUNS,
    is_sure: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete all of a run's state, to free a server's memory or to start over. This cannot be undone.

    The run must not be active on this machine; one that is active elsewhere loses access to its state. The run's
    folder stays, with logs, metrics and checkpoints. A resumed run then continues from its newest checkpoint. Without
    checkpoints it starts over.
    """
    directory = run_directory.find_run(run, runs)
    # The lock keeps a launcher from starting the run meanwhile.
    with directory.lock():
        with closing(_open_for_reading(directory)) as store:
            found = _summarize_store(store)
        typer.echo(
            f"{found['place']}: {found['trained']} steps trained, {_format_value(found['rollouts'])} rollouts, "
            f"{len(found['batches'])} batches"
        )
        if not is_sure:
            confirm_deletion(f"delete the state of {directory.name}?")
        spec = load_spec(directory.run_file)
        # Claiming the store fences off a coordinator that still runs elsewhere.
        with closing(open_store(spec, directory.path, make_claim(directory.path))) as store:
            store.reset()
    typer.echo(f"{directory.name}: state deleted")


def _open_for_reading(directory: RunDirectory) -> Store:
    """Open the run's store for reading. Raises RunInvalid when the run has none yet."""
    spec = load_spec(directory.run_file)
    if spec.redis is None and not (directory.path / "store.db").exists():
        raise RunInvalid(f"RUN must have started, got {directory.path}, which has no state; there is nothing to do")
    return open_store_reader(spec, directory.path)


def _summarize_store(store: Store) -> dict[str, Any]:
    """Summarize the store without reading rollouts and batches."""
    facts = store.read_facts()
    reports = store.read_reports()
    return {
        **store.describe(),
        "trained": store.read_last_trained_step(),
        "rollouts": {str(step): count for step, count in store.count_rollouts().items()},
        "batches": store.list_batch_steps(),
        "reports": len(reports),
        "facts": sorted(facts),
        "failedPrompts": len(DurableFacts.from_stored(facts).collect_failed_prompts(reports)),
    }


def _write_export(store: Store, out: Path) -> dict[str, int]:
    """Write every file of an export. Returns the number of entries by kind."""
    facts = store.read_facts()
    reports = store.read_reports()
    rollouts = store.read_rollouts()
    (out / "store.json").write_text(json.dumps(_summarize_store(store), indent=2) + "\n", encoding="utf-8")
    (out / "facts.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _write_lines(out / "reports.jsonl", reports)
    _write_lines(
        out / "rollouts.jsonl",
        [
            {"step": row.step, "index": row.index, "sample": row.sample, "attempt": row.attempt}
            | wire.graded_to_json(row.data)
            for row in rollouts
        ],
    )
    (out / "batches").mkdir()
    batches = 0
    for step in store.list_batch_steps():
        trained = store.read_batch_rollouts(step)
        data = store.read_batch(step)
        if data is not None:  # None: an active run has deleted the batch since it was listed
            batch = wire.batch_from_stored(data, trained)
            (out / "batches" / f"{step:06d}.pb").write_bytes(wire.batch_to_bytes(batch))
            batches += 1
    return {"facts": len(facts), "reports": len(reports), "rollouts": len(rollouts), "batches": batches}


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _format_value(value: Any) -> str:
    """Format a value of the summary for people."""
    if isinstance(value, dict):
        named = (f"{count} of step {name}" if name.isdigit() else f"{count} {name}" for name, count in value.items())
        return ", ".join(named) or "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "nobody" if value is None else str(value)
