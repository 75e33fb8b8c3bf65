"""The process of one part: `python -m benchmarks.gpu.child NAME FILE SCALE [--inject]`. Started by `runner`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.gpu.part import Figures, PartSkipped, Size, State


def run_named_part(name: str, scale: int, *, is_injected: bool) -> tuple[State, str, Figures]:
    """Measure a part and judge its figures. is_injected: put its broken figures into them first."""
    try:
        # Imported here: a package that is missing skips the parts, and names itself.
        from benchmarks.gpu.catalogue import PARTS
    except ModuleNotFoundError as error:
        return State.SKIPPED, f"needs the package {error.name}, which is not installed", {}
    part = next(part for part in PARTS if part.name == name)
    try:
        figures = part.measure(Size(scale))
    except PartSkipped as error:
        return State.SKIPPED, str(error), {}
    if is_injected:
        figures |= part.broken
    fault = part.find_fault(figures)
    return (State.OK, "", figures) if fault is None else (State.FAILED, fault, figures)


def main() -> None:
    """Run the part of the command line and write its outcome."""
    name, file, scale, *options = sys.argv[1:]
    state, reason, figures = run_named_part(name, int(scale), is_injected="--inject" in options)
    outcome = {"state": state.value, "reason": reason, "figures": figures}
    Path(file).write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    main()
