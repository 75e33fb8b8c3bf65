"""Environments, GPUs and arguments of a run's processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.run_files import a_run

from specrl.coordinator.members.trainer_link import CHECKPOINT_DEADLINE_S, STEP_DEADLINE_S
from specrl.launcher.processes import environment
from specrl.launcher.processes.programs import build_programs
from specrl.launcher.run_directory import RunDirectory
from specrl.machine import assign_gpus
from specrl.rpc.run_token import write_token
from specrl.spec import parse_spec


def test_variables_of_a_surrounding_torchrun_are_removed() -> None:
    outer = {"PATH": "/bin", "RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "1"}
    inner = environment.base_environment(2, outer)
    assert "RANK" not in inner
    assert "WORLD_SIZE" not in inner
    assert inner["PATH"] == "/bin"


def test_processes_stay_offline_and_report_no_usage() -> None:
    inner = environment.base_environment(2, {"HF_HUB_OFFLINE": "0"})
    assert inner["HF_HUB_OFFLINE"] == inner["VLLM_NO_USAGE_STATS"] == inner["DO_NOT_TRACK"] == "1"
    assert inner["OMP_NUM_THREADS"] == "2"


@given(st.integers(0, 9), st.lists(st.integers(1, 4), max_size=6))
def test_no_gpu_is_assigned_twice_while_there_are_enough(count: int, wanted: list[int]) -> None:
    gpus = [str(number) for number in range(count)]
    dealt = assign_gpus(gpus, wanted)
    taken = [gpu for part in dealt for gpu in part]
    if sum(wanted) <= count:
        assert len(set(taken)) == len(taken) == sum(wanted)
    assert [len(part) for part in dealt] == ([0] * len(wanted) if not gpus else wanted)


def test_every_program_gets_its_arguments_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # tests of the trainer set it in this process
    spec = parse_spec(
        a_run(
            tmp_path,
            generation={"replicas": 2, "threads": 3, "sampling": {"maxTokens": 16}},
            trainer={"optimizer": {"learningRate": "1e-3"}, "parallelism": {"tensor": 2}, "threads": 4},
        )
    )
    programs = {program.name: program for program in build_programs(spec, RunDirectory(tmp_path), 5000, 6000)}
    assert list(programs) == ["coordinator", "trainer", "gen-0", "gen-1"]

    (coordinator,) = programs["coordinator"].ranks()
    assert coordinator.arguments[1:] == (
        *("--run-directory", str(tmp_path), "--host", "127.0.0.1", "--port", "5000", "--http-port", "6000"),
    )
    (replica,) = programs["gen-1"].ranks()
    assert replica.arguments[1:] == (
        *("--spec", str(tmp_path / "run.yaml"), "--replica-id", "gen-1"),
        *("--coordinator", "127.0.0.1:5000", "--port", "0", "--metrics-port", "0"),
        *("--token-file", str(tmp_path / "token")),
    )
    assert replica.environment["OMP_NUM_THREADS"] == "3"
    assert "TORCHDYNAMO_DISABLE" not in replica.environment

    first, second = programs["trainer"].ranks()
    for rank in (first, second):
        assert rank.arguments[-4:] == ("--metrics-port", "0", "--token-file", str(tmp_path / "token"))
    assert [first.environment["RANK"], second.environment["RANK"]] == ["0", "1"]
    assert first.environment["WORLD_SIZE"] == second.environment["WORLD_SIZE"] == "2"
    assert first.environment["MASTER_PORT"] == second.environment["MASTER_PORT"]
    assert first.environment["TORCHDYNAMO_DISABLE"] == "1"
    assert first.environment["OMP_NUM_THREADS"] == "4"
    assert first.log != second.log


def test_variables_of_the_user_win_over_those_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # tests of the trainer set it in this process
    assert environment.rank_environment(1, 0, 1, 1, ())["TORCHDYNAMO_DISABLE"] == "1"
    on_gpu = environment.rank_environment(1, 0, 1, 1, ("2",))
    assert on_gpu["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert on_gpu["CUDA_VISIBLE_DEVICES"] == "2"
    assert "TORCHDYNAMO_DISABLE" not in on_gpu
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    assert environment.rank_environment(1, 0, 1, 1, ("2",))["PYTORCH_ALLOC_CONF"] == "backend:cudaMallocAsync"


def test_coordinator_stops_before_all_others_and_has_time_to_save(tmp_path: Path) -> None:
    coordinator, *others = build_programs(parse_spec(a_run(tmp_path)), RunDirectory(tmp_path), 1, 2)
    assert all(coordinator.stop_order < other.stop_order for other in others)
    assert coordinator.grace_s > STEP_DEADLINE_S + CHECKPOINT_DEADLINE_S, "the trainer finishes its step first"
    assert [program.ends_run for program in (coordinator, *others)] == [True, False, False]


def test_the_token_is_in_no_command_line_and_no_environment(tmp_path: Path) -> None:
    """Other users see command lines, and workers that grade answers inherit the environment."""
    token = write_token(tmp_path)
    spec = parse_spec(a_run(tmp_path))
    for program in build_programs(spec, RunDirectory(tmp_path), 5000, 6000):
        for rank in program.ranks():
            assert token not in " ".join((*rank.arguments, *rank.environment.keys(), *rank.environment.values()))
