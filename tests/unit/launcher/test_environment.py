"""Environment of children, GPUs, programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.run_files import a_run

from specrl.launcher import environment
from specrl.launcher.programs import programs_of
from specrl.launcher.run_directory import RunDirectory
from specrl.spec import parse_spec


def test_torchrun_of_the_user_does_not_reach_children() -> None:
    outer = {"PATH": "/bin", "RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "1"}
    inner = environment.base_environment(2, outer)
    assert "RANK" not in inner
    assert "WORLD_SIZE" not in inner
    assert inner["PATH"] == "/bin"


def test_children_stay_offline_and_silent() -> None:
    inner = environment.base_environment(2, {"HF_HUB_OFFLINE": "0"})
    assert inner["HF_HUB_OFFLINE"] == inner["VLLM_NO_USAGE_STATS"] == inner["DO_NOT_TRACK"] == "1"
    assert inner["OMP_NUM_THREADS"] == "2"


def test_gpus_chosen_by_the_user_are_the_ones_dealt(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert environment.visible_gpus({}, tmp_path) == ("0", "1")
    assert environment.visible_gpus({"CUDA_VISIBLE_DEVICES": "3,5"}, tmp_path) == ("3", "5")
    assert environment.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


@given(st.integers(0, 9), st.lists(st.integers(1, 4), max_size=6))
def test_no_gpu_is_dealt_twice_while_there_are_enough(count: int, wanted: list[int]) -> None:
    gpus = [str(number) for number in range(count)]
    dealt = environment.deal_gpus(gpus, wanted)
    taken = [gpu for part in dealt for gpu in part]
    if sum(wanted) <= count:
        assert len(set(taken)) == len(taken) == sum(wanted)
    assert [len(part) for part in dealt] == ([0] * len(wanted) if not gpus else wanted)


def test_every_program_of_a_run_is_started_with_its_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # a test of the trainer sets it in this process
    spec = parse_spec(
        a_run(
            tmp_path,
            generation={"replicas": 2, "threads": 3, "sampling": {"maxTokens": 16}},
            trainer={"optimizer": {"learningRate": "1e-3"}, "parallelism": {"tensor": 2}, "threads": 4},
        )
    )
    programs = {program.name: program for program in programs_of(spec, RunDirectory(tmp_path), 5000, 6000)}
    assert list(programs) == ["coordinator", "trainer", "gen-0", "gen-1"]

    (coordinator,) = programs["coordinator"].ranks()
    assert coordinator.arguments[1:] == (
        *("--run-directory", str(tmp_path), "--host", "127.0.0.1", "--port", "5000", "--http-port", "6000"),
    )
    (replica,) = programs["gen-1"].ranks()
    assert replica.arguments[1:] == (
        *("--spec", str(tmp_path / "run.yaml"), "--replica-id", "gen-1"),
        *("--coordinator", "127.0.0.1:5000", "--port", "0", "--metrics-port", "0"),
    )
    assert replica.environment["OMP_NUM_THREADS"] == "3"
    assert "TORCHDYNAMO_DISABLE" not in replica.environment

    first, second = programs["trainer"].ranks()
    assert first.arguments[-2:] == second.arguments[-2:] == ("--metrics-port", "0")
    assert [first.environment["RANK"], second.environment["RANK"]] == ["0", "1"]
    assert first.environment["WORLD_SIZE"] == second.environment["WORLD_SIZE"] == "2"
    assert first.environment["MASTER_PORT"] == second.environment["MASTER_PORT"]
    assert first.environment["TORCHDYNAMO_DISABLE"] == "1"
    assert first.environment["OMP_NUM_THREADS"] == "4"
    assert first.log != second.log


def test_coordinator_stops_before_all_others_and_has_time_to_save(tmp_path: Path) -> None:
    coordinator, *others = programs_of(parse_spec(a_run(tmp_path)), RunDirectory(tmp_path), 1, 2)
    assert all(coordinator.stop_order < other.stop_order for other in others)
    assert coordinator.grace_s >= 60
    assert [program.ends_run for program in (coordinator, *others)] == [True, False, False]
