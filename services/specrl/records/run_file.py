"""The run file as a run records it, in its store and in its mirror, so that each later start can compare its own.

A later start may be of a newer version, with more fields and other defaults, or of an older one, to which somebody has
gone back. Invariant: two run files are the same run if every field has the same value, where a field that one of the
versions lacks has its default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specrl.errors import SpecInvalid
from specrl.spec.load import find_differences, keep_known_fields, parse_spec, select_run_fields
from specrl.spec.run import RunSpec


@dataclass(frozen=True)
class RecordedRun:
    """The fields that decide what a run computes, without nulls."""

    run_file: dict[str, Any]
    """All of them, since another version may have other defaults."""
    given: dict[str, Any]
    """The fields that differ from their defaults. A version that does not know a field cannot tell."""


def record_run(spec: RunSpec) -> RecordedRun:
    """Return what is to be recorded of a run file."""
    given = select_run_fields(spec, exclude_none=True, exclude_defaults=True)
    return RecordedRun(select_run_fields(spec, exclude_none=True), given)


def find_edits(before: RecordedRun, now: RecordedRun) -> dict[str, tuple[Any, Any]]:
    """Find the fields in which a run file differs from the recorded one: path to both values.

    now: of this version. before: of any.
    """
    known = keep_known_fields(before.run_file)
    try:
        # Parsed again, so that a field that is new in this version has its default and counts as equal.
        stored = select_run_fields(parse_spec(known), exclude_none=True)
    except SpecInvalid:  # of a version with other rules
        stored = known
    unknown = find_differences(before.given, keep_known_fields(before.given))
    return find_differences(stored, now.run_file) | unknown
