"""Translates a RunSpec to vLLM's arguments and environment, and checks requests. Pure.

Called by `launch` and `engine`. Settings that the run file does not have:
- logprobs_mode is `processed_logprobs`: log-probabilities of the distribution that was sampled, temperature included.
  The trainer computes at the same temperature, so importance ratios are consistent. Greedy ones are at temperature 1.
- With top-p or top-k they are renormalised over the tokens left, whose ids are returned, too (`return_sampling_mask`).
- Prefix caching is on, since the rollouts of a group share their prompt. The engine salts the cache by version.
- There is one engine core. Its workers are extended by `worker.WorkerExtension`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrl.errors import RecordInvalid, RunInvalid
from specrl.generation.draft_lengths.decoding_step import OFF
from specrl.generation.gpu_memory import check_kv_cache, estimate_replica_bytes, gpu_step_tokens
from specrl.generation.nodes import ONE_NODE, ReplicaNodes
from specrl.models import ModelFolder
from specrl.records import RolloutRequest
from specrl.spec import RunSpec
from specrl.spec.generation import DraftLength, KvCacheDtype
from specrl.spec.run import LogLevel
from specrl.spec.trainer import Routing

CPU_KV_CACHE_MIB = 256  # on CPUs, if generation.kvCacheMib is null
SMALLEST_STEP_TOKENS = 2048  # vLLM's default for max_num_batched_tokens
SMALLEST_TEMPERATURE = 0.01  # vLLM silently raises smaller temperatures to this
WORKER_EXTENSION = "specrl.generation.vllm_backend.extensions.worker.WorkerExtension"


def build_environment(spec: RunSpec, nodes: ReplicaNodes = ONE_NODE) -> dict[str, str]:
    """Build the environment variables that vLLM reads at import: no network, no usage statistics, no thread binding."""
    own_address = {"VLLM_HOST_IP": nodes.host} if nodes.count > 1 else {}  # its message queues listen there
    return own_address | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # replicas and trainer share a laptop's cores
        "OMP_NUM_THREADS": str(spec.generation.threads),
        # numba (n-gram look-up) must not change OpenMP's thread count: see worker.py, "Packed weights".
        "NUMBA_THREADING_LAYER": "workqueue",
        "NUMBA_NUM_THREADS": str(spec.generation.threads),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # no pickles, even if the user's environment allows them
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # gRPC's threads do not survive a fork
        # At every start vLLM logs a dozen warnings about settings that this module makes on purpose.
        "VLLM_LOGGING_LEVEL": "DEBUG" if spec.telemetry.log_level is LogLevel.DEBUG else "ERROR",
    }


def is_eager(spec: RunSpec, is_cpu: bool) -> bool:
    """Whether to run without compilation and CUDA graphs: generation.eager, or True on CPUs if it is null.

    See `compilation.resolve_eager`, which replaces null.
    """
    return spec.generation.eager if spec.generation.eager is not None else is_cpu


def build_compile_environment(spec: RunSpec, is_cpu: bool) -> dict[str, str]:
    """Build the environment variables of torch.compile in the engine core, on CPUs. torch reads them at import.

    vLLM's sampler uses torch.compile even in eager mode. On CPUs that needs a C++ compiler, takes about twenty seconds
    at the first tokens, and is slower afterwards. So eager mode turns it off.

    The last two are those that vLLM 0.32 sets itself, but after its imports (platforms/cpu.py).
    """
    if not is_cpu:
        return {}
    if is_eager(spec, is_cpu):
        return {"TORCH_COMPILE_DISABLE": "1"}
    return {
        "TORCH_COMPILE_DISABLE": "0",
        "TORCHDYNAMO_DISABLE": "0",  # in a user's environment it would make vLLM's start fail
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
    }


def kv_cache_bytes(spec: RunSpec, is_cpu: bool) -> int | None:
    """Return the KV cache's size in bytes; None lets vLLM choose it from the GPU's free memory."""
    mib = spec.generation.kv_cache_mib
    if mib is None and is_cpu:
        mib = CPU_KV_CACHE_MIB
    return None if mib is None else mib << 20


def build_engine_arguments(
    spec: RunSpec,
    head: Path | None,
    is_cpu: bool,
    nodes: ReplicaNodes = ONE_NODE,
    utilization: float | None = None,
) -> dict[str, Any]:
    """Build the keyword arguments of vLLM's AsyncEngineArgs.

    head: folder of the EAGLE-3 head or of the draft model, None without one. utilization: of `choose_utilization`.
    """
    generation = spec.generation
    speculative = build_speculative_config(spec, head)
    if speculative is not None and list_adaptive_lengths(spec):
        speculative["num_speculative_tokens_per_batch_size"] = build_length_table(spec)
    steps = build_unchunked_arguments(spec) if is_cpu else {"max_num_batched_tokens": gpu_step_tokens(spec)}
    return steps | {
        "model": spec.model.path,
        "dtype": spec.model.dtype.value,
        "max_model_len": spec.model.max_length,
        "max_num_seqs": generation.max_live_rollouts,
        "tensor_parallel_size": generation.tensor_parallel,
        "enable_expert_parallel": generation.expert_parallel,
        "seed": spec.schedule.seed,
        "enforce_eager": is_eager(spec, is_cpu),
        "kv_cache_memory_bytes": kv_cache_bytes(spec, is_cpu),
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": WORKER_EXTENSION,
        "speculative_config": speculative,
        **_build_chosen_arguments(spec, utilization),
        **build_graph_arguments(spec, is_cpu),
        **_build_routing_arguments(spec, is_cpu),
        **_build_set_arguments(spec, is_cpu),
        **build_node_arguments(nodes),
    }


def choose_utilization(
    spec: RunSpec, policy: ModelFolder, drafter: ModelFolder | None, card_bytes: int
) -> float | None:
    """Choose the share of a GPU's memory that must be free when vLLM starts; None leaves vLLM's own, 0.92.

    With kvCacheMib vLLM does not fill that share, but still demands it. So it is what the replica needs, and other
    programs may have the rest of the GPU. card_bytes: memory of the GPU.

    Raises MemoryTooSmall if kvCacheMib does not fit.
    """
    generation = spec.generation
    if generation.gpu_memory_utilization is not None:
        return float(generation.gpu_memory_utilization)
    if generation.kv_cache_mib is None:
        return None
    needed = estimate_replica_bytes(spec, policy, drafter.num_parameters if drafter is not None else 0)
    check_kv_cache(spec, needed, card_bytes)
    return (needed + (generation.kv_cache_mib << 20)) / card_bytes


def _build_chosen_arguments(spec: RunSpec, utilization: float | None) -> dict[str, Any]:
    """Build the arguments that are passed only if something other than vLLM's default was chosen."""
    generation = spec.generation
    is_fp8 = generation.kv_cache_dtype is KvCacheDtype.FP8
    chosen = {
        "gpu_memory_utilization": utilization,
        "kv_cache_dtype": "fp8" if is_fp8 else None,
        "attention_backend": generation.attention_backend,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def build_node_arguments(nodes: ReplicaNodes) -> dict[str, Any]:
    """Build the arguments of a replica of several nodes. vLLM gives each node the same number of ranks, in order."""
    if nodes.count == 1:
        return {}
    return {
        "nnodes": nodes.count,
        "node_rank": nodes.rank,
        "master_addr": nodes.address,
        "master_port": nodes.port,
        "distributed_executor_backend": "mp",
    }


def _build_routing_arguments(spec: RunSpec, is_cpu: bool) -> dict[str, Any]:
    """Have vLLM return the routed experts of each token if the trainer replays them.

    On CPUs, `extensions/routed_experts.py` does this and cannot handle overlapping steps.
    """
    if spec.trainer.routing is not Routing.REPLAY:
        return {}
    return {"enable_return_routed_experts": True} | ({"async_scheduling": False} if is_cpu else {})


def _build_set_arguments(spec: RunSpec, is_cpu: bool) -> dict[str, Any]:
    """Have vLLM return the ids that top-p and top-k leave, if the run uses them.

    With vLLM's first model runner, `extensions/sampling_sets.py` does this and cannot handle overlapping steps. That
    runner is used on CPUs, and on GPUs for suffix decoding.
    """
    if not spec.generation.sampling.is_truncated:
        return {}
    is_first_runner = is_cpu or spec.generation.speculation.suffix is not None
    return {"return_sampling_mask": True} | ({"async_scheduling": False} if is_first_runner else {})


def build_unchunked_arguments(spec: RunSpec) -> dict[str, Any]:
    """Build the arguments that turn chunked prefill off, for CPUs.

    For a seeded request, vLLM 0.32 rewinds the random generator after each chunk of the prompt but the last. CPU
    generators lack the method for that, and the engine core dies. So every prompt must fit into one step.
    """
    needed = spec.model.max_length + spec.generation.full_step_tokens
    chosen = spec.generation.max_batched_tokens or SMALLEST_STEP_TOKENS
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(chosen, needed),
    }


def build_speculative_config(spec: RunSpec, head: Path | None) -> dict[str, Any] | None:
    """Build vLLM's `speculative_config`; None without speculation.

    head: folder of the EAGLE-3 head or of the draft model, None without one.
    """
    speculation = spec.generation.speculation
    if not speculation.num_draft_tokens:
        return None
    config: dict[str, Any] = {
        "method": speculation.kind,  # our mechanisms are named as vLLM's methods
        "num_speculative_tokens": speculation.num_draft_tokens,
    }
    if head is not None:
        config["model"] = str(head)
    if speculation.draft_model is not None:
        config["draft_tensor_parallel_size"] = spec.generation.tensor_parallel  # vLLM accepts no other value
    if speculation.draft_sampling is not None:
        config["draft_sample_method"] = speculation.draft_sampling.value.lower()
    if speculation.ngram is not None:
        config["prompt_lookup_min"] = speculation.ngram.lookup_min
        config["prompt_lookup_max"] = speculation.ngram.lookup_max
    if speculation.suffix is not None:
        config["suffix_decoding_max_cached_requests"] = speculation.suffix.cached_rollouts
    return config


def build_length_table(spec: RunSpec) -> list[tuple[int, int, int]]:
    """Build vLLM's `num_speculative_tokens_per_batch_size`: (first batch size, last, length).

    With this list vLLM prepares for changing lengths. Its second model runner captures full CUDA graphs only for the
    lengths in the list (0.32 and 0.33, v1/worker/gpu/cudagraph_utils.py `_init_candidates`). Any other length would run
    piecewise, be measured as expensive, and never be chosen. So the list has every length from 0, which also stands for
    OFF, to the longest. With fewer batch sizes than lengths, it has the longest, then 0, then some between.

    The batch sizes in the list are arbitrary: `scheduler.py` replaces the lookup that vLLM makes of it.
    """
    longest = spec.generation.speculation.num_draft_tokens
    largest = spec.generation.max_live_rollouts
    count = min(longest + 1, largest)
    lengths = sorted(longest - place * longest // max(1, count - 1) for place in range(count))
    one_each = [(batch, batch, length) for batch, length in enumerate(lengths, start=1)]
    return [*one_each[:-1], (count, largest, longest)]


def build_graph_arguments(spec: RunSpec, is_cpu: bool) -> dict[str, Any]:
    """Build the arguments that make CUDA graphs cover a full batch with drafts: B * (k + 1) tokens, not B.

    By default vLLM captures up to 512 tokens and runs larger verification steps eagerly. Then speculation can slow a
    run down: a 235B recipe ran at 0.53x for this reason.
    """
    if is_cpu or is_eager(spec, is_cpu):
        return {}
    return {"compilation_config": {"cudagraph_capture_sizes": choose_captured_sizes(spec)}}


def choose_captured_sizes(spec: RunSpec) -> list[int]:
    """Return the step sizes, in tokens, to capture CUDA graphs for, ascending: vLLM's own grid and full batches.

    The grid is the one that vLLM 0.32 and 0.33 derive from the largest size (config/vllm.py `_set_cudagraph_sizes`):
    multiples of 8, and from 256 on of 16. It lacks, for example, a full step of 30 rollouts with 2 drafts each: 90
    tokens. `check_graph_coverage` would reject such a run. Extending the grid would not help: vLLM rounds each size up
    to whole requests, and drops sizes of more than maxLiveRollouts requests.
    """
    generation = spec.generation
    full_step = generation.full_step_tokens
    grid = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, full_step + 1, 16)) if size <= full_step]
    lengths = list_adaptive_lengths(spec) or (generation.speculation.num_draft_tokens,)
    full_batches = (generation.max_live_rollouts * (max(length, 0) + 1) for length in lengths)
    return sorted({*grid, *full_batches})


def check_graph_coverage(spec: RunSpec, largest: int | None, is_cpu: bool) -> None:
    """Raise RunInvalid if vLLM's CUDA graphs do not cover a full step. largest: tokens of its largest graph."""
    full_step = spec.generation.full_step_tokens
    if is_cpu or is_eager(spec, is_cpu) or (largest or 0) >= full_step:
        return
    raise RunInvalid(
        f"CUDA graphs must cover generation.maxLiveRollouts * (numDraftTokens + 1) = {full_step} tokens, "
        f"got {largest or 0}; a larger step would run eagerly: lower maxLiveRollouts or numDraftTokens, or set "
        "generation.eager=true to run without graphs on purpose"
    )


def list_adaptive_lengths(spec: RunSpec) -> tuple[int, ...]:
    """Return the lengths that an adaptive draft length may choose; empty if the length does not adapt.

    Length 0 is left out: it is slower than OFF, and yields no drafts to observe. vLLM's suffix decoding supports only
    its configured length: it chooses each draft's length below that, and its trees must see every step.
    """
    speculation = spec.generation.speculation
    longest = spec.generation.speculation.num_draft_tokens
    if not longest or spec.generation.draft_length is DraftLength.FIXED:
        return ()
    if speculation.kind == "suffix":
        return ()
    return (OFF, *range(1, longest + 1))


def check_request(request: RolloutRequest, spec: RunSpec, vocab_size: int) -> None:
    """Raise RecordInvalid unless vLLM can compute the request exactly as requested."""
    sampling = request.sampling
    name = f"request {request.rollout_id}"
    # Drafts may reach past the completion's end and must fit the context, too.
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
            f"{name}: prompt and completion must fit {room} tokens (model.maxLength - numDraftTokens - 1), got "
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
        raise RecordInvalid(f"{name}: seed must be >= 0 and < 2**63, got {sampling.seed}; choose another or none")
