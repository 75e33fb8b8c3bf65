"""Makes tiny policies and drafters. Nothing is downloaded, and the same seed gives the same weights.

    make_policy          random Qwen3, Qwen2, Llama, MiMo or Qwen3-MoE with a byte-level tokenizer
    make_text_policy     the same, trained for seconds until it continues the given texts
    make_mtp_policy      MiMo: a Qwen2 with one head for multi-token prediction, which guesses right often
    make_bigram_drafter  an EAGLE-3 head that guesses right often, for a policy with `bigram` set
    make_draft_model     a Qwen3 of one layer, which guesses right often for such a policy
    allow_only           restricts a policy to a few tokens, so that its distribution can be enumerated

A random policy is nearly uniform, and a random head never guesses right. Tests of acceptance would test nothing.
`sharpness` scales the output layer and `bigram` the embedding, so that the next token depends mostly on the last one.
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
    Qwen2Config,
    Qwen2ForCausalLM,
)

from specrl.files import cache_folder

PAD = "<|pad|>"
EOS = "<|eos|>"
SPECIAL = (PAD, EOS, "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


MIXTURE = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
}


BIAS_STD = 0.1  # transformers starts biases at 0, where a lost one would change nothing


class MiMoConfig(Qwen2Config):
    """MiMo's config, which transformers does not have."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """MiMo without its heads: a Qwen2."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = (r"model\.mtp_layers\.",)


AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
# As in the folder of MiMo-7B. Its remote code is needed by neither specrl nor transformers here, but by plain vLLM.
PUBLISHED_MIMO = {
    "attention_bias": True,
    "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    "num_nextn_predict_layers": 1,
    "use_mrope": False,
    "use_sliding_window": False,
}
CONFIGURATION_MIMO = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""


@dataclass(frozen=True)
class Shape:
    """Size of a tiny model. head_dim must be one that vLLM's CPU attention supports; 32 is the smallest.

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
    """Write a random model of the shape's family, with tokenizer, to `path`. Returns `path`."""
    tokenizer = make_tokenizer(path, shape.vocab)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(shape, tokenizer), dtype=torch.float32)
    _adjust_weights(model, sharpness, bigram)
    model.to(dtype).save_pretrained(path)
    return path


@torch.no_grad()
def _adjust_weights(model: Any, sharpness: float, bigram: float) -> None:
    """Scale output layer and embedding, and draw the biases, if there are any."""
    model.lm_head.weight.mul_(sharpness)
    model.model.embed_tokens.weight.mul_(bigram)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.normal_(std=BIAS_STD)


def make_mtp_policy(
    path: Path,
    *,
    seed: int = 0,
    shape: Shape = Shape(),
    sharpness: float = 1.0,
    bigram: float = 1.0,
    noise: float = 0.0,
) -> Path:
    """Write a random MiMo, whose head passes the last token's embedding to the policy's output layer.

    noise: standard deviation of what is added to the head. Without it attention and MLP add nothing, and get no
    gradient either.
    """
    make_policy(path, seed=seed, shape=replace(shape, family="mimo"), sharpness=sharpness, bigram=bigram)
    add_mtp_head(path, noise=noise)
    return path


def add_mtp_head(path: Path, *, noise: float = 0.0) -> None:
    """Add a head to a MiMo without one, as `make_mtp_policy` says."""
    weights = load_file(path / "model.safetensors")
    prefix = "model.mtp_layers.0."
    hidden = len(weights["model.norm.weight"])
    eye = torch.eye(hidden)
    for name, tensor in list(weights.items()):
        if name.startswith("model.layers.0."):  # attention and MLP that add nothing
            is_norm = name.endswith("layernorm.weight")
            weights[prefix + name.removeprefix("model.layers.0.")] = torch.full_like(tensor, 1.0 if is_norm else 0.0)
    weights[prefix + "input_proj.weight"] = torch.cat([torch.zeros_like(eye), eye], 1)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{prefix}{name}.weight"] = torch.ones(hidden)
    for name in [name for name in weights if name.startswith(prefix)] if noise else []:
        weights[name] = weights[name] + noise * torch.randn(weights[name].shape)
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, **PUBLISHED_MIMO)
    (path / "configuration_mimo.py").write_text(CONFIGURATION_MIMO, encoding="utf-8")


def make_text_policy(
    path: Path, texts: Sequence[str], *, seed: int = 0, shape: Shape = Shape(), steps: int = 150
) -> Path:
    """Write a model of the shape's family trained on `texts`, each followed by the end token.

    Training takes about a second per 20 steps. The result is cached in $SPECRL_CACHE_DIR, by everything that it depends
    on.
    """
    source = Path(__file__).read_text(encoding="utf-8")
    made_of = (source, torch.__version__, transformers.__version__, *texts, seed, shape, steps)
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
    model = AutoModelForCausalLM.from_config(_config(shape, tokenizer), dtype=torch.float32)
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
    """Save a tokenizer with one token per byte after the special ones. It can encode any text."""
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
    """Write an EAGLE-3 head whose guess depends only on the last token, as in a policy with large `bigram`.

    Queries and keys are copies of the token's embedding, large enough that a position attends to itself. Values pass
    the embedding to the policy's norm and output layer. `noise` is relative and makes guesses worse. The output layer
    always differs a little from the policy's, because vLLM would share equal ones.
    """
    from specrl.drafting.eagle3.head import Eagle3Head, fresh_head_config
    from specrl.models.policy_config import read_policy_config
    from specrl.spec.generation import Eagle3

    config = read_policy_config(policy)
    assert config.num_heads == config.num_groups
    assert config.num_heads * config.head_dim == config.hidden_size
    weights = load_file(policy / "model.safetensors")
    head = Eagle3Head(fresh_head_config(config, Eagle3()))
    eye = torch.eye(config.hidden_size)
    generator = torch.Generator().manual_seed(seed)
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
    head.write_folder(path, torch.float32)
    return path


def make_draft_model(path: Path, policy: Path, *, noise: float = 0.0, seed: int = 0) -> Path:
    """Write a Qwen3 whose only layer adds nothing, with the policy's embedding and output layer.

    `noise` is relative and makes guesses worse; without it they are those of the policy's embedding.
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

    The embedding sets the first element of every hidden state to a constant, which no layer changes. The output layer
    reads it with a large negative weight for each forbidden token. Make drafters afterwards from this folder: they use
    the policy's embedding, and a copy of its output layer.
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


def add_heads(path: Path, prefix: str, **fields: int) -> dict[str, torch.Tensor]:
    """Add heads for multi-token prediction to a policy's folder in place: copies of its first layer below `prefix`.

    fields: of config.json. Returns the heads' tensors by name.
    """
    weights = load_file(path / "model.safetensors")
    first = "model.layers.0."
    heads = {prefix + name.removeprefix(first): x.clone() for name, x in weights.items() if name.startswith(first)}
    save_file(weights | heads, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, **fields)
    return heads


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
