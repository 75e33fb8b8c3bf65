"""A local run is never scaled beyond its machine's memory, or that of its GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.run_files import a_run

from specrl.launcher.gpu_checks import GpuNeed
from specrl.launcher.memory import GIB, MemoryNeed
from specrl.launcher.processes.replicas import ReplicaScaler
from specrl.launcher.processes.supervisor import Supervisor
from specrl.launcher.run_directory import RunDirectory
from specrl.spec import parse_spec


def test_only_replicas_that_do_not_fit_into_memory_are_refused_and_only_once(tmp_path: Path) -> None:
    spec = parse_spec(a_run(tmp_path))
    replicas = ReplicaScaler(spec, RunDirectory(tmp_path), 1, MemoryNeed(0, 2 * GIB, 0, 1), lambda: 5 * GIB)
    supervisor = Supervisor([])
    told = [replicas.scale_to(wanted, supervisor) for wanted in (1, 4, 4, 3, 3, 4, 2)]
    assert told == [
        None,
        "available memory must be >= 6.0 GiB for 3 more replicas, got 5.0 GiB; keeping 1; "
        f"`specrl scale {tmp_path} -n 1` takes the number out of the run file again",
        None,
        "scaled from 1 replicas to 3",
        None,
        "scaled from 3 replicas to 4",
        "scaled from 4 replicas to 2",
    ]
    assert [slot.program.name for slot in supervisor._slots] == [f"gen-{number}" for number in range(4)]


def scale_on_two_gpus(folder: Path, numbers: tuple[int, ...], **generation: int) -> tuple[list[str | None], list[str]]:
    """Scale a run on two GPUs of 80 GiB, whose trainer and replicas need 10 GiB each beside the KV cache.

    Returns what is told for each number, and the programs that were started.
    """
    spec = parse_spec(a_run(folder, generation={"sampling": {"maxTokens": 16}} | generation))
    need = GpuNeed(("0", "1"), card_bytes=80 * GIB, trainer_bytes=10 * GIB, replica_bytes=10 * GIB)
    replicas = ReplicaScaler(spec, RunDirectory(folder), 1, need)
    supervisor = Supervisor([])
    told = [replicas.scale_to(wanted, supervisor) for wanted in numbers]
    return told, [slot.program.name for slot in supervisor._slots]


def test_replicas_that_would_overfill_a_gpu_are_refused(tmp_path: Path) -> None:
    """Each was started with the KV cache of the run's start, however full its GPU was."""
    told, started = scale_on_two_gpus(tmp_path, (2, 3, 3, 1), kvCacheMib=40 * 1024)
    assert told[0] == "scaled from 1 replicas to 2"
    assert told[1] is not None
    assert "beside what runs, got 3 (a GPU that 2 generation ranks share must have 100.0 GiB" in told[1]
    assert "resume it with `--set generation.replicas=3 --set generation.kvCacheMib=null`" in told[1]
    assert told[1].endswith(f"; keeping 2; `specrl scale {tmp_path} -n 2` takes the number out of the run file again")
    assert "lora" not in told[1], "a resumed run cannot change it"
    assert told[2:] == [None, "scaled from 2 replicas to 1"]
    assert started == ["gen-0", "gen-1"]


def test_replicas_without_a_fixed_kv_cache_share_no_gpu(tmp_path: Path) -> None:
    """A replica takes 92 % of its GPU without one, also of the trainer's."""
    (told,), started = scale_on_two_gpus(tmp_path, (2,))
    assert told is not None
    assert "got 2 (without generation.kvCacheMib each replica takes a whole GPU); stop the run, and resume" in told
    assert not started


@pytest.mark.parametrize("cache", [{"kvCacheMib": 40 * 1024}, {}])
def test_a_number_that_fits_with_no_kv_cache_is_refused_without_advice_to_resume(
    tmp_path: Path, cache: dict[str, int]
) -> None:
    """The advice was to resume with it, which preflight refused."""
    (told,), started = scale_on_two_gpus(tmp_path, (16,), **cache)
    assert told is not None
    assert "got 16 (a GPU that a trainer rank and 8 generation ranks share must have 92.0 GiB" in told
    assert "a KV cache of 256 MiB), got 80.0 GiB); scale to fewer replicas, or resume the run with more GPUs;" in told
    assert "--set" not in told
    assert not started
