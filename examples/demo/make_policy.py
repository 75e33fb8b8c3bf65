"""Make the demo's base policy on the spot: a tiny Qwen3 model, undertrained on worked solutions of generated problems.

    python examples/demo/make_policy.py --out DIR [--steps N] [--seed S] [--layers N] [--worked-only] [--difficulty N]
                                        [--calculator]

What it leaves is an ordinary Hugging Face checkpoint with a tokenizer, which vLLM, Megatron and transformers load. It
has read what a base model has read: problems worked out step by step, and problems with the answer alone. So it
often answers at once, and is then mostly wrong. That working a problem out pays is what RL is to teach it. With
`--worked-only` it has learnt that already: every answer is worked out, and long. With `--calculator` the problems are
sums, and those that are worked out are so by a call of a tool, for examples/tools/run.yaml.
The number of steps is fixed, not the time, so one seed gives one policy (on one machine and number of threads).
Deeper and narrower than such a small model would otherwise be: speculation gains when the policy is much dearer than
a drafter of one layer. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from specrl.prompts.families import Problem, default_difficulty, family_names, generate_problem

FAMILY = "wheels"
CALCULATED = "addition"
STEPS = 150
SEED = 0
LAYERS = 8
# Runs take seeds >= 0 for training prompts and 999 for validation; the warm-up's problems come from elsewhere.
WARM_UP_STREAM = 1_000_000

VOCABULARY = 384  # 256 bytes, 4 special tokens, and the words of the families
MATRIX_RATE = 3e-3
OTHER_RATE = 2e-3
NOT_PREDICTED = -100  # what torch's cross entropy leaves out
WARM_UP_STEPS = 15

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Texts:
    """What a batch holds: so many problems worked out, and so many with the answer alone.

    difficulty: steps that every problem is longer by, as `difficulty` in a run file's generated source.
    has_calculator: problems are sums, worked out by a call of a tool.
    """

    worked: int = 12
    alone: int = 8
    difficulty: int = 0
    has_calculator: bool = False


def make_policy(out: Path, steps: int = STEPS, seed: int = SEED, layers: int = LAYERS, texts: Texts = Texts()) -> None:
    """Train the base policy and save it with its tokenizer as `out`, whole or not at all.

    Raises FileExistsError if `out` exists.
    """
    if out.exists():
        raise FileExistsError(f"out must not exist, got out={out}; remove it or name another folder")
    tokenizer = build_tokenizer(texts)
    torch.manual_seed(seed)
    model = build_model(tokenizer, layers)
    train(model, stream_batches(tokenizer, seed, texts), steps)
    save_whole(model, tokenizer, out)


def build_tokenizer(texts: Texts) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE that encodes any text, with every digit a token and the families' words whole."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    problems = [generate_problem(family, WARM_UP_STREAM, index) for family in family_names() for index in range(300)]
    calls = ("".join(work(problem)) for problem in problems if texts.has_calculator and problem.family == CALCULATED)
    bpe.train_from_iterator(chain((text for p in problems for text in (p.question, p.solution)), calls), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, layers: int) -> Qwen3ForCausalLM:
    """Build the untrained model: layers of 192, fp32; 8 of them are 2.6 M parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    for name, weight in model.named_parameters():
        if "embed" in name:
            torch.nn.init.normal_(weight, std=0.05)
        elif weight.ndim == 2:
            # Unit variance through each matrix, and quiet residual branches: it learns within a hundred steps.
            quiet = 0.2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            torch.nn.init.normal_(weight, std=quiet * weight.shape[1] ** -0.5)
    return model


def train(model: Qwen3ForCausalLM, batches: Iterator[tuple[Tensor, Tensor]], steps: int) -> None:
    """Fit the model to worked solutions for `steps` batches; the questions are not predicted."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [Muon(matrices, MATRIX_RATE), torch.optim.AdamW(others, OTHER_RATE, (0.9, 0.95), weight_decay=0.0)]
    rates = [MATRIX_RATE, OTHER_RATE]
    model.train()
    with progress_bar() as progress:
        task = progress.add_task("base policy", total=steps, loss=math.nan)
        for step in range(steps):
            inputs_BT, targets_BT = next(batches)
            logits_BTV = model(input_ids=inputs_BT).logits
            loss = functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
            torch.autograd.backward(loss)  # Tensor.backward has no types
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            fraction = min(1.0, (step + 1) / WARM_UP_STEPS) * (1.0 - 0.7 * step / steps)
            for optimizer, rate in zip(optimizers, rates, strict=True):
                optimizer.param_groups[0]["lr"] = rate * fraction
                optimizer.step()
                optimizer.zero_grad()
            progress.update(task, advance=1, loss=loss.item())


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for matrices (https://kellerjordan.github.io/posts/muon), in fp32.

    Needs less than half of AdamW's examples here. torch.optim.Muon iterates in bf16, which most CPUs only emulate.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], rate: float) -> None:
        super().__init__(matrices, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every matrix by its momentum's nearest orthogonal matrix, scaled to the size of AdamW's steps."""
        group = self.param_groups[0]
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for weight in group["params"]:
            by_shape.setdefault(weight.shape, []).append(weight)
        for shape, weights in by_shape.items():
            updates = orthogonalise(torch.stack([self._momentum(weight) for weight in weights]))
            for weight, update in zip(weights, updates, strict=True):
                weight.mul_(1.0 - 0.01 * group["lr"]).sub_(update, alpha=0.2 * max(shape) ** 0.5 * group["lr"])

    def _momentum(self, weight: torch.nn.Parameter) -> Tensor:
        """Fold the gradient into the weight's momentum; return it with Nesterov's look-ahead."""
        assert weight.grad is not None
        momentum: Tensor = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
        momentum.lerp_(weight.grad, 0.05)
        nesterov: Tensor = weight.grad.lerp(momentum, 0.95)
        return nesterov


def orthogonalise(matrices_NRC: Tensor) -> Tensor:
    """Bring all singular values of each matrix near 1 by five Newton-Schulz iterations (Muon's quintic)."""
    tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x = matrices_NRC.mT if tall else matrices_NRC
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    orthogonal: Tensor = x.mT if tall else x
    return orthogonal


def stream_batches(tokenizer: PreTrainedTokenizerFast, seed: int, texts: Texts) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets) [worked + alone, T]; worked solutions of a batch are of like length: little padding."""
    rng = random.Random(seed)  # noqa: S311 - an order, not a secret
    family = CALCULATED if texts.has_calculator else FAMILY
    usual, extra = default_difficulty(family), texts.difficulty
    difficulty = replace(usual, shortest=usual.shortest + extra, longest=usual.longest + extra)
    start = 0
    while True:
        indices = range(start, start + 10 * (texts.worked + texts.alone))
        problems = [generate_problem(family, WARM_UP_STREAM + seed, index, difficulty) for index in indices]
        many = 10 * texts.worked
        worked = [
            encode(tokenizer, problem, *(work(problem) if texts.has_calculator else (problem.solution,)))
            for problem in problems[:many]
        ]
        alone = [encode(tokenizer, problem, f"#### {problem.answer}") for problem in problems[many:]]
        worked.sort(key=lambda row: len(row[0]) + len(row[1]))
        places = list(range(10))
        rng.shuffle(places)
        for place in places:
            rows = worked[place * texts.worked :][: texts.worked] + alone[place * texts.alone :][: texts.alone]
            yield pad(rows, int(tokenizer.pad_token_id))
        start = indices.stop


def work(problem: Problem) -> tuple[str, str, str]:
    """A sum worked out: the call, what the tool writes in the way of a run file's defaults, and the answer."""
    first, second = re.findall(r"[0-9]+", problem.question)
    return f"<tool>{first}+{second}</tool>", f"<output>{problem.answer}</output>", f"#### {problem.answer}"


Row = tuple[list[int], list[int], list[int]]


def encode(tokenizer: PreTrainedTokenizerFast, problem: Problem, *turns: str) -> Row:
    """Return a problem's prompt and a solution of it as token ids, and what is to be predicted of the solution.

    turns: what the policy writes, between what a tool writes, which is read and not predicted.
    """
    solution: list[int] = []
    targets: list[int] = []
    for place, text in enumerate((*turns[:-1], turns[-1] + END)):
        tokens = tokenizer.encode(text)
        solution += tokens
        targets += tokens if place % 2 == 0 else [NOT_PREDICTED] * len(tokens)
    return tokenizer.encode(USER + problem.question + ASSISTANT), solution, targets


def pad(rows: list[Row], pad_id: int) -> tuple[Tensor, Tensor]:
    """Stack rows padded on the right; targets are shifted by one, where anything is to be predicted."""
    width = max(len(prompt) + len(solution) for prompt, solution, _ in rows)
    inputs_BT = torch.full((len(rows), width), pad_id)
    targets_BT = torch.full((len(rows), width), NOT_PREDICTED)
    for row, (prompt, solution, targets) in enumerate(rows):
        end = len(prompt) + len(solution)
        inputs_BT[row, :end] = torch.tensor(prompt + solution)
        targets_BT[row, len(prompt) - 1 : end - 1] = torch.tensor(targets)
    return inputs_BT, targets_BT


def save_whole(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint beside `out` and rename it, so that an interrupted run leaves nothing under that name."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)  # mkdtemp's 0700 would hide it from other users
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def progress_bar() -> Progress:
    """Show steps, time left and the loss."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Make the demo's base policy.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint; must not exist")
    parser.add_argument("--steps", type=int, default=STEPS, help="batches of supervised training (default %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="weights and problems (default %(default)s)")
    parser.add_argument("--layers", type=int, default=LAYERS, help="depth of the policy (default %(default)s)")
    parser.add_argument("--worked-only", action="store_true", help="read worked solutions alone: long answers")
    parser.add_argument("--difficulty", type=int, default=0, help="steps that problems are longer by (default 0)")
    parser.add_argument("--calculator", action="store_true", help="read sums, worked out by calls of a tool")
    arguments = parser.parse_args()
    alone = 0 if arguments.worked_only else Texts.alone
    texts = Texts(alone=alone, difficulty=arguments.difficulty, has_calculator=arguments.calculator)
    make_policy(arguments.out, arguments.steps, arguments.seed, arguments.layers, texts)
    print(f"policy written to {arguments.out}")


if __name__ == "__main__":
    main()
