"""Runs micro-batches through the policy's pipeline stages, forward, or forward and backward.

Megatron's pipeline schedules do the work, for one stage or many. Hooks keep what the drafter learns from
(`lessons.py`). It is detached, so the drafter cannot influence the policy's gradients. Called by `sharded_policy.py`.

Shapes: P packed tokens on this context parallel rank, L of these predict a sampled token; H hidden size; W columns of
the vocabulary on this tensor parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from specrl.trainer.megatron_backend.parallel.groups import RankGroups
from specrl.trainer.megatron_backend.policy.lessons import NORMED, KeptPass, Lesson, LessonKeeper, TaughtLessons
from specrl.trainer.megatron_backend.policy.tensors import MicroBatch

OnLogits = Callable[[int, torch.Tensor], torch.Tensor | None]


class PipelineSchedule:
    """Runs passes of one model.

    chunks: this rank's chunks of the model, unwrapped, for the hooks. `run_passes` takes the same chunks wrapped for
    data parallelism.
    """

    def __init__(self, chunks: Sequence[Any], groups: RankGroups) -> None:
        self._now: KeptPass | None = None
        self._keeper: LessonKeeper | None = None
        self._stage_of: dict[int | str, int] = {}
        self._chunks = chunks
        self._groups = groups
        for chunk in chunks:
            if chunk.post_process:
                chunk.output_layer.register_forward_pre_hook(self._select_rows)

    def keep_lessons(self, keeper: LessonKeeper) -> None:
        """Register hooks that keep what a drafter reads. A collective of the pipeline."""
        self._keeper = keeper
        inputs = keeper.drafter.inputs
        layers = {*inputs.aux_layers, *([0] if inputs.embedding else [])}
        mine: set[int | str] = set()

        def keep_output(key: int | str) -> Any:
            def keep(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
                if self._now is not None and self._now.lessons:
                    x_P1H = output[0] if isinstance(output, tuple) else output
                    keeper.keep_states(self._now, key, self._gather_tensor_ranks(x_P1H.detach()))

            mine.add(key)
            return keep

        for chunk in self._chunks:
            if 0 in layers and chunk.pre_process:
                chunk.embedding.register_forward_hook(keep_output(0))
            for layer in chunk.decoder.layers:
                if layer.layer_number in layers:
                    layer.register_forward_hook(keep_output(layer.layer_number))
            if inputs.normed and chunk.post_process:
                chunk.decoder.final_layernorm.register_forward_hook(keep_output(NORMED))
        # Tell all stages which of them has which states. A drafter may read none.
        keys: tuple[int | str, ...] = (*sorted(layers), *([NORMED] if inputs.normed else []))
        stage = self._groups.pipeline.rank
        device = self._groups.device
        stages = torch.tensor([stage if key in mine else -1 for key in keys], dtype=torch.int64, device=device)
        if keys:
            dist.all_reduce(stages, dist.ReduceOp.MAX, group=self._groups.pipeline.group)
        self._stage_of = dict(zip(keys, stages.tolist(), strict=True))

    def _gather_tensor_ranks(self, x_P1H: torch.Tensor) -> torch.Tensor:
        """Gather [P, 1, H] from the parts that tensor parallel ranks have, with sequence parallelism."""
        if self._groups.tensor.size == 1:
            return x_P1H
        gathered: torch.Tensor = gather_from_sequence_parallel_region(x_P1H, tensor_parallel_output_grad=False)
        return gathered

    def _select_rows(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Select the positions that predict a sampled token, before the output layer: [P, 1, H] -> [L, 1, H]."""
        assert self._now is not None
        hidden_P1H = self._gather_tensor_ranks(inputs[0])
        return (hidden_P1H.index_select(0, self._now.batch.row_L), *inputs[1:])

    def run_passes(
        self,
        chunks: Sequence[torch.nn.Module],
        batches: Sequence[MicroBatch],
        on_logits: OnLogits,
        *,
        is_training: bool,
        lessons: Sequence[Sequence[Lesson]] = (),
    ) -> TaughtLessons:
        """Run the micro-batches forward, and backward if training. A collective of all ranks of a replica.

        batches: in a pipeline all must have the same number of tokens, since stages do not exchange sizes.
        on_logits: called at the last stage with a micro-batch's number and this rank's columns [L, W] of its logits, in
            the policy's dtype. Returns the loss to differentiate; None without training.
        lessons: for each micro-batch, what the drafter of `keep_lessons` learns from.

        Returns the lessons that this rank learns from.
        """
        passes = [KeptPass(batch, lessons[i] if lessons else ()) for i, batch in enumerate(batches)]

        def forward_step(numbers: Iterator[int], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            number = next(numbers)
            batch = batches[number]
            self._now = passes[number]  # read by the hooks
            try:
                token_ids_P = batch.packing.take_local(batch.token_ids_A)
                # None for position_ids and attention_mask: rotary positions and masks come from the packing.
                output = chunk(token_ids_P[None], None, None, packed_seq_params=batch.packing)
            finally:
                self._now = None

            def compute_loss(logits_1LW: torch.Tensor) -> tuple[torch.Tensor, int, None]:  # called at the last stage
                logits_LW = logits_1LW.squeeze(0)  # the gradient of an index would be another matrix as large
                if self._keeper is not None and passes[number].lessons:
                    self._keeper.keep_logits(passes[number], logits_LW)
                found = on_logits(number, logits_LW)
                return (logits_1LW.new_zeros(()) if found is None else found), 0, None

            return output, compute_loss

        with torch.set_grad_enabled(is_training):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(range(len(batches))) for _ in chunks],
                model=list(chunks),
                num_microbatches=len(batches),
                seq_length=len(batches[0].token_ids_A),
                micro_batch_size=1,
                forward_only=not is_training,
            )
        return [] if self._keeper is None else self._collect_lessons(self._keeper, passes)

    def _collect_lessons(self, keeper: LessonKeeper, passes: Sequence[KeptPass]) -> TaughtLessons:
        config = self._chunks[0].config
        found = [
            keeper.collect_lessons(kept, self._stage_of, config.hidden_size, config.params_dtype)
            for kept in passes
            if kept.lessons
        ]
        return [item for item in found if item is not None]
