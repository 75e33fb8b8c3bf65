"""Tiny policies and drafters, made on the spot. Nothing is downloaded; the same seed gives the same weights.

    make_policy          random Qwen3, Llama or Qwen3-MoE with a byte-level tokenizer
    make_text_policy     the same, trained for seconds until it continues the given texts
    make_mtp_policy      MiMo: a Qwen2 with one head for multi-token prediction, which guesses right often
    make_bigram_drafter  an EAGLE-3 head that guesses right often, for a policy with `bigram` set
    make_draft_model     a Qwen3 of one layer, which guesses right often for such a policy
    allow_only           leave a policy a handful of tokens, so that its distribution can be enumerated

A random policy is nearly uniform, and a random head never guesses right: tests of acceptance would test nothing.
`sharpness` scales the output layer, and `bigram` the embedding, so that the next token depends mostly on the last one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from specrl.files import cache_folder

PAD, EOS = "<|pad|>", "<|eos|>"
SPECIAL = (PAD, EOS, "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


MIXTURE = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
}


@dataclass(frozen=True)
class Shape:
    """Size of a tiny model. head_dim must be one that vLLM's CPU attention knows: 32 is the smallest.

    family: transformers' model_type. rope: replaces fields of rope_parameters.
    """

    hidden: int = 64
    layers: int = 4
    heads: int = 2
    groups: int = 2
    head_dim: int = 32
    intermediate: int = 128
    vocab: int = 264
    max_length: int = 1024
    is_tied: bool = False
    family: str = "qwen3"
    rope: Mapping[str, Any] = field(default_factory=dict)


def make_policy(
    path: Path,
    *,
    seed: int = 0,
    shape: Shape = Shape(),
    sharpness: float = 1.0,
    bigram: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random model of the shape's family, with tokenizer, to `path` and return it."""
    tokenizer = make_tokenizer(path, shape.vocab)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(shape, tokenizer), dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
        model.model.embed_tokens.weight.mul_(bigram)
    model.to(dtype).save_pretrained(path)
    return path


def make_mtp_policy(
    path: Path, *, seed: int = 0, shape: Shape = Shape(), sharpness: float = 1.0, bigram: float = 1.0
) -> Path:
    """Write a random MiMo, whose head hands the last token's embedding through to the policy's own output layer.

    A MiMo without its head is a Qwen2; written as model_type qwen2 it needs no code from elsewhere, here or in vLLM.
    """
    tokenizer = make_tokenizer(path, shape.vocab)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(_config(replace(shape, family="qwen2"), tokenizer))
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
        model.model.embed_tokens.weight.mul_(bigram)
    model.save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    prefix, eye = "model.mtp_layers.0.", torch.eye(shape.hidden)
    for name, tensor in list(weights.items()):
        if name.startswith("model.layers.0."):  # attention and MLP that add nothing
            is_norm = name.endswith("layernorm.weight")
            weights[prefix + name.removeprefix("model.layers.0.")] = torch.full_like(tensor, 1.0 if is_norm else 0.0)
    weights[prefix + "input_proj.weight"] = torch.cat([torch.zeros_like(eye), eye], 1)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{prefix}{name}.weight"] = torch.ones(shape.hidden)
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    return path


def make_text_policy(
    path: Path, texts: Sequence[str], *, seed: int = 0, shape: Shape = Shape(), steps: int = 150
) -> Path:
    """Write a Qwen3 trained on `texts`, each followed by the end token.

    It is trained once, about a second per 20 steps, and kept in $SPECRL_CACHE_DIR by all that makes it.
    """
    made_of = (Path(__file__).read_text(), torch.__version__, transformers.__version__, *texts, seed, shape, steps)
    digest = sha256(repr(made_of).encode()).hexdigest()
    kept = cache_folder() / "test-policies" / digest
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=kept.parent, ignore_cleanup_errors=True) as folder:
            fresh = Path(folder) / "policy"
            _train_text_policy(fresh, texts, seed, shape, steps)
            with suppress(OSError):  # another process was faster
                fresh.rename(kept)
    shutil.copytree(kept, path, dirs_exist_ok=True)
    return path


def _train_text_policy(path: Path, texts: Sequence[str], seed: int, shape: Shape, steps: int) -> None:
    tokenizer = make_tokenizer(path, shape.vocab)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(_config(shape, tokenizer))
    batch = tokenizer([text + EOS for text in texts], return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(steps):
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(path)


def make_tokenizer(path: Path, vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte after the special ones, saved to `path`. Any text can be encoded."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert vocab >= len(SPECIAL) + len(letters)
    ids = {token: number for number, token in enumerate((*SPECIAL, *letters))}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=list(SPECIAL[2:]),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return tokenizer


def make_bigram_drafter(path: Path, policy: Path, *, noise: float = 0.0, seed: int = 0) -> Path:
    """Write an EAGLE-3 head whose guess depends on the last token only, as a policy with large `bigram` does.

    Queries and keys are copies of the token's embedding, large enough that a position attends to itself; values hand
    the embedding through to the policy's own norm and output layer. `noise` is relative and spoils the guesses; the
    output layer always differs a little from the policy's, since vLLM would share the two if they were equal.
    """
    from specrl.drafting.head import Eagle3Head, head_config, save_head
    from specrl.drafting.policy_config import read_policy_config
    from specrl.spec.generation import Eagle3

    config = read_policy_config(policy)
    assert config.num_heads == config.num_groups
    assert config.num_heads * config.head_dim == config.hidden_size
    weights = load_file(policy / "model.safetensors")
    head = Eagle3Head(head_config(config, Eagle3()))
    eye, generator = torch.eye(config.hidden_size), torch.Generator().manual_seed(seed)
    nothing = torch.zeros_like(eye)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(1.0 if parameter.ndim == 1 else 0.0)
        attention = head.midlayer.self_attn
        attention.q_proj.weight.copy_(torch.cat([3 * eye, nothing], 1))
        attention.k_proj.weight.copy_(torch.cat([3 * eye, nothing], 1))
        attention.v_proj.weight.copy_(torch.cat([eye, nothing], 1))
        attention.o_proj.weight.copy_(eye)
        head.norm.weight.copy_(weights["model.norm.weight"])
        output = weights["lm_head.weight"]
        spoilt = torch.randn(output.shape, generator=generator) * output[:, 1:].std() * (noise + 1e-3)
        head.lm_head.weight.copy_(output + spoilt)
    save_head(path, head, torch.float32)
    return path


def make_draft_model(path: Path, policy: Path, *, noise: float = 0.0, seed: int = 0) -> Path:
    """Write a Qwen3 of one layer that adds nothing, between the policy's own embedding and output layer.

    `noise` is relative and spoils its guesses; without it they are those of the policy's embedding alone.
    """
    perturb(path, policy, scale=0.0, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: tensor
        for name, tensor in load_file(policy / "model.safetensors").items()
        if not name.startswith("model.layers.") or name.startswith("model.layers.0.")
    }
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        weights[name] = torch.zeros_like(weights[name])
    output = weights["lm_head.weight"]
    weights["lm_head.weight"] = output + torch.randn(output.shape, generator=generator) * output[:, 1:].std() * noise
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, num_hidden_layers=1, layer_types=["full_attention"])
    return path


def allow_only(folder: Path, tokens: Sequence[int], *, temperature: float = 1.0) -> Path:
    """Make all other tokens impossible (less likely than e**-50), in place, and divide the logits by `temperature`.

    The first number of every hidden state becomes a constant, by the embedding, which no layer writes to; the output
    layer reads it with a large negative weight for each token that is not allowed. Drafters are made afterwards, from
    this folder: they use the policy's embedding, and a copy of its output layer.
    """
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, 0] = 4 * embedding[:, 1:].std()
    output = weights["lm_head.weight"]
    output /= temperature
    output[:, 0] = -40.0
    output[list(tokens), 0] = 0.0
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def perturb(path: Path, source: Path, *, scale: float, seed: int) -> Path:
    """Copy a model folder with every floating-point tensor changed by `scale` times its own spread."""
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(seed)
    changed: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.is_floating_point():
            spread = tensor.float().std() if tensor.numel() > 1 and tensor.ndim > 1 else torch.tensor(1.0)
            noise = torch.randn(tensor.shape, generator=generator) * spread * scale
            changed[name] = (tensor.float() + noise).to(tensor.dtype).contiguous()
        else:
            changed[name] = tensor
    save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
    return path


def edit_config(path: Path, **changes: Any) -> None:
    """Change fields of a folder's config.json in place."""
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, **changes}), encoding="utf-8")


def _config(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> Any:
    return AutoConfig.for_model(
        shape.family,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_length,
        tie_word_embeddings=shape.is_tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **shape.rope},
        **MIXTURE.get(shape.family, {}),
    )
