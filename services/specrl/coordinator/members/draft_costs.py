"""Keeps the draft costs that replicas have learnt, so that later replicas of the same kind begin with them.

A replica of a cluster keeps no files of its own. The coordinator writes each table to the run's folder, where it
outlives every pod. It does not read what is in a table: only the replica knows which batch sizes and draft lengths it
needs (`generation/vllm_backend/draft_length_client.py`). The service calls this.
"""

from __future__ import annotations

import re
from pathlib import Path

import structlog

from specrl.errors import RecordInvalid
from specrl.files import parse_object, read_text, write_text

FOLDER = "draft-costs"
MOST_TABLES = 64
"""Kinds of machine, model and version of one run. More would be a fault of the replicas."""
MOST_BYTES = 1 << 16
"""Of one table. One of 8 batch sizes and 16 lengths has 3 kB."""

_KEY = re.compile(r"[0-9a-f]{24}")

log = structlog.get_logger(__name__)


class DraftCostTables:
    """The tables of one run. folder: the run's folder; None keeps them in memory only."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = None if folder is None else folder / FOLDER
        self._tables: dict[str, str] = {}

    def find_table(self, key: str) -> str:
        """Return the table of a kind of machine, as JSON; empty if there is none. Raises RecordInvalid."""
        _check_key(key)
        if key not in self._tables and self._folder is not None:
            try:
                self._tables[key] = read_text(self._folder / f"{key}.json", MOST_BYTES)
            except FileNotFoundError:
                return ""
            except (OSError, ValueError) as error:
                log.warning("draft_costs_not_read", file=f"{key}.json", reason=str(error))
                return ""
        return self._tables.get(key, "")

    def keep_table(self, key: str, table: str) -> None:
        """Keep a table, in place of an earlier one of this kind of machine.

        A file that cannot be written is logged: the table is kept in memory. Raises RecordInvalid.
        """
        _check_key(key)
        if len(table) > MOST_BYTES:
            raise RecordInvalid(f"draft costs must have at most {MOST_BYTES} bytes, got {len(table)}; keep fewer")
        try:
            parse_object(table)
        except ValueError as error:
            raise RecordInvalid(f"draft costs must be a JSON object: {error}; update the replica") from error
        if key not in self._tables and len(self._tables) >= MOST_TABLES:
            raise RecordInvalid(
                f"a run must have at most {MOST_TABLES} tables of draft costs, got another one; restart the coordinator"
            )
        self._tables[key] = table
        if self._folder is None:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            write_text(self._folder / f"{key}.json", table)
        except OSError as error:
            log.warning("draft_costs_not_kept", file=f"{key}.json", reason=str(error))


def _check_key(key: str) -> None:
    if _KEY.fullmatch(key) is None:
        raise RecordInvalid(f"the key of draft costs must be 24 hex digits, got {key[:40]!r}; update the replica")
