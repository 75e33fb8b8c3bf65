"""A drafter that is trained here drafts well there: the hidden states, the shifts and the names are vLLM's.

An off-by-one in any of them trains happily and accepts nothing; only the engine can tell.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.integration.trainer.conftest import ROOT
from tests.integration.trainer.runs import a_spec
from tests.tiny_models import Shape, make_policy
from transformers import Qwen3ForCausalLM

from specrl.records import FinishReason, Rollout, TrainRollout, VersionSpan

PROMPTS, TRAINED, LENGTH, DRAFT = 16, 192, 32, 3

ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    policy, drafter, path, draft = sys.argv[1:]
    prompts, length = json.load(open(path))
    llm = LLM(
        model=policy, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=16, seed=0,
        kv_cache_memory_bytes=1 << 26, disable_log_stats=False, use_tqdm_on_load=False, skip_tokenizer_init=True,
        speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": int(draft)},
    )
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    counts = {item.name: getattr(item, "value", None) for item in llm.get_metrics()}
    drafts, accepted = (counts["vllm:spec_decode_num_" + name] for name in ("drafts", "accepted_tokens"))
    json.dump({"drafts": drafts, "accepted": accepted}, open(path, "w"))

if __name__ == "__main__":
    main()
"""


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


@pytest.mark.parametrize("draft_vocab_size", [None, 160])
def test_trained_drafter_is_accepted_by_the_engine(
    draft_vocab_size: int | None, learnable: Path, tmp_path: Path
) -> None:
    from specrl.trainer.megatron_backend import MegatronBackend

    eagle3 = {} if draft_vocab_size is None else {"draftVocabSize": draft_vocab_size}
    spec = a_spec(learnable, speculation={"eagle3": eagle3})
    spec = spec.model_copy(
        update={
            "generation": spec.generation.model_copy(
                update={
                    "sampling": spec.generation.sampling.model_copy(update={"temperature": 1}),
                }
            )
        }
    )
    backend = MegatronBackend(spec)
    backend.load(None)
    epochs = backend.train_drafter(sampled(learnable), 4)
    policy, drafter = backend.export(tmp_path)
    backend.close()
    assert drafter is not None
    rng = np.random.default_rng(9)
    prompts = rng.integers(4, 260, (PROMPTS, 6)).tolist()
    exchange = tmp_path / "exchange.json"
    exchange.write_text(json.dumps([prompts, 48]))
    (tmp_path / "engine.py").write_text(ENGINE)
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(tmp_path / "engine.py"), str(policy), str(drafter), str(exchange), str(DRAFT)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    counts = json.loads(exchange.read_text())
    length = 1 + counts["accepted"] / counts["drafts"]
    print(f"acceptance length {length:.2f}, trained {epochs[-1].acceptance_per_position}, {epochs[-1].seconds:.1f} s")  # noqa: T201
    assert length > 1.5
    # What the trainer estimates is what the engine finds, roughly: other prompts, and greedy.
    estimate = 1 + sum(np.cumprod(epochs[-1].acceptance_per_position))
    assert length > 0.7 * estimate
