"""Every name of vllm, megatron and torch that specrl uses without a promise of theirs.

vllm and megatron promise none, so every import of theirs is here; of torch, what has an underscore in its path. So is
every class of theirs that is subclassed, and everything of theirs that is replaced or assigned to. `tests/unit/seams`
collects these from the sources, and fails for one that is missing here and for a row that nothing uses.

Names are spelt as our code imports them, or as upstream defines them where our code meets an object without a type.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Use(StrEnum):
    """What our code does with a name."""

    IMPORTS = "imports"
    SUBCLASSES = "subclasses"
    OVERRIDES = "overrides"
    """A method, or an attribute, in a subclass of ours."""
    REPLACES = "replaces"
    """Puts another function or object in its place, or sets it."""
    READS = "reads"
    """Calls or reads it: as a private name of an object, or in a way that only its body explains."""
    ADDS = "adds"
    """It must not exist upstream."""


FOUND_BY_SYNTAX = frozenset({Use.IMPORTS, Use.SUBCLASSES, Use.OVERRIDES, Use.REPLACES, Use.ADDS})
"""Uses that are found in our syntax trees. Of `READS` that is true of private names alone."""


@dataclass(frozen=True)
class Seam:
    """One name.

    where: our modules, below `specrl`. body: our code relies on how it works, so that its syntax tree is compared, too.
    only: the parameters that we pass by name, where upstream has very many. absent: why it may be missing in a version.
    looks_for: attributes that we set, and that it looks up. unchecked: why neither sources nor `.pyi` tell of it.
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
    def package(self) -> str:
        """The package's name as Python imports it."""
        return self.name.partition(".")[0]

    @property
    def last(self) -> str:
        """The name without its path."""
        return self.name.rpartition(".")[2]


_VLLM = "generation.vllm_backend"
_MEGATRON = "trainer.megatron_backend"
_SCHEDULER = (f"{_VLLM}.scheduler",)
_REST = (f"{_VLLM}.draft_rest",)
_EXPERTS = (f"{_VLLM}.routed_experts",)
_REPAIR = (f"{_VLLM}.cpu_repair",)
_KERNELS = (f"{_VLLM}.cpu_kernels",)
_PLUGIN = (f"{_VLLM}.plugin",)
_WORKER = (f"{_VLLM}.worker",)
_SAMPLERS = (f"{_VLLM}.samplers",)
_ENGINE = (f"{_VLLM}.engine",)
_MODEL = (f"{_MEGATRON}.model",)
_POLICY = (f"{_MEGATRON}.policy",)
_SHIM = (f"{_MEGATRON}.cpu_shim",)
_STATE = (f"{_MEGATRON}.optimizer_state",)
_GROUP = ("weights.group",)

_SCHED = "vllm.v1.core.sched.scheduler.Scheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_SAMPLER = "vllm.v1.worker.gpu.sample.sampler.Sampler"
_RANDOM = "megatron.core.tensor_parallel.random"
_ARGUMENTS = (
    "model dtype max_model_len max_num_seqs tensor_parallel_size seed enforce_eager kv_cache_memory_bytes "
    "logprobs_mode enable_prefix_caching use_tqdm_on_load worker_extension_cls speculative_config "
    "enable_chunked_prefill max_num_batched_tokens compilation_config enable_return_routed_experts async_scheduling "
    "nnodes node_rank master_addr master_port distributed_executor_backend"
)
_SAMPLING = "max_tokens temperature top_p top_k seed stop logprobs skip_special_tokens output_kind ignore_eos"
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
    "optimizer lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad bf16 params_dtype use_distributed_optimizer"
)

VLLM = (
    # Start and requests.
    Seam("vllm.AsyncEngineArgs", Use.IMPORTS, (f"{_VLLM}.launch",), only=tuple(_ARGUMENTS.split())),
    Seam("vllm.AsyncEngineArgs.create_engine_config", Use.READS, (f"{_VLLM}.launch",)),
    Seam("vllm.config.parallel.ParallelConfig.distributed_executor_backend", Use.REPLACES, (f"{_VLLM}.launch",)),
    Seam("vllm.config.VllmConfig._set_cudagraph_sizes", Use.READS, (f"{_VLLM}.arguments",), body=True),
    Seam(
        "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager._init_candidates",
        Use.READS,
        (f"{_VLLM}.arguments",),
        body=True,
    ),
    Seam("vllm.config.scheduler.SchedulerConfig.scheduler_cls", Use.REPLACES, (f"{_VLLM}.drafting",)),
    Seam("vllm.SamplingParams", Use.IMPORTS, (f"{_VLLM}.completion",), only=tuple(_SAMPLING.split())),
    Seam("vllm.SamplingParams.ignore_eos", Use.READS, (f"{_VLLM}.drafting",)),
    Seam("vllm.sampling_params.RequestOutputKind", Use.IMPORTS, (f"{_VLLM}.completion",)),
    Seam("vllm.inputs.engine.tokens_input", Use.IMPORTS, (f"{_VLLM}.drafting", *_ENGINE)),
    Seam("vllm.exceptions.VLLMClientError", Use.IMPORTS, (f"{_VLLM}.translation",)),
    Seam("vllm.v1.engine.exceptions.EngineDeadError", Use.IMPORTS, (f"{_VLLM}.translation",)),
    Seam("vllm.v1.metrics.loggers.StatLoggerBase", Use.SUBCLASSES, (f"{_VLLM}.counters",)),
    Seam("vllm.v1.metrics.loggers.StatLoggerBase.__init__", Use.OVERRIDES, (f"{_VLLM}.counters",)),
    Seam("vllm.v1.metrics.loggers.StatLoggerBase.record", Use.OVERRIDES, (f"{_VLLM}.counters",)),
    Seam("vllm.v1.metrics.loggers.StatLoggerBase.log_engine_initialized", Use.OVERRIDES, (f"{_VLLM}.counters",)),
    Seam("vllm.v1.engine.async_llm.AsyncLLM", Use.IMPORTS, _ENGINE),
    Seam("vllm.v1.engine.async_llm.AsyncLLM.add_request", Use.READS, _ENGINE),
    Seam("vllm.v1.engine.async_llm.AsyncLLM.abort", Use.READS, _ENGINE),
    Seam("vllm.v1.engine.async_llm.AsyncLLM.pause_generation", Use.READS, _ENGINE),
    Seam("vllm.v1.engine.async_llm.AsyncLLM.reset_prefix_cache", Use.READS, _ENGINE),
    Seam("vllm.v1.engine.async_llm.AsyncLLM.update_weight_version", Use.READS, _ENGINE),
    Seam("vllm.v1.engine.async_llm.AsyncLLM.collective_rpc", Use.READS, _ENGINE),
    # A replica of several nodes.
    Seam("vllm.v1.executor.multiproc_executor.MultiprocExecutor", Use.IMPORTS, (f"{_VLLM}.member",)),
    Seam("vllm.entrypoints.cli.serve.run_headless", Use.READS, (f"{_VLLM}.member",), body=True),
    # The engine core, and the live draft length.
    Seam("vllm.v1.engine.core.EngineCore", Use.IMPORTS, _PLUGIN),
    Seam(
        "vllm.v1.engine.core.EngineCore.specrl_drafting",
        Use.ADDS,
        _PLUGIN,
        absent="it is ours; the front end calls it by name",
    ),
    Seam("vllm.v1.engine.core.EngineCore.post_step", Use.REPLACES, _PLUGIN, body=True),
    Seam("vllm.v1.engine.core_client.AsyncMPClient.call_utility_async", Use.READS, (f"{_VLLM}.drafting",)),
    Seam(_SCHED, Use.SUBCLASSES, _SCHEDULER),
    Seam("vllm.v1.core.sched.async_scheduler.AsyncScheduler", Use.SUBCLASSES, _SCHEDULER, body=True),
    Seam(f"{_SCHED}.__init__", Use.OVERRIDES, _SCHEDULER),
    Seam(f"{_SCHED}.dynamic_sd_lookup", Use.OVERRIDES, _SCHEDULER),
    Seam(f"{_SCHED}.schedule", Use.OVERRIDES, _SCHEDULER, body=True),
    Seam(f"{_SCHED}.update_from_output", Use.OVERRIDES, _SCHEDULER, body=True),
    Seam(f"{_SCHED}.make_spec_decoding_stats", Use.OVERRIDES, _SCHEDULER),
    Seam(f"{_SCHED}.add_request", Use.OVERRIDES, _SCHEDULER),
    Seam(f"{_SCHED}.reset_prefix_cache", Use.OVERRIDES, _SCHEDULER, body=True),
    Seam(f"{_SCHED}.set_pause_state", Use.OVERRIDES, _SCHEDULER),
    Seam(f"{_SCHED}.running", Use.READS, _SCHEDULER),
    Seam(f"{_SCHED}.waiting", Use.READS, _SCHEDULER),
    Seam("vllm.v1.core.sched.output.SchedulerOutput.num_spec_tokens_to_schedule", Use.READS, (*_SCHEDULER, *_REST)),
    Seam("vllm.v1.core.sched.output.SchedulerOutput.scheduled_spec_decode_tokens", Use.READS, (*_SCHEDULER, *_REST)),
    Seam("vllm.v1.core.sched.output.SchedulerOutput.skip_drafts", Use.READS, _SCHEDULER, absent="new in 0.33"),
    # The first model runner, and the drafter that rests.
    Seam("vllm.config.VllmConfig.use_v2_model_runner", Use.READS, _EXPERTS),
    Seam(_RUNNER, Use.READS, _REST),
    Seam("vllm.v1.worker.cpu_model_runner.CPUModelRunner", Use.READS, _REST),
    Seam("vllm.v1.worker.gpu.model_runner.GPUModelRunner", Use.READS, _REST),
    Seam("vllm.v1.worker.cpu.model_runner.CPUModelRunner", Use.READS, _REST),
    Seam(f"{_RUNNER}.drafter", Use.READS, _REST),
    Seam(f"{_RUNNER}.speculative_config", Use.REPLACES, _REST),
    Seam(f"{_RUNNER}.execute_model", Use.REPLACES, (*_REST, *_EXPERTS), body=True),
    Seam(f"{_RUNNER}.sample_tokens", Use.REPLACES, (*_REST, *_EXPERTS), body=True),
    Seam(f"{_RUNNER}._sample", Use.REPLACES, _REST, body=True),
    Seam(f"{_RUNNER}.propose_draft_token_ids", Use.REPLACES, _REST, body=True),
    Seam(f"{_RUNNER}.execute_model_state", Use.READS, (*_REST, *_EXPERTS)),
    Seam(f"{_RUNNER}.use_aux_hidden_state_outputs", Use.REPLACES, _REST),
    Seam("vllm.model_executor.models.interfaces.EagleModelMixin.aux_hidden_state_layers", Use.REPLACES, _REST),
    Seam("vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.propose", Use.REPLACES, _REST),
    Seam("vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer._last_draft_probs", Use.REPLACES, _REST),
    Seam("vllm.v1.spec_decode.ngram_proposer.NgramProposer.propose", Use.REPLACES, _REST, body=True),
    Seam("vllm.v1.spec_decode.suffix_decoding.SuffixDecodingProposer.propose", Use.REPLACES, _REST),
    Seam("vllm.config.CUDAGraphMode", Use.IMPORTS, _REST),
    Seam("vllm.config.CompilationMode", Use.IMPORTS, _REST),
    # Weights.
    Seam("vllm.config.set_current_vllm_config", Use.IMPORTS, _WORKER),
    Seam("vllm.model_executor.model_loader.reload.initialize_layerwise_reload", Use.IMPORTS, _WORKER, body=True),
    Seam("vllm.model_executor.model_loader.reload.finalize_layerwise_reload", Use.IMPORTS, _WORKER, body=True),
    Seam("vllm.model_executor.layers.vocab_parallel_embedding.ParallelLMHead", Use.IMPORTS, _WORKER),
    Seam("vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase", Use.IMPORTS, _WORKER),
    Seam(
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase.moe_kernel",
        Use.REPLACES,
        _WORKER,
    ),
    Seam(f"{_RUNNER}.get_draft_model", Use.READS, _WORKER),
    # The check of sampling: samplers of the first model runner, and of the second with a table of requests of our own.
    Seam("vllm.v1.sample.sampler.Sampler", Use.READS, _SAMPLERS),
    Seam("vllm.v1.sample.rejection_sampler.RejectionSampler", Use.READS, _SAMPLERS),
    Seam(f"{_RUNNER}.sampler", Use.READS, _SAMPLERS),
    Seam(f"{_RUNNER}.rejection_sampler", Use.READS, _SAMPLERS),
    Seam("vllm.v1.spec_decode.metadata.SpecDecodeMetadata", Use.IMPORTS, _SAMPLERS),
    Seam(
        f"{_SAMPLER}.__call__",
        Use.READS,
        _SAMPLERS,
        body=True,
        looks_for=("req_states",),
    ),
    Seam(f"{_SAMPLER}.sampling_states", Use.REPLACES, _SAMPLERS),
    Seam(f"{_SAMPLER}.needs_logits_processing", Use.REPLACES, _SAMPLERS),
    Seam(f"{_SAMPLER}.req_states", Use.REPLACES, _SAMPLERS),
    Seam(f"{_SAMPLER}.logprob_token_ids_state", Use.REPLACES, _SAMPLERS),
    Seam(f"{_SAMPLER}.logits_processors", Use.REPLACES, _SAMPLERS),
    Seam(f"{_SAMPLER}.thinking_budget_state", Use.REPLACES, _SAMPLERS),
    Seam("vllm.v1.worker.gpu.sample.states.SamplingStates", Use.IMPORTS, _SAMPLERS),
    Seam("vllm.v1.worker.gpu.sample.logprob.LogprobTokenIdsState", Use.IMPORTS, _SAMPLERS),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler.__call__",
        Use.READS,
        _SAMPLERS,
        body=True,
        looks_for=("sampler",),
    ),
    # Experts that were sampled.
    Seam("vllm.config.VllmConfig", Use.IMPORTS, _EXPERTS),
    Seam("vllm.config.VllmConfig._verify_aux_output_compatibility", Use.REPLACES, _EXPERTS, body=True),
    Seam("vllm.distributed.aux_output_connector.worker.get_aux_output_connector", Use.IMPORTS, _EXPERTS),
    Seam(
        "vllm.distributed.aux_output_connector.worker.AuxOutputWorkerConnector.begin_step",
        Use.READS,
        _EXPERTS,
        body=True,
    ),
    Seam(
        "vllm.distributed.aux_output_connector.worker.AuxOutputWorkerConnector.prepare_output",
        Use.READS,
        _EXPERTS,
        body=True,
    ),
    Seam("vllm.distributed.aux_output_connector.worker.PendingAuxOutput.enqueue_cpu_copy", Use.READS, _EXPERTS),
    Seam("vllm.distributed.aux_output_connector.worker.PendingAuxOutput.process_output", Use.READS, _EXPERTS),
    Seam("vllm.v1.outputs.ModelRunnerOutput.aux_output_connector_output", Use.REPLACES, _EXPERTS),
    # Repairs on CPUs.
    Seam(
        "vllm.platforms.current_platform",
        Use.IMPORTS,
        (*_KERNELS, *_REPAIR, f"{_VLLM}.drafting", f"{_VLLM}.launch", *_EXPERTS, *_WORKER),
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
    Seam("megatron.core.parallel_state", Use.IMPORTS, (f"{_MEGATRON}.groups", *_MODEL, *_POLICY)),
    Seam("megatron.core.parallel_state._global_process_group_list", Use.READS, (f"{_MEGATRON}.groups",)),
    Seam("megatron.core.parallel_state.initialize_model_parallel", Use.READS, (f"{_MEGATRON}.groups",), body=True),
    Seam("megatron.core.parallel_state.destroy_model_parallel", Use.READS, (f"{_MEGATRON}.groups",), body=True),
    Seam("megatron.core.tensor_parallel", Use.IMPORTS, (f"{_MEGATRON}.groups",)),
    Seam("megatron.core.models.gpt.GPTModel", Use.IMPORTS, _MODEL),
    Seam("megatron.core.models.gpt.gpt_layer_specs.get_gpt_layer_local_spec", Use.IMPORTS, _MODEL),
    Seam("megatron.core.transformer.TransformerConfig", Use.IMPORTS, _MODEL, only=tuple(_TRANSFORMER.split())),
    Seam("megatron.core.transformer.transformer_block.TransformerBlockSubmodules", Use.IMPORTS, _MODEL),
    Seam("megatron.core.transformer.transformer_block.get_num_layers_to_build", Use.IMPORTS, _MODEL),
    Seam(
        "megatron.core.transformer.transformer_layer.TransformerLayerSubmodules.input_layernorm", Use.REPLACES, _MODEL
    ),
    Seam(
        "megatron.core.transformer.transformer_layer.TransformerLayerSubmodules.pre_mlp_layernorm",
        Use.REPLACES,
        _MODEL,
    ),
    Seam("megatron.core.transformer.attention.SelfAttentionSubmodules.core_attention", Use.REPLACES, _MODEL),
    Seam("megatron.core.transformer.attention.SelfAttentionSubmodules.q_layernorm", Use.REPLACES, _MODEL),
    Seam("megatron.core.transformer.attention.SelfAttentionSubmodules.k_layernorm", Use.REPLACES, _MODEL),
    Seam("megatron.core.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding.inv_freq", Use.REPLACES, _MODEL),
    Seam("megatron.core.tensor_parallel.layers.ColumnParallelLinear.sequence_parallel", Use.REPLACES, _MODEL),
    Seam("megatron.core.tensor_parallel.layers.ColumnParallelLinear.allreduce_dgrad", Use.REPLACES, _MODEL),
    Seam(
        "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads",
        Use.READS,
        _MODEL,
        body=True,
        looks_for=("sequence_parallel",),
    ),
    Seam(
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding._yarn_get_concentration_factor_from_config",
        Use.READS,
        _MODEL,
        body=True,
        looks_for=("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim"),
    ),
    Seam(
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding._yarn_get_concentration_factor",
        Use.READS,
        _MODEL,
        body=True,
    ),
    Seam(
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding._yarn_get_mscale",
        Use.READS,
        _MODEL,
        body=True,
    ),
    # Attention, routing and passes.
    Seam("megatron.core.packed_seq_params.PackedSeqParams", Use.SUBCLASSES, (f"{_MEGATRON}.attention",)),
    Seam("megatron.core.packed_seq_params.PackedSeqParams.__post_init__", Use.OVERRIDES, (f"{_MEGATRON}.attention",)),
    Seam("megatron.core.packed_seq_params.PackedSeqParams.qkv_format", Use.OVERRIDES, (f"{_MEGATRON}.attention",)),
    Seam("megatron.core.packed_seq_params.PackedSeqParams.cu_seqlens_q", Use.OVERRIDES, (f"{_MEGATRON}.attention",)),
    Seam("megatron.core.packed_seq_params.PackedSeqParams.cu_seqlens_kv", Use.OVERRIDES, (f"{_MEGATRON}.attention",)),
    Seam("megatron.core.packed_seq_params.PackedSeqParams.max_seqlen_q", Use.OVERRIDES, (f"{_MEGATRON}.attention",)),
    Seam("megatron.core.packed_seq_params.PackedSeqParams.max_seqlen_kv", Use.OVERRIDES, (f"{_MEGATRON}.attention",)),
    Seam("megatron.core.transformer.module.MegatronModule", Use.SUBCLASSES, (f"{_MEGATRON}.attention",)),
    Seam("megatron.core.transformer.module.MegatronModule.__init__", Use.OVERRIDES, (f"{_MEGATRON}.attention",)),
    Seam("megatron.core.transformer.dot_product_attention.DotProductAttention", Use.READS, (f"{_MEGATRON}.attention",)),
    Seam("megatron.core.transformer.transformer_config.TransformerConfig", Use.IMPORTS, (f"{_MEGATRON}.attention",)),
    Seam(
        "megatron.core.tensor_parallel.mappings.gather_from_sequence_parallel_region",
        Use.IMPORTS,
        (f"{_MEGATRON}.attention", f"{_MEGATRON}.schedule"),
    ),
    Seam("megatron.core.transformer.moe.router.TopKRouter.router_replay", Use.REPLACES, (f"{_MEGATRON}.replay",)),
    Seam(
        "megatron.core.transformer.moe.router_replay.RouterReplay.get_replay_topk",
        Use.READS,
        (f"{_MEGATRON}.replay",),
    ),
    Seam("megatron.core.pipeline_parallel.get_forward_backward_func", Use.IMPORTS, (f"{_MEGATRON}.schedule",)),
    Seam("megatron.core.tensor_parallel.copy_to_tensor_model_parallel_region", Use.IMPORTS, (f"{_MEGATRON}.adapters",)),
    # Gradients and optimizer.
    Seam("megatron.core.distributed.DistributedDataParallel", Use.IMPORTS, _POLICY),
    Seam("megatron.core.distributed.DistributedDataParallelConfig", Use.IMPORTS, _POLICY),
    Seam("megatron.core.distributed.finalize_model_grads", Use.IMPORTS, _POLICY),
    Seam("megatron.core.optimizer.OptimizerConfig", Use.IMPORTS, _POLICY, only=tuple(_OPTIMIZER.split())),
    Seam("megatron.core.optimizer.get_megatron_optimizer", Use.IMPORTS, _POLICY),
    Seam("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer", Use.IMPORTS, (*_POLICY, *_STATE)),
    Seam(
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.compute_full_param_layout", Use.READS, _POLICY
    ),
    Seam(
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._get_model_param_range_map",
        Use.READS,
        _STATE,
        body=True,
    ),
    Seam(
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._get_main_param_and_optimizer_states",
        Use.READS,
        _STATE,
        body=True,
    ),
    Seam("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.model_param_gbuf_map", Use.READS, _STATE),
    Seam("megatron.core.optimizer.optimizer.ChainedOptimizer.chained_optimizers", Use.READS, _STATE),
    Seam("megatron.core.tensor_parallel.vocab_parallel_cross_entropy", Use.IMPORTS, _POLICY),
    Seam("megatron.core.tensor_parallel.mappings.reduce_from_tensor_model_parallel_region", Use.IMPORTS, _POLICY),
    # Megatron without CUDA.
    Seam(_RANDOM, Use.IMPORTS, _SHIM),
    Seam(f"{_RANDOM}.torch", Use.REPLACES, _SHIM),
    Seam(f"{_RANDOM}._set_cuda_rng_state", Use.REPLACES, _SHIM, body=True),
    Seam(f"{_RANDOM}._get_cuda_rng_state", Use.REPLACES, _SHIM, body=True),
    Seam("megatron.core.transformer.moe.token_dispatcher", Use.IMPORTS, _SHIM),
    Seam("megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu", Use.REPLACES, _SHIM, body=True),
)

TORCH = (
    Seam("torch.nn.Module", Use.SUBCLASSES, ("drafting.head", f"{_MEGATRON}.adapters")),
    Seam("torch.nn.RMSNorm", Use.SUBCLASSES, _MODEL),
    Seam("torch.autograd.Function", Use.SUBCLASSES, ("trainer.losses.sequences",)),
    Seam("torch.Tensor.grad", Use.REPLACES, ("drafting.online",)),
    # Process groups: torch.distributed re-exports these without types.
    Seam("torch._C._distributed_c10d.BroadcastOptions", Use.IMPORTS, _GROUP),
    Seam("torch._C._distributed_c10d.BroadcastOptions.rootRank", Use.REPLACES, _GROUP),
    Seam("torch._C._distributed_c10d.BroadcastOptions.rootTensor", Use.REPLACES, _GROUP),
    Seam("torch._C._distributed_c10d.HashStore", Use.IMPORTS, (f"{_MEGATRON}.groups",)),
    Seam("torch._C._distributed_c10d.PrefixStore", Use.IMPORTS, _GROUP),
    Seam("torch._C._distributed_c10d.ProcessGroupGloo", Use.IMPORTS, _GROUP),
    Seam("torch._C._distributed_c10d.ProcessGroupNCCL", Use.IMPORTS, _GROUP),
    Seam("torch._C._distributed_c10d.ProcessGroupNCCL.Options", Use.READS, _GROUP),
    Seam("torch._C._distributed_c10d.ProcessGroupNCCL.Options._timeout", Use.REPLACES, _GROUP),
    Seam("torch._C._distributed_c10d.ProcessGroupNCCL.abort", Use.READS, _GROUP),
    Seam("torch._C._distributed_c10d.Store", Use.IMPORTS, _GROUP),
    Seam("torch._C._distributed_c10d.TCPStore", Use.IMPORTS, (f"{_MEGATRON}.backend", *_GROUP)),
    # Megatron without CUDA.
    Seam("torch.compile", Use.REPLACES, _SHIM),
    Seam("torch.Tensor.to", Use.REPLACES, _SHIM),
    Seam("torch.Tensor.type", Use.REPLACES, _SHIM),
    Seam("torch.Tensor.cuda", Use.REPLACES, _SHIM),
    Seam("torch.nn.Module.cuda", Use.REPLACES, _SHIM),
    Seam(
        "torch.ops._C",
        Use.READS,
        _KERNELS,
        unchecked="operators of vLLM's compiled module; cpu_kernels looks for them at start, and tests run them",
    ),
)

SEAMS: tuple[Seam, ...] = (*VLLM, *MEGATRON, *TORCH)
