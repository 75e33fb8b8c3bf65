"""A batch's rollouts reach the ranks that train on them, rank 0, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fork_server import ForkServer
from tests.integration.trainer.conftest import VOCAB, Launch
from tests.integration.trainer.runs import a_batch, a_spec
from tests.integration.trainer.worker_group import sizes

from specrl.trainer.layout import list_replicas
from specrl.trainer.micro_batches import plan_batch

RANKS = 8
LAYOUTS = ["data=8", "tensor=4,data=2", "tensor=2,pipeline=2,data=2", "context=2,data=4", "tensor=8"]


@pytest.fixture(scope="module")
def received(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[bool]]]:
    """Which rollouts each rank has got whole, by layout and number of rollouts."""
    out = tmp_path_factory.mktemp("shares") / "out"
    program = ["share_worker", str(out), json.dumps(LAYOUTS)]
    Launch(ranks, out, "data=8", program, []).finish([0] * RANKS)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("rollouts", [1, 8, 24])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_gets_the_rollouts_that_it_trains_on(
    received: list[dict[str, list[bool]]], layout: str, rollouts: int
) -> None:
    spec = a_spec(Path("policy"), **sizes(layout))
    lengths = [len(item.prompt_token_ids) + item.rollout.total_length for item in a_batch(1, VOCAB, rollouts).rollouts]
    plan = plan_batch(spec.trainer, lengths)
    for replica, members in enumerate(list_replicas(spec.trainer.parallelism)):
        mine = {index for cut in plan[replica] for index in cut}
        for rank in members:
            whole = {index for index, is_whole in enumerate(received[rank][f"{layout} {rollouts}"]) if is_whole}
            assert whole == (set(range(rollouts)) if rank == 0 else mine)
