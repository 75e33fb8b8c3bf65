"""Length distributions by name, for those who have no run of their own yet. Log-normal: median in tokens, sigma.

Round figures of the size that public reasoning and chat runs report; a forecast that matters is made with the lengths
of a run (`--calibration`).
"""

from __future__ import annotations

NAMED: dict[str, tuple[float, float]] = {
    "short-answers": (200.0, 0.5),
    "chat": (500.0, 0.8),
    "math-base": (1500.0, 0.9),
    "math-reasoning": (5000.0, 0.8),
    "agentic-code": (8000.0, 1.0),
}
