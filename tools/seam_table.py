"""Lists every name of vllm, megatron-core and torch that specrl uses and that upstream may change without notice.

vllm and megatron-core promise no stable API, so every name imported from them is listed. Of torch only private names
are: those with an underscore in their path. Also listed are all upstream classes that we subclass, and all upstream
attributes that we replace or assign.

`gpu_pins.py` describes each name in a version of its package. `tests/unit/seams` collects these uses from our syntax
trees. It fails for a use that has no row, and for a row that has no use.

A name is spelled as our code imports it. Where our code reaches it through an untyped object, it is spelled as upstream
defines it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Use(StrEnum):
    """How our code uses a name."""

    IMPORTS = "imports"
    SUBCLASSES = "subclasses"
    OVERRIDES = "overrides"
    """Our subclass overrides the method or attribute."""
    REPLACES = "replaces"
    """Our code assigns it: a replacement function or object, or a value."""
    READS = "reads"
    """Our code calls or reads it, either as a private name of an object or relying on how its body works."""
    ADDS = "adds"
    """Our code adds it, so it must not exist upstream."""


FOUND_BY_SYNTAX = frozenset({Use.IMPORTS, Use.SUBCLASSES, Use.OVERRIDES, Use.REPLACES, Use.ADDS})
"""Uses that the test finds in our syntax trees. Of `READS` it finds private names only."""


@dataclass(frozen=True)
class Seam:
    """One upstream name, and how our code uses it.

    where: the modules of ours that use it, relative to `specrl`.
    body: our code relies on how the name works inside, so its syntax tree is compared, too.
    only: the parameters that we pass by name; the others are not compared. For functions with very many of them.
    absent: why the name may be missing in a supported version.
    looks_for: attributes that our code sets and that the body must still read.
    unchecked: why neither sources nor `.pyi` files can show the name.
    """

    name: str
    use: Use
    where: tuple[str, ...]
    body: bool = False
    only: tuple[str, ...] = ()
    absent: str = ""
    looks_for: tuple[str, ...] = ()
    unchecked: str = ""

    @property
    def package_name(self) -> str:
        """Import name of the upstream package."""
        return self.name.partition(".")[0]

    @property
    def last_name(self) -> str:
        """The last component of the name."""
        return self.name.rpartition(".")[2]


def _list_seams(owner: str, names: str, use: Use, where: tuple[str, ...], *, body: bool = False) -> tuple[Seam, ...]:
    """Return the rows of names that our code uses alike. names: of one module or class, separated by spaces."""
    return tuple(Seam(f"{owner}.{name}", use, where, body) for name in names.split())


# Modules of ours.
_VLLM = "generation.vllm_backend"
_ENGINE = (f"{_VLLM}.engine",)
_LAUNCH = (f"{_VLLM}.launch",)
_FOLLOWER = (f"{_VLLM}.follower",)
_ENGINE_ARGUMENTS = (f"{_VLLM}.arguments",)
_COMPLETION = (f"{_VLLM}.completion",)
_TRANSLATION = (f"{_VLLM}.translation",)
_COUNTERS = (f"{_VLLM}.counters",)
_DRAFT_LENGTH = (f"{_VLLM}.draft_length_client",)
_PLUGIN = (f"{_VLLM}.plugin",)
_SCHEDULER = (f"{_VLLM}.extensions.scheduler",)
_REST = (f"{_VLLM}.extensions.draft_rest",)
_EXPERTS = (f"{_VLLM}.extensions.routed_experts",)
_SETS = (f"{_VLLM}.extensions.sampling_sets",)
_LATE = (f"{_VLLM}.extensions.late_logprobs",)
_REPAIR = (f"{_VLLM}.extensions.cpu_repair",)
_KERNELS = (f"{_VLLM}.extensions.cpu_kernels",)
_WORKER = (f"{_VLLM}.extensions.worker",)
_SAMPLERS = (f"{_VLLM}.extensions.samplers",)
_MEGATRON = "trainer.megatron_backend"
_GROUPS = (f"{_MEGATRON}.parallel.groups",)
_MODEL = (f"{_MEGATRON}.model.gpt_model",)
_ATTENTION = (f"{_MEGATRON}.model.attention",)
_SWIGLU = (f"{_MEGATRON}.kernels.fused_swiglu",)
_DRAFTERS = tuple(f"drafting.{name}" for name in ("drafter", "layers", "eagle3.head", "mtp.head"))
_ADAPTERS = (f"{_MEGATRON}.model.adapters",)
_ROUTER = (f"{_MEGATRON}.model.router_replay",)
_PASSES = (f"{_MEGATRON}.policy.schedule",)
_POLICY = (f"{_MEGATRON}.policy.sharded_policy",)
_BUILDER = (f"{_MEGATRON}.policy.optimizer",)
_STATE = (f"{_MEGATRON}.policy.optimizer_state",)
_SHIM = (f"{_MEGATRON}.cpu_shim",)
_SENDER = (f"{_MEGATRON}.weight_sender",)
_GROUP = ("weights.group",)

# Modules and classes of theirs.
_LOADER = "vllm.model_executor.model_loader.default_loader.DefaultModelLoader"
_CORE_PROCESS = "vllm.v1.engine.core.EngineCore"
_SCHED = "vllm.v1.core.sched.scheduler.Scheduler"
_STEP = "vllm.v1.core.sched.output.SchedulerOutput"
_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
_CUDA_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager"
_PROPOSERS = "vllm.v1.spec_decode"
_SAMPLER = "vllm.v1.worker.gpu.sample.sampler.Sampler"
_DETOKENIZER = "vllm.v1.engine.detokenizer.IncrementalDetokenizer"
_LOGGER = "vllm.v1.metrics.loggers.StatLoggerBase"
_RELOAD = "vllm.model_executor.model_loader.reload"
_LAYERS = "vllm.model_executor.layers"
_CONNECTOR = "vllm.distributed.aux_output_connector.worker"
_CORE = "megatron.core"
_LAYER_PARTS = f"{_CORE}.transformer.transformer_layer.TransformerLayerSubmodules"
_ATTENTION_PARTS = f"{_CORE}.transformer.attention.SelfAttentionSubmodules"
_COLUMNS = f"{_CORE}.tensor_parallel.layers.ColumnParallelLinear"
_PACKED = f"{_CORE}.packed_seq_params.PackedSeqParams"
_YARN = f"{_CORE}.models.common.embeddings.yarn_rotary_pos_embedding"
_OPTIMIZERS = f"{_CORE}.optimizer"
_SHARDED = f"{_OPTIMIZERS}.distrib_optimizer.DistributedOptimizer"
_RANDOM = f"{_CORE}.tensor_parallel.random"
_C10D = "torch._C._distributed_c10d"

# Parameters that we pass by name.
_ARGUMENTS = (
    "model dtype max_model_len max_num_seqs tensor_parallel_size seed enforce_eager kv_cache_memory_bytes "
    "logprobs_mode enable_prefix_caching use_tqdm_on_load worker_extension_cls speculative_config "
    "gpu_memory_utilization kv_cache_dtype attention_backend enable_expert_parallel "
    "enable_chunked_prefill max_num_batched_tokens compilation_config enable_return_routed_experts async_scheduling "
    "return_sampling_mask "
    "nnodes node_rank master_addr master_port distributed_executor_backend"
)
_SAMPLING = (
    "max_tokens temperature top_p top_k seed stop logprobs flat_logprobs detokenize skip_special_tokens output_kind "
    "skip_clone"
)
_TRANSFORMER = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
    "layernorm_epsilon qk_layernorm add_bias_linear gated_linear_unit activation_func attention_dropout hidden_dropout "
    "bias_dropout_fusion bias_activation_fusion gradient_accumulation_fusion tensor_model_parallel_size "
    "sequence_parallel context_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "batch_p2p_comm overlap_p2p_comm recompute_granularity recompute_method recompute_num_layers pipeline_dtype "
    "params_dtype bf16 use_cpu_initialization deterministic_mode cuda_graph_modules calculate_per_token_loss "
    "num_moe_experts moe_router_topk moe_ffn_hidden_size moe_router_pre_softmax moe_router_load_balancing_type "
    "moe_router_dtype moe_token_dispatcher_type expert_model_parallel_size expert_tensor_parallel_size"
)
_OPTIMIZER = (
    "optimizer lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad bf16 params_dtype use_distributed_optimizer "
    "muon_momentum muon_scale_mode muon_extra_scale_factor muon_tp_mode muon_fp32_matmul_prec"
)

VLLM = (
    # Start and requests.
    Seam("vllm.AsyncEngineArgs", Use.IMPORTS, _LAUNCH, only=tuple(_ARGUMENTS.split())),
    Seam("vllm.AsyncEngineArgs.create_engine_config", Use.READS, _LAUNCH),
    Seam("vllm.config.parallel.ParallelConfig.distributed_executor_backend", Use.REPLACES, _LAUNCH),
    Seam("vllm.config.VllmConfig._set_cudagraph_sizes", Use.READS, _ENGINE_ARGUMENTS, body=True),
    Seam(f"{_CUDA_GRAPHS}._init_candidates", Use.READS, _ENGINE_ARGUMENTS, body=True),
    Seam("vllm.config.scheduler.SchedulerConfig.scheduler_cls", Use.REPLACES, _DRAFT_LENGTH),
    Seam("vllm.SamplingParams", Use.IMPORTS, _COMPLETION, only=tuple(_SAMPLING.split())),
    Seam("vllm.sampling_params.RequestOutputKind", Use.IMPORTS, _COMPLETION + _LATE),
    Seam("vllm.v1.engine.EngineCoreRequest", Use.IMPORTS, _COMPLETION),
    Seam(_DETOKENIZER, Use.IMPORTS, _COMPLETION),
    *_list_seams(_DETOKENIZER, "from_new_request update get_next_output_text", Use.READS, _COMPLETION),
    Seam("vllm.logprobs.FlatLogprobs", Use.READS, _COMPLETION),
    Seam("vllm.inputs.engine.tokens_input", Use.IMPORTS, _ENGINE),
    Seam("vllm.exceptions.VLLMClientError", Use.IMPORTS, _TRANSLATION),
    Seam("vllm.v1.engine.exceptions.EngineDeadError", Use.IMPORTS, _TRANSLATION),
    Seam(_LOGGER, Use.SUBCLASSES, _COUNTERS),
    *_list_seams(_LOGGER, "__init__ record log_engine_initialized", Use.OVERRIDES, _COUNTERS),
    Seam("vllm.v1.engine.async_llm.AsyncLLM", Use.IMPORTS, _ENGINE),
    *_list_seams(
        "vllm.v1.engine.async_llm.AsyncLLM",
        "add_request abort get_tokenizer pause_generation reset_prefix_cache update_weight_version collective_rpc",
        Use.READS,
        _ENGINE,
    ),
    # The engine core's process, which is forked before the front end has threads.
    *_list_seams("vllm.v1.engine", "async_llm core utils", Use.IMPORTS, _LAUNCH),
    Seam("vllm.v1.worker.cpu_worker", Use.IMPORTS, _LAUNCH),
    Seam("vllm.v1.engine.utils.get_mp_context", Use.REPLACES, _LAUNCH),
    # A replica of several nodes.
    Seam("vllm.v1.executor.multiproc_executor.MultiprocExecutor", Use.IMPORTS, _FOLLOWER),
    Seam("vllm.entrypoints.cli.serve.run_headless", Use.READS, _FOLLOWER, body=True),
    # The engine core, and the live draft length.
    Seam(_CORE_PROCESS, Use.IMPORTS, _PLUGIN),
    Seam(f"{_CORE_PROCESS}.specrl_drafting", Use.ADDS, _PLUGIN, absent="it is ours; the front end calls it by name"),
    Seam(f"{_CORE_PROCESS}.post_step", Use.REPLACES, _PLUGIN, body=True),
    Seam(_LOADER, Use.IMPORTS, _PLUGIN),
    Seam(f"{_LOADER}.get_all_weights", Use.REPLACES, _PLUGIN, body=True),
    Seam("vllm.v1.engine.core_client.AsyncMPClient.call_utility_async", Use.READS, _DRAFT_LENGTH),
    Seam(_SCHED, Use.SUBCLASSES, _SCHEDULER + _LATE),
    Seam("vllm.v1.core.sched.async_scheduler.AsyncScheduler", Use.SUBCLASSES, _SCHEDULER, body=True),
    *_list_seams(_SCHED, "schedule reset_prefix_cache", Use.OVERRIDES, _SCHEDULER, body=True),
    Seam(f"{_SCHED}.update_from_output", Use.OVERRIDES, _SCHEDULER + _LATE, body=True),
    *_list_seams(
        _SCHED,
        "__init__ dynamic_sd_lookup make_spec_decoding_stats add_request set_pause_state",
        Use.OVERRIDES,
        _SCHEDULER,
    ),
    *_list_seams(_SCHED, "running waiting", Use.READS, _SCHEDULER),
    *_list_seams(_STEP, "num_spec_tokens_to_schedule scheduled_spec_decode_tokens", Use.READS, _SCHEDULER + _REST),
    Seam(f"{_STEP}.skip_drafts", Use.READS, _SCHEDULER, absent="new in 0.33"),
    # Log-probabilities, which are sent once.
    Seam(f"{_SCHED}.requests", Use.READS, _LATE),
    Seam("vllm.v1.engine.EngineCoreOutput.new_logprobs", Use.REPLACES, _LATE),
    Seam("vllm.v1.engine.EngineCoreOutput.finish_reason", Use.READS, _LATE),
    Seam("vllm.v1.outputs.LogprobsLists", Use.READS, _LATE, body=True),
    Seam("vllm.v1.engine.logprobs.LogprobsProcessor.update_from_output", Use.READS, _LATE, body=True),
    # The model runners, and running them without the drafter.
    Seam("vllm.config.VllmConfig.use_v2_model_runner", Use.READS, _EXPERTS + _SETS),
    *_list_seams(
        "vllm.v1.worker",
        "gpu_model_runner.GPUModelRunner cpu_model_runner.CPUModelRunner "
        "gpu.model_runner.GPUModelRunner cpu.model_runner.CPUModelRunner",
        Use.READS,
        _REST,
    ),
    Seam(f"{_RUNNER}.drafter", Use.READS, _REST),
    Seam(f"{_RUNNER}.execute_model_state", Use.READS, _REST + _EXPERTS),
    Seam(f"{_RUNNER}.execute_model", Use.REPLACES, _REST + _EXPERTS, body=True),
    Seam(f"{_RUNNER}.sample_tokens", Use.REPLACES, _REST + _EXPERTS + _SETS, body=True),
    *_list_seams(_RUNNER, "_sample propose_draft_token_ids", Use.REPLACES, _REST, body=True),
    *_list_seams(_RUNNER, "speculative_config use_aux_hidden_state_outputs", Use.REPLACES, _REST),
    Seam("vllm.model_executor.models.interfaces.EagleModelMixin.aux_hidden_state_layers", Use.REPLACES, _REST),
    Seam(f"{_PROPOSERS}.ngram_proposer.NgramProposer.propose", Use.REPLACES, _REST, body=True),
    Seam(f"{_PROPOSERS}.suffix_decoding.SuffixDecodingProposer.propose", Use.REPLACES, _REST),
    Seam(f"{_PROPOSERS}.llm_base_proposer.SpecDecodeBaseProposer.propose", Use.REPLACES, _REST),
    Seam(f"{_PROPOSERS}.llm_base_proposer.SpecDecodeBaseProposer._last_draft_probs", Use.REPLACES, _REST),
    *_list_seams("vllm.config", "CUDAGraphMode CompilationMode", Use.IMPORTS, _REST),
    Seam(f"{_SECOND_RUNNER}.execute_model", Use.REPLACES, _REST, body=True, looks_for=("num_spec_tokens_to_schedule",)),
    Seam(f"{_SECOND_RUNNER}.sample_tokens", Use.READS, _REST, body=True, looks_for=("speculator", "draft_tokens")),
    *_list_seams(_SECOND_RUNNER, "speculator req_states", Use.READS, _REST),
    Seam("vllm.v1.worker.gpu.states.RequestState.draft_tokens", Use.READS, _REST),
    Seam("vllm.v1.worker.gpu.input_batch.InputBatch.num_reqs", Use.READS, _REST),
    Seam(f"{_SPECULATORS}.speculator.BaseSpeculator.propose", Use.REPLACES, _REST),
    *_list_seams(
        _SPECULATORS,
        "target_dependent_ar.speculator.TargetDependentARSpeculator.propose "
        "multi_module_mtp.speculator.MultiModuleMTPSpeculator.propose "
        "standalone_ar.speculator.StandaloneARSpeculator.propose ngram.speculator.NgramGPUSpeculator.propose",
        Use.READS,
        _REST,
        body=True,
    ),
    # Weights.
    Seam("vllm.config.set_current_vllm_config", Use.IMPORTS, _WORKER),
    Seam(f"{_RELOAD}.initialize_layerwise_reload", Use.IMPORTS, _WORKER, body=True),
    Seam(f"{_RELOAD}.finalize_layerwise_reload", Use.IMPORTS, _WORKER, body=True),
    Seam(f"{_LAYERS}.vocab_parallel_embedding.ParallelLMHead", Use.IMPORTS, _WORKER),
    Seam(f"{_LAYERS}.fused_moe.fused_moe_method_base.FusedMoEMethodBase", Use.IMPORTS, _WORKER),
    Seam(f"{_LAYERS}.fused_moe.fused_moe_method_base.FusedMoEMethodBase.moe_kernel", Use.REPLACES, _WORKER),
    Seam(f"{_RUNNER}.get_draft_model", Use.READS, _WORKER),
    # The sampling check calls the samplers of both model runners. The second runner's get a request table of ours.
    *_list_seams("vllm.v1.sample", "sampler.Sampler rejection_sampler.RejectionSampler", Use.READS, _SAMPLERS),
    *_list_seams(_RUNNER, "sampler rejection_sampler", Use.READS, _SAMPLERS + _SETS),
    Seam(f"{_PROPOSERS}.metadata.SpecDecodeMetadata", Use.IMPORTS, _SAMPLERS),
    Seam(f"{_SAMPLER}.__call__", Use.READS, _SAMPLERS, body=True, looks_for=("req_states",)),
    *_list_seams(
        _SAMPLER,
        "sampling_states needs_logits_processing req_states logprob_token_ids_state logits_processors "
        "thinking_budget_state",
        Use.REPLACES,
        _SAMPLERS,
    ),
    Seam("vllm.v1.worker.gpu.sample.states.SamplingStates", Use.IMPORTS, _SAMPLERS),
    Seam("vllm.v1.worker.gpu.sample.logprob.LogprobTokenIdsState", Use.IMPORTS, _SAMPLERS),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler.__call__",
        Use.READS,
        _SAMPLERS,
        body=True,
        looks_for=("sampler",),
    ),
    # Routed experts of sampled tokens, for routing replay in the trainer.
    Seam("vllm.config.VllmConfig._verify_aux_output_compatibility", Use.REPLACES, _EXPERTS, body=True),
    Seam(f"{_CONNECTOR}.get_aux_output_connector", Use.IMPORTS, _EXPERTS),
    *_list_seams(f"{_CONNECTOR}.AuxOutputWorkerConnector", "begin_step prepare_output", Use.READS, _EXPERTS, body=True),
    *_list_seams(f"{_CONNECTOR}.PendingAuxOutput", "enqueue_cpu_copy process_output", Use.READS, _EXPERTS),
    Seam("vllm.v1.outputs.ModelRunnerOutput.aux_output_connector_output", Use.REPLACES, _EXPERTS),
    # The ids that top-k and top-p left. The second model runner returns them itself; the first one's samplers are
    # watched.
    Seam("vllm.config.VllmConfig", Use.IMPORTS, _EXPERTS + _SETS),
    Seam("vllm.config.VllmConfig._verify_sampling_replay_config", Use.REPLACES, _SETS, body=True),
    Seam("vllm.config.model.ModelConfig.return_sampling_mask", Use.READS, _SETS),
    Seam("vllm.v1.sample.sampler.Sampler.sample", Use.REPLACES, _SETS, body=True),
    Seam("vllm.v1.sample.rejection_sampler.RejectionSampler._get_logprobs_tensors", Use.REPLACES, _SETS, body=True),
    *_list_seams(
        f"{_PROPOSERS}.metadata.SpecDecodeMetadata",
        "target_logits_indices bonus_logits_indices cu_num_sampled_tokens",
        Use.READS,
        _SETS,
    ),
    Seam("vllm.v1.outputs.SamplingMaskLists", Use.IMPORTS, _SETS, body=True),
    Seam("vllm.v1.outputs.ModelRunnerOutput.sampling_masks", Use.REPLACES, _SETS),
    Seam("vllm.outputs.CompletionOutput.sampling_mask", Use.READS, _COMPLETION),
    Seam(
        "vllm.v1.engine.input_processor.InputProcessor._validate_params",
        Use.READS,
        _COMPLETION,
        body=True,
        looks_for=("return_sampling_mask",),
    ),
    # Repairs on CPUs.
    Seam(
        "vllm.platforms.current_platform",
        Use.IMPORTS,
        _KERNELS + _REPAIR + _DRAFT_LENGTH + _LAUNCH + _EXPERTS + _WORKER,
    ),
    Seam("vllm.triton_utils.HAS_TRITON", Use.IMPORTS, _REPAIR),
    Seam("vllm.utils.cpu_triton_utils", Use.IMPORTS, _REPAIR),
    Seam("vllm.utils.cpu_triton_utils._expand_kernel_impl", Use.REPLACES, _REPAIR, body=True),
    Seam("vllm.v1.sample.ops.topk_topp_sampler", Use.IMPORTS, _REPAIR),
    Seam("vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_only", Use.REPLACES, _REPAIR, body=True),
    Seam("vllm.ir", Use.IMPORTS, _KERNELS),
    Seam("vllm.platforms.interface.Platform.get_default_ir_op_priority", Use.REPLACES, _KERNELS, body=True),
)

MEGATRON = (
    # The model.
    Seam(f"{_CORE}.parallel_state", Use.IMPORTS, _GROUPS + _MODEL + _BUILDER),
    Seam(f"{_CORE}.parallel_state._global_process_group_list", Use.READS, _GROUPS),
    Seam(f"{_CORE}.parallel_state.initialize_model_parallel", Use.READS, _GROUPS, body=True),
    Seam(f"{_CORE}.parallel_state.destroy_model_parallel", Use.READS, _GROUPS, body=True),
    Seam(f"{_CORE}.tensor_parallel", Use.IMPORTS, _GROUPS),
    *_list_seams(f"{_CORE}.models.gpt", "GPTModel gpt_layer_specs.get_gpt_layer_local_spec", Use.IMPORTS, _MODEL),
    Seam(f"{_CORE}.transformer.TransformerConfig", Use.IMPORTS, _MODEL, only=tuple(_TRANSFORMER.split())),
    Seam(f"{_CORE}.transformer.transformer_block.TransformerBlockSubmodules", Use.IMPORTS, _MODEL),
    Seam(f"{_CORE}.transformer.transformer_block.get_num_layers_to_build", Use.IMPORTS, _MODEL),
    *_list_seams(_LAYER_PARTS, "input_layernorm pre_mlp_layernorm", Use.REPLACES, _MODEL),
    *_list_seams(_ATTENTION_PARTS, "core_attention q_layernorm k_layernorm", Use.REPLACES, _MODEL),
    Seam(f"{_CORE}.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding.inv_freq", Use.REPLACES, _MODEL),
    *_list_seams(_COLUMNS, "sequence_parallel allreduce_dgrad", Use.REPLACES, _MODEL),
    Seam(
        f"{_CORE}.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads",
        Use.READS,
        _MODEL,
        body=True,
        looks_for=("sequence_parallel",),
    ),
    Seam(
        f"{_YARN}._yarn_get_concentration_factor_from_config",
        Use.READS,
        _MODEL,
        body=True,
        looks_for=("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim"),
    ),
    *_list_seams(_YARN, "_yarn_get_concentration_factor _yarn_get_mscale", Use.READS, _MODEL, body=True),
    # Attention, routing and passes.
    Seam(_PACKED, Use.SUBCLASSES, _ATTENTION),
    *_list_seams(
        _PACKED,
        "__post_init__ qkv_format cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv",
        Use.OVERRIDES,
        _ATTENTION,
    ),
    Seam(f"{_CORE}.transformer.module.MegatronModule", Use.SUBCLASSES, _ATTENTION),
    Seam(f"{_CORE}.transformer.module.MegatronModule.__init__", Use.OVERRIDES, _ATTENTION),
    Seam(f"{_CORE}.transformer.dot_product_attention.DotProductAttention", Use.READS, _ATTENTION),
    Seam(f"{_CORE}.transformer.transformer_config.TransformerConfig", Use.IMPORTS, _ATTENTION),
    Seam(f"{_CORE}.tensor_parallel.mappings.gather_from_sequence_parallel_region", Use.IMPORTS, _ATTENTION + _PASSES),
    Seam(f"{_CORE}.transformer.moe.router.TopKRouter.router_replay", Use.REPLACES, _ROUTER),
    Seam(f"{_CORE}.transformer.moe.router_replay.RouterReplay.get_replay_topk", Use.READS, _ROUTER),
    Seam(f"{_CORE}.pipeline_parallel.get_forward_backward_func", Use.IMPORTS, _PASSES),
    Seam(f"{_CORE}.tensor_parallel.copy_to_tensor_model_parallel_region", Use.IMPORTS, _ADAPTERS),
    # Fast kernels.
    Seam(f"{_CORE}.transformer.mlp", Use.IMPORTS, _SWIGLU),
    *_list_seams(
        f"{_CORE}.transformer.mlp", "bias_swiglu_impl weighted_bias_swiglu_impl", Use.REPLACES, _SWIGLU, body=True
    ),
    Seam(f"{_CORE}.transformer.mlp.MLP.forward", Use.READS, _SWIGLU, body=True, looks_for=("bias_swiglu_impl",)),
    # Gradients and optimizer.
    Seam(f"{_CORE}.distributed.DistributedDataParallel", Use.IMPORTS, _BUILDER),
    Seam(f"{_CORE}.distributed.DistributedDataParallelConfig", Use.IMPORTS, _BUILDER),
    Seam(f"{_CORE}.distributed.finalize_model_grads", Use.IMPORTS, _POLICY),
    Seam(f"{_OPTIMIZERS}.OptimizerConfig", Use.IMPORTS, _BUILDER, only=tuple(_OPTIMIZER.split())),
    Seam(f"{_OPTIMIZERS}.get_megatron_optimizer", Use.IMPORTS, _BUILDER),
    Seam(f"{_OPTIMIZERS}.emerging_optimizers.TensorParallelMuon", Use.IMPORTS, _STATE),
    Seam(_SHARDED, Use.IMPORTS, _BUILDER + _STATE),
    Seam(f"{_SHARDED}.compute_full_param_layout", Use.READS, _BUILDER),
    *_list_seams(
        _SHARDED, "_get_model_param_range_map _get_main_param_and_optimizer_states", Use.READS, _STATE, body=True
    ),
    Seam(f"{_SHARDED}.model_param_gbuf_map", Use.READS, _STATE),
    Seam(f"{_OPTIMIZERS}.optimizer.ChainedOptimizer.chained_optimizers", Use.READS, _STATE),
    Seam(f"{_CORE}.tensor_parallel.mappings.reduce_from_tensor_model_parallel_region", Use.IMPORTS, _POLICY),
    # Megatron without CUDA.
    Seam(_RANDOM, Use.IMPORTS, _SHIM),
    Seam(f"{_RANDOM}.torch", Use.REPLACES, _SHIM),
    *_list_seams(_RANDOM, "_set_cuda_rng_state _get_cuda_rng_state", Use.REPLACES, _SHIM, body=True),
    Seam(f"{_CORE}.transformer.moe.token_dispatcher", Use.IMPORTS, _SHIM),
    Seam(f"{_CORE}.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu", Use.REPLACES, _SHIM, body=True),
)

TORCH = (
    Seam("torch.nn.Module", Use.SUBCLASSES, (*_DRAFTERS, *_ADAPTERS)),
    Seam("torch.nn.RMSNorm", Use.SUBCLASSES, _MODEL),
    Seam(
        "torch.autograd.Function",
        Use.SUBCLASSES,
        ("drafting.vocabulary", "trainer.losses.sequences", f"{_MEGATRON}.policy.distributions"),
    ),
    Seam("torch.Tensor.grad", Use.REPLACES, ("drafting.online",)),
    # Process groups: torch.distributed re-exports these without types.
    *_list_seams(_C10D, "BroadcastOptions PrefixStore ProcessGroupGloo ProcessGroupNCCL Store", Use.IMPORTS, _GROUP),
    *_list_seams(_C10D, "BroadcastOptions.rootRank BroadcastOptions.rootTensor", Use.REPLACES, _GROUP),
    *_list_seams(_C10D, "ProcessGroupNCCL.Options ProcessGroupNCCL.abort", Use.READS, _GROUP),
    Seam(f"{_C10D}.ProcessGroupNCCL.Options._timeout", Use.REPLACES, _GROUP),
    Seam(f"{_C10D}.TCPStore", Use.IMPORTS, _SENDER + _GROUP),
    Seam(f"{_C10D}.HashStore", Use.IMPORTS, _GROUPS),
    # Megatron without CUDA.
    *_list_seams("torch", "compile Tensor.to Tensor.type Tensor.cuda nn.Module.cuda", Use.REPLACES, _SHIM),
    Seam(
        "torch.ops._C",
        Use.READS,
        _KERNELS + _REPAIR,
        unchecked="operators of vLLM's compiled module; cpu_kernels checks for them at start, and tests run them",
    ),
    Seam(
        "torch.ops._C.init_cpu_memory_env",
        Use.REPLACES,
        _REPAIR,
        unchecked="an operator of vLLM's compiled module; without it nothing is replaced",
    ),
)

SEAMS: tuple[Seam, ...] = (*VLLM, *MEGATRON, *TORCH)
