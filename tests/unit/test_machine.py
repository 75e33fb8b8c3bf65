"""Memory below a container's limit, with every kind of cgroup and with malformed files; GPUs; units for bfloat16."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import specrl.machine
from specrl.errors import RunInvalid
from specrl.machine import available_memory_bytes, has_bfloat16_units, require_driver, visible_gpus

FREE = 64 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 GiB of available memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=FREE))


def a_cgroup(place: Path, **files: str | bytes) -> Path:
    """Write files of cgroup v2 (`memory_max`) or v1 (`v1_limit_in_bytes`) with this content."""
    (place / "memory").mkdir()
    for name, content in files.items():
        version, _, rest = name.partition("_")
        path = place / "memory" / f"memory.{rest}" if version == "v1" else place / f"memory.{rest}"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return place


@pytest.mark.parametrize(
    ("files", "available"),
    [
        pytest.param({}, FREE, id="no cgroup"),
        pytest.param({"memory_max": "5000\n", "memory_current": "1000\n"}, 4000, id="v2"),
        pytest.param({"memory_max": "max\n", "memory_current": "1000\n"}, FREE, id="v2 without a limit"),
        pytest.param({"memory_max": "5000\n", "memory_current": "6000\n"}, 0, id="v2 above its limit"),
        pytest.param({"memory_max": f"{FREE * 2}\n", "memory_current": "0\n"}, FREE, id="v2 above the machine"),
        pytest.param(
            {"memory_max": "5000", "memory_current": "4500", "memory_stat": "anon 500\ninactive_file 3000\n"},
            3500,
            id="v2, most of it cache of files",
        ),
        pytest.param({"v1_limit_in_bytes": "5000\n", "v1_usage_in_bytes": "1000\n"}, 4000, id="v1"),
        pytest.param(
            {"v1_limit_in_bytes": "9223372036854771712\n", "v1_usage_in_bytes": "1000\n"}, FREE, id="v1 without a limit"
        ),
        pytest.param(
            {
                "v1_limit_in_bytes": "5000",
                "v1_usage_in_bytes": "4500",
                "v1_stat": "inactive_file 1\ntotal_inactive_file 3000\n",
            },
            3500,
            id="v1, most of it cache of files",
        ),
        pytest.param(
            {
                "memory_max": "5000",
                "memory_current": "0",
                "v1_limit_in_bytes": "3000",
                "v1_usage_in_bytes": "0",
            },
            3000,
            id="both, as hybrid hierarchies have",
        ),
    ],
)
def test_a_containers_limit_counts_where_it_is_lower(tmp_path: Path, files: dict[str, str], available: int) -> None:
    assert available_memory_bytes(a_cgroup(tmp_path, **files)) == available


@pytest.mark.parametrize(
    "content", ["", "\n", "many", "-1", "1.5", "5000 6000", b"\xff\xfe", "9" * 5000, "1" * 2000000]
)
def test_a_malformed_limit_counts_as_none(tmp_path: Path, content: str | bytes) -> None:
    """The launcher's own reader raised ValueError, and `specrl run` ended with a traceback."""
    assert available_memory_bytes(a_cgroup(tmp_path, memory_max=content, v1_limit_in_bytes=content)) == FREE


@pytest.mark.parametrize("content", ["", "many", "-1", b"\xff\xfe", "inactive_file\n", "inactive_file many\n"])
def test_a_limit_applies_if_the_usage_cannot_be_read(tmp_path: Path, content: str | bytes) -> None:
    cgroup = a_cgroup(tmp_path, memory_max="5000", memory_current=content, memory_stat=content)
    assert available_memory_bytes(cgroup) == 5000


def test_a_limit_applies_if_the_usage_is_missing_or_a_folder(tmp_path: Path) -> None:
    cgroup = a_cgroup(tmp_path, memory_max="5000")
    (tmp_path / "memory.stat").mkdir()
    assert available_memory_bytes(cgroup) == 5000


def test_only_gpus_that_the_user_allows_are_visible(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,5"}, tmp_path) == ("3", "5")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


@pytest.mark.parametrize(("chosen", "expected"), [("0, 1", ("0", "1")), ("-1", ()), ("2,-1,3", ("2",)), (" ", ())])
def test_visible_gpus_are_read_as_cuda_reads_them(chosen: str, expected: tuple[str, ...]) -> None:
    """-1, the usual way to hide all GPUs, counted as one GPU."""
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16\nflags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu avx2 amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd i8mm bf16\n", True),
        ("flags\t\t: fpu avx2\n", False),
        ("flags\t\t: fpu amx_bf16\nflags\t\t: fpu avx2\n", False),  # one core lacks them
        ("model name\t: bf16 amx_bf16\n", False),
        ("", False),
    ],
)
def test_units_for_bfloat16_are_those_that_linux_lists_for_every_core(
    tmp_path: Path, text: str, expected: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert has_bfloat16_units(tmp_path / "cpuinfo") is expected


def test_a_system_that_does_not_describe_its_cpus_has_no_units_for_bfloat16(tmp_path: Path) -> None:
    assert not has_bfloat16_units(tmp_path / "cpuinfo")


DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  {}  Release Build\n"


@pytest.mark.parametrize(
    ("version", "gpus", "is_refused"),
    [("570.158.01", ("0",), True), ("580.95.05", ("0",), False), ("570.158.01", (), False), (None, ("0",), False)],
)
def test_an_old_driver_is_refused_before_a_model_is_loaded(
    version: str | None, gpus: tuple[str, ...], is_refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The docs asked for 570, on which no package of the images runs. Pods said so only when torch failed."""
    file = tmp_path / "version"
    if version is not None:
        file.write_text(DRIVER.format(version))
    monkeypatch.setattr(specrl.machine, "DRIVER_FILE", file)
    monkeypatch.setattr(specrl.machine, "visible_gpus", lambda: gpus)
    if is_refused:
        with pytest.raises(
            RunInvalid, match=r"must be 580 or newer for CUDA 13, .* got 570\.158\.01; install"
        ) as error:
            require_driver()
        assert error.value.exit_code == 2
    else:
        require_driver()
