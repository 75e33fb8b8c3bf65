"""One rank that gets batches from rank 0 in several layouts, and trains on none.

RANK=0 WORLD_SIZE=8 ... python -m tests.integration.trainer.share_worker OUT LAYOUTS       LAYOUTS: a JSON list
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from google.protobuf.empty_pb2 import Empty
from tests.integration.trainer.conftest import VOCAB
from tests.integration.trainer.runs import a_batch, a_spec
from tests.integration.trainer.worker_group import sizes

from specrl.api.v1 import rollout_pb2, trainer_pb2
from specrl.records import Batch, TrainMetrics, TrainRollout, wire
from specrl.trainer.calls import RankCalls
from specrl.trainer.ranks import AllRanks, ControlGroup, follow_rank_0


class KeepingBackend:
    """A backend that keeps the batch of its last step."""

    batch: Batch

    def check_rollouts(self, rollouts: list[TrainRollout], *, is_step: bool) -> None:
        """Accept all rollouts, which must be whole."""
        assert is_step
        assert not any(item.is_outline for item in rollouts)

    def train_step(self, batch: Batch) -> TrainMetrics:
        """Keep the batch, and return no figures."""
        self.batch = batch
        return TrainMetrics.for_empty_batch(0.0)

    def close(self) -> None:
        """Nothing to close."""


def get_batch(layout: str, rollouts: int, control: ControlGroup, out: Path) -> list[bool]:
    """Get a batch as this rank of the layout. Returns which of its rollouts are whole, which equal those sent."""
    backend: Any = KeepingBackend()
    calls = RankCalls(backend, a_spec(out, **sizes(layout)), out, "127.0.0.1")
    sent = a_batch(1, VOCAB, rollouts)
    if control.rank == 0:
        ranks = AllRanks(calls, control)
        messages = [wire.train_rollout_to_wire(item) for item in sent.rollouts]
        batch = rollout_pb2.Batch(step=1, rollouts=messages)
        ranks.run_call(RankCalls.TrainParts, trainer_pb2.TrainPartsRequest(batch=batch, rollouts_total=rollouts))
        ranks.run_call(RankCalls.Close, Empty())
    else:
        follow_rank_0(calls, control)
    for item, other in zip(backend.batch.rollouts, sent.rollouts, strict=True):
        assert item.rollout.total_length == other.rollout.total_length
        assert item.rollout.turn_spans == other.rollout.turn_spans
        assert len(item.prompt_token_ids) == len(other.prompt_token_ids)
        assert item.rollout.group_id == other.rollout.group_id
        assert (item.advantage, item.reward) == (other.advantage, other.reward)
        if not item.is_outline:
            assert item.prompt_token_ids == other.prompt_token_ids
            assert np.array_equal(item.rollout.token_ids_T, other.rollout.token_ids_T)
            assert np.array_equal(item.rollout.sampler_logprobs_T, other.rollout.sampler_logprobs_T)
    return [not item.is_outline for item in backend.batch.rollouts]


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    control = ControlGroup()
    found = {
        f"{layout} {count}": get_batch(layout, count, control, out)
        for layout in json.loads(sys.argv[2])
        for count in (1, 8, 24)
    }
    (out / f"{control.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
