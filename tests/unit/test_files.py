"""Following a file that another process writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrl import files
from specrl.files import Follow


def test_lines_are_given_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follow = Follow(path)
    assert follow.lines() == []  # not there yet

    path.write_bytes(b"one\ntw")
    assert follow.lines() == [b"one"]
    assert follow.lines() == []
    path.write_bytes(b"one\ntwo\n")
    assert follow.lines() == [b"two"]


def test_a_file_that_is_cut_back_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"one\ntwo\nthree\n")
    follow = Follow(path)
    follow.lines()
    path.write_bytes(b"one\n")
    assert follow.lines() == [b"one"]


def test_a_long_file_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 10)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"one\ntwo\nthree\n")
    follow = Follow(path)
    assert [follow.lines(), follow.lines(), follow.lines()] == [[b"one", b"two"], [b"three"], []]
