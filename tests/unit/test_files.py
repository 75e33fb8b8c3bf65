"""Replacing a file and writing a folder atomically, and following a file that another process writes."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
from tests.small_disk import mount_small_disk

from specrl import files
from specrl.files import LineFollower


def test_a_file_that_is_replaced_has_the_new_content_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    for content in ("old", "new, größer"):
        files.write_text(path, content)
        assert path.read_text(encoding="utf-8") == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_mode_asked_for_less_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_text(tmp_path / "status.json", "{}")
        files.write_text(tmp_path / "token", "secret", mode=0o600)
    finally:
        os.umask(before)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert found == {"status.json": 0o640, "token": 0o600}


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_full_disk_leaves_the_old_file_and_no_scratch_file(tmp_path: Path, is_synced: bool) -> None:
    with mount_small_disk(tmp_path / "disk", "64k") as disk:
        path = disk / "status.json"
        files.write_text(path, "old")
        with pytest.raises(OSError, match="No space left") as refused:
            files.write_bytes(path, bytes(1 << 20), is_synced=is_synced)
        assert refused.value.errno == errno.ENOSPC
        assert path.read_text() == "old"
        assert list(disk.iterdir()) == [path], "what was half written must make room"
        files.write_text(path, "new")
        assert path.read_text() == "new"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_writer_that_fails_leaves_the_old_file_and_no_scratch_file(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "progress"
    path.write_text("old")

    def write_half() -> None:
        with files.replace_file(path) as scratch:
            scratch.write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_whole_and_takes_nothing_from_a_killed_writer(tmp_path: Path) -> None:
    (tmp_path / ".export.tmp" / "left over").mkdir(parents=True)
    with files.write_folder(tmp_path / "export") as scratch:
        (scratch / "weights").write_text("new")
        assert not (tmp_path / "export").exists()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "export",
        "export/weights",
    ]


def test_a_folder_whose_writer_fails_or_whose_name_is_taken_does_not_appear(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "weights").write_text("old")

    def write_new(error: Exception | None) -> None:
        with files.write_folder(tmp_path / "export") as scratch:
            (scratch / "weights").write_text("new")
            if error is not None:
                raise error

    with pytest.raises(RuntimeError, match="stopped"):
        write_new(RuntimeError("stopped"))
    with pytest.raises(OSError, match="not empty"):
        write_new(None)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert (tmp_path / "export" / "weights").read_text() == "old"


def test_a_name_that_cannot_be_replaced_is_an_error_and_leaves_no_scratch_file(tmp_path: Path) -> None:
    (tmp_path / "status.json" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        files.write_text(tmp_path / "status.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_two_writers_of_one_file_never_share_a_scratch_file(tmp_path: Path) -> None:
    """With a shared scratch name, the second writer truncated the first one's file, or renamed it away."""
    path = tmp_path / "status.json"
    with files.replace_file(path) as first, files.replace_file(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first", "whoever ends last"


def test_a_reader_finds_whole_content_while_several_threads_write(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    contents = [bytes([letter]) * 100_000 for letter in b"abc"]
    files.write_bytes(path, contents[0])
    failed: list[BaseException] = []

    def repeat_writing(content: bytes) -> None:
        try:
            for _ in range(30):
                files.write_bytes(path, content)
        except BaseException as error:  # noqa: BLE001 - the test shows the error
            failed.append(error)

    writers = [threading.Thread(target=repeat_writing, args=[content]) for content in contents]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() in contents
    assert failed == []
    assert list(tmp_path.iterdir()) == [path]


def test_what_must_survive_a_power_cut_is_synced_before_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync = files.sync_to_disk
    rename = Path.replace

    def record_sync(path: Path) -> None:
        done.append(f"sync {'folder' if path.is_dir() else 'file'}")
        sync(path)

    def record_rename(path: Path, target: Path) -> Path:
        done.append("rename")
        return rename(path, target)

    monkeypatch.setattr(files, "sync_to_disk", record_sync)
    monkeypatch.setattr(Path, "replace", record_rename)
    files.write_text(tmp_path / "status.json", "not synced")
    assert done == ["rename"]
    done.clear()
    files.write_text(tmp_path / "run.yaml", "synced", is_synced=True)
    assert done == ["sync file", "rename", "sync folder"]


def test_a_file_is_created_once(tmp_path: Path) -> None:
    path = tmp_path / "store-id"
    files.create_text(path, "first")
    with pytest.raises(FileExistsError):
        files.create_text(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_each_line_is_returned_once_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follow = LineFollower(path)
    assert follow.read_lines() == []  # not there yet

    path.write_bytes(b"one\ntw")
    assert follow.read_lines() == [b"one"]
    assert follow.read_lines() == []
    path.write_bytes(b"one\ntwo\n")
    assert follow.read_lines() == [b"two"]


def test_a_truncated_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"one\ntwo\nthree\n")
    follow = LineFollower(path)
    follow.read_lines()
    path.write_bytes(b"one\n")
    assert follow.read_lines() == [b"one"]


def test_a_long_file_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 10)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"one\ntwo\nthree\n")
    follow = LineFollower(path)
    assert [follow.read_lines(), follow.read_lines(), follow.read_lines()] == [[b"one", b"two"], [b"three"], []]


def test_a_line_longer_than_a_chunk_is_returned_whole_and_the_next_one_after_it(tmp_path: Path) -> None:
    """The follower used to return nothing from then on."""
    path = tmp_path / "lines"
    long = b"x" * (2 * files.CHUNK_BYTES + 5)
    path.write_bytes(long + b"\nnext\n")
    follow = LineFollower(path)
    found = follow.read_lines() + follow.read_lines()
    assert found == [long, b"next"]
