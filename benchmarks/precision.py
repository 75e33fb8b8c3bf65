"""Measures how far the trainer's and the engine's log-probabilities in bfloat16 are from those in float32.

    python benchmarks/precision.py --policy FOLDER --out runs/precision

The engine samples completions in bfloat16, at temperature 1, for word problems. Then the same tokens are scored by
transformers and by our trainer, each in float32 and in bfloat16. So every column is of the same policy and tokens:

    engine      vLLM, the log-probabilities that came with the sampled tokens
    trainer     Megatron, as the canary and a training step compute them
    reference   transformers in float32

Printed: mean and largest absolute difference, in nats, of each pair. The canary of a run compares engine and trainer.
Every part runs in its own process, since vLLM and Megatron both claim the process, and is kept in --out, so the same
command continues after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from specrl.spec import RunSpec, parse_spec

PARTS = (
    "engine bfloat16",
    "trainer bfloat16",
    "trainer float32",
    "transformers bfloat16",
    "transformers float32",
)
PROMPTS = 16
TOKENS = 32
THREADS = "1"  # of each part; the sums of more threads are rounded in another order, but as much


def a_spec(policy: str, dtype: str) -> RunSpec:
    """Make the spec of a run on word problems."""
    folder = Path(policy)
    has_template = (folder / "chat_template.jinja").exists()
    has_template = has_template or "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())
    return parse_spec(
        {
            "name": "precision",
            "model": {"path": policy, "dtype": dtype, "maxLength": 512},
            "prompts": {
                "source": {"generated": {"family": "wordProblem", "count": PROMPTS}},
                "format": "Chat" if has_template else "Raw",
                "maxTokens": 384,
            },
            "rewards": {"exact": {}},
            "generation": {
                "sampling": {"maxTokens": TOKENS},
                "speculation": {"none": {}},
                "maxLiveRollouts": PROMPTS,
                "kvCacheMib": 256,
            },
            "trainer": {"optimizer": {"learningRate": "1e-6"}, "microBatchTokens": 512},
            "schedule": {"steps": 1, "promptsPerStep": 1, "groupSize": 2},
            "telemetry": {"logLevel": "warning"},
        }
    )


async def sample_completions(spec: RunSpec) -> list[dict[str, Any]]:
    """Sample a completion of each prompt. Returns prompts, tokens and log-probabilities."""
    from specrl.generation.vllm_backend.engine import VllmEngine
    from specrl.prompts.stream import load_prompts
    from specrl.records import RolloutRequest, Sampling

    stream = load_prompts(spec)
    requests = {
        str(number): RolloutRequest(
            str(number), str(number), 0, stream.prompt(number).token_ids, Sampling(TOKENS, seed=number)
        )
        for number in range(PROMPTS)
    }
    engine = VllmEngine(spec, "gen-0")
    await engine.start()
    try:
        return [
            {
                "prompt": list(requests[rollout.rollout_id].prompt_token_ids),
                "tokens": rollout.token_ids_T.tolist(),
                "logprobs": rollout.sampler_logprobs_T.tolist(),
            }
            async for rollout in engine.generate([*requests.values()], admit_together=True)
        ]
    finally:
        await engine.close()


def score_by_trainer(spec: RunSpec, rows: list[dict[str, Any]]) -> list[list[float]]:
    """Score the tokens as a canary does."""
    from specrl.records import FinishReason, Rollout, TrainRollout, VersionSpan
    from specrl.trainer.megatron_backend import MegatronBackend

    backend = MegatronBackend(spec)
    backend.load_model(None)
    items = [
        TrainRollout(
            tuple(row["prompt"]),
            Rollout(
                rollout_id=str(number),
                group_id=str(number),
                sample_index=0,
                token_ids_T=np.array(row["tokens"], dtype=np.int32),
                sampler_logprobs_T=np.array(row["logprobs"], dtype=np.float32),
                versions=(VersionSpan(0, 0, len(row["tokens"])),),
                finish_reason=FinishReason.LENGTH,
                replica_id="",
                text="",
                seconds=0.0,
            ),
            0.0,
        )
        for number, row in enumerate(rows)
    ]
    scores = [part.tolist() for part in backend.score_rollouts(items)]
    backend.close()
    return scores


def score_by_transformers(policy: str, dtype: str, rows: list[dict[str, Any]]) -> list[list[float]]:
    """Score the tokens with transformers. The softmax is in float32 in either case, as everywhere else."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=getattr(torch, dtype)).eval()
    found = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["prompt"] + row["tokens"]])
            logits_TV = model(ids).logits[0, len(row["prompt"]) - 1 : -1].float()
            picked = logits_TV.log_softmax(-1).gather(1, torch.tensor(row["tokens"])[:, None])
            found.append(picked[:, 0].tolist())
    return found


def run_part(part: str, policy: str, out: Path) -> None:
    """Run one part in this process, and write its log-probabilities."""
    by, dtype = part.split()
    sampled = out / "engine bfloat16.json"
    if by == "engine":
        rows = asyncio.run(sample_completions(a_spec(policy, dtype)))
        content: Any = rows
    else:
        rows = json.loads(sampled.read_text())
        score = score_by_transformers(policy, dtype, rows) if by == "transformers" else None
        content = score if score is not None else score_by_trainer(a_spec(policy, dtype), rows)
    (out / f"{part}.json").write_text(json.dumps(content))


def read_logprobs(out: Path, part: str) -> np.ndarray:
    """Read the log-probabilities [N] of all tokens."""
    content = json.loads((out / f"{part}.json").read_text())
    return np.concatenate([row["logprobs"] if isinstance(row, dict) else row for row in content])


def main() -> None:
    """Run the parts that are missing, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", required=True, help="a Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the parts' results")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part is not None:
        run_part(given.part, given.policy, given.out)
        return
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"OMP_NUM_THREADS": THREADS, "SPECRL_CACHE_DIR": cache, "HF_HUB_OFFLINE": "1"}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        for part in PARTS:
            if not (given.out / f"{part}.json").exists():
                command = [sys.executable, __file__, "--policy", given.policy, "--out", str(given.out), "--part", part]
                subprocess.run(command, check=True, env=environment)
    found = {part: read_logprobs(given.out, part) for part in PARTS}
    table = Table("log-probabilities of", "against", "mean, nats", "largest", "bias")
    for first, second in combinations(PARTS, 2):
        difference = found[first] - found[second]
        table.add_row(
            first,
            second,
            f"{np.abs(difference).mean():.2g}",
            f"{np.abs(difference).max():.2g}",
            f"{difference.mean():+.2g}",
        )
    console = Console()
    console.print(f"{len(found[PARTS[0]])} tokens of {PROMPTS} completions")
    console.print(table)


if __name__ == "__main__":
    main()
