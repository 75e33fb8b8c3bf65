"""Make the demo's base policy on the spot: a tiny Qwen3 model, undertrained on worked solutions of generated problems.

    python examples/demo/make_policy.py --out DIR [--steps N] [--seed S] [--layers N] [--worked-only] [--difficulty N]
                                        [--family NAME | --calculator] [--plain]

An untrained model with its tokenizer, and texts; `specrl sft` does the rest (docs/sft.md), and leaves an ordinary
Hugging Face folder. The policy has read what a base model has read: problems worked out step by step, and problems with
the answer alone. So it often answers at once, and is then mostly wrong. That working a problem out pays is what RL is
to teach it. With `--worked-only` it has learnt that already: every answer is worked out, and long. With `--calculator`
the problems are sums, and those that are worked out are so by a call of a tool, for examples/05-tools/run.yaml.
The number of steps is fixed, not the time, so one seed gives one policy (on one machine and number of threads).
Deeper and narrower than such a small model would otherwise be: speculation gains when the policy is much dearer than
a drafter of one layer. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from specrl.prompts.families import GeneratedProblem, default_difficulty, family_names, generate_problem

EXAMPLES = Path(__file__).resolve().parents[1]
FAMILY = "wheels"
CALCULATED = "addition"
STEPS = 170
SEED = 0
LAYERS = 8
WORKED, ALONE = 12, 8
# Runs take seeds >= 0 for training prompts and 999 for validation; the warm-up's problems come from elsewhere.
WARM_UP_STREAM = 1_000_000

LONGEST = 512  # tokens of a problem with its solution
VOCABULARY = 384  # 256 bytes, 4 special tokens, and the words of the families
LEARNING = {"learningRate": '"3e-3"', "finalLearningRate": '"3e-4"', "decay": "Linear", "warmupSteps": "20"}
"""Of AdamW; the run file's own are for RL."""

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Wanted:
    """A policy of so many layers, trained for so many steps.

    worked, alone: problems of a step that are worked out, and that have the answer alone.
    difficulty: steps that every problem is longer by, as `difficulty` in a run file's generated source.
    has_calculator: problems are sums, worked out by a call of a tool.
    """

    steps: int
    seed: int
    layers: int
    worked: int
    alone: int
    difficulty: int
    family: str
    has_calculator: bool

    @property
    def run_file(self) -> Path:
        """What the policy is for, with the template that its texts are read in."""
        return EXAMPLES / ("05-tools" if self.has_calculator else "demo") / "run.yaml"


def make_policy(out: Path, wanted: Wanted, *, is_plain: bool) -> None:
    """Train the base policy and leave it with its tokenizer as `out`, whole or not at all.

    Raises FileExistsError if `out` exists, CalledProcessError if `specrl sft` fails, which then has said why.
    """
    if out.exists():
        raise FileExistsError(f"out must not exist, got out={out}; remove it or name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        untrained, pairs, trained = (Path(folder) / name for name in ("untrained", "pairs.jsonl", "trained"))
        tokenizer = build_tokenizer(wanted)
        tokenizer.save_pretrained(untrained)
        torch.manual_seed(wanted.seed)
        build_model(tokenizer, wanted.layers).save_pretrained(untrained)
        pairs.write_text("".join(json.dumps(pair) + "\n" for pair in read_texts(wanted)), encoding="utf-8")
        command = [sys.executable, "-m", "specrl.cli", "sft", "-f", str(wanted.run_file)]
        command += ["--data", str(pairs), "--out", str(trained), "--held-out", "0"]
        command += ["--steps", str(wanted.steps), "--batch-size", str(wanted.worked + wanted.alone)]
        for field, value in settings(untrained, wanted).items():
            command += ["--set", f"{field}={value}"]
        subprocess.run(command + (["--plain"] if is_plain else []), check=True)
        trained.rename(out)


def settings(untrained: Path, wanted: Wanted) -> dict[str, str]:
    """Fields of the run file that are others for the warm-up."""
    return {
        "model.path": yaml.dump(str(untrained.absolute()), default_style='"', width=math.inf).strip(),
        "model.maxLength": str(LONGEST),
        "prompts.maxTokens": str(LONGEST // 2),
        "checkpoint.everySteps": str(wanted.steps),
        "schedule.seed": str(wanted.seed),
        **{f"trainer.optimizer.{field}": value for field, value in LEARNING.items()},
    }


def build_tokenizer(wanted: Wanted) -> PreTrainedTokenizerFast:
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
    calls = ("".join(work(problem)) for problem in problems if wanted.has_calculator and problem.family == CALCULATED)
    bpe.train_from_iterator(chain((text for p in problems for text in (p.question, p.solution)), calls), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=LONGEST,
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
        max_position_embeddings=LONGEST,
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


def read_texts(wanted: Wanted) -> Iterator[dict[str, str]]:
    """What the policy reads, each text once: problems worked out, and problems with the answer alone."""
    usual, extra, batch = default_difficulty(wanted.family), wanted.difficulty, wanted.worked + wanted.alone
    difficulty = replace(usual, shortest=usual.shortest + extra, longest=usual.longest + extra)
    for index in range(wanted.steps * batch):
        problem = generate_problem(wanted.family, WARM_UP_STREAM + wanted.seed, index, difficulty)
        worked = "".join(work(problem)) if wanted.has_calculator else problem.solution
        is_worked = index % batch < wanted.worked
        yield {"prompt": problem.question, "completion": worked if is_worked else f"#### {problem.answer}"}


def work(problem: GeneratedProblem) -> tuple[str, str, str]:
    """A sum worked out: the call, what the tool writes in the way of a run file's defaults, and the answer."""
    first, second = re.findall(r"[0-9]+", problem.question)
    return f"<tool>{first}+{second}</tool>", f"<output>{problem.answer}</output>", f"#### {problem.answer}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Make the demo's base policy.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint; must not exist")
    parser.add_argument("--steps", type=int, default=STEPS, help="batches of supervised training (default %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="weights and problems (default %(default)s)")
    parser.add_argument("--layers", type=int, default=LAYERS, help="depth of the policy (default %(default)s)")
    parser.add_argument("--worked-only", action="store_true", help="read worked solutions alone: long answers")
    parser.add_argument("--difficulty", type=int, default=0, help="steps that problems are longer by (default 0)")
    parser.add_argument("--family", choices=family_names(), default=FAMILY, help="of problems (default %(default)s)")
    parser.add_argument("--calculator", action="store_true", help="read sums, worked out by calls of a tool")
    parser.add_argument("--plain", action="store_true", help="lines instead of a bar")
    arguments = parser.parse_args()
    wanted = Wanted(
        steps=arguments.steps,
        seed=arguments.seed,
        layers=arguments.layers,
        worked=WORKED,
        alone=0 if arguments.worked_only else ALONE,
        difficulty=arguments.difficulty,
        family=CALCULATED if arguments.calculator else arguments.family,
        has_calculator=arguments.calculator,
    )
    make_policy(arguments.out, wanted, is_plain=arguments.plain)
    print(f"policy written to {arguments.out}")


if __name__ == "__main__":
    main()
