"""Greedy completions with drafts, by vLLM without specrl's plugin. Drafters that the trainer trained are tested so.

    draft_greedily(ORDERS, FOLDER)      completions of several engines, and how many draft tokens they accepted

The engines run one after another in one fork of the server of `engine_fork`, which has imported vLLM. `plain_vllm`
tests that an export is served by a process that has imported nothing of specrl.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests import engine_fork
from tests.sampling_lab import ONE_PROCESS, bind_kernels_once

TIMEOUT_S = 400.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # As in the product: the server of forks may be the one that the product's engines are forked from later.
    "NUMBA_NUM_THREADS": "1",
    "NUMBA_THREADING_LAYER": "workqueue",
}


@dataclass(frozen=True)
class DraftOrder:
    """An engine and its prompts. speculation: vLLM's `speculative_config`. length: tokens of each completion."""

    policy: str
    speculation: Mapping[str, Any]
    prompts: Sequence[Sequence[int]]
    length: int


@dataclass(frozen=True)
class Drafts:
    """The completions. drafts: number of drafts. accepted: number of accepted draft tokens, by position."""

    tokens: list[list[int]]
    drafts: int
    accepted: list[int]


def draft_greedily(orders: Sequence[DraftOrder], folder: Path) -> list[Drafts]:
    """Answer all orders. folder: for files of the exchange, and for a policy's own code."""
    exchange = folder / "exchange.json"
    exchange.write_text(json.dumps([asdict(order) for order in orders]), encoding="utf-8")
    process = engine_fork.start_fork(
        answer_orders, exchange, folder / "modules", environment=os.environ | ONE_PROCESS | ENVIRONMENT
    )
    process.join(timeout=TIMEOUT_S)
    assert process.exitcode == 0
    return [Drafts(**found) for found in json.loads(exchange.read_text(encoding="utf-8"))]


def answer_orders(exchange: Path, modules: Path) -> None:
    """Answer the orders of a file. Called in the fork. modules: where transformers copies a policy's own code."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.HF_MODULES_CACHE = str(modules)  # the variable of this name was read at import
    bind_kernels_once()
    orders = json.loads(exchange.read_text(encoding="utf-8"))
    found = [answer_order(DraftOrder(**order)) for order in orders]
    exchange.write_text(json.dumps([asdict(drafts) for drafts in found]), encoding="utf-8")


def answer_order(order: DraftOrder) -> Drafts:
    """Start an engine in this process, and stop it after its completions."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        model=order.policy,
        trust_remote_code=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=16,
        seed=0,
        kv_cache_memory_bytes=1 << 26,
        disable_log_stats=False,
        use_tqdm_on_load=False,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        speculative_config=dict(order.speculation),
    )
    params = SamplingParams(temperature=0.0, max_tokens=order.length, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in order.prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    metrics: dict[str, Any] = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    found = Drafts(
        tokens=[list(output.outputs[0].token_ids) for output in outputs],
        drafts=metrics["num_drafts"].value,
        accepted=list(metrics["num_accepted_tokens_per_pos"].values),
    )
    llm.llm_engine.engine_core.shutdown()
    del llm, outputs
    gc.collect()
    cleanup_dist_env_and_memory()
    gc.freeze()  # as in sampling_lab
    return found
