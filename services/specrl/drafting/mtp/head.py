"""The heads for multi-token prediction of a MiMo policy: their torch module, under the names of the policy's folder.

    m_t = input_proj([RMSNorm(h_t), RMSNorm(embedding(x_{t+1}))])   h_t: the policy's last state, before its final norm
    one Qwen2 decoder layer on m_t; then final_layernorm            at position 0, the embedding is zeroed
    -> the policy's output layer, frozen: logits of x_{t+2}; the head's output replaces h_t for the next token

The computation is exactly that of vLLM 0.32, `model_executor/models/mimo_mtp.py`. vLLM runs the first head in every
pass (`v1/spec_decode/llm_base_proposer.py` gives no `spec_step_idx`), however many there are. So only the first head is
trained. The others are kept and exported as they are.

The heads belong to the policy: their tensors have its version, and are in its manifest, folder and export. Every rank
holds them whole. The output layer stays where it is, sharded by vocabulary (`vocabulary.py`).

Called by the trainer, through `kind.py`.

Shapes: R packed rows, W tokens of a row or columns of the vocabulary, M starts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from specrl.drafting.attention import MultiPassAttention
from specrl.drafting.drafter import Drafter, DrafterInputs, list_misfits
from specrl.drafting.layers import AttentionProjections, FeedForward, LayerShape
from specrl.drafting.packing import PackedRows
from specrl.drafting.vocabulary import PolicyOutput
from specrl.errors import CheckpointInvalid
from specrl.models.policy_config import PolicyConfig
from specrl.records import WeightOwner
from specrl.spec import RunSpec
from specrl.tensor_files import FolderReader


class MtpLayer(nn.Module):
    """One head: norms of both inputs, their projection, a decoder layer with biases, and a final norm."""

    def __init__(self, policy: PolicyConfig, shape: LayerShape) -> None:
        super().__init__()
        hidden = policy.hidden_size

        def make_norm() -> nn.RMSNorm:
            return nn.RMSNorm(hidden, eps=policy.norm_epsilon)

        self.token_layernorm = make_norm()
        self.hidden_layernorm = make_norm()
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = make_norm()
        self.self_attn = AttentionProjections(hidden, hidden, shape, has_bias=policy.family.has_qkv_bias)
        self.post_attention_layernorm = make_norm()
        self.mlp = FeedForward(hidden, shape)
        self.final_layernorm = make_norm()

    def join_inputs(self, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Normalise and project [..., H] hidden states and [..., H] embeddings of the next tokens to [..., H]."""
        both = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedding)], -1)
        out: torch.Tensor = self.input_proj(both)
        return out

    def after_attention(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Compute the head's output [..., H] from attention output [..., N*D] and the layer's input [..., H]."""
        after = residual + self.self_attn.o_proj(attended)
        out: torch.Tensor = self.final_layernorm(after + self.mlp(self.post_attention_layernorm(after)))
        return out


class MtpHeads(Drafter):
    """All heads of a policy. The first drafts; the others are carried along."""

    owner = WeightOwner.POLICY
    is_vocabulary_sharded = True

    def __init__(self, policy: PolicyConfig) -> None:
        super().__init__()
        self.policy = policy
        self.shape = LayerShape(
            policy.intermediate_size,
            policy.num_heads,
            policy.num_groups,
            policy.head_dim,
            policy.norm_epsilon,
            policy.rope_theta,
            policy.rope_scaling,
        )
        # The state after the last layer is what the final norm reads. vLLM's MiMo applies that norm before the output
        # layer alone.
        self.inputs = DrafterInputs(aux_layers=(policy.num_layers,), embedding=True)
        self.mtp_layers = nn.ModuleList([MtpLayer(policy, self.shape) for _ in range(policy.num_mtp_heads)])
        self.register_buffer("draft_ids_K", torch.arange(policy.vocab_size), persistent=False)

    def connect_output(self, read_output: Callable[[], PolicyOutput]) -> None:
        """Draft by the policy's output layer; see `Drafter`."""
        super().connect_output(read_output)
        self._read_output = read_output

    def draft_logits(self, rows: PackedRows, passes: int) -> Iterator[torch.Tensor]:
        """Yield the logits of each pass; see `Drafter`."""
        head = self.mtp_layers[0]
        assert isinstance(head, MtpLayer)
        dtype = head.input_proj.weight.dtype
        hidden_RWH = rows.aux_RWA.to(dtype)
        # The embedding of the next token. The last position has none, and no start needs it.
        next_RWH = functional.pad(rows.embedding_RWH[:, 1:], (0, 0, 0, 1)).to(dtype)
        next_RWH = next_RWH.masked_fill((rows.position_RW == 0)[..., None], 0)
        mixed_RWH = head.join_inputs(hidden_RWH, next_RWH)
        input_RWH = head.input_layernorm(mixed_RWH)
        attention = MultiPassAttention(head.self_attn, self.shape, rows)
        attention.remember_context(input_RWH)
        mixed_RMH = rows.gather_starts(mixed_RWH)
        input_RMH = rows.gather_starts(input_RWH)
        hidden_RMH = rows.gather_starts(hidden_RWH)
        for j in range(passes):
            if j > 0:
                mixed_RMH = head.join_inputs(hidden_RMH, rows.gather_starts(rows.embedding_RWH, 1 + j).to(dtype))
                input_RMH = head.input_layernorm(mixed_RMH)
            hidden_RMH = head.after_attention(attention(input_RMH, j), mixed_RMH)
            yield self.compute_logits(hidden_RMH[rows.select_starts(j)])

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [..., W] of this rank's columns from outputs [..., H] of a head."""
        weight_WH = self._read_output().weight
        assert weight_WH is not None, "only the last stage's ranks draft"
        return functional.linear(self.vocabulary.share_input(hidden).to(weight_WH.dtype), weight_WH)

    def estimate_forward_flops(self, passes: int, context: int, starts: int) -> float:
        """Count the operations of `draft_logits`; see `Drafter`."""
        hidden = self.policy.hidden_size
        queries = self.shape.num_heads * self.shape.head_dim
        keys = 2 * self.shape.num_groups * self.shape.head_dim
        # Once per token of the context: the projection of both inputs, and the keys and values of pass 0.
        everywhere = 2 * hidden * hidden + hidden * keys
        # Per start and pass: projections, output, MLP, logits, and attention to the mean context of a start.
        a_pass = (
            2 * hidden * hidden
            + hidden * (queries + keys)
            + queries * hidden
            + 3 * hidden * self.shape.intermediate_size
            + hidden * self.policy.vocab_size
            + 2 * queries * max(0.0, context - starts / 2)
        )
        return 2.0 * (everywhere * context + passes * a_pass * starts)

    def collect_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Collect the tensors by their names in the policy's folder; see `Drafter`."""
        return {f"model.{name}": weight.detach().to(dtype) for name, weight in self.named_parameters()}

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load tensors as `collect_tensors` returns them. Raises CheckpointInvalid if names or shapes differ."""
        mine = {f"model.{name}": weight for name, weight in self.named_parameters()}
        wrong = list_misfits(mine, tensors)
        if wrong:
            raise CheckpointInvalid(
                f"the policy's heads must have the sizes of its layers, got other tensors: {', '.join(wrong[:4])}; use "
                "the heads that came with the policy, or eagle3"
            )
        for name, weight in mine.items():
            weight.copy_(tensors[name])

    def write_folder(self, directory: Path, dtype: torch.dtype) -> None:
        """Not called: the heads are in the policy's folder."""
        raise NotImplementedError


def load_heads(_spec: RunSpec, policy: PolicyConfig) -> MtpHeads:
    """Read the heads from the policy's folder, in float32. Raises CheckpointInvalid if they do not fit the policy."""
    heads = MtpHeads(policy)
    reader = FolderReader(policy.path)
    heads.load_tensors({name: reader.read_tensor(name) for name in heads.collect_tensors(torch.float32)})
    return heads
