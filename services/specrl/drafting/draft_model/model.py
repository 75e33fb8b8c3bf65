"""A draft model: a smaller language model with the policy's vocabulary, computed by transformers.

vLLM drafts with it as with any model: it reads the tokens up to x_{t+1} and predicts x_{t+2}, then reads its own draft
and predicts x_{t+3}, and so on. It sees no hidden states of the policy, and a token's position is its place in the
sequence (vLLM 0.32, `v1/spec_decode/draft_model.py` and `llm_base_proposer.py`). Training replaces the drafts by the
rollout's own tokens. So the logits of pass j at a start t are the model's logits at position t + 1 + j, and one forward
pass has the logits of all passes.

Every family of transformers can be trained whose parameters have the names that the folder gives its tensors. These
are the names that vLLM's loader expects, too, so no name is ever mapped. Mixtures of experts are refused, because
transformers joins the tensors of all experts. Python code in a folder is never run.

Sequences are padded at the right. A causal model is blind to what comes after a token, so padding changes nothing in
any family, and no mask depends on the family.

Memory is bounded (`PassLimits`). Of a sequence longer than LONG_TOKENS only the inputs of the layers are kept, and the
layers are computed again in the backward pass.

Called by the trainer, through `kind.py`.

Shapes: R packed rows, W tokens of a row, M starts of a row, N sequences, S tokens of the longest, H hidden, E starts
that count in a pass, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from specrl.drafting.draft_model.kind import FIELD, LONG_TOKENS, most_starts
from specrl.drafting.draft_model.sequences import unpack_sequences
from specrl.drafting.drafter import Drafter, DrafterInputs
from specrl.drafting.packing import PackedRows, PassLimits
from specrl.errors import CheckpointInvalid
from specrl.files import read_object
from specrl.models import ModelFolder, read_model_folder
from specrl.models.model_folder import Shape
from specrl.models.policy_config import PolicyConfig
from specrl.records import WeightOwner
from specrl.spec import RunSpec
from specrl.tensor_files import INDEX, copy_all_but_weights, save_tensors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
# Tensors that a folder may have and the model has not: old Llama folders store the rotary frequencies.
_COMPUTED = ("rotary_emb.inv_freq",)


class DraftModel(Drafter):
    """A draft model. Its parameters are those of `model`, a causal language model of transformers."""

    owner = WeightOwner.DRAFTER
    inputs = DrafterInputs()  # only token ids
    # Narrow matrices, and passes of a few sequences. Measured on CPUs with a model of 0.1 million parameters beside a
    # policy of 1.4 million: at 1.0 a step took 1.14 of its time instead of at most 1.07 (benchmarks/adaptation.py).
    relative_speed = 0.25

    def __init__(self, model: Any, folder: Path) -> None:
        """model: without dropout, which would make training differ from the engine."""
        super().__init__()
        self.model = model.train()  # transformers checkpoints layers in this mode only
        self.folder = folder
        config = model.config.get_text_config()
        self.limits = PassLimits(LONG_TOKENS, most_starts(config.vocab_size))
        self.register_buffer("draft_ids_K", torch.arange(config.vocab_size), persistent=False)
        ends = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
        self._layer_parameters = sum(weight.numel() for weight in self.parameters() if id(weight) not in ends)
        self._output_parameters = model.get_output_embeddings().weight.numel()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._score_width = config.num_hidden_layers * heads * head_dim

    def draft_logits(self, rows: PackedRows, passes: int) -> Iterator[torch.Tensor]:
        """See `Drafter`. All passes come from one forward pass: pass j at a start is pass 0 at the j-th start after."""
        sequences = unpack_sequences(rows)
        logits_EV = self._compute_logits(sequences.token_ids_NS, sequences.place_E)
        yield logits_EV
        is_start_RM = rows.select_starts(0)
        number_RM = (is_start_RM.flatten().cumsum(0) - 1).view_as(is_start_RM)
        for j in range(1, passes):
            yield logits_EV[number_RM.roll(-j, 1)[rows.select_starts(j)]]

    def _compute_logits(self, token_ids_NS: torch.Tensor, place_E: torch.Tensor) -> torch.Tensor:
        """Compute the logits [E, V] at some places of the flattened [N, S].

        The output layer runs at these places only. It is the model's own, with the scale or the cap of its family.
        """

        def select_places(_layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (inputs[0].flatten(0, 1)[place_E][None], *inputs[1:])

        is_long = torch.is_grad_enabled() and token_ids_NS.numel() > LONG_TOKENS
        if is_long and self.model.supports_gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        hook = self.model.get_output_embeddings().register_forward_pre_hook(select_places)
        try:
            logits_1EV: torch.Tensor = self.model(input_ids=token_ids_NS, use_cache=False).logits
        finally:
            hook.remove()
            self.model.gradient_checkpointing_disable()
        return logits_1EV[0]

    def estimate_forward_flops(self, passes: int, context: int, starts: int) -> float:
        """See `Drafter`. Two operations per weight and token, plus the attention scores and values of all tokens.

        The number of passes costs nothing. Embeddings cost nothing, and the output layer is computed at starts only.
        """
        scores = 2 * self._score_width * context / 2  # causal: half of all pairs
        layers = (self._layer_parameters + scores) * context
        if context > LONG_TOKENS:
            layers = layers * 4 / 3  # computed again, which a backward pass of two forward passes does not include
        return 2.0 * float(layers + self._output_parameters * starts)

    def map_to_draft_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Drafter`. A draft model can draft every token."""
        return token_ids

    def collect_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """See `Drafter`. A tied output layer is not listed, as in the folder."""
        return {name: weight.detach().to(dtype) for name, weight in self.model.named_parameters()}

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `Drafter`."""
        problem = _compare_shapes(
            {name: tuple(weight.shape) for name, weight in self.model.named_parameters()},
            {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        )
        if problem is not None:
            raise CheckpointInvalid(
                f"the draft model's tensors must be those of {self.folder}, got {problem}; resume with the run's own "
                "draft model"
            )
        for name, weight in self.model.named_parameters():
            weight.copy_(tensors[name])

    def write_folder(self, directory: Path, dtype: torch.dtype) -> None:
        """See `Drafter`. Config, tokenizer and all other files are copied from the model's folder."""
        directory.mkdir(parents=True, exist_ok=True)
        copy_all_but_weights(self.folder, directory)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.collect_tensors(dtype).items()}
        save_tensors(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        config = read_object(directory / CONFIG)
        config.pop("torch_dtype", None)  # the older name of the field
        config["dtype"] = str(dtype).removeprefix("torch.")
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_drafter(spec: RunSpec, _policy: PolicyConfig) -> DraftModel:
    """Load the run's draft model; see `DrafterKind.load_drafter`. Preflight has compared it with the policy."""
    section = spec.generation.speculation.draft_model
    assert section is not None
    return load_draft_model(Path(section.path))


def load_draft_model(path: Path) -> DraftModel:
    """Load a folder in float32 on the CPU. Raises CheckpointInvalid if the model cannot be trained."""
    folder = read_model_folder(path, FIELD)
    problem = describe_obstacle(folder)
    if problem is not None:
        raise CheckpointInvalid(f"{FIELD} {problem}; use another draft model, or set trainer.drafter.online: false")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # this process writes a log, not to a terminal
    model = AutoModelForCausalLM.from_pretrained(folder.path, **_choose_options(folder), local_files_only=True)
    return DraftModel(model, folder.path)


def _choose_options(folder: ModelFolder) -> dict[str, Any]:
    """Return transformers' options for a model that computes what the engine computes: config, precision, attention."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    # PyTorch's own attention cannot cap scores, as Gemma 2 does.
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    return {
        "config": config,
        "dtype": torch.float32,
        "attn_implementation": attention,
        "trust_remote_code": False,
    }


def describe_obstacle(folder: ModelFolder) -> str | None:
    """Say why a draft model cannot be trained, as in `must be ..., got ...`; None if it can. Loads no weights."""
    if not any((folder.path / name).exists() for name in (WEIGHTS, INDEX)):
        return f"must have {WEIGHTS} or {INDEX}, of which transformers reads one, to be trained, got {folder.path}"
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(**_choose_options(folder))  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - the seam to transformers, whose families raise many types
        reason = str(error).strip().partition("\n")[0]
        return (
            "must be a language model of a family that transformers knows, to be trained, got "
            f"model_type={folder.config.get('model_type')!r} in {folder.path}: {type(error).__name__}: {reason}"
        )
    if model.get_output_embeddings() is None or model.get_input_embeddings() is None:
        return f"must be a language model with an output layer, got {type(model).__name__} in {folder.path}"
    mine = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    stored = {name: shape for name, shape in folder.shapes.items() if not name.endswith(_COMPUTED)}
    if folder.is_tied:
        stored.pop("lm_head.weight", None)  # some folders store the tied layer a second time
    problem = _compare_shapes(mine, stored)
    if problem is None:
        return None
    return (
        f"must have the tensors of transformers' {type(model).__name__}, which are named otherwise in mixtures of "
        f"experts, to be trained, got {problem} in {folder.path}"
    )


def _compare_shapes(mine: Mapping[str, Shape], given: Mapping[str, Shape]) -> str | None:
    """Name up to three tensors that are missing, unknown or of another shape; None if all agree."""
    wrong = [
        f"{name} {given.get(name, 'missing') if name in mine else 'unknown'}"
        for name in sorted(mine.keys() | given.keys())
        if mine.get(name) != given.get(name)
    ]
    return ", ".join(wrong[:3]) or None
