"""`specrl store`: look into what a run keeps, copy it out to read, or delete it. docs/store.md says what it is."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from specrl.cli.options import RUNS, Runs
from specrl.coordinator.board import FAILED_PROMPTS
from specrl.coordinator.store import Store, claim_for, open_store, read_store
from specrl.errors import RunInvalid
from specrl.launcher import run_directory
from specrl.launcher.run_directory import RunDirectory
from specrl.records import wire
from specrl.spec import load_spec

app = typer.Typer(help="A run's state: look into it, copy it out to read, or delete it.", no_args_is_help=True)

Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder or name.")]


@app.command()
def inspect(
    run: Run,
    runs: Runs = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, for programs.")] = False,
) -> None:
    """Show where a run's state is kept and what is in it. Changes nothing; the run may be under way."""
    directory = run_directory.find(run, runs)
    with closing(_read(directory)) as store:
        found = _summary(store)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, value in found.items():
        typer.echo(f"{name:{width}}  {_words(value)}")


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to; must not exist.")],
    runs: Runs = RUNS,
) -> None:
    """Copy a run's state to files that people and programs can read. Changes nothing; the run may be under way.

    DIR gets store.json (what `inspect` shows), facts.json, reports.jsonl (one line a trained step), rollouts.jsonl (one
    line a finished rollout of an untrained step, with its text and verdict) and batches/STEP.pb (specrl.api.v1.Batch).
    """
    directory = run_directory.find(run, runs)
    with closing(_read(directory)) as store:
        try:
            out.mkdir(parents=True)
            written = _write(store, out)
        except OSError as error:
            raise RunInvalid(
                f"--out must be a folder that can be made, got {out}: {error.strerror}; name another, or make room"
            ) from error
    typer.echo(f"{_words(written)} written to {out}")


@app.command()
def reset(
    run: Run,
    runs: Runs = RUNS,
    is_sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete all of a run's state, to free a server's memory or to begin anew. There is no way back.

    The run must not be under way here; one that is under way elsewhere is shut out. Its folder stays, with logs,
    metrics and checkpoints: a run that is resumed then goes on from its newest checkpoint. Delete those too, and it
    begins anew.
    """
    directory = run_directory.find(run, runs)
    with directory.lock():
        with closing(_read(directory)) as store:
            found = _summary(store)
        typer.echo(
            f"{found['place']}: {found['trained']} steps trained, {_words(found['rollouts'])} rollouts, "
            f"{len(found['batches'])} batches"
        )
        if not is_sure:
            typer.confirm(f"delete the state of {directory.name}?", abort=True)
        spec = load_spec(directory.run_file)
        with closing(open_store(spec, directory.path, claim_for(directory.path))) as store:
            store.reset()
    typer.echo(f"{directory.name}: state deleted")


def _read(directory: RunDirectory) -> Store:
    """The run's store, to read. Raises RunInvalid when the run has none yet."""
    spec = load_spec(directory.run_file)
    if spec.redis is None and not (directory.path / "store.db").exists():
        raise RunInvalid(f"a run must have begun to have a state, got {directory.path}, which never did; nothing to do")
    return read_store(spec, directory.path)


def _summary(store: Store) -> dict[str, Any]:
    """What is in it, without reading the bulk."""
    facts, reports = store.facts(), store.reports()
    return {
        **store.describe(),
        "trained": store.trained(),
        "rollouts": {str(step): count for step, count in store.rollout_counts().items()},
        "batches": store.batches(),
        "reports": len(reports),
        "facts": sorted(facts),
        "failedPrompts": len(
            {*facts.get(FAILED_PROMPTS, ()), *(group for r in reports for group in r.get("failed", ()))}
        ),
    }


def _write(store: Store, out: Path) -> dict[str, int]:
    """Write every file; returns how much of what."""
    facts, reports, rollouts = store.facts(), store.reports(), store.rollouts()
    (out / "store.json").write_text(json.dumps(_summary(store), indent=2) + "\n", encoding="utf-8")
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
    for step in store.batches():
        trained, data = store.batch_rollouts(step), store.batch(step)
        if data is not None:  # forgotten since it was listed, by a run that is under way
            batch = wire.batch_from_stored(data, trained)
            (out / "batches" / f"{step:06d}.pb").write_bytes(wire.batch_to_bytes(batch))
            batches += 1
    return {"facts": len(facts), "reports": len(reports), "rollouts": len(rollouts), "batches": batches}


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _words(value: Any) -> str:
    """A value of the summary for people."""
    if isinstance(value, dict):
        named = (f"{count} of step {name}" if name.isdigit() else f"{count} {name}" for name, count in value.items())
        return ", ".join(named) or "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "nobody" if value is None else str(value)
