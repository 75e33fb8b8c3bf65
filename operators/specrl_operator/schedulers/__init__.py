"""What places a job's pods together or not at all. One small module per scheduler; the job names at most one. Pure."""

from __future__ import annotations

from collections.abc import Callable

from specrl.spec.cluster import Gang
from specrl_operator.api import KAI_QUEUE, LOCAL_QUEUE, POD_GROUP, Job, Kind, Object
from specrl_operator.schedulers import kai, kueue, volcano

NEEDS: dict[Gang, Kind] = {Gang.KUEUE: LOCAL_QUEUE, Gang.KAI: KAI_QUEUE, Gang.VOLCANO: POD_GROUP}
"""A kind by which each is known to be installed."""

_DECORATE: dict[Gang, Callable[[list[Object], Job], list[Object]]] = {
    Gang.KUEUE: kueue.decorate,
    Gang.KAI: kai.decorate,
    Gang.VOLCANO: volcano.decorate,
}


def gang_of(job: Job) -> Gang:
    """The scheduler that the job asks for; `Auto` is resolved here, and nowhere written down."""
    gang = job.spec.scheduling.gang
    if gang is not Gang.AUTO:
        return gang
    return Gang.KUEUE if job.spec.scheduling.queue_name is not None else Gang.NONE


def decorate(objects: list[Object], job: Job) -> list[Object]:
    """`objects` with what the job's scheduler reads of them, and what it needs beside them."""
    decorate_ = _DECORATE.get(gang_of(job))
    return objects if decorate_ is None else decorate_(objects, job)
