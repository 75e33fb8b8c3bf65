"""Runs that benchmarks start: which are kept. A script stands in for `specrl`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from benchmarks import demo_runs

from specrl.launcher.run_directory import RunDirectory

# Called with `run -f FILE --runs RUNS ...`. Its run finishes at once, and its run file is not that which was asked for.
FINISHES = """#!/bin/sh
mkdir -p "$5/demo-1/export" && echo x >> "$5/../starts"
cp "$3" "$5/demo-1/run.yaml" && echo '# hf://... was replaced by a folder' >> "$5/demo-1/run.yaml"
sed -i 's/count: 512/count: 511/' "$5/demo-1/run.yaml"
echo '{"phase": "finished"}' > "$5/demo-1/status.json"
"""


def install_program(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Let a shell script stand in for `specrl`."""
    program = folder / "specrl"
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(demo_runs, "SPECRL", program)


def count_starts(folder: Path) -> int:
    return len((folder / "starts").read_text(encoding="utf-8").splitlines())


def test_a_run_whose_file_was_resolved_is_kept_under_the_settings_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`specrl run` replaces a data set's name by the files that it fetched. Such runs were trained and thrown away."""
    install_program(monkeypatch, tmp_path, FINISHES)
    for _ in range(2):
        assert demo_runs.run({"schedule.steps": "3"}, tmp_path / "runs") == tmp_path / "runs" / "demo-1"
    assert count_starts(tmp_path) == 1
    assert not (tmp_path / "runs" / "demo-1" / "export").exists()
    demo_runs.run({"schedule.steps": "4"}, tmp_path / "runs")
    assert count_starts(tmp_path) == 2


# A run that goes on until SIGTERM, and then writes what it saves.
GOES_ON = """#!/bin/sh
trap 'touch "$5/../saved"; exit 130' TERM
touch "$5/../started"
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_run_ends_before_the_benchmark_that_is_told_to_end(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark alone ended, so that the next one measured beside its run."""
    install_program(monkeypatch, tmp_path, GOES_ON)

    def end_once_started(_steps: int) -> None:
        if (tmp_path / "started").exists():
            os.kill(os.getpid(), number)

    before = signal.signal(number, signal.SIG_DFL)  # below nohup SIGHUP is ignored, and `call` leaves that as it is
    try:
        with pytest.raises(KeyboardInterrupt):
            demo_runs.run({}, tmp_path / "runs", end_once_started)
        assert (tmp_path / "saved").exists()
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_signal_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        demo_runs.call(["sleep", "0.1"], tmp_path / "log", lambda: os.kill(os.getpid(), signal.SIGHUP), 0.02)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_folder_of_a_run_that_goes_on_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_program(monkeypatch, tmp_path, FINISHES)
    directory = RunDirectory(tmp_path / "runs" / "demo-1")
    directory.path.mkdir(parents=True)
    with directory.lock(), pytest.raises(demo_runs.Failed, match="must have ended, got a run that another launcher"):
        demo_runs.run({}, tmp_path / "runs")
    demo_runs.run({}, tmp_path / "runs")


def test_kept_results_of_other_settings_or_models_are_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"first")
    file = tmp_path / "kept" / "results.json"
    settings = demo_runs.identify([model, 8])
    assert demo_runs.read_kept(file, settings) is None
    demo_runs.write_kept(file, settings, {"runs": [1, 2]})
    assert demo_runs.read_kept(file, demo_runs.identify([model, 8])) == {"settings": settings, "runs": [1, 2]}
    with pytest.raises(demo_runs.Failed, match="got others; name another file"):
        demo_runs.read_kept(file, demo_runs.identify([model, 9]))
    (model / "model.safetensors").write_bytes(b"trained again")
    with pytest.raises(demo_runs.Failed, match="got others; name another file"):
        demo_runs.read_kept(file, demo_runs.identify([model, 8]))
    file.write_text("[]", encoding="utf-8")
    with pytest.raises(demo_runs.Failed, match="got others; name another file"):
        demo_runs.read_kept(file, settings)
