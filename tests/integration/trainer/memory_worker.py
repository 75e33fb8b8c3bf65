"""One rank that trains two steps, and compares the peak of live tensors in the second with the estimate.

    RANK=0 WORLD_SIZE=2 ... python -m tests.integration.trainer.memory_worker POLICY OUT CASE

CASE is JSON: arguments of `runs.a_spec`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.integration.trainer.runs import a_rollout, a_spec
from tests.live_tensors import LiveTensors

from specrl.models import read_served_models
from specrl.records import Batch, TrainRollout, VersionSpan
from specrl.spec import RunSpec
from specrl.trainer.megatron_backend import MegatronBackend
from specrl.trainer.memory.estimate import estimate_rank_memory

PROMPT, COMPLETION = 2, 62


def a_full_spec(policy: Path, case: dict[str, Any]) -> RunSpec:
    """A run whose rollouts are as long as they may be, so that the estimate can be exact. A step is one micro-batch."""
    spec = a_spec(policy, **case)
    generation = spec.generation
    sampling = generation.sampling.model_copy(update={"max_tokens": COMPLETION})
    return spec.model_copy(
        update={
            "prompts": spec.prompts.model_copy(update={"max_tokens": PROMPT}),
            "generation": generation.model_copy(update={"sampling": sampling}),
            "trainer": spec.trainer.model_copy(update={"micro_batch_tokens": 8 * (PROMPT + COMPLETION)}),
        }
    )


def a_full_batch(step: int, vocab: int) -> Batch:
    generator = np.random.default_rng([5, step])

    def make_rollout(index: int) -> TrainRollout:
        item = a_rollout(generator, index, vocab, step - 1)
        rollout = replace(
            item.rollout,
            token_ids_T=generator.integers(4, vocab, COMPLETION).astype(np.int32),
            sampler_logprobs_T=np.full(COMPLETION, -8, dtype=np.float32),
            versions=(VersionSpan(step - 1, 0, COMPLETION),),
        )
        return replace(item, prompt_token_ids=(4,) * PROMPT, rollout=rollout)

    return Batch(step, tuple(make_rollout(index) for index in range(8)))


def measure(policy: Path, case: dict[str, Any]) -> dict[str, float]:
    """Return the most bytes of live tensors in a step with moments, and the estimate."""
    spec = a_full_spec(policy, case)
    with LiveTensors() as live:
        backend = MegatronBackend(spec)
        backend.load_model(None)
        backend.train_step(a_full_batch(1, backend.config.vocab_size))
        live.most = live.now
        backend.train_step(a_full_batch(2, backend.config.vocab_size))
    backend.close()
    return {"measured": live.most, "estimated": estimate_rank_memory(spec, read_served_models(spec)).most}


def main() -> None:
    policy, out, case = sys.argv[1:]
    found = measure(Path(policy), json.loads(case))
    (Path(out) / f"memory-{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
