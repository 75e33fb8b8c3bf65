"""The token of a run on one machine: who can read its folder may act on it. See `coordinator/admission.py`."""

from __future__ import annotations

import secrets
from pathlib import Path

from specrl.files import SMALL_BYTES, read_text, write_text

TOKEN_FILE = "token"  # noqa: S105 - a file's name
"""In the run's folder, mode 0600; another one at every start of the coordinator."""


def write(directory: Path) -> str:
    """Draw a token and write it into `directory`, whole, readable by the owner alone; returns it."""
    token = secrets.token_urlsafe(32)
    write_text(directory / TOKEN_FILE, token, mode=0o600)
    return token


def read(directory: Path) -> str:
    """The token of the coordinator that drives this run. Raises OSError or ValueError when it cannot be read."""
    return read_text(directory / TOKEN_FILE, SMALL_BYTES).strip()
