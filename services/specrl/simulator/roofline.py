"""Seconds from published figures: each part of a step takes the longer of moving its bytes and doing its arithmetic.

    step(B, k, s) = products(B (k+1)) + attention(B, s) + sampler(B (k+1)) + layers * kernels + collectives
                    + host(B, k) + k * drafter + [B (k+1) > captured] * layers * launches

Attention reads a rollout's keys and values once for its k + 1 queries. Of E experts with t tokens each choosing c,
E (1 - (1 - c/E)^t) are read (Xu et al., arXiv:2503.05447 and others count alike). A replica's GPUs: attention and
dense layers are shared by groups of tensorParallel; experts by all of expertParallel.
Training is counted in floating-point operations: 2 for each active parameter and token forward, 6 with gradients, and
attention's on top (Narayanan et al., arXiv:2104.04473).
"""

from __future__ import annotations

import numpy as np

from specrl.simulator.costs import Floats
from specrl.simulator.hardware import Gpu
from specrl.simulator.models import ModelShape
from specrl.simulator.scenario import Mechanism, Precision, Scenario

LOGIT_BYTES = 4  # samplers compute in float32


class Roofline:
    """Costs of one scenario."""

    def __init__(self, scenario: Scenario, shape: ModelShape, gpu: Gpu) -> None:
        self._shape, self._gpu, self._layout = shape, gpu, scenario.layout
        self._engine, self._how = scenario.engine, scenario.efficiency
        self._mechanism = scenario.speculation.mechanism
        is_fp8 = scenario.model.precision is Precision.FP8
        self.bytes_per_weight = 1 if is_fp8 else 2
        self._flops = (gpu.fp8_flops if is_fp8 and gpu.fp8_flops else gpu.bf16_flops) * self._how.flops
        self._bandwidth = gpu.memory_bandwidth * self._how.memory_bandwidth
        work = scenario.workload
        self._mean_context = work.prompt_tokens + work.max_tokens / 4  # of training's attention; a small part of it
        fits_domain = self._layout.gpus_per_replica <= gpu.nvlink_gpus
        self._link = gpu.nvlink_bandwidth if fits_domain else gpu.network_bandwidth

    # -- generation ------------------------------------------------------------------------------------------------

    def step_s(self, batch_B: Floats, k: int, context: float) -> Floats:
        """See the module."""
        queries_B = batch_B * (k + 1)
        gpu = self._products(queries_B) + self._attention(batch_B, context, k) + self._sampler(queries_B)
        gpu = gpu + self._shape.layers * self._how.kernel_us_per_layer * 1e-6 + self._collectives(queries_B)
        if k and self._mechanism is Mechanism.EAGLE3:
            gpu = gpu + k * self._drafter(batch_B, context)
        if not self._engine.has_host_costs:
            return gpu
        host = self._how.host_step_ms * 1e-3 + self._how.host_sequence_us * 1e-6 * batch_B
        if k:
            host = host + self._how.speculation_step_ms * 1e-3
        if k and self._mechanism is Mechanism.EAGLE3:
            host = host + k * self._how.draft_pass_ms * 1e-3
        if k and self._mechanism is Mechanism.NGRAM:
            host = host + self._how.lookup_us_per_sequence * 1e-6 * batch_B
        captured = self._engine.capture_tokens
        if captured is not None:
            eager_s = self._shape.layers * self._how.eager_us_per_layer * 1e-6
            host = host + np.where(queries_B > captured, eager_s, 0.0)
        return gpu + host

    def start_s(self, rollouts: int, tokens: float) -> float:
        """Reading the prompts."""
        return float(self._products(np.array([tokens]))[0]) if tokens else 0.0

    def _products(self, tokens_B: Floats) -> Floats:
        """Matrix products: the attention's and output layer's weights, then the feed-forward layers'."""
        shape, layout = self._shape, self._layout
        groups = layout.gpus_per_replica / layout.tensor_parallel
        shared = shape.layers * shape.attention_parameters + shape.head_parameters
        if not shape.experts:
            shared += shape.layers * shape.expert_parameters
        shared_s = self._roof(shared / layout.tensor_parallel, tokens_B / groups)
        if not shape.experts:
            return shared_s
        used = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** tokens_B)
        expert = shape.layers * shape.expert_parameters / layout.gpus_per_replica
        moved = used * expert * self.bytes_per_weight / self._bandwidth
        computed = 2 * tokens_B * shape.experts_per_token * expert / self._flops
        return np.asarray(shared_s + np.maximum(moved, computed))

    def _roof(self, parameters: float, tokens_B: Floats) -> Floats:
        moved = parameters * self.bytes_per_weight / self._bandwidth
        return np.asarray(np.maximum(moved, 2 * parameters * tokens_B / self._flops))

    def _attention(self, batch_B: Floats, context: float, k: int) -> Floats:
        shape, layout = self._shape, self._layout
        groups = layout.gpus_per_replica / layout.tensor_parallel
        share = max(1 / layout.tensor_parallel, 1 / shape.kv_heads) / groups
        moved = batch_B * context * shape.kv_bytes_per_token(self.bytes_per_weight) * share / self._bandwidth
        operations = 4 * shape.layers * shape.heads * shape.head_dim * context * (k + 1) * batch_B
        computed = operations / (layout.tensor_parallel * groups) / (self._gpu.bf16_flops * self._how.flops)
        return np.maximum(moved, computed)

    def _sampler(self, tokens_B: Floats) -> Floats:
        groups = self._layout.gpus_per_replica / self._layout.tensor_parallel
        moved = tokens_B / groups * self._shape.vocabulary * LOGIT_BYTES * self._how.sampler_passes
        return np.asarray(moved / self._bandwidth)

    def _collectives(self, tokens_B: Floats) -> Floats:
        """Two of each layer: all-reduces of tensor parallelism, and dispatch and combine of experts."""
        layout, how, shape = self._layout, self._how, self._shape
        if layout.gpus_per_replica == 1:
            return np.zeros_like(tokens_B)
        groups = layout.gpus_per_replica / layout.tensor_parallel
        activations = tokens_B / groups * shape.hidden * 2
        once = np.full_like(tokens_B, 0.0)
        if layout.tensor_parallel > 1:
            ring = 2 * (layout.tensor_parallel - 1) / layout.tensor_parallel
            once = once + (1 if layout.expert_parallel > 1 else 2) * (
                how.collective_us * 1e-6 + ring * activations / self._link
            )
        if layout.expert_parallel > 1:
            routed = activations / layout.tensor_parallel * shape.experts_per_token
            once = once + 2 * (how.collective_us * 1e-6 + routed / self._link)
        return np.asarray(shape.layers * once)

    def _drafter(self, batch_B: Floats, context: float) -> Floats:
        """GPU time of one pass of an EAGLE-3 head: one layer and its output layer, replicated in a replica's groups."""
        groups = self._layout.gpus_per_replica / self._layout.tensor_parallel
        parameters = self._shape.drafter_parameters / self._layout.tensor_parallel
        moved = parameters * 2 / self._bandwidth
        computed = 2 * parameters * batch_B / groups / (self._gpu.bf16_flops * self._how.flops)
        cache = batch_B / groups * context * self._shape.kv_bytes_per_token(2) / self._shape.layers / self._bandwidth
        return np.asarray(np.maximum(moved, computed) + cache + 2 * self._how.kernel_us_per_layer * 1e-6)

    # -- training and weights --------------------------------------------------------------------------------------

    def data_s(self) -> float:
        """Assembling a batch and carrying it to the trainer."""
        return self._how.data_s

    def logprob_s(self, tokens: float) -> float:
        """Forward passes of policy and reference."""
        return self._how.logprob_passes * self._forward_s(tokens)

    def train_s(self, tokens: float) -> float:
        """Forward and backward."""
        return 3 * self._forward_s(tokens)

    def _forward_s(self, tokens: float) -> float:
        shape = self._shape
        attention = 4 * shape.layers * shape.heads * shape.head_dim * self._mean_context / 2
        operations = (2 * shape.active_parameters + attention) * tokens
        reached = self._how.train_flops_experts if shape.experts else self._how.train_flops
        return operations / (self._layout.training_gpus * self._gpu.bf16_flops * reached)

    def prepare_s(self) -> float:
        """Every replica receives every weight; receivers pass them on, so that their number does not matter."""
        sent = self._shape.parameters * self.bytes_per_weight / self._layout.gpus_per_replica
        return self._how.prepare_s + sent / (self._gpu.network_bandwidth * self._how.sync_bandwidth)

    def load_s(self) -> float:
        """Copying what arrived over the weights that serve, and the change of versions around it."""
        sent = self._shape.parameters * self.bytes_per_weight / self._layout.gpus_per_replica
        return 0.2 + 2 * sent / self._bandwidth

    def sharing(self) -> None:
        """GPUs are not shared."""
