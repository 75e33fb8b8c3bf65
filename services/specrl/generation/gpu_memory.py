"""Estimates the GPU memory that one rank of a generation replica needs. Pure arithmetic, without torch and vllm.

    weights      b (P + D) / T, of policy and drafter
    activations  b N (4 H + 3 I / T), for the largest step
    logits       three float32 rows of V for each token of a full step, of scores, probabilities and drafts
    fixed        2 GiB, for CUDA's context, kernels and workspaces; 2 GiB more for CUDA graphs

b: bytes of the policy's dtype, P, D: parameters, T: tensor parallel ranks, N: tokens of a step, H: hidden size,
I: intermediate size, V: vocabulary. The fixed parts are allowances; no GPU has measured them yet. vLLM takes the KV
cache beside these. Called by the replica, which tells vLLM how much must be free, and by the launcher's preflight.
"""

from __future__ import annotations

from specrl.errors import MemoryTooSmall
from specrl.models import ModelFolder
from specrl.records.weights import ITEM_BYTES
from specrl.spec import RunSpec

MIB = 1 << 20
CONTEXT_BYTES = 2048 * MIB
GRAPH_BYTES = 2048 * MIB
SMALLEST_GPU_STEP_TOKENS = 8192
"""What vLLM's own server computes in a step on an H100 (0.33, `EngineArgs.get_batch_defaults`). The default of an
embedded engine, 2048, leaves a GPU idle while it reads long prompts."""


def gpu_step_tokens(spec: RunSpec) -> int:
    """Return the most tokens of one step on a GPU."""
    generation = spec.generation
    return generation.max_batched_tokens or max(SMALLEST_GPU_STEP_TOKENS, generation.full_step_tokens)


def estimate_replica_bytes(spec: RunSpec, policy: ModelFolder, drafter_parameters: int) -> int:
    """Estimate the bytes of one rank without its KV cache. drafter_parameters: 0 without a drafter of its own."""
    config = policy.policy_config
    ranks = spec.generation.tensor_parallel
    item_bytes = ITEM_BYTES[spec.model.dtype.value]
    parameters = policy.num_parameters + drafter_parameters
    width = 4 * config.hidden_size + 3 * config.active_intermediate_size / ranks
    activations = item_bytes * gpu_step_tokens(spec) * width
    logits = 3 * 4 * config.vocab_size * spec.generation.full_step_tokens
    graphs = 0 if spec.generation.eager else GRAPH_BYTES
    return int(item_bytes * parameters / ranks + activations + logits) + CONTEXT_BYTES + graphs


def check_kv_cache(spec: RunSpec, needed_bytes: int, card_bytes: int) -> None:
    """Raise MemoryTooSmall if a GPU cannot hold a replica's rank and generation.kvCacheMib, or the rank alone.

    needed_bytes: of the rank without its KV cache. card_bytes: memory of the GPU that the replica may use.
    """
    left_mib = (card_bytes - needed_bytes) // MIB
    graphs = "" if spec.generation.eager else ", or set generation.eager=true, which needs no CUDA graphs"
    if left_mib <= 0:
        raise MemoryTooSmall(
            f"a generation replica's GPU must have more than {needed_bytes // MIB} MiB for weights, activations, CUDA "
            f"graphs and a KV cache, got {card_bytes // MIB} MiB; raise generation.tensorParallel, lower "
            f"generation.maxLiveRollouts or maxBatchedTokens{graphs}"
        )
    cache_mib = spec.generation.kv_cache_mib or 0
    if cache_mib > left_mib:
        raise MemoryTooSmall(
            f"generation.kvCacheMib must be <= {left_mib}, got {cache_mib}: the GPU has {card_bytes // MIB} MiB, and "
            f"weights, activations and CUDA graphs need about {needed_bytes // MIB} MiB of them; lower it{graphs}"
        )
