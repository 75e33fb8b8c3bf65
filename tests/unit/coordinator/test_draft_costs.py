"""The coordinator keeps the draft costs of its replicas: over restarts, within bounds, and under safe names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import structlog

from specrl.coordinator.members.draft_costs import FOLDER, MOST_BYTES, MOST_TABLES, DraftCostTables
from specrl.errors import RecordInvalid

KEY = "0123456789abcdef01234567"
TABLE = '{"nodes": [1, 4]}'


def test_a_restarted_coordinator_still_has_the_tables(tmp_path: Path) -> None:
    tables = DraftCostTables(tmp_path)
    assert tables.find_table(KEY) == ""
    tables.keep_table(KEY, "{}")
    tables.keep_table(KEY, TABLE)
    assert tables.find_table(KEY) == TABLE
    assert DraftCostTables(tmp_path).find_table(KEY) == TABLE
    assert [file.name for file in (tmp_path / FOLDER).iterdir()] == [f"{KEY}.json"]


def test_tables_are_kept_in_memory_where_the_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / FOLDER).touch()
    tables = DraftCostTables(tmp_path)
    with structlog.testing.capture_logs() as events:
        tables.keep_table(KEY, TABLE)
    assert [event["event"] for event in events] == ["draft_costs_not_kept"]
    assert tables.find_table(KEY) == TABLE
    unbound = DraftCostTables()
    unbound.keep_table(KEY, TABLE)
    assert unbound.find_table(KEY) == TABLE


def test_a_table_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / f"{KEY}.json").write_bytes(b"\xff\xff")
    with structlog.testing.capture_logs() as events:
        assert DraftCostTables(tmp_path).find_table(KEY) == ""
    assert [event["event"] for event in events] == ["draft_costs_not_read"]


@pytest.mark.parametrize("key", ["", "../../token", KEY.upper(), KEY + "0", f"{KEY}\n", "g" * 24])
def test_a_key_that_is_no_hash_is_refused(tmp_path: Path, key: str) -> None:
    tables = DraftCostTables(tmp_path)
    with pytest.raises(RecordInvalid, match="must be 24 hex digits"):
        tables.find_table(key)
    with pytest.raises(RecordInvalid, match="must be 24 hex digits"):
        tables.keep_table(key, TABLE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        ("", "must be a JSON object"),
        ("[1]", "must be a JSON object"),
        ("{", "must be a JSON object"),
        ("[" * 30_000, "must be a JSON object"),
        (json.dumps({"a": "b" * MOST_BYTES}), "must have at most 65536 bytes"),
    ],
)
def test_a_table_that_is_no_object_or_too_large_is_refused(tmp_path: Path, table: str, rule: str) -> None:
    tables = DraftCostTables(tmp_path)
    with pytest.raises(RecordInvalid, match=rule):
        tables.keep_table(KEY, table)
    assert tables.find_table(KEY) == ""


def test_the_number_of_tables_is_bounded() -> None:
    tables = DraftCostTables()
    for number in range(MOST_TABLES):
        tables.keep_table(f"{number:024x}", TABLE)
    tables.keep_table(f"{0:024x}", "{}")
    with pytest.raises(RecordInvalid, match="at most 64 tables"):
        tables.keep_table(KEY, TABLE)
