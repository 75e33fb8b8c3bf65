"""Measures the parts of the GPU kit in one process, as small as they can be, and judges sound and broken figures.

python -m tests.integration.trainer.gpu_kit_worker NAMES...
"""

from __future__ import annotations

import json
import sys

from benchmarks.gpu.catalogue import PARTS
from benchmarks.gpu.part import Size


def main() -> None:
    """Print, by name, what is wrong with a part's figures, and with the same figures after they were broken."""
    faults = {}
    for part in PARTS:
        if part.name in sys.argv[1:]:
            figures = part.measure(Size(0))
            faults[part.name] = part.find_fault(figures), part.find_fault(figures | part.broken)
    print(json.dumps(faults))  # noqa: T201 - the answer to the test


if __name__ == "__main__":
    main()
