"""Says what a stopped run has saved. Used by the coordinator, which saves it, and by the terminal after a kill."""

from __future__ import annotations


def describe_saved(trained: int, saved: int, failure: str = "") -> str:
    """Return what a stopped run has saved, as in `step 12 is saved`.

    trained: last trained step. saved: step of the newest checkpoint; 0 for none. failure: why the last checkpoint could
    not be written, or empty.
    """
    if not trained:
        return "no step was trained, so there is nothing to save"
    if saved == trained:
        return f"step {trained} is saved"
    cause = f" ({failure})" if failure else ""
    if not saved:
        return f"step {trained} is not saved{cause}: there is no checkpoint, so a resumed run trains all steps again"
    return f"step {trained} is not saved{cause}: a resumed run trains again from the checkpoint of step {saved}"
