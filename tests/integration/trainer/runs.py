"""Run files and batches of the trainer's tests. Deterministic, so that all processes get the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specrl.records import Batch, DrafterEpoch, FinishReason, Rollout, SamplingSets, TrainRollout, VersionSpan, wire
from specrl.spec import RunSpec, parse_spec
from specrl.trainer.layout import list_replicas
from specrl.trainer.micro_batches import plan_batch

TEMPERATURE = 0.7
LEARNING_RATE = 1e-3
MUON_RATIO = 2.0  # of the learning rate of matrices to that of other parameters
EPSILON = 1e-5  # 1e-8 would amplify rounding noise of near-zero gradients to the learning rate
WEIGHT_DECAY = 0.01
CAP = 2.0
STEPS = 2
"""Trained steps. The last needs the optimizer's state of the one before, and is made again from its checkpoint."""


GSPO_CLIP = 0.004
KL_COEFFICIENT = 0.05
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
    sampling: dict[str, Any] | None = None,
    **parallelism: int,
) -> RunSpec:
    """A run of `policy`, with micro-batches small enough that a batch needs several.

    parallelism: fields of `trainer.parallelism`, as the run file has them.
    By default, the drafter learns from 60 of the about 150 tokens of a step.
    """
    return parse_spec(
        {
            "name": "toy",
            "model": {"path": str(policy), "dtype": dtype, "maxLength": 256},
            "prompts": {"source": {"generated": {"family": "addition", "count": 10}}, "maxTokens": 16},
            "rewards": {"exact": {}},
            "generation": {
                "sampling": {"maxTokens": 64, "temperature": str(TEMPERATURE), **(sampling or {})},
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
    """Make a rollout of random tokens: 1 to 40 of them after a prompt of 2 to 12."""
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
    """Make a batch with a reward that overflows float32 when it is multiplied."""
    first, *others = a_batch(step, vocab).rollouts
    return Batch(step, (replace(first, advantage=3e38, reward=3e38), *others))


def a_batch(step: int, vocab: int, rollouts: int = 8) -> Batch:
    """Make the batch of a step, the same in every process."""
    generator = np.random.default_rng([7, step])
    return Batch(step, tuple(a_rollout(generator, i, vocab, step - 1) for i in range(rollouts)))


def as_shared(batch: Batch, spec: RunSpec, rank: int) -> Batch:
    """Return the batch as a rank gets it: with outlines of the rollouts that other replicas train on."""
    plan = plan_batch(spec.trainer, [len(item.prompt_token_ids) + item.rollout.total_length for item in batch.rollouts])
    replica = next(n for n, ranks in enumerate(list_replicas(spec.trainer.parallelism)) if rank in ranks)
    mine = {index for cut in plan[replica] for index in cut}
    rollouts = [
        item
        if rank == 0 or index in mine
        else wire.train_rollout_from_wire(wire.outline_train_rollout(wire.train_rollout_to_wire(item)))
        for index, item in enumerate(batch.rollouts)
    ]
    return replace(batch, rollouts=tuple(rollouts))


def with_sets(batch: Batch, vocab: int) -> Batch:
    """Give every sampled token a set of itself and up to 15 others; the first one of a rollout the whole vocabulary."""
    generator = np.random.default_rng([9, batch.step])
    found = []
    for item in batch.rollouts:
        sets = [
            sorted({token, *generator.integers(0, vocab, generator.integers(0, 16)).tolist()})
            for token in item.rollout.token_ids_T.tolist()
        ]
        sets[0] = list(range(vocab))
        found.append(replace(item, rollout=replace(item.rollout, sets=SamplingSets.from_lists(sets))))
    return replace(batch, rollouts=tuple(found))


def with_experts(batch: Batch) -> Batch:
    """Add two of four experts at random to every token but the last, in each of four layers.

    One token in one layer names the same expert twice, which no router can do.
    """
    generator = np.random.default_rng([8, batch.step])
    found = []
    for item in batch.rollouts:
        tokens = len(item.prompt_token_ids) + item.rollout.total_length - 1
        of_all = generator.permuted(np.tile(np.arange(4, dtype=np.uint8), (tokens, 4, 1)), axis=-1)
        of_all[0, 1] = 3
        found.append(replace(item, rollout=replace(item.rollout, experts_SLK=of_all[..., :2])))
    return replace(batch, rollouts=tuple(found))


def as_sampled(batch: Batch, kind: str, vocab: int) -> Batch:
    """Add what rollouts of a kind of job carry. kind: as in `layout_worker.KINDS`."""
    if kind == "replayed":
        return with_experts(batch)
    return with_sets(batch, vocab) if kind == "truncated" else batch


def plan_epochs(count: int, epochs: int, *, first: int = 0) -> list[DrafterEpoch]:
    """Epochs at falling rates on the first `count` rollouts. first: rollouts of the first epoch; 0: as the others."""
    rates = [1 - 0.9 * number / epochs for number in range(epochs + 1)]
    counts = [first or count, *[count] * (epochs - 1)]
    early = (epochs + 1) // 2
    return [
        DrafterEpoch(counts[number], rates[number], rates[number + 1], uses_cross_entropy=number < early)
        for number in range(epochs)
    ]
