"""specrl: RL post-training with lossless speculative decoding, and with generation that overlaps training.

`specrl.run` and `specrl.load_report` do what the commands do (docs/scripting.md). They are loaded when they are first
used: every process of a run imports this package, and most need neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrl.python_api import load_report, run

__all__ = ["load_report", "run"]


def __getattr__(name: str) -> Any:
    """Load one of the public functions."""
    if name not in __all__:
        raise AttributeError(f"module 'specrl' has no attribute {name!r}")
    from specrl import python_api

    return getattr(python_api, name)


def __dir__() -> list[str]:
    """List the public functions with the modules that are loaded."""
    return sorted({*globals(), *__all__})
