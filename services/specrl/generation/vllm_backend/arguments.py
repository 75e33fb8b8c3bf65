"""From a RunSpec to vLLM's arguments and environment, and the rules that a request must satisfy. Pure.

Choices that are not the run file's:
- logprobs_mode `processed_logprobs`: log-probabilities of the distribution that was sampled from, temperature included.
  The trainer computes at the same temperature, so importance ratios compare like with like. Greedy ones are at 1.
- prefix caching on: the rollouts of a group share their prompt. The engine salts it by version.
- one engine core; its workers get `worker.WorkerExtension`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrl.errors import RecordInvalid, RunInvalid
from specrl.generation.draft_length import OFF
from specrl.generation.nodes import ONE_NODE, Nodes
from specrl.records import RolloutRequest
from specrl.spec import RunSpec
from specrl.spec.generation import DraftLength
from specrl.spec.run import LogLevel
from specrl.spec.trainer import Routing

CPU_KV_CACHE_MIB = 256
SMALLEST_STEP_TOKENS = 2048  # vLLM's own default for one step
SMALLEST_TEMPERATURE = 0.01  # vLLM raises anything between this and 0 to it
WORKER_EXTENSION = "specrl.generation.vllm_backend.worker.WorkerExtension"


def environment(spec: RunSpec, nodes: Nodes = ONE_NODE) -> dict[str, str]:
    """Variables that vLLM reads while it is imported. No network, no statistics, no thread binding."""
    own_address = {"VLLM_HOST_IP": nodes.host} if nodes.count > 1 else {}  # where its message queues listen
    return own_address | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # replicas and trainer share a laptop's cores
        "OMP_NUM_THREADS": str(spec.generation.threads),
        # numba (n-gram look-up) must leave OpenMP's thread count alone: see worker, "packed weights".
        "NUMBA_THREADING_LAYER": "workqueue",
        "NUMBA_NUM_THREADS": str(spec.generation.threads),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # no pickles, whatever is set outside
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # gRPC's threads do not survive a fork
        # Its dozen warnings at every start are about choices that are made on this page.
        "VLLM_LOGGING_LEVEL": "DEBUG" if spec.telemetry.log_level is LogLevel.DEBUG else "ERROR",
    }


def is_eager(spec: RunSpec, is_cpu: bool) -> bool:
    """Whether to compute without compilation and CUDA graphs: generation.eager, true on CPUs when it is null."""
    return spec.generation.eager if spec.generation.eager is not None else is_cpu


def eager_environment(spec: RunSpec, is_cpu: bool) -> dict[str, str]:
    """Variables for the engine core. vLLM's sampler uses torch.compile even where vLLM is told not to compile; on a
    CPU that takes a C++ compiler and some twenty seconds at the first tokens, and is slower afterwards.
    """
    return {"TORCH_COMPILE_DISABLE": "1"} if is_cpu and is_eager(spec, is_cpu) else {}


def kv_cache_bytes(spec: RunSpec, is_cpu: bool) -> int | None:
    """Size of the KV cache; None leaves it to vLLM, which measures a GPU."""
    mib = spec.generation.kv_cache_mib
    if mib is None and is_cpu:
        mib = CPU_KV_CACHE_MIB
    return None if mib is None else mib << 20


def engine_arguments(spec: RunSpec, head: Path | None, is_cpu: bool, nodes: Nodes = ONE_NODE) -> dict[str, Any]:
    """Keyword arguments of vllm's AsyncEngineArgs. `head` is the folder of the EAGLE-3 head."""
    generation = spec.generation
    speculative = speculative_config(spec, head)
    if speculative is not None and draft_lengths(spec):
        speculative["num_speculative_tokens_per_batch_size"] = named_lengths(spec)
    return (unchunked(spec) if is_cpu else {}) | {
        "model": spec.model.path,
        "dtype": spec.model.dtype.value,
        "max_model_len": spec.model.max_length,
        "max_num_seqs": generation.max_live_rollouts,
        "tensor_parallel_size": generation.tensor_parallel,
        "seed": spec.schedule.seed,
        "enforce_eager": is_eager(spec, is_cpu),
        "kv_cache_memory_bytes": kv_cache_bytes(spec, is_cpu),
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": WORKER_EXTENSION,
        "speculative_config": speculative,
        **graph_arguments(spec, is_cpu),
        **_routing(spec, is_cpu),
        **node_arguments(nodes),
    }


def node_arguments(nodes: Nodes) -> dict[str, Any]:
    """Where the ranks of a replica of several nodes meet; vLLM gives each node as many of them, in the nodes' order."""
    if nodes.count == 1:
        return {}
    return {
        "nnodes": nodes.count,
        "node_rank": nodes.rank,
        "master_addr": nodes.address,
        "master_port": nodes.port,
        "distributed_executor_backend": "mp",
    }


def _routing(spec: RunSpec, is_cpu: bool) -> dict[str, Any]:
    """Experts are returned with the tokens where they are replayed: on CPUs by `routed_experts`, a step at a time."""
    if spec.trainer.routing is not Routing.REPLAY:
        return {}
    return {"enable_return_routed_experts": True} | ({"async_scheduling": False} if is_cpu else {})


def unchunked(spec: RunSpec) -> dict[str, Any]:
    """Prompts are computed whole on CPUs.

    For a request with a seed, vLLM 0.32 rewinds the generator after each chunk of its prompt but the last, by a method
    that CPU generators do not have: the engine core dies. So no prompt may be cut, and the longest must fit one step.
    """
    room = spec.generation.max_live_rollouts * (spec.generation.speculation.num_draft_tokens + 1)
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(SMALLEST_STEP_TOKENS, spec.model.max_length + room),
    }


def speculative_config(spec: RunSpec, head: Path | None) -> dict[str, Any] | None:
    """vLLM's `speculative_config` of the run's mechanism. `head` is the folder of the EAGLE-3 head or draft model."""
    speculation = spec.generation.speculation
    if not speculation.num_draft_tokens:
        return None
    config: dict[str, Any] = {
        "method": speculation.kind,  # our names of mechanisms are vLLM's
        "num_speculative_tokens": speculation.num_draft_tokens,
    }
    if head is not None:
        config["model"] = str(head)
    if speculation.draft_model is not None:
        config["draft_tensor_parallel_size"] = spec.generation.tensor_parallel  # vLLM takes no other
    if speculation.draft_sampling is not None:
        config["draft_sample_method"] = speculation.draft_sampling.value.lower()
    if speculation.ngram is not None:
        config["prompt_lookup_min"] = speculation.ngram.lookup_min
        config["prompt_lookup_max"] = speculation.ngram.lookup_max
    if speculation.suffix is not None:
        config["suffix_decoding_max_cached_requests"] = speculation.suffix.cached_rollouts
    return config


def named_lengths(spec: RunSpec) -> list[tuple[int, int, int]]:
    """vLLM's `num_speculative_tokens_per_batch_size` of a live draft length: (first batch size, last, length).

    Given this list, vLLM prepares for lengths that change. Its second model runner captures full CUDA graphs for the
    lengths in it alone (0.32 and 0.33, v1/worker/gpu/cudagraph_utils.py `_init_candidates`). Any other length would run
    piecewise, be measured as dear, and never be chosen. So every length from 0, which also stands for OFF, to the
    longest is named once. With fewer batch sizes than lengths, the longest is, then 0, then some between. The batch
    sizes themselves mean nothing: `scheduler.py` replaces the lookup that vLLM makes of the list.
    """
    longest, largest = spec.generation.speculation.num_draft_tokens, spec.generation.max_live_rollouts
    count = min(longest + 1, largest)
    lengths = sorted(longest - place * longest // max(1, count - 1) for place in range(count))
    one_each = [(batch, batch, length) for batch, length in enumerate(lengths, start=1)]
    return [*one_each[:-1], (count, largest, longest)]


def graph_arguments(spec: RunSpec, is_cpu: bool) -> dict[str, Any]:
    """CUDA graphs for every step of a full batch: B * (k + 1) tokens, not B.

    vLLM captures up to 512 tokens by default. A larger verification step runs eagerly then, and speculation that should
    gain loses: a 235B recipe ran at 0.53x for this reason.
    """
    if is_cpu or is_eager(spec, is_cpu):
        return {}
    return {"compilation_config": {"cudagraph_capture_sizes": captured_tokens(spec)}}


def captured_tokens(spec: RunSpec) -> list[int]:
    """Tokens of the steps that CUDA graphs are captured for, ascending: vLLM's own grid, and full batches.

    The grid is what vLLM 0.32 and 0.33 make of a largest size alone (config/vllm.py `_set_cudagraph_sizes`): multiples
    of 8, from 256 on of 16. It lacks a full step of 30 rollouts with 2 drafts each, 90 tokens, and
    `check_graph_coverage` refused such a run. A larger grid would not help: vLLM rounds each size up to whole requests,
    and drops it where these are more than maxLiveRollouts.
    """
    generation, full_step = spec.generation, full_step_tokens(spec)
    grid = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, full_step + 1, 16)) if size <= full_step]
    lengths = draft_lengths(spec) or (generation.speculation.num_draft_tokens,)
    full_batches = (generation.max_live_rollouts * (max(length, 0) + 1) for length in lengths)
    return sorted({*grid, *full_batches})


def full_step_tokens(spec: RunSpec) -> int:
    """Tokens that a decoding step of a full batch computes, drafts included."""
    return spec.generation.max_live_rollouts * (spec.generation.speculation.num_draft_tokens + 1)


def check_graph_coverage(spec: RunSpec, largest: int | None, is_cpu: bool) -> None:
    """Raise RunInvalid when vLLM captured less than a full step; `largest` is its largest graph, in tokens."""
    if is_cpu or is_eager(spec, is_cpu) or (largest or 0) >= full_step_tokens(spec):
        return
    raise RunInvalid(
        f"CUDA graphs must cover generation.maxLiveRollouts * (numDraftTokens + 1) = {full_step_tokens(spec)} tokens, "
        f"got {largest or 0}; a larger step would run eagerly: lower maxLiveRollouts or numDraftTokens, or set "
        "generation.eager=true to do without graphs knowingly"
    )


def draft_lengths(spec: RunSpec) -> tuple[int, ...]:
    """Lengths that the mechanism can be asked for; empty without speculation or with generation.draftLength Fixed.

    N-gram look-up keeps no KV cache, so that length 0 is the same as none. vLLM's suffix decoding takes its configured
    length alone: it chooses each draft's own length below that, and its trees must see every step.
    """
    speculation, longest = spec.generation.speculation, spec.generation.speculation.num_draft_tokens
    if not longest or spec.generation.draft_length is DraftLength.FIXED:
        return ()
    if speculation.kind == "suffix":
        return ()
    return (OFF, *range(1 if speculation.kind == "ngram" else 0, longest + 1))


def check_request(request: RolloutRequest, spec: RunSpec, vocab_size: int) -> None:
    """Raise RecordInvalid unless vLLM can compute the request as asked, drafts past its end included."""
    sampling, name = request.sampling, f"request {request.rollout_id}"
    room = spec.model.max_length - (spec.generation.speculation.num_draft_tokens + 1)
    length = len(request.prompt_token_ids) + sampling.max_tokens
    if not request.prompt_token_ids:
        raise RecordInvalid(f"{name}: the prompt must have at least one token, got none; drop the prompt")
    outside = [token for token in request.prompt_token_ids if not 0 <= token < vocab_size]
    if outside:
        raise RecordInvalid(
            f"{name}: prompt tokens must be >= 0 and < {vocab_size}, got {outside[0]}; use the policy's own tokenizer"
        )
    if sampling.max_tokens < 1:
        raise RecordInvalid(f"{name}: max_tokens must be >= 1, got {sampling.max_tokens}; ask for at least one token")
    if length > room:
        raise RecordInvalid(
            f"{name}: prompt and completion must fit {room} tokens (model.maxLength less draft tokens + 1), got "
            f"{len(request.prompt_token_ids)} + {sampling.max_tokens}; shorten it or raise model.maxLength"
        )
    if sampling.temperature != 0 and not sampling.temperature >= SMALLEST_TEMPERATURE:
        raise RecordInvalid(
            f"{name}: temperature must be 0 or >= {SMALLEST_TEMPERATURE}, got {sampling.temperature}; use 0 for greedy"
        )
    if not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise RecordInvalid(
            f"{name}: top_p must be > 0 and <= 1 and top_k >= 0, got {sampling.top_p} and {sampling.top_k}; use 1 and 0"
        )
    if sampling.seed is not None and not 0 <= sampling.seed < 1 << 63:
        raise RecordInvalid(f"{name}: seed must be >= 0 and < 2**63, got {sampling.seed}; leave it out or mend it")
