"""A drafter that is trained here drafts well there: the hidden states, the shifts and the names are vLLM's.

An off-by-one in any of them trains happily and accepts nothing; only the engine can tell.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.fork_server import ROOT
from tests.integration.trainer.runs import a_spec
from tests.tiny_models import Shape, make_policy
from transformers import Qwen3ForCausalLM

from specrl.records import DrafterMetrics, FinishReason, Rollout, TrainRollout, VersionSpan

PROMPTS, TRAINED, LENGTH, DRAFT = 16, 192, 32, 3
DRAFT_VOCABULARIES = (None, 160)  # None: the policy's own

ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

def count(policy, drafter, prompts, length, draft):
    llm = LLM(
        model=policy, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=16, seed=0,
        kv_cache_memory_bytes=1 << 26, disable_log_stats=False, use_tqdm_on_load=False, skip_tokenizer_init=True,
        speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": draft},
    )
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    counts = {item.name: getattr(item, "value", None) for item in llm.get_metrics()}
    return [counts["vllm:spec_decode_num_" + name] for name in ("drafts", "accepted_tokens")]

def main():
    cases = json.load(open(sys.argv[1]))
    found = []
    for case in cases:
        found.append(count(**case))
        cleanup_dist_env_and_memory()
    json.dump(found, open(sys.argv[1], "w"))

if __name__ == "__main__":
    main()
"""
"""One process, because vLLM's import costs more than both engines."""


@pytest.fixture(scope="module")
def learnable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose next token depends mostly on the last one."""
    path = tmp_path_factory.mktemp("learnable")
    return make_policy(path, seed=1, sharpness=30, bigram=20, shape=Shape(heads=4, groups=2))


def sampled(policy: Path) -> list[TrainRollout]:
    """Rollouts of the policy at temperature 1, drawn by transformers."""
    model = Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    torch.manual_seed(0)
    tokens_BS = torch.randint(4, 260, (TRAINED, 4))
    with torch.no_grad():
        cache = None
        inputs_BS = tokens_BS
        for _ in range(LENGTH):
            out = model(inputs_BS, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            inputs_BS = torch.multinomial(out.logits[:, -1].softmax(-1), 1)
            tokens_BS = torch.cat([tokens_BS, inputs_BS], 1)
    return [
        TrainRollout(
            tuple(row[:4]),
            Rollout(
                rollout_id=f"r{number}",
                group_id=f"g{number}",
                sample_index=0,
                token_ids_T=np.array(row[4:], dtype=np.int32),
                sampler_logprobs_T=np.full(LENGTH, -1.0, dtype=np.float32),
                versions=(VersionSpan(0, 0, LENGTH),),
                finish_reason=FinishReason.LENGTH,
                replica_id="",
                text="",
                seconds=0.0,
            ),
            0.0,
        )
        for number, row in enumerate(tokens_BS.tolist())
    ]


@dataclass(frozen=True)
class Drafted:
    """A trained drafter. epochs: what the trainer measured; drafts, accepted: what the engine counted."""

    epochs: list[DrafterMetrics]
    drafts: int
    accepted: int


@pytest.fixture(scope="module")
def drafted(learnable: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, Drafted]:
    """By the drafter's vocabulary: trained here, then used by vLLM for greedy completions of other prompts."""
    folder = tmp_path_factory.mktemp("drafted")
    prompts = np.random.default_rng(9).integers(4, 260, (PROMPTS, 6)).tolist()
    rollouts, epochs, cases = sampled(learnable), [], []
    for size in DRAFT_VOCABULARIES:
        epochs_of_size, policy, drafter = train(learnable, rollouts, size, folder / str(size))
        epochs.append(epochs_of_size)
        cases.append({"policy": str(policy), "drafter": str(drafter), "prompts": prompts, "length": 48, "draft": DRAFT})
    exchange = folder / "exchange.json"
    exchange.write_text(json.dumps(cases))
    (folder / "engine.py").write_text(ENGINE)
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(folder / "engine.py"), str(exchange)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    counts = json.loads(exchange.read_text())
    found = (Drafted(of_size, *count) for of_size, count in zip(epochs, counts, strict=True))
    return dict(zip(DRAFT_VOCABULARIES, found, strict=True))


def train(
    policy: Path, rollouts: list[TrainRollout], size: int | None, out: Path
) -> tuple[list[DrafterMetrics], Path, Path]:
    """Four epochs of a fresh drafter. Returns what was measured, and the folders of policy and drafter."""
    from specrl.trainer.megatron_backend import MegatronBackend

    spec = a_spec(policy, speculation={"eagle3": {} if size is None else {"draftVocabSize": size}})
    sampling = spec.generation.sampling.model_copy(update={"temperature": 1})
    spec = spec.model_copy(update={"generation": spec.generation.model_copy(update={"sampling": sampling})})
    backend = MegatronBackend(spec)
    backend.load(None)
    epochs = backend.train_drafter(rollouts, 4)
    exported, drafter = backend.export(out)
    backend.close()
    assert drafter is not None
    return epochs, exported, drafter


@pytest.mark.parametrize("size", DRAFT_VOCABULARIES)
def test_trained_drafter_is_accepted_by_the_engine(size: int | None, drafted: dict[int | None, Drafted]) -> None:
    found = drafted[size]
    length = 1 + found.accepted / found.drafts
    last = found.epochs[-1]
    print(f"acceptance length {length:.2f}, trained {last.acceptance_per_position}, {last.seconds:.1f} s")  # noqa: T201
    assert length > 1.5
    # What the trainer estimates is what the engine finds, roughly: other prompts, and greedy.
    estimate = 1 + sum(np.cumprod(last.acceptance_per_position))
    assert length > 0.7 * estimate
