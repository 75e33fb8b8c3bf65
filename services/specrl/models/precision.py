"""Chooses the precision of a run whose `model.dtype` is Auto, and says what an explicit one means on this machine.

Called once for each run, by the launcher's preflight and by commands that start engines or trainers themselves. The
choice is written into the run's own file, so that its processes, and a run that is resumed, keep it. On a cluster the
operator chooses instead (specrl_operator/children/desired.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from specrl.machine import has_bfloat16_units, visible_gpus
from specrl.spec import RunSpec
from specrl.spec.run import Dtype


def resolve_dtype(spec: RunSpec) -> RunSpec:
    """Return the run with the precision that suits this machine. A run that names one is returned unchanged."""
    if spec.model.dtype is not Dtype.AUTO:
        return spec
    suits_bfloat16 = bool(visible_gpus()) or has_bfloat16_units()
    dtype = Dtype.BFLOAT16 if suits_bfloat16 else Dtype.FLOAT32
    return spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": dtype})})


def describe_dtype(given: RunSpec) -> str:
    """Return the precision of a run in words, and why Auto takes it: `float32 (this CPU has no bfloat16 units)`."""
    chosen = resolve_dtype(given).model.dtype.value
    if given.model.dtype is not Dtype.AUTO:
        return chosen
    if visible_gpus():
        return f"{chosen} (model.dtype: Auto, on GPUs)"
    return f"{chosen} (model.dtype: Auto; this CPU has {'' if has_bfloat16_units() else 'no '}bfloat16 units)"


def list_dtype_notices(spec: RunSpec) -> Iterator[str]:
    """Yield a warning when the run computes in a precision that this machine lacks."""
    if spec.model.dtype is Dtype.BFLOAT16 and not visible_gpus() and not has_bfloat16_units():
        yield (
            "model.dtype is bfloat16, which this CPU only emulates: it is slow, and replicas may differ too much from "
            "the trainer; Auto takes float32 here"
        )
