"""What a machine's GPUs cannot run is refused in numbers before anything starts, and shared GPUs are divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.run_files import a_model_folder, a_run

from specrl.errors import MemoryTooSmall, SpecInvalid
from specrl.generation.gpu_memory import estimate_replica_bytes
from specrl.launcher import gpu_checks, launch, preflight
from specrl.launcher.gpu_checks import (
    TRAINER_CONTEXT_BYTES,
    GpuNeed,
    count_programs,
    estimate_gpu_need,
    find_gpu_problems,
)
from specrl.launcher.memory import MemoryNeed
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.terminal.view import PlainView
from specrl.machine import GpuMachine, read_gpu_machine, read_memory
from specrl.models import RunModels, read_model_folder
from specrl.spec import RunSpec, parse_spec
from specrl.trainer.memory.estimate import estimate_rank_memory

CARD = 80 << 30
ONE_GPU = GpuMachine(("0",), "580.95.05", {"0": CARD})
TWO_GPUS = GpuMachine(("0", "1"), "580.95.05", {"0": CARD, "1": CARD})


@pytest.fixture
def models(tmp_path: Path) -> RunModels:
    return RunModels(read_model_folder(a_model_folder(tmp_path / "model"), "model.path"))


def a_spec(generation: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    return parse_spec(a_run(Path("/runs"), generation={"sampling": {"maxTokens": 16}} | (generation or {}), **changes))


def share_gpus(spec: RunSpec, models: RunModels, machine: GpuMachine) -> RunSpec:
    need = estimate_gpu_need(spec, models, machine)
    return spec if need is None else gpu_checks.share_gpus(spec, need)


def said(spec: RunSpec, machine: GpuMachine) -> list[str]:
    return [str(problem) for problem in find_gpu_problems(spec, machine)]


def test_a_driver_too_old_for_the_lock_is_named() -> None:
    (found,) = said(a_spec(), GpuMachine(("0", "1"), "535.104.05"))
    assert found.startswith("NVIDIA's driver: must be 580 or newer")
    assert "got 535.104.05; install a newer one" in found
    assert said(a_spec(), GpuMachine(("0", "1"))) == []  # unknown


def test_fewer_gpus_than_ranks_are_counted() -> None:
    """NCCL would end the trainer with "Duplicate GPU", and vLLM a replica with an assertion."""
    trainer = {"optimizer": {"learningRate": "1e-5"}, "parallelism": {"data": 4}}
    found = said(a_spec({"tensorParallel": 4}, trainer=trainer), TWO_GPUS)
    assert [line.split(":")[0] for line in found] == ["trainer.parallelism", "generation.tensorParallel"]
    assert all("a GPU for each of its 4 ranks, got 2 visible: 0, 1; lower it, or make more" in line for line in found)


def test_gpus_that_do_not_exist_are_named() -> None:
    (found,) = said(a_spec(), GpuMachine(("0", "7", "MIG-1"), "", {"0": CARD}))
    assert "CUDA_VISIBLE_DEVICES: must name GPUs of this machine, got 7; see" in found


def test_a_gpu_whose_memory_is_unknown_is_accepted(models: RunModels) -> None:
    """It was refused as no GPU of this machine, such as one that shares the CPU's memory."""
    machine = GpuMachine(("0",), "", {"0": None})
    assert said(a_spec(), machine) == []
    spec = a_spec()
    assert share_gpus(spec, models, machine) is spec


def test_nccl_between_ranks_that_share_a_gpu_is_refused() -> None:
    spec = a_spec({"replicas": 2}, weights={"transport": "Nccl"})
    (found,) = said(spec, TWO_GPUS)
    assert found.startswith("weights.transport: must be Auto or Gloo unless")
    assert "got Nccl for 3 ranks on 2 GPUs; use Auto" in found
    assert said(a_spec(weights={"transport": "Nccl"}), TWO_GPUS) == []


def test_expert_parallel_needs_gpus() -> None:
    """vLLM's kernel for CPUs ignores which experts a rank holds, and computes with others."""
    spec = a_spec({"tensorParallel": 2, "expertParallel": True})
    (found,) = said(spec, GpuMachine(()))
    assert found.startswith("generation.expertParallel: must be false on CPUs")
    assert said(spec, TWO_GPUS) == []


@pytest.mark.parametrize(("gpus", "replicas", "expected"), [
    (1, 1, {(1, 1)}), (2, 1, {(0, 1)}), (1, 2, {(1, 2)}), (2, 2, {(1, 1), (0, 1)}), (3, 2, {(0, 1)}),
    (2, 3, {(1, 1), (0, 2)}),
])  # fmt: skip
def test_programs_of_each_gpu_are_counted(gpus: int, replicas: int, expected: set[tuple[int, int]]) -> None:
    assert count_programs(a_spec({"replicas": replicas}), [str(gpu) for gpu in range(gpus)]) == expected


@pytest.mark.parametrize("replicas", [1, 2])
def test_trainer_and_replicas_on_one_gpu_divide_its_memory(replicas: int, models: RunModels) -> None:
    """On one H100 no run could start: each replica wanted 92 % of the card."""
    spec = a_spec({"replicas": replicas})
    shared = share_gpus(spec, models, ONE_GPU)
    cache_mib = shared.generation.kv_cache_mib
    assert cache_mib is not None
    assert models.policy is not None
    each = estimate_replica_bytes(shared, models.policy, 0) + (cache_mib << 20)
    trainer = estimate_rank_memory(shared, models).most + TRAINER_CONTEXT_BYTES
    assert 0 <= CARD - trainer - replicas * each < 4 << 20  # all of it is used
    assert shared.generation.model_copy(update={"kv_cache_mib": None}) == spec.generation


def test_the_kv_cache_fits_each_of_the_gpus(models: RunModels) -> None:
    """KV caches were sized for GPU 0 (the trainer, a replica), although GPU 1 (two replicas) had less room."""
    spec = a_spec({"replicas": 3})
    assert models.policy is not None
    needed = estimate_replica_bytes(spec, models.policy, 0)
    cache_mib = share_gpus(spec, models, TWO_GPUS).generation.kv_cache_mib
    assert cache_mib == (CARD // 2 - needed) >> 20
    too_large = a_spec({"replicas": 3, "kvCacheMib": cache_mib + 1})
    with pytest.raises(MemoryTooSmall, match=r"a GPU that 2 generation ranks share must have .*, got 80\.0 GiB"):
        share_gpus(too_large, models, TWO_GPUS)


def test_nothing_is_chosen_where_each_program_has_a_gpu_or_the_user_has_chosen(models: RunModels) -> None:
    alone = a_spec()
    assert share_gpus(alone, models, TWO_GPUS) is alone
    assert share_gpus(alone, models, GpuMachine(("0",))) is alone  # without nvidia-smi
    assert share_gpus(alone, RunModels(), ONE_GPU) is alone
    for chosen in ({"kvCacheMib": 512}, {"gpuMemoryUtilization": "0.4"}):
        spec = a_spec(chosen)
        assert share_gpus(spec, models, ONE_GPU) is spec


def test_programs_that_do_not_fit_one_gpu_are_refused_in_numbers(models: RunModels) -> None:
    small = GpuMachine(("0",), "", {"0": 4 << 30})
    with pytest.raises(MemoryTooSmall, match=r"a trainer rank and 1 generation ranks share must have .* got 4\.0 GiB"):
        share_gpus(a_spec(), models, small)
    with pytest.raises(MemoryTooSmall, match=r"a KV cache of 81920 MiB\), got 80\.0 GiB; lower generation\.kvCacheMib"):
        share_gpus(a_spec({"kvCacheMib": 81920}), models, ONE_GPU)
    with pytest.raises(MemoryTooSmall, match=r"kvCacheMib must be <= \d+, got 81920: the GPU has 81920 MiB.*eager"):
        share_gpus(a_spec({"kvCacheMib": 81920}), models, TWO_GPUS)


def test_preflight_reports_what_the_gpus_cannot_run_and_writes_what_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    a_model_folder(tmp_path / "model")
    spec = parse_spec(a_run(tmp_path))
    monkeypatch.setattr(preflight, "read_gpu_machine", lambda: ONE_GPU)
    ready = preflight.check_run(spec)
    assert ready.spec.generation.kv_cache_mib is not None
    assert any("programs share a GPU" in notice for notice in ready.notices)
    monkeypatch.setattr(preflight, "read_gpu_machine", lambda: GpuMachine(("0",), "535.104.05", {"0": 1 << 30}))
    with pytest.raises(SpecInvalid) as caught:
        preflight.check_run(spec)
    assert len(caught.value.problems) == 2  # driver and memory


class Reached(Exception):
    """The launch came to the replicas, and no process has been started yet."""


@pytest.mark.parametrize(("machine", "kind"), [(ONE_GPU, GpuNeed), (GpuMachine(), MemoryNeed)])
def test_the_launcher_scales_by_what_preflight_found_of_gpus_or_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: GpuMachine, kind: type
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(machine.visible))
    monkeypatch.setattr(preflight, "read_gpu_machine", lambda: machine)
    a_model_folder(tmp_path / "model")

    def stop_launch(_spec: RunSpec, _directory: RunDirectory, _port: int, need: GpuNeed | MemoryNeed | None) -> None:
        assert isinstance(need, kind)
        raise Reached

    monkeypatch.setattr(launch, "ReplicaScaler", stop_launch)
    with pytest.raises(Reached):
        launch.start_run(parse_spec(a_run(tmp_path)), tmp_path / "runs", PlainView(Console()))


def test_cards_are_read_by_index_and_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "0, GPU-aaaa-1, 81559\n1, GPU-bbbb-2, 81559\n2, GPU-cccc-3, [N/A]\n"
    memory = {"1": 81559 << 20, "GPU-aaaa": 81559 << 20, "2": None}
    assert read_memory(listing, ("1", "GPU-aaaa", "2", "7")) == memory
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert read_gpu_machine() == GpuMachine()
