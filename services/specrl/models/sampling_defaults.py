"""Compares the sampling that a policy's generation_config.json proposes with the run's own.

Invariant: nothing of that file is applied but its end tokens. A run samples as its run file says, since the trainer
computes log-probabilities of just that distribution. Launcher and coordinator tell the user once of each difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specrl.files import read_object
from specrl.spec import RunSpec

GENERATION_CONFIG = "generation_config.json"

# Fields that change the distribution and that no run has, each with the value that has no effect.
_UNSUPPORTED = {
    "min_p": 0,
    "typical_p": 1,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "no_repeat_ngram_size": 0,
}


def list_sampling_notices(spec: RunSpec, folder: Path) -> Iterator[str]:
    """Yield a message if the policy's authors propose other sampling than the run's. folder: the policy's.

    Without the file, or with a broken one, which the engine reports, there is none.
    """
    try:
        proposed = read_object(folder / GENERATION_CONFIG)
    except (OSError, ValueError):
        return
    differences = list(_list_differences(spec, proposed))
    if differences:
        yield f"{GENERATION_CONFIG} of the policy is not applied; it proposes {', '.join(differences)}"


def _list_differences(spec: RunSpec, proposed: dict[str, Any]) -> Iterator[str]:
    sampling = spec.generation.sampling
    own = {
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_tokens,
    }
    for name, value in own.items():
        other = proposed.get(name)
        if isinstance(other, int | float) and other != value:
            yield f"{name} {other:g}, and the run has {value:g}"
    for name, neutral in _UNSUPPORTED.items():
        other = proposed.get(name)
        if isinstance(other, int | float) and other != neutral:
            yield f"{name} {other:g}, which runs do not have"
    if proposed.get("do_sample") is False and "temperature" not in proposed:
        yield f"greedy decoding, and the run has temperature {own['temperature']:g}"
