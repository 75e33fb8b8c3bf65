"""Runs micro-batches through the policy's stages: forward passes, or forward and backward ones. Called by `policy.py`.

Megatron's schedules do it, for one stage as for many. Hidden states for the drafter are left behind by hooks, detached,
as the passes go by; they cannot reach the policy's gradients.

Shapes: P packed tokens, T sampled tokens, H hidden, W columns of the vocabulary on this tensor parallel rank; R
rollouts of a micro-batch whose states are kept, S tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from specrl.drafting.packing import HeadBatch
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

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._now: _Pass | None = None
        self.aux_layers: tuple[int, ...] = ()
        self._chunks = chunks
        for chunk in chunks:
            chunk.output_layer.register_forward_pre_hook(self._only_rows)

    def capture(self, aux_layers: tuple[int, ...]) -> None:
        """Make hidden states available: of these indices (0: embedding) and before the last norm."""
        self.aux_layers = aux_layers

        def keep(key: int | str, x_P1H: torch.Tensor) -> None:
            if self._now is not None and self._now.rows:
                places_RS = self._now.batch.places(self._now.rows)
                self._now.states[key] = x_P1H.detach()[places_RS, 0]

        def keep_output(key: int) -> Any:
            return lambda _module, _inputs, output: keep(key, output[0] if isinstance(output, tuple) else output)

        for chunk in self._chunks:
            if 0 in aux_layers:
                chunk.embedding.register_forward_hook(keep_output(0))
            for layer in chunk.decoder.layers:
                if layer.layer_number in aux_layers:
                    layer.register_forward_hook(keep_output(layer.layer_number))
            chunk.decoder.final_layernorm.register_forward_pre_hook(lambda _module, inputs: keep(LAST, inputs[0]))

    def _only_rows(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Only positions that predict a sampled token reach the output layer: [P, 1, H] -> [T, 1, H]."""
        assert self._now is not None
        hidden_P1H, *rest = inputs
        return (hidden_P1H.index_select(0, self._now.batch.row_T), *rest)

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

        on_logits: called with a micro-batch's number and this rank's columns [T, W] of its logits, in the policy's
        dtype; returns the loss that is differentiated when training. rows: of each micro-batch the rollouts whose
        hidden states are returned, as what the drafter learns from.
        """
        passes = [_Pass(batch, rows[i] if rows else ()) for i, batch in enumerate(batches)]

        def forward(numbers: Iterator[int], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            number = next(numbers)
            batch = batches[number]
            self._now = passes[number]
            try:
                output = chunk(batch.token_ids_P[None], batch.position_P[None], None, packed_seq_params=batch.packing)
            finally:
                self._now = None

            def loss(logits_1TW: torch.Tensor) -> tuple[torch.Tensor, int, None]:
                found = on_logits(number, logits_1TW[0])
                return (logits_1TW.new_zeros(()) if found is None else found), 0, None

            return output, loss

        with torch.set_grad_enabled(is_training):
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=[iter(range(len(batches))) for _ in chunks],
                model=list(chunks),
                num_microbatches=len(batches),
                seq_length=1,
                micro_batch_size=1,
                forward_only=not is_training,
            )
        return [self._states(item) if item.rows else None for item in passes]

    def _states(self, item: _Pass) -> HeadBatch:
        aux_RSA = torch.cat([item.states[layer] for layer in self.aux_layers], -1)
        return item.batch.head_batch(item.rows, aux_RSA, item.states[LAST])
