"""Keeps what the drafter learns from in the policy's own passes, and sends it to the ranks that learn.

    hooks of a pass   states of the lessons' rollouts, and the logits of the lessons' targets
    tensor ranks      exchange columns: each gets whole rows for its lessons, or the columns that can be drafted
    context ranks     exchange rows: each gets all rows of its lessons
    pipeline          the stage that has something broadcasts it
    data ranks        send the lessons that another replica learns from (`lesson_exchange.py`)

So a rank ends with the lessons that it learns from and no others, and no rank holds an output layer. A drafter that
drafts by the policy's output layer learns at the last stage alone; there the tensor ranks share each lesson and keep
their own columns.

Nothing is computed again: the logits are those that the policy's loss is computed from, before temperature.

Called by `schedule.py`.

Shapes: A packed tokens of a micro-batch, P of them on this context parallel rank, L of these predict a sampled token; H
hidden size; V vocabulary, W columns of it on this tensor parallel rank, K columns that a lesson keeps; R lessons, S
tokens of the longest, N targets of some lessons, M of them on this context parallel rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specrl.drafting.budget import TrainingSlice
from specrl.drafting.drafter import Drafter
from specrl.drafting.packing import LessonBatch
from specrl.drafting.vocabulary import split_rows
from specrl.models.policy_config import PolicyConfig
from specrl.trainer.megatron_backend.model.gpt_model import compute_padded_vocabulary, mask_padding
from specrl.trainer.megatron_backend.parallel.exchange import exchange_tensors
from specrl.trainer.megatron_backend.parallel.groups import RankGroups
from specrl.trainer.megatron_backend.policy.tensors import MicroBatch

NORMED = "normed"  # key of the final norm's output; the other keys are numbers of layers, 0 for the embedding


@dataclass(frozen=True)
class Lesson:
    """A training slice of one rollout of a micro-batch.

    home: the data parallel rank whose passes have its states. cut, row: the number of its micro-batch there, and its
    rollout's number in that. replica: the data parallel rank that learns from it. learner: number of the rank, or of
    the tensor group, that does, below `count_learners`.
    """

    home: int
    cut: int
    row: int
    slice: TrainingSlice
    replica: int
    learner: int

    @property
    def num_targets(self) -> int:
        """Number of its targets: one for each start."""
        return max(0, self.slice.completion_length - 1)


TaughtLessons = list[tuple[list[Lesson], LessonBatch]]
"""Lessons of this rank, with what it learns from them, one entry for each micro-batch that has any."""


@dataclass
class KeptPass:
    """What this rank has kept of one pass.

    states: by the keys of `schedule.py`, [R, S, H] of the lessons of this rank's pipeline. target_MK, normaliser_M1: of
    all lessons; at the last stage.
    """

    batch: MicroBatch
    lessons: Sequence[Lesson] = ()
    states: dict[int | str, torch.Tensor] = field(default_factory=dict)
    target_MK: torch.Tensor | None = None
    normaliser_M1: torch.Tensor | None = None


class LessonKeeper:
    """Keeps lessons for one drafter. temperature: at which the policy is sampled."""

    def __init__(self, drafter: Drafter, temperature: float, config: PolicyConfig, groups: RankGroups) -> None:
        self.drafter = drafter
        self._temperature = temperature
        self._vocab_size = config.vocab_size
        self._width = compute_padded_vocabulary(config, groups.tensor.size) // groups.tensor.size
        self._groups = groups

    # -- whose lesson it is -------------------------------------------------------------------------------------------

    def _tensor_rank(self, lesson: Lesson) -> int:
        """The tensor parallel rank of the learner; this one if the tensor ranks share the lesson."""
        groups = self._groups
        return groups.tensor.rank if self.drafter.is_vocabulary_sharded else lesson.learner % groups.tensor.size

    def _context_rank(self, lesson: Lesson) -> int:
        groups = self._groups
        if self.drafter.is_vocabulary_sharded:
            return lesson.learner
        return lesson.learner // groups.tensor.size % groups.context.size

    def _is_in_pipeline(self, lesson: Lesson) -> bool:
        """Whether a rank of this rank's pipeline learns from it."""
        groups = self._groups
        return (self._tensor_rank(lesson), self._context_rank(lesson)) == (groups.tensor.rank, groups.context.rank)

    @property
    def learner(self) -> int | None:
        """This rank's number among the learners of its replica; None if it learns from no lesson."""
        groups = self._groups
        if not self.drafter.is_vocabulary_sharded:
            return groups.replica_rank
        return groups.context.rank if groups.pipeline.rank == groups.pipeline.size - 1 else None

    def describe_rows(self, hidden_size: int, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Describe a row of each field of this rank's `LessonBatch`: its shape behind [B, S] or [N], and its type.

        hidden_size, dtype: the policy's.
        """
        inputs = self.drafter.inputs
        columns = len(self.drafter.draft_ids_K)
        if self.drafter.is_vocabulary_sharded:
            first, end = self._list_column_bounds()[self._groups.tensor.rank]
            columns = end - first if self.drafter.is_reduced else self._width
        return {
            "token_ids_BS": ((), torch.int64),
            "aux_BSA": ((len(inputs.aux_layers) * hidden_size,), dtype),
            "embedding_BSH": ((hidden_size * inputs.embedding,), dtype),
            "normed_BSH": ((hidden_size * inputs.normed,), dtype),
            "target_NK": ((columns,), dtype),
            "normaliser_N1": ((int(self.drafter.is_reduced),), torch.float32),
        }

    # -- during a pass ------------------------------------------------------------------------------------------------

    def keep_states(self, kept: KeptPass, key: int | str, x_P1H: torch.Tensor) -> None:
        """Keep the states of this pipeline's lessons. A collective of the context group."""
        x_A1H = kept.batch.packing.gather_tokens(x_P1H)
        chosen = [lesson for lesson in kept.lessons if self._is_in_pipeline(lesson)]
        if chosen:
            kept.states[key] = x_A1H[_index_tokens(kept.batch, chosen), 0]

    def keep_logits(self, kept: KeptPass, logits_LW: torch.Tensor) -> None:
        """Keep what the targets of all lessons need of this rank's logits, which are at temperature 1."""
        owner_N, number_N = _locate_targets(kept.batch, kept.lessons)
        row_M = number_N[owner_N == self._groups.context.rank]
        logits_LW = logits_LW.detach()
        if not self.drafter.is_reduced:
            kept.target_MK = logits_LW[row_M]
            return
        first, end = self._list_column_bounds()[self._groups.tensor.rank]
        column_K = self.drafter.draft_ids_K[first:end] - self._groups.tensor.rank * self._width
        kept.target_MK = logits_LW[row_M[:, None], column_K]
        # A few rows at a time: each is as wide as the policy's vocabulary, and becomes float32.
        parts = [self._compute_normaliser(logits_LW[row_M[rows]]) for rows in split_rows(len(row_M), self._width)]
        kept.normaliser_M1 = torch.cat(parts)

    def _compute_normaliser(self, logits_RW: torch.Tensor) -> torch.Tensor:
        """Compute the log of the sum of exp(logit / temperature) over this rank's columns; returns [R, 1] float32."""
        scaled_RW = logits_RW.float().div_(self._temperature)
        return mask_padding(scaled_RW, self._vocab_size).logsumexp(-1, keepdim=True)

    def _list_column_bounds(self) -> list[tuple[int, int]]:
        """List the first and the end of the draft vocabulary's tokens that each tensor parallel rank has."""
        edges = torch.arange(self._groups.tensor.size + 1, device=self.drafter.draft_ids_K.device) * self._width
        return list(itertools.pairwise(torch.searchsorted(self.drafter.draft_ids_K, edges).tolist()))

    # -- after the passes ---------------------------------------------------------------------------------------------

    def collect_lessons(
        self, kept: KeptPass, stage_of: dict[int | str, int], hidden_size: int, dtype: torch.dtype
    ) -> tuple[list[Lesson], LessonBatch] | None:
        """Bring this rank's lessons of a pass to it. None if it has none. A collective of the replica's ranks.

        stage_of: the pipeline stage that has each state. dtype: the policy's.
        """
        groups = self._groups
        in_pipeline = [lesson for lesson in kept.lessons if self._is_in_pipeline(lesson)]
        target_NK, normaliser_N1 = self._exchange_targets(kept, in_pipeline)
        if not in_pipeline:
            return None
        mine = [place for place, lesson in enumerate(in_pipeline) if lesson.learner == self.learner]
        shape = (len(in_pipeline), max(lesson.slice.length for lesson in in_pipeline), hidden_size)
        states: dict[int | str, torch.Tensor] = {}
        for key, stage in stage_of.items():
            x_RSH = kept.states.pop(key, None)
            if x_RSH is None:
                x_RSH = torch.empty(shape, dtype=dtype, device=groups.device)
            states[key] = groups.pipeline.broadcast_tensor(x_RSH.contiguous(), stage)[mine]
        counts = [lesson.num_targets for lesson in in_pipeline]
        if not self.drafter.is_vocabulary_sharded:
            columns = len(self.drafter.draft_ids_K)
            target_NK = self._broadcast_rows(target_NK, sum(counts), columns, dtype)
            normaliser_N1 = self._broadcast_rows(
                normaliser_N1, sum(counts), int(self.drafter.is_reduced), torch.float32
            )
        if not mine or target_NK is None or normaliser_N1 is None:
            return None
        firsts = list(itertools.accumulate(counts, initial=0))
        rows_N = torch.cat([torch.arange(firsts[i], firsts[i + 1], device=groups.device) for i in mine])
        lessons = [in_pipeline[i] for i in mine]
        return lessons, self._build_batch(kept.batch, lessons, states, target_NK[rows_N], normaliser_N1[rows_N])

    def _broadcast_rows(
        self, rows_NK: torch.Tensor | None, count: int, columns: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Broadcast the last stage's rows to the pipeline. A collective of it."""
        if rows_NK is None:
            rows_NK = torch.empty(count, columns, dtype=dtype, device=self._groups.device)
        if columns == 0:
            return rows_NK
        return self._groups.broadcast_from_last_stage(rows_NK.contiguous())

    def _exchange_targets(
        self, kept: KeptPass, in_pipeline: Sequence[Lesson]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the targets of this pipeline's lessons; None at stages but the last.

        A collective of the last stage's tensor and context groups.
        """
        if kept.target_MK is None:
            return None, None
        target_MK = kept.target_MK
        normaliser_M1 = kept.normaliser_M1
        kept.target_MK = kept.normaliser_M1 = None
        if not self.drafter.is_vocabulary_sharded:
            bounds = self._list_column_bounds()
            widths = [end - first if self.drafter.is_reduced else self._width for first, end in bounds]
            target_MK = torch.cat(self._exchange_columns(kept, target_MK, widths), 1)
            if not self.drafter.is_reduced:
                target_MK = target_MK[:, : self._vocab_size]
            if normaliser_M1 is not None:
                parts = self._exchange_columns(kept, normaliser_M1, [1] * self._groups.tensor.size)
                normaliser_M1 = torch.cat(parts, 1).logsumexp(-1, keepdim=True)
        if normaliser_M1 is None:
            normaliser_M1 = torch.empty(len(target_MK), 0, device=target_MK.device)
        return (
            self._exchange_rows(kept, in_pipeline, target_MK),
            self._exchange_rows(kept, in_pipeline, normaliser_M1),
        )

    def _exchange_columns(self, kept: KeptPass, x_MK: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        """Send each tensor rank this rank's columns of its lessons. Returns every rank's columns of this one's.

        widths: columns of each rank. The rows are still those of this context rank.
        """
        tensor = self._groups.tensor
        to_M = self._repeat_for_own_targets(kept, [self._tensor_rank(lesson) for lesson in kept.lessons])
        count = int((to_M == tensor.rank).sum())
        parts = [x_MK[to_M == rank] for rank in range(tensor.size)]
        return exchange_tensors(parts, [(count, width) for width in widths], tensor)

    def _exchange_rows(self, kept: KeptPass, in_pipeline: Sequence[Lesson], x_MK: torch.Tensor) -> torch.Tensor:
        """Send each context rank this rank's rows of its lessons. Returns all rows of this pipeline's lessons."""
        context = self._groups.context
        if x_MK.shape[1] == 0:
            return x_MK.new_empty(sum(lesson.num_targets for lesson in in_pipeline), 0)
        # Rows of x_MK belong to lessons of this tensor rank.
        of_tensor = [lesson for lesson in kept.lessons if self._tensor_rank(lesson) == self._groups.tensor.rank]
        ranks = [self._context_rank(lesson) for lesson in of_tensor]
        to_M = self._repeat_for_own_targets(kept, ranks, of_tensor)
        owner_N, _ = _locate_targets(kept.batch, in_pipeline)
        counts = [int((owner_N == rank).sum()) for rank in range(context.size)]
        parts = exchange_tensors(
            [x_MK[to_M == rank] for rank in range(context.size)],
            [(count, x_MK.shape[1]) for count in counts],
            context,
        )
        if context.size == 1:
            return parts[0]
        whole_NK = x_MK.new_empty(len(owner_N), x_MK.shape[1])
        for rank, part in enumerate(parts):
            whole_NK[owner_N == rank] = part
        return whole_NK

    def _repeat_for_own_targets(
        self, kept: KeptPass, values: Sequence[int], lessons: Sequence[Lesson] | None = None
    ) -> torch.Tensor:
        """Repeat a value of each lesson, by default of all, for those of its targets that this context rank has."""
        lessons = kept.lessons if lessons is None else lessons
        counts = [lesson.num_targets for lesson in lessons]
        device = self._groups.device
        value_R, count_R = (torch.tensor(x, dtype=torch.int64, device=device) for x in (values, counts))
        value_N = value_R.repeat_interleave(count_R)
        owner_N, _ = _locate_targets(kept.batch, lessons)
        return value_N[owner_N == self._groups.context.rank]

    def _build_batch(
        self,
        batch: MicroBatch,
        lessons: Sequence[Lesson],
        states: dict[int | str, torch.Tensor],
        target_NK: torch.Tensor,
        normaliser_N1: torch.Tensor,
    ) -> LessonBatch:
        """Build what this rank learns from. Sequences end with their lessons."""
        inputs = self.drafter.inputs
        index_RS = _index_tokens(batch, lessons)
        device = index_RS.device
        width = index_RS.shape[1]
        nothing_RS0 = target_NK.new_empty(*index_RS.shape, 0)
        contexts_R, lengths_R = (
            torch.tensor(values, device=device)
            for values in zip(*((lesson.slice.context, lesson.slice.length) for lesson in lessons), strict=True)
        )
        return LessonBatch(
            token_ids_BS=batch.token_ids_A[index_RS],
            aux_BSA=torch.cat([nothing_RS0, *(states[layer][:, :width] for layer in inputs.aux_layers)], -1),
            embedding_BSH=states[0][:, :width] if inputs.embedding else nothing_RS0,
            normed_BSH=states[NORMED][:, :width] if inputs.normed else nothing_RS0,
            target_NK=target_NK,
            normaliser_N1=normaliser_N1,
            prompt_lengths_B=contexts_R,
            lengths_B=lengths_R,
        )


def count_learners(drafter: Drafter, groups: RankGroups) -> int:
    """Count the ranks, or the tensor groups, that share the lessons of a replica."""
    return groups.context.size if drafter.is_vocabulary_sharded else groups.replica_size


def _index_tokens(batch: MicroBatch, lessons: Sequence[Lesson]) -> torch.Tensor:
    """Compute indices [R, S] into [A] of the lessons' tokens. Shorter lessons repeat their last token up to S."""
    first_R1, length_R1 = (
        torch.tensor(values)[:, None]
        for values in zip(*((batch.starts_B[lesson.row], lesson.slice.length) for lesson in lessons), strict=True)
    )
    place_RS = torch.arange(int(length_R1.max())).minimum(length_R1 - 1)
    return (first_R1 + place_RS).to(batch.token_ids_A.device)


def _locate_targets(batch: MicroBatch, lessons: Sequence[Lesson]) -> tuple[torch.Tensor, torch.Tensor]:
    """Locate the targets [N] of some lessons.

    Returns the context parallel rank that has each, and its number among that rank's rows of logits [L]; the number is
    right at that rank alone.
    """
    packing = batch.packing
    device = batch.token_ids_A.device
    firsts = [batch.starts_B[lesson.row] for lesson in lessons]
    places = [
        first + lesson.slice.context + torch.arange(lesson.num_targets)
        for first, lesson in zip(firsts, lessons, strict=True)
    ]
    place_N = torch.cat([torch.zeros(0, dtype=torch.int64), *places]).to(device)
    if packing.order_A is not None:
        place_N = packing.order_A.to(device)[place_N]
    per_rank = len(batch.token_ids_A) // packing.context.size
    number_P = torch.full((per_rank,), -1, device=device)
    number_P[batch.row_L] = torch.arange(len(batch.row_L), device=device)
    return place_N // per_rank, number_P[place_N % per_rank]
