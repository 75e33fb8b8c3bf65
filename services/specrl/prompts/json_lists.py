"""Read the records of JSON files that hold one list, as data sets on the hub have them.

JSON Lines are read by `sources`, which calls this module. Invariant: as there, a reference reaches its verifier as the
file writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from specrl.errors import DatasetInvalid
from specrl.files import open_regular, read_text
from specrl.prompts.columns import NumberedRow, parse_json_record

LIST_BYTES = 256 << 20
"""Largest file with one JSON list. Larger data sets have a record per line."""

_SPACE = re.compile(r"[ \t\r\n]*")


def has_json_list(path: str) -> bool:
    """Whether a file begins with a list, so that it is not JSON Lines. Raises OSError."""
    with open_regular(Path(path)) as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def read_json_rows(path: str, answer: str) -> Iterator[NumberedRow]:
    """Yield the items of a JSON file that holds one list of objects, with their numbers.

    The file's text is read whole, and parsed item by item: all values at once may take 25 times as much memory. So a
    number also keeps the digits that the file has. Raises DatasetInvalid, OSError.
    """
    decoder = json.JSONDecoder()
    number = 0
    try:
        text = read_text(Path(path), LIST_BYTES).removeprefix("\ufeff").strip()
        at = _skip_space(text, 0)
        sign = text[at : at + 1]
        if sign != "[":
            raise ValueError("no list")
        at = _skip_space(text, at + 1)
        if text[at : at + 1] == "]":
            sign = "]"
        while sign != "]":
            _, end = decoder.raw_decode(text, at)
            number += 1
            yield number, parse_json_record(text[at:end], answer)
            at = _skip_space(text, end)
            sign = text[at : at + 1]
            if sign not in ("]", ","):
                raise ValueError(f"no comma after item {number}")
            at = _skip_space(text, at + 1)
        if _skip_space(text, at + (number == 0)) < len(text):
            raise ValueError("more after its end")
    except (ValueError, RecursionError) as error:
        raise DatasetInvalid(f"{path}: must be a JSON list of objects, got {error}; correct the file") from error


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()
