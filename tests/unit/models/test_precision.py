"""The precision that `model.dtype: Auto` stands for: by the machine, once for each run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.run_files import a_model_folder, a_run, a_run_file

from specrl.errors import RunInvalid, SpecInvalid
from specrl.launcher import launch, preflight, run_directory
from specrl.launcher.terminal.view import View
from specrl.models import precision
from specrl.spec import RunSpec, load_process_spec, load_spec, parse_spec
from specrl.spec.run import Dtype


def a_spec(folder: Path, dtype: str | None) -> RunSpec:
    run = a_run(folder)
    if dtype is None:
        del run["model"]["dtype"]
    else:
        run["model"]["dtype"] = dtype
    return parse_spec(run)


def set_machine(monkeypatch: pytest.MonkeyPatch, *, gpus: tuple[str, ...] = (), has_units: bool = False) -> None:
    monkeypatch.setattr(precision, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(precision, "has_bfloat16_units", lambda: has_units)


@pytest.mark.parametrize(
    ("machine", "dtype", "words"),
    [
        ({}, Dtype.FLOAT32, "float32 (model.dtype: Auto; this CPU has no bfloat16 units)"),
        ({"has_units": True}, Dtype.BFLOAT16, "bfloat16 (model.dtype: Auto; this CPU has bfloat16 units)"),
        ({"gpus": ("0",)}, Dtype.BFLOAT16, "bfloat16 (model.dtype: Auto, on GPUs)"),
    ],
)
def test_a_run_without_a_precision_gets_the_one_that_suits_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], dtype: Dtype, words: str
) -> None:
    """The default was bfloat16, which does not start on CPUs without units for it: their canary refuses the replica."""
    set_machine(monkeypatch, **machine)
    spec = a_spec(tmp_path, None)
    assert precision.resolve_dtype(spec).model.dtype is dtype
    assert precision.describe_dtype(spec) == words


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_precision_that_the_user_names_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    set_machine(monkeypatch, has_units=dtype == "float32")
    spec = a_spec(tmp_path, dtype)
    assert precision.resolve_dtype(spec) is spec
    assert precision.describe_dtype(spec) == dtype


def test_bfloat16_on_a_cpu_that_emulates_it_is_a_notice_of_preflight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine(monkeypatch)
    a_model_folder(tmp_path / "model")
    ready = preflight.check_run(a_spec(tmp_path, "bfloat16"))
    assert [notice for notice in ready.notices if "this CPU only emulates" in notice]
    assert not preflight.check_run(a_spec(tmp_path, None)).notices


def test_a_new_run_stores_the_chosen_precision_and_a_resumed_run_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine(monkeypatch)
    a_model_folder(tmp_path / "model")
    started = list[RunSpec]()

    def start_nothing(spec: RunSpec, directory: run_directory.RunDirectory, *_: object) -> launch.LaunchResult:
        started.append(spec)
        return launch.LaunchResult(directory, launch.RunOutcome(launch.RunEnd.INTERRUPTED))

    monkeypatch.setattr(launch, "_run_programs", start_nothing)
    view = ViewOfNothing()
    directory = launch.start_run(a_spec(tmp_path, None), tmp_path / "runs", view).directory
    assert load_spec(directory.run_file).model.dtype is Dtype.FLOAT32

    set_machine(monkeypatch, has_units=True)  # the run moves to another machine
    launch.resume_run(directory, (), view)
    assert [spec.model.dtype for spec in started] == [Dtype.FLOAT32, Dtype.FLOAT32]
    with pytest.raises(RunInvalid, match=r"nothing but generation\.replicas"):
        launch.resume_run(directory, ("model.dtype=Auto",), view)


class ViewOfNothing(View):
    """A view that shows nothing."""

    check_every_s = 10.0

    def show_message(self, text: str) -> None:
        return

    def close(self) -> None:
        return


def test_a_process_refuses_a_file_in_which_nobody_has_chosen_the_precision(tmp_path: Path) -> None:
    file = a_run_file(tmp_path)
    assert load_process_spec(file).model.dtype is Dtype.FLOAT32
    file.write_text(file.read_text().replace("float32", "Auto"))
    with pytest.raises(SpecInvalid, match=r"model\.dtype: must be float32 or bfloat16"):
        load_process_spec(file)
