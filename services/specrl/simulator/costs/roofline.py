"""Seconds from published figures: each part of a step takes the longer of moving its bytes and doing its arithmetic.

    gpu(B, k, s) = products(B (k+1)) + attention(B, s) (1 + k * reread) + sampler(B (k+1)) + layers * kernels
                   + collectives + k * drafter
    step(B, k, s) = max(gpu, host(B / groups)) + [B (k+1) / groups > captured] * layers * launches

The engine prepares the next step while the GPU computes this one, hence the longer of gpu and host. With n-gram drafts,
and where `engine.overlapsHost` is false, both add up. The GPU reads a rollout's keys and values once, and the
share `reread` of them again for each token that it verifies. Of E experts, t tokens that choose c experts
each read E (1 - (1 - c/E)^t) (Xu et al., arXiv:2503.05447, and others count alike). Groups of tensorParallel GPUs share
attention and dense layers; all expertParallel GPUs share the experts. Each group is an engine process of its own, as
with vLLM's data parallelism, so it has its own host and CUDA graphs.
Training takes 2 floating-point operations per active parameter and token in a forward pass, and 6 with gradients. Those
of attention are added (Narayanan et al., arXiv:2104.04473). Called by `simulate`.
"""

from __future__ import annotations

import numpy as np

from specrl.simulator.costs.interface import Floats, ProcessorSharing
from specrl.simulator.scenarios.hardware import Gpu
from specrl.simulator.scenarios.models import ModelShape
from specrl.simulator.scenarios.scenario import Mechanism, Precision, Scenario

LOGIT_BYTES = 4  # samplers compute in float32


class RooflineCosts:
    """The costs of one scenario on GPUs."""

    def __init__(self, scenario: Scenario, shape: ModelShape, gpu: Gpu) -> None:
        self._shape = shape
        self._gpu = gpu
        self._layout = scenario.layout
        self._engine = scenario.engine
        self._how = scenario.efficiency
        self._mechanism = scenario.speculation.mechanism
        is_fp8 = scenario.model.precision is Precision.FP8
        self.bytes_per_weight = 1 if is_fp8 else 2
        self._flops = (gpu.fp8_flops if is_fp8 and gpu.fp8_flops else gpu.bf16_flops) * self._how.flops
        self._bandwidth = gpu.memory_bandwidth * self._how.memory_bandwidth
        work = scenario.workload
        self._mean_context = work.prompt_tokens + work.max_tokens / 4  # for attention in training, a small part of it
        fits_domain = self._layout.gpus_per_replica <= gpu.nvlink_gpus
        self._link = gpu.nvlink_bandwidth if fits_domain else gpu.network_bandwidth
        # Every replica receives every weight. Receivers pass them on, so the number of replicas does not matter.
        sent = shape.total_parameters * self.bytes_per_weight / self._layout.gpus_per_replica
        self.data_s = self._how.data_s
        self.prepare_s = self._how.prepare_s + sent / (gpu.network_bandwidth * self._how.sync_bandwidth)
        # 0.2 s for switching versions, plus a read and a write of every received byte.
        self.load_s = 0.2 + 2 * sent / self._bandwidth
        self.sharing: ProcessorSharing | None = None  # GPUs are not shared

    # -- generation ------------------------------------------------------------------------------------------------

    def step_s(self, batch_B: Floats, k: int, context: float) -> Floats:
        """Return the module's step(B, k, s), in seconds."""
        queries_B = batch_B * (k + 1)
        gpu = self._products_s(queries_B) + self._attention_s(batch_B, context, k) + self._sampler_s(queries_B)
        gpu = gpu + self._shape.layers * self._how.kernel_us_per_layer * 1e-6 + self._collectives_s(queries_B)
        # An EAGLE-3 head drafts with k passes on the GPU.
        if k and self._mechanism is Mechanism.EAGLE3:
            gpu = gpu + k * self._draft_pass_s(batch_B, context)
        groups = self._layout.attention_groups
        host = self._how.host_step_ms * 1e-3 + self._how.host_sequence_us * 1e-6 * batch_B / groups
        # vLLM turns async scheduling off for n-gram drafts (VllmConfig.__post_init__).
        overlaps = self._engine.overlaps_host and not (k and self._mechanism is Mechanism.NGRAM)
        step = np.maximum(gpu, host) if overlaps else gpu + host
        captured = self._engine.capture_tokens
        if captured is not None:
            eager_s = self._shape.layers * self._how.eager_us_per_layer * 1e-6
            step = step + np.where(queries_B / groups > captured, eager_s, 0.0)
        return np.asarray(step)

    def start_s(self, rollouts: int, tokens: float) -> float:
        """Return the seconds for reading the prompts."""
        return float(self._products_s(np.array([tokens]))[0]) if tokens else 0.0

    def _products_s(self, tokens_B: Floats) -> Floats:
        """Return the time of matrix products: attention weights and output layer, then the feed-forward layers."""
        shape = self._shape
        layout = self._layout
        shared = shape.layers * shape.attention_parameters + shape.head_parameters
        if not shape.experts:
            shared += shape.layers * shape.expert_parameters
        shared_s = self._weights_s(shared / layout.tensor_parallel, tokens_B / layout.attention_groups)
        if not shape.experts:
            return shared_s
        # Expected number of different experts that the tokens of a batch choose.
        used = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** tokens_B)
        expert = shape.layers * shape.expert_parameters / layout.gpus_per_replica
        moved = used * expert * self.bytes_per_weight / self._bandwidth
        computed = 2 * tokens_B * shape.experts_per_token * expert / self._flops
        return np.asarray(shared_s + np.maximum(moved, computed))

    def _weights_s(self, parameters: float, tokens_B: Floats) -> Floats:
        moved = parameters * self.bytes_per_weight / self._bandwidth
        return np.asarray(np.maximum(moved, 2 * parameters * tokens_B / self._flops))

    def _attention_s(self, batch_B: Floats, context: float, k: int) -> Floats:
        shape = self._shape
        layout = self._layout
        # With more GPUs than key-value heads, heads are replicated: a GPU reads at least one of them.
        share = max(1 / layout.tensor_parallel, 1 / shape.kv_heads) / layout.attention_groups
        reads = 1 + k * self._how.kv_reread_share
        kv_bytes = shape.kv_bytes_per_token(self.bytes_per_weight)
        moved = batch_B * context * kv_bytes * share * reads / self._bandwidth
        operations = 4 * shape.layers * shape.heads * shape.head_dim * context * (k + 1) * batch_B
        computed = operations / layout.gpus_per_replica / (self._gpu.bf16_flops * self._how.flops)
        return np.maximum(moved, computed)

    def _sampler_s(self, tokens_B: Floats) -> Floats:
        logits_B = tokens_B / self._layout.attention_groups * self._shape.vocabulary
        return np.asarray(logits_B * LOGIT_BYTES * self._how.sampler_passes / self._bandwidth)

    def _collectives_s(self, tokens_B: Floats) -> Floats:
        """Return the time of all collectives: all-reduces of tensor parallelism, dispatch and combine of experts."""
        layout = self._layout
        how = self._how
        shape = self._shape
        if layout.gpus_per_replica == 1:
            return np.zeros_like(tokens_B)
        activations = tokens_B / layout.attention_groups * shape.hidden * 2  # bytes in bfloat16
        once = np.full_like(tokens_B, 0.0)
        if layout.tensor_parallel > 1:
            # A ring all-reduce sends 2 (n - 1) / n of the data over each link.
            ring = 2 * (layout.tensor_parallel - 1) / layout.tensor_parallel
            once = once + (1 if layout.expert_parallel > 1 else 2) * (
                how.collective_us * 1e-6 + ring * activations / self._link
            )
        if layout.expert_parallel > 1:
            routed = activations / layout.tensor_parallel * shape.experts_per_token
            once = once + 2 * (how.collective_us * 1e-6 + routed / self._link)
        return np.asarray(shape.layers * once)

    def _draft_pass_s(self, batch_B: Floats, context: float) -> Floats:
        """Return the GPU time of one pass of an EAGLE-3 head: one layer and its output layer.

        The head is replicated in every group of tensorParallel GPUs.
        """
        groups = self._layout.attention_groups
        parameters = self._shape.drafter_parameters / self._layout.tensor_parallel
        moved = parameters * 2 / self._bandwidth
        computed = 2 * parameters * batch_B / groups / (self._gpu.bf16_flops * self._how.flops)
        cache = batch_B / groups * context * self._shape.kv_bytes_per_token(2) / self._shape.layers / self._bandwidth
        return np.asarray(np.maximum(moved, computed) + cache + 2 * self._how.kernel_us_per_layer * 1e-6)

    # -- training --------------------------------------------------------------------------------------------------

    def logprob_s(self, tokens: float) -> float:
        """Return the seconds for the forward passes of policy and reference."""
        return self._how.logprob_passes * self._forward_s(tokens)

    def train_s(self, tokens: float) -> float:
        """Return the seconds for forward and backward."""
        return 3 * self._forward_s(tokens)  # the backward pass costs two forward passes

    def _forward_s(self, tokens: float) -> float:
        shape = self._shape
        # Half, since attention is causal: a token attends to half of the others on average.
        attention = 4 * shape.layers * shape.heads * shape.head_dim * self._mean_context / 2
        operations = (2 * shape.active_parameters + attention) * tokens
        reached = self._how.train_flops_experts if shape.experts else self._how.train_flops
        return operations / (self._layout.training_gpus * self._gpu.bf16_flops * reached)
