"""Sends lessons to the data parallel ranks that learn from them, so that all ranks share the work of every update.

Most lessons stay at the rank whose passes have their states (`budget.deal_update`). The others travel between the ranks
that have the same place in their replicas: token ids, states, and the policy's logits.

Called by `drafter_training.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from specrl.drafting.packing import TARGET_FIELDS, LessonBatch
from specrl.trainer.megatron_backend.parallel.exchange import exchange_tensors
from specrl.trainer.megatron_backend.parallel.groups import RankGroups
from specrl.trainer.megatron_backend.policy.lessons import Lesson, TaughtLessons


def exchange_lessons(
    taught: TaughtLessons,
    dealt: Sequence[Lesson],
    learner: int,
    rows: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    groups: RankGroups,
) -> TaughtLessons:
    """Send this rank's lessons to the ranks that learn from them. Returns what this rank learns from.

    A collective of the data parallel group. taught: what this rank's passes have kept. dealt: all lessons of all ranks,
    in an order that is equal at all. learner: this rank's number among the learners of its replica. rows: as
    `LessonKeeper.describe_rows` returns them.
    """
    data = groups.data
    device = groups.device
    moved = [lesson for lesson in dealt if lesson.learner == learner and lesson.replica != lesson.home]
    if not moved:
        return taught
    sent = [[it for it in moved if (it.home, it.replica) == (data.rank, to)] for to in range(data.size)]
    received = [[it for it in moved if (it.home, it.replica) == (origin, data.rank)] for origin in range(data.size)]
    held = {lesson: (batch, place) for lessons, batch in taught for place, lesson in enumerate(lessons)}
    mine = [lesson for lessons in received for lesson in lessons]
    lengths_B = torch.tensor([lesson.slice.length for lesson in mine], dtype=torch.int64, device=device)
    contexts_B = torch.tensor([lesson.slice.context for lesson in mine], dtype=torch.int64, device=device)
    columns = {"lengths_B": lengths_B, "prompt_lengths_B": contexts_B}
    for name, (shape, dtype) in rows.items():
        nothing = torch.empty(0, *shape, dtype=dtype, device=device)
        parts = [torch.cat([nothing, *(_take_rows(*held[lesson], name) for lesson in lessons)]) for lessons in sent]
        counts = [sum(_count_rows(lesson, name) for lesson in lessons) for lessons in received]
        found = nothing.new_empty(sum(counts), *shape)
        if found.shape[1:].numel() > 0:  # a drafter may not read the field
            found = torch.cat(exchange_tensors(parts, [(count, *shape) for count in counts], data))
        if name not in TARGET_FIELDS and mine:
            found = pad_sequence(found.split([lesson.slice.length for lesson in mine]), batch_first=True)
        columns[name] = found
    kept = [_select_staying(lessons, batch) for lessons, batch in taught]
    return [item for item in kept if item[0]] + ([(mine, LessonBatch(**columns))] if mine else [])


def _take_rows(batch: LessonBatch, place: int, name: str) -> torch.Tensor:
    """Take a lesson's rows of one field, without padding."""
    rows: torch.Tensor = getattr(batch, name)
    if name not in TARGET_FIELDS:
        return rows[place, : int(batch.lengths_B[place])]
    counts = batch.count_targets()
    first = sum(counts[:place])
    return rows[first : first + counts[place]]


def _count_rows(lesson: Lesson, name: str) -> int:
    return lesson.num_targets if name in TARGET_FIELDS else lesson.slice.length


def _select_staying(lessons: Sequence[Lesson], batch: LessonBatch) -> tuple[list[Lesson], LessonBatch]:
    places = [place for place, lesson in enumerate(lessons) if lesson.replica == lesson.home]
    return [lessons[place] for place in places], batch.select_sequences(places)
