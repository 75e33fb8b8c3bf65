"""Measures what online training of a policy's native heads gains over frozen heads, while the policy moves.

    python -m benchmarks.native_heads --out runs/native-heads [--steps 40] [--learning-rate 5e-4] [--seeds 1,2,3]

A tiny MiMo, whose next token depends mostly on the last one, gets a head that is trained on its own completions. Then
the policy learns to write even token ids, by 64 rollouts a step. The trainer is the product's. transformers samples the
rollouts, from the trainer's weights, in place of an engine. In every step, before the policy is updated, the heads that
are trained online and the first ones are both measured on the step's rollouts. So both see the same tokens of the same
policy. That the measure is what vLLM accepts is tested by tests/integration/trainer/test_heads_in_vllm.py.

Printed for each ten steps: the acceptance length of both (tokens per verification, greedy drafts at temperature 1),
their difference, how far the policy has moved (K3's estimate of its divergence from step 0, nats per token), the
reward, and the drafter's share of the trainer's time. The last line has the difference over the last ten steps, with
its 95 % interval (Student's t over the means of the seeds). Exits with 1 if the interval includes 0.
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from benchmarks.loss_curves import average_seeds, is_above_zero, mean_with_interval
from rich.console import Console
from rich.table import Table
from tests.tiny_models import make_mtp_policy
from transformers import AutoModelForCausalLM, PreTrainedModel

from specrl.records import Batch, DrafterEpoch, FinishReason, Rollout, TrainRollout, VersionSpan
from specrl.spec import RunSpec, parse_spec
from specrl.trainer.megatron_backend import MegatronBackend

DRAFTS = 3  # k
PROMPTS = 8
GROUP = 8
LENGTH = 32  # tokens of a completion
EPOCHS = 16  # of the head's initialisation
TEN = 10  # steps of a row
Row = tuple[float, float, float, float, float]  # acceptance length online and frozen, divergence, reward, share of time


def a_spec(policy: Path, learning_rate: str) -> RunSpec:
    """Make the run file. The penalty is too small to matter: it makes the trainer measure the divergence."""
    return parse_spec(
        {
            "name": "native-heads",
            "model": {"path": str(policy), "dtype": "float32", "maxLength": 128},
            "prompts": {"source": {"generated": {"family": "any", "count": 1}}, "maxTokens": 8},
            "rewards": {"exact": {}},
            "generation": {"sampling": {"maxTokens": LENGTH}, "speculation": {"mtp": {"numDraftTokens": DRAFTS}}},
            "trainer": {
                "optimizer": {"learningRate": learning_rate},
                "loss": {"referenceKl": {"coefficient": "1e-9"}},
                "microBatchTokens": 4096,
            },
            "schedule": {"steps": 1, "promptsPerStep": PROMPTS, "groupSize": GROUP},
        }
    )


@torch.no_grad()
def sample_rollouts(model: PreTrainedModel, step: int, seed: int) -> list[TrainRollout]:
    """Sample a batch at temperature 1. The reward is the share of even token ids, the advantage is centred by group."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    inputs = torch.randint(4, 260, (PROMPTS, 4), generator=generator).repeat_interleave(GROUP, 0)
    tokens = inputs
    logprobs = []
    cache = None
    for _ in range(LENGTH):
        out = model(inputs, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        probabilities = out.logits[:, -1].softmax(-1)
        inputs = torch.multinomial(probabilities, 1, generator=generator)
        logprobs.append(probabilities.gather(1, inputs).log())
        tokens = torch.cat([tokens, inputs], 1)
    rewards = (tokens[:, 4:] % 2 == 0).float().mean(1)
    advantages = (rewards.view(PROMPTS, GROUP) - rewards.view(PROMPTS, GROUP).mean(1, keepdim=True)).flatten()
    return [
        TrainRollout(
            tuple(tokens[i, :4].tolist()),
            Rollout(
                rollout_id=f"r{i}",
                group_id=f"g{i // GROUP}",
                sample_index=i % GROUP,
                token_ids_T=tokens[i, 4:].numpy().astype(np.int32),
                sampler_logprobs_T=torch.cat(logprobs, 1)[i].numpy().astype(np.float32),
                versions=(VersionSpan(step - 1, 0, LENGTH),),
                finish_reason=FinishReason.LENGTH,
                replica_id="",
                text="",
                seconds=0.0,
            ),
            float(advantages[i]),
            reward=float(rewards[i]),
        )
        for i in range(len(tokens))
    ]


def initialise_head(out: Path, learning_rate: str) -> Path:
    """Return the policy with a head that was trained on its completions; make it if needed."""
    if not (out / "init" / "policy").exists():
        base = make_mtp_policy(out / "base", seed=1, sharpness=30, bigram=20, noise=0.1)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        rollouts = [item for step in range(1, 4) for item in sample_rollouts(model, step, 0)]
        backend = MegatronBackend(a_spec(base, learning_rate))
        backend.load_model(None)
        rates = [1 - 0.9 * number / EPOCHS for number in range(EPOCHS + 1)]
        epochs = [DrafterEpoch(len(rollouts), first, last, True) for first, last in pairwise(rates)]
        backend.train_drafter(rollouts, (), epochs, out / "progress")
        backend.export_model(out / "init")
        backend.close()
    return out / "init" / "policy"


def train(policy: Path, steps: int, learning_rate: str, seed: int) -> list[Row]:
    """Train the policy and its head, and measure both heads in each step."""
    backend = MegatronBackend(a_spec(policy, learning_rate))
    backend.load_model(None)
    assert backend.models.drafter is not None
    heads = backend.models.drafter.model
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()

    def copy_heads() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in heads.collect_tensors(torch.float32).items()}

    first = copy_heads()
    rows: list[Row] = []
    for step in range(1, steps + 1):
        model.load_state_dict(dict(backend.models.policy.gather_tensors()), strict=False)
        rollouts = sample_rollouts(model, step, seed)
        online = backend.evaluate_drafter(rollouts)
        own = copy_heads()
        heads.load_tensors(first)
        frozen = backend.evaluate_drafter(rollouts)
        heads.load_tensors(own)
        metrics = backend.train_step(Batch(step, tuple(rollouts)))
        assert metrics.drafter is not None
        assert metrics.reference_kl is not None
        share = metrics.drafter.seconds / (metrics.logprob_seconds + metrics.train_seconds)
        reward = mean(item.reward for item in rollouts)
        rows.append((online.acceptance_length, frozen.acceptance_length, metrics.reference_kl, reward, share))
    backend.close()
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the policies")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", default="5e-4", help="of the policy (default: %(default)s)")
    parser.add_argument("--seeds", default="1,2,3", help="default: %(default)s")
    given = parser.parse_args()
    torch.set_num_threads(1)
    policy = initialise_head(given.out, given.learning_rate)
    runs = [train(policy, given.steps, given.learning_rate, int(seed)) for seed in given.seeds.split(",")]
    table = Table("steps", "online", "frozen", "difference", "divergence", "reward", "drafter's time")
    for begin in range(0, given.steps, TEN):
        rows = [row for run in runs for row in run[begin : begin + TEN]]
        online, frozen, divergence, reward, share = (mean(values) for values in zip(*rows, strict=True))
        end = begin + len(rows) // len(runs)
        figures = (online, frozen, online - frozen, divergence, reward)
        table.add_row(f"{begin + 1}-{end}", *(f"{figure:.2f}" for figure in figures), f"{share:.1%}")
    console = Console()
    console.print(table)
    gains = average_seeds([[row[0] - row[1] for row in run[-TEN:]] for run in runs])
    console.print(f"last {TEN} steps: online above frozen by {mean_with_interval(gains)} tokens per verification")
    sys.exit(0 if is_above_zero(gains) else 1)


if __name__ == "__main__":
    main()
