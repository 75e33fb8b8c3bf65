"""Runs micro-batches through the policy's stages: forward passes, or forward and backward ones. Called by `policy.py`.

Megatron's schedules do it, for one stage as for many. Hidden states for the drafter are left behind by hooks, detached,
as the passes go by; they cannot reach the policy's gradients.

Shapes: A packed tokens, P and L (sampled ones) of them on this context parallel rank, H hidden, W columns of the
vocabulary on this tensor parallel rank; R rollouts of a micro-batch whose states are kept, S tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from specrl.drafting.packing import HeadBatch
from specrl.trainer.megatron_backend.groups import Groups
from specrl.trainer.megatron_backend.tensors import MicroBatch

LAST = "last"  # the input of the final norm, beside the numbers of auxiliary layers
OnLogits = Callable[[int, torch.Tensor], torch.Tensor | None]


@dataclass
class _Pass:
    """The micro-batch that is on its way through a stage, and the hidden states that it leaves behind."""

    batch: MicroBatch
    rows: Sequence[int] = ()
    states: dict[int | str, torch.Tensor] = field(default_factory=dict)


class Schedule:
    """Of the chunks of a model on this rank, unwrapped; `run` takes the same ones wrapped for data parallelism."""

    def __init__(self, chunks: Sequence[Any], groups: Groups) -> None:
        self._now: _Pass | None = None
        self.aux_layers: tuple[int, ...] = ()
        self._chunks, self._groups = chunks, groups
        for chunk in chunks:
            if chunk.post_process:
                chunk.output_layer.register_forward_pre_hook(self._only_rows)

    def capture(self, aux_layers: tuple[int, ...]) -> None:
        """Make hidden states available: of these indices (0: embedding) and before the last norm."""
        self.aux_layers = aux_layers
        mine: set[int | str] = set()

        def keep(key: int | str, x_P1H: torch.Tensor) -> None:
            if self._now is not None and self._now.rows:
                places_RS = self._now.batch.places(self._now.rows)
                x_A1H = self._now.batch.packing.gather(self._of_tensor_ranks(x_P1H.detach()))
                self._now.states[key] = x_A1H[places_RS, 0]

        def keep_output(key: int) -> Any:
            return lambda _module, _inputs, output: keep(key, output[0] if isinstance(output, tuple) else output)

        for chunk in self._chunks:
            if 0 in aux_layers and chunk.pre_process:
                chunk.embedding.register_forward_hook(keep_output(0))
                mine.add(0)
            for layer in chunk.decoder.layers:
                if layer.layer_number in aux_layers:
                    layer.register_forward_hook(keep_output(layer.layer_number))
                    mine.add(layer.layer_number)
            if chunk.post_process:
                chunk.decoder.final_layernorm.register_forward_pre_hook(lambda _module, inputs: keep(LAST, inputs[0]))
                mine.add(LAST)
        keys: tuple[int | str, ...] = (*aux_layers, LAST)
        stage, device = self._groups.pipeline.rank, self._groups.device
        stages = torch.tensor([stage if key in mine else -1 for key in keys], device=device)
        dist.all_reduce(stages, dist.ReduceOp.MAX, group=self._groups.pipeline.group)
        self._stage_of: dict[int | str, int] = dict(zip(keys, stages.tolist(), strict=True))

    def _of_tensor_ranks(self, x_P1H: torch.Tensor) -> torch.Tensor:
        """[P, 1, H] out of what each tensor parallel rank has of it."""
        if self._groups.tensor.size == 1:
            return x_P1H
        gathered: torch.Tensor = gather_from_sequence_parallel_region(x_P1H, tensor_parallel_output_grad=False)
        return gathered

    def _only_rows(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Only positions that predict a sampled token reach the output layer: [P, 1, H] -> [L, 1, H]."""
        assert self._now is not None
        hidden_P1H, *rest = self._of_tensor_ranks(inputs[0]), *inputs[1:]
        return (hidden_P1H.index_select(0, self._now.batch.row_L), *rest)

    def run(
        self,
        chunks: Sequence[torch.nn.Module],
        batches: Sequence[MicroBatch],
        on_logits: OnLogits,
        *,
        is_training: bool,
        rows: Sequence[Sequence[int]] = (),
    ) -> list[HeadBatch | None]:
        """Pass the micro-batches through the chunks, backward too when training. A collective.

        In a pipeline all of them have the same number of tokens, so that stages need not ask for it.

        on_logits: called with a micro-batch's number and this rank's columns [L, W] of its logits, in the policy's
        dtype; returns the loss that is differentiated when training. rows: of each micro-batch the rollouts whose
        hidden states are returned, at all stages, as what the drafter learns from.
        """
        passes = [_Pass(batch, rows[i] if rows else ()) for i, batch in enumerate(batches)]

        def forward(numbers: Iterator[int], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            number = next(numbers)
            batch = batches[number]
            self._now = passes[number]
            try:
                token_ids_P = batch.packing.mine(batch.token_ids_A)
                # Positions are the packing's; the argument is read by embeddings of positions alone.
                output = chunk(token_ids_P[None], None, None, packed_seq_params=batch.packing)
            finally:
                self._now = None

            def loss(logits_1TW: torch.Tensor) -> tuple[torch.Tensor, int, None]:  # at the last stage alone
                found = on_logits(number, logits_1TW[0])
                return (logits_1TW.new_zeros(()) if found is None else found), 0, None

            return output, loss

        with torch.set_grad_enabled(is_training):
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=[iter(range(len(batches))) for _ in chunks],
                model=list(chunks),
                num_microbatches=len(batches),
                seq_length=len(batches[0].token_ids_A),
                micro_batch_size=1,
                forward_only=not is_training,
            )
        return [self._states(item) if item.rows else None for item in passes]

    def _states(self, item: _Pass) -> HeadBatch:
        found = {key: self._from_stage(stage, item.states.get(key), item) for key, stage in self._stage_of.items()}
        aux_RSA = torch.cat([found[layer] for layer in self.aux_layers], -1)
        return item.batch.head_batch(item.rows, aux_RSA, found[LAST])

    def _from_stage(self, stage: int, states_RSH: torch.Tensor | None, item: _Pass) -> torch.Tensor:
        """Hidden states at all stages. A collective of the pipeline."""
        pipeline, config = self._groups.pipeline, self._chunks[0].config
        if states_RSH is None:
            shape = (*item.batch.places(item.rows).shape, config.hidden_size)
            states_RSH = torch.empty(shape, dtype=config.params_dtype, device=self._groups.device)
        if pipeline.size > 1:
            states_RSH = states_RSH.contiguous()
            dist.broadcast(states_RSH, dist.get_global_rank(pipeline.group, stage), group=pipeline.group)
        return states_RSH
