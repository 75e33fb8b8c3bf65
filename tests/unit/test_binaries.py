"""External programs: the one on the PATH if new enough, otherwise a pinned one with a verified checksum."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e import binaries
from tests.e2e.binaries import Binary, BinaryMissing, find

GOOD = b"#!/bin/sh\necho tool v2.5.1\n"


@pytest.fixture(autouse=True)
def nothing_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SPECRL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("SPECRL_BINARIES", raising=False)
    binaries._fetched.cache_clear()
    yield
    binaries._fetched.cache_clear()


@pytest.fixture
def carry(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], list[Path]]:
    """A registry that has `tool` with this content. Yields the files that were downloaded."""

    def carries(content: bytes) -> list[Path]:
        fetched: list[Path] = []

        def fetch(folder: Path) -> None:
            fetched.append(folder)
            (folder / "tool").write_bytes(content)

        wanted = {platform.machine(): hashlib.sha256(GOOD).hexdigest()}
        tool = Binary("tool", ("version",), (2, 4), "2.5.1", wanted, fetch)
        monkeypatch.setitem(binaries.BINARIES, "tool", tool)
        return fetched

    return carries


def on_path(tmp_path: Path, version: str) -> Path:
    program = tmp_path / "bin" / "tool"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho tool v{version}\n")
    program.chmod(0o755)
    return program


def test_pinned_program_is_fetched_once_and_runs(tmp_path: Path, carry: Callable[[bytes], list[Path]]) -> None:
    fetched = carry(GOOD)
    path = find("tool")
    assert path.read_bytes() == GOOD
    assert binaries._version(path, ("version",)) == (2, 5)
    binaries._fetched.cache_clear()  # as another process
    assert find("tool") == path
    assert len(fetched) == 1
    assert [each.name for each in (tmp_path / "cache" / "binaries").iterdir()] == [path.parent.name]


def test_another_content_is_refused_and_not_kept(tmp_path: Path, carry: Callable[[bytes], list[Path]]) -> None:
    carry(GOOD + b"# and more\n")
    with pytest.raises(BinaryMissing, match=r"tool 2.5.1 must have SHA-256 [0-9a-f]{64}, got"):
        find("tool")
    assert not list((tmp_path / "cache" / "binaries").iterdir())


@pytest.mark.parametrize(("version", "is_taken"), [("2.4.0", True), ("3.0.0", True), ("2.3.9", False)])
def test_program_on_the_path_is_taken_if_new_enough(
    tmp_path: Path, carry: Callable[[bytes], list[Path]], version: str, is_taken: bool
) -> None:
    fetched = carry(GOOD)
    program = on_path(tmp_path, version)
    assert (find("tool") == program) is is_taken
    assert bool(fetched) is not is_taken


def test_nothing_is_downloaded_if_downloads_are_forbidden(
    tmp_path: Path, carry: Callable[[bytes], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = carry(GOOD)
    on_path(tmp_path, "1.0.0")
    monkeypatch.setenv("SPECRL_BINARIES", "path")
    with pytest.raises(BinaryMissing, match=r"tool must be on the PATH in version 2.4 or later, got /"):
        find("tool")
    assert not fetched


def test_an_unreachable_registry_is_reported(
    carry: Callable[[bytes], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    carry(GOOD)

    def fails(_: Path) -> None:
        raise OSError("no route to host")

    tool = binaries.BINARIES["tool"]
    monkeypatch.setitem(
        binaries.BINARIES,
        "tool",
        Binary(tool.name, tool.version_arguments, tool.minimum, tool.pinned, tool.checksums, fails),
    )
    with pytest.raises(BinaryMissing, match=r"tool 2.5.1 must be fetched, got no route to host"):
        find("tool")
