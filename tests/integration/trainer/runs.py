"""Run files and batches of the trainer's tests, the same in every process that asks for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specrl.records import Batch, FinishReason, Rollout, TrainRollout, VersionSpan
from specrl.spec import RunSpec, parse_spec

TEMPERATURE = 0.7
LEARNING_RATE = 1e-3
EPSILON = 1e-5  # 1e-8 would blow rounding noise of near-zero gradients up to the learning rate
WEIGHT_DECAY = 0.01
CAP = 2.0


GSPO_CLIP, KL_COEFFICIENT = 0.004, 0.05
GSPO = {
    "objective": "Gspo",
    "normaliser": "Sequences",
    "advantages": "LeaveOneOut",
    "clipLow": str(GSPO_CLIP),
    "clipHigh": str(GSPO_CLIP),
    "referenceKl": {"coefficient": str(KL_COEFFICIENT), "estimator": "K1", "place": "Reward"},
}
"""Trained with two updates a step: what a step of the default loss has no use for."""
TWO_UPDATES = {
    "updatesPerStep": 2,
    "maxSkippedSteps": 1,
    "decay": "Linear",
    "decaySteps": 1,
    "finalLearningRate": "1e-4",
}


def a_spec(
    policy: Path,
    *,
    speculation: dict[str, Any] | None = None,
    drafter: dict[str, Any] | None = None,
    loss: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    dtype: str = "float32",
    recompute: str = "Nothing",
    routing: str = "Anew",
    **parallelism: int,
) -> RunSpec:
    """A run of `policy`, with micro-batches small enough that a batch needs several.

    parallelism: fields of `trainer.parallelism`, as the run file has them.
    The drafter learns from part of each step, unless told otherwise: 60 of about 150 tokens.
    """
    return parse_spec(
        {
            "name": "toy",
            "model": {"path": str(policy), "dtype": dtype, "maxLength": 256},
            "prompts": {"source": {"generated": {"family": "addition", "count": 10}}, "maxTokens": 16},
            "rewards": {"exact": {}},
            "generation": {
                "sampling": {"maxTokens": 64, "temperature": str(TEMPERATURE)},
                "speculation": {"eagle3": {}} if speculation is None else speculation,
            },
            "trainer": {
                "parallelism": parallelism,
                "optimizer": {
                    "learningRate": str(LEARNING_RATE),
                    "weightDecay": str(WEIGHT_DECAY),
                    "epsilon": str(EPSILON),
                    "warmupSteps": 2,
                    **(optimizer or {}),
                },
                "loss": {"correction": {"high": str(CAP)}, **(loss or {})},
                "drafter": {"tokenBudget": 60} if drafter is None else drafter,
                "microBatchTokens": 128,
                "lora": lora,
                "recompute": recompute,
                "routing": routing,
            },
            "schedule": {"steps": 3, "promptsPerStep": 2, "groupSize": 4},
            "weights": {"timeoutS": 30},
        }
    )


def a_rollout(generator: np.random.Generator, index: int, vocab: int, version: int = 0) -> TrainRollout:
    """Random tokens of random lengths: 1 to 40 generated ones after a prompt of 2 to 12."""
    length = int(generator.integers(1, 41))
    return TrainRollout(
        tuple(int(i) for i in generator.integers(4, vocab, generator.integers(2, 13))),
        Rollout(
            rollout_id=f"r{index}",
            group_id=f"g{index // 4}",
            sample_index=index % 4,
            token_ids_T=generator.integers(4, vocab, length).astype(np.int32),
            sampler_logprobs_T=(-8 * generator.random(length)).astype(np.float32),
            versions=(VersionSpan(version, 0, length),),
            finish_reason=FinishReason.LENGTH,
            replica_id="gen-0",
            text="",
            seconds=0.0,
        ),
        float(generator.normal()),
        reward=float(generator.integers(0, 2)),
    )


def a_poisoned_batch(step: int, vocab: int) -> Batch:
    """One of its rewards overflows in float32 when it is multiplied by anything."""
    first, *others = a_batch(step, vocab).rollouts
    return Batch(step, (replace(first, advantage=3e38, reward=3e38), *others))


def a_batch(step: int, vocab: int, rollouts: int = 8) -> Batch:
    """The batch of one step: the same one in every process."""
    generator = np.random.default_rng([7, step])
    return Batch(step, tuple(a_rollout(generator, i, vocab, step - 1) for i in range(rollouts)))


def with_experts(batch: Batch) -> Batch:
    """The same with two of four experts for every token but the last, in each of four layers, at random.

    But for one token in one layer, which is to go to one expert twice: nobody can do as it says.
    """
    generator, found = np.random.default_rng([8, batch.step]), []
    for item in batch.rollouts:
        tokens = len(item.prompt_token_ids) + item.rollout.length - 1
        of_all = generator.permuted(np.tile(np.arange(4, dtype=np.uint8), (tokens, 4, 1)), axis=-1)
        of_all[0, 1] = 3
        found.append(replace(item, rollout=replace(item.rollout, experts_SLK=of_all[..., :2])))
    return replace(batch, rollouts=tuple(found))
