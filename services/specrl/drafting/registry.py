"""The kinds of drafters that the trainer can train, by their member of `generation.speculation`.

A member that is missing here drafts without training: `none`, `ngram`, `suffix`.
"""

from __future__ import annotations

from specrl.drafting.draft_model.kind import DraftModelKind
from specrl.drafting.eagle3.kind import Eagle3Kind
from specrl.drafting.kind import DrafterKind
from specrl.drafting.mtp.kind import MtpKind
from specrl.spec import RunSpec

KINDS: dict[str, DrafterKind] = {
    "eagle3": Eagle3Kind(),
    "mtp": MtpKind(),
    "draft_model": DraftModelKind(),
}


def find_kind(spec: RunSpec) -> DrafterKind | None:
    """Return the kind of the run's drafter; None for a run whose trainer has no drafter."""
    kind = KINDS.get(spec.generation.speculation.kind)
    return kind if kind is not None and kind.is_held(spec) else None
