"""The checkpoints of a run, as `specrl checkpoint list --json` and `specrl checkpoint verify --json` print them."""

from __future__ import annotations

from specrl.formats.reports import ReportModel


class CheckpointRow(ReportModel):
    """One complete checkpoint in the run's folder."""

    step: int
    """Step after which it was written."""
    path: str
    """Its folder."""
    size_bytes: int
    """Size of its files."""
    written: float
    """Seconds since 1970."""
    has_drafter: bool
    """Whether it has a drafter."""
    kept: str
    """Why it is not pruned when the next one is written, or `superseded`."""
    is_mirrored: bool
    """Whether checkpoint.mirror has a copy."""
    cursor: int | None
    """Position in the stream of the first prompt that is not settled. Null for a checkpoint that does not record it."""
    problems: int | None
    """Prompts in an epoch. Null for a checkpoint that does not record it."""


class CheckpointVerdict(ReportModel):
    """One checkpoint whose files were compared with their checksums."""

    step: int
    """Step after which it was written."""
    damages: list[str]
    """Files that are missing or altered, one sentence each. Empty if it is intact."""
