"""Measures the speed of a training step: specrl's packed step, the same padded, plain transformers, and TRL's GRPO.

    python benchmarks/trainer.py                       # a random Qwen3 with about 7 million weights, one CPU thread
    python benchmarks/trainer.py --policy DIR --rollouts 64 --longest 2048 --dtype bfloat16 --json trainer.json

All contenders share one process and one batch: long-tailed completions (log-normal, cut at --longest) after prompts of
16 to 64 tokens. They begin with the same weights, and their log-probabilities are compared before anything is timed.
Each round has one step of each contender: log-probabilities without gradient, then forward, backward, clip and AdamW.

    packed        specrl's trainer: rollouts one after another, no padding. With one update per step it needs no
                  log-probabilities beforehand
    with pass     the same, with a pass for log-probabilities beforehand, as if it made several updates
    padded        the same as packed on rollouts that are all as long as the longest
    transformers  AutoModelForCausalLM, rows in the batch's order, each micro-batch padded to its longest; output layer
                  and softmax only for completions
    trl           GRPOTrainer's log-probabilities and loss, on its own shapes: all rows padded to the longest

Micro-batches have at most --micro-batch-tokens tokens, padding included. Printed: tokens of the rollouts (without
padding) per second relative to TRL's, and the floating-point operations of forward and backward for these tokens as a
share of this machine's matrix product, measured in the same rounds. Medians over rounds, and ranges.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from specrl.drafting.budget import POLICY_FORWARDS, estimate_policy_flops
from specrl.models.policy_config import read_policy_config
from specrl.records import Batch, FinishReason, Rollout, TrainRollout, VersionSpan
from specrl.spec import RunSpec, parse_spec
from specrl.trainer.megatron_backend.backend import MegatronBackend
from specrl.trainer.megatron_backend.training import logprobs

LEARNING_RATE = 1e-6
CLIP = 0.2
CAP = 2.0
MATRIX = 2048  # rows and columns of the product that measures the machine's peak
GPU_MATRIX = 8192  # the same on a GPU
GPU_PRODUCTS = 10  # of GPU_MATRIX, one after the other
AGREEMENT = {
    "float32": 1e-3,
    "bfloat16": 0.5,
}  # nats: largest allowed difference between log-probabilities of two contenders


def make_policy(folder: Path, hidden: int, layers: int, words: int = 4096, head_dim: int = 64) -> Path:
    """Write a Qwen3 with random weights, and a tokenizer with as many words."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head_dim,
        num_key_value_heads=max(1, hidden // head_dim // 2),
        head_dim=head_dim,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106 - a token of text
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)  # noqa: S106
    return folder


def a_spec(policy: Path, arguments: argparse.Namespace) -> RunSpec:
    """Make a run of the policy without a drafter."""
    return parse_spec(
        {
            "name": "benchmark",
            "model": {"path": str(policy), "dtype": arguments.dtype, "maxLength": arguments.longest + 128},
            "prompts": {"source": {"generated": {"family": "addition", "count": 10}}, "maxTokens": 64},
            "rewards": {"exact": {}},
            "generation": {"sampling": {"maxTokens": arguments.longest}, "speculation": {"none": {}}},
            "trainer": {
                "optimizer": {"learningRate": str(LEARNING_RATE)},
                "loss": {"correction": {"high": str(CAP)}, "clipLow": str(CLIP), "clipHigh": str(CLIP)},
                "microBatchTokens": arguments.micro_batch_tokens,
                "threads": arguments.threads,
            },
            "schedule": {"steps": 1000, "promptsPerStep": arguments.rollouts // 4, "groupSize": 4},
        }
    )


def a_batch(rollouts: int, longest: int, words: int) -> list[TrainRollout]:
    """Make rollouts of random tokens. Lengths are log-normal around a fifth of `longest`, which the last one has."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(longest / 5), 0.9, rollouts), 8, longest).astype(int)
    lengths[-1] = longest

    def one(index: int, length: int) -> TrainRollout:
        prompt = tuple(int(token) for token in generator.integers(4, words, generator.integers(16, 65)))
        sampled = Rollout(
            rollout_id=f"r{index}",
            group_id=f"g{index // 4}",
            sample_index=index % 4,
            token_ids_T=generator.integers(4, words, length).astype(np.int32),
            sampler_logprobs_T=np.full(length, -np.log(words), dtype=np.float32),
            versions=(VersionSpan(0, 0, length),),
            finish_reason=FinishReason.LENGTH,
            replica_id="gen-0",
            text="",
            seconds=0.0,
        )
        return TrainRollout(prompt, sampled, float(generator.normal()))

    return [one(index, int(length)) for index, length in enumerate(lengths)]


def as_long_as_the_longest(rollouts: Sequence[TrainRollout]) -> list[TrainRollout]:
    """Put longer prompts before the same completions, so that each has as many tokens as the longest."""
    longest = max(len(item.prompt_token_ids) + item.rollout.total_length for item in rollouts)

    def padded(item: TrainRollout) -> TrainRollout:
        missing = longest - len(item.prompt_token_ids) - item.rollout.total_length
        return replace(item, prompt_token_ids=(4,) * missing + item.prompt_token_ids)

    return [padded(item) for item in rollouts]


class Specrl:
    """The trainer's backend on one rank, and a batch for it."""

    def __init__(self, backend: MegatronBackend, rollouts: Sequence[TrainRollout], *, has_pass: bool = False) -> None:
        self._backend = backend
        self._has_pass = has_pass
        self._rollouts = tuple(rollouts)

    def logprobs(self) -> list[torch.Tensor]:
        return [torch.from_numpy(found_T) for found_T in self._backend.score_rollouts(self._rollouts)]

    def step(self) -> float:
        with mock.patch.object(logprobs, "needs_logprob_pass", return_value=self._has_pass):
            metrics = self._backend.train_step(Batch(self._backend.get_status().step + 1, self._rollouts))
        return metrics.logprob_seconds + metrics.train_seconds


@dataclass
class Rows:
    """Rollouts as padded rows: all prompts end, and all completions begin, in one column."""

    prompt_BP: torch.Tensor
    prompt_mask_BP: torch.Tensor
    completion_BC: torch.Tensor
    completion_mask_BC: torch.Tensor
    sampler_BC: torch.Tensor
    advantage_B: torch.Tensor

    @classmethod
    def of(cls, rollouts: Sequence[TrainRollout], device: torch.device) -> Rows:
        def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, *, left: bool = False) -> torch.Tensor:
            width = max(map(len, rows))
            filled = [[*[0] * (width - len(row)), *row] if left else [*row, *[0] * (width - len(row))] for row in rows]
            return torch.tensor(filled, dtype=dtype, device=device)

        prompts = [item.prompt_token_ids for item in rollouts]
        completions = [item.rollout.token_ids_T.tolist() for item in rollouts]
        return cls(
            prompt_BP=padded(prompts, torch.int64, left=True),
            prompt_mask_BP=padded([[1] * len(row) for row in prompts], torch.int64, left=True),
            completion_BC=padded(completions, torch.int64),
            completion_mask_BC=padded([[1] * len(row) for row in completions], torch.int64),
            sampler_BC=padded([item.rollout.sampler_logprobs_T.tolist() for item in rollouts], torch.float32),
            advantage_B=torch.tensor([item.advantage for item in rollouts], dtype=torch.float32, device=device),
        )

    @property
    def tokens_BS(self) -> torch.Tensor:
        return torch.cat([self.prompt_BP, self.completion_BC], 1)

    @property
    def mask_BS(self) -> torch.Tensor:
        return torch.cat([self.prompt_mask_BP, self.completion_mask_BC], 1)


def cuts(rollouts: Sequence[TrainRollout], max_tokens: int) -> list[list[TrainRollout]]:
    """Group consecutive rollouts whose padded rows hold at most `max_tokens` tokens."""
    found: list[list[TrainRollout]] = []
    for item in rollouts:
        row = [*found[-1], item] if found else [item]
        width = max(len(it.prompt_token_ids) for it in row) + max(it.rollout.total_length for it in row)
        if not found or len(row) * width > max_tokens:
            found.append([item])
        else:
            found[-1].append(item)
    return found


class Transformers:
    """A training step as one writes it with transformers and torch."""

    def __init__(self, policy: Path, rollouts: Sequence[TrainRollout], max_tokens: int, dtype: torch.dtype) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=dtype).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
        self._rows = [Rows.of(cut, device) for cut in cuts(rollouts, max_tokens)]
        self._tokens = sum(item.rollout.total_length for item in rollouts)

    def _logprobs(self, rows: Rows) -> torch.Tensor:
        """[T] log-probabilities of the completions' tokens, row after row."""
        mask_BS = rows.mask_BS
        position_BS = (mask_BS.cumsum(1) - 1).clamp(min=0)
        hidden_BSH = self._model.model(
            rows.tokens_BS, attention_mask=mask_BS, position_ids=position_BS
        ).last_hidden_state
        is_real_BC = rows.completion_mask_BC.bool()
        before_BCH = hidden_BSH[:, rows.prompt_BP.shape[1] - 1 : -1]
        logits_TV = self._model.lm_head(before_BCH[is_real_BC]).float()
        target_T = rows.completion_BC[is_real_BC]
        return logits_TV.log_softmax(-1).gather(1, target_T[:, None])[:, 0]

    def logprobs(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [
                part
                for rows in self._rows
                for part in self._logprobs(rows).cpu().split(rows.completion_mask_BC.sum(1).tolist())
            ]

    def step(self) -> float:
        started = now()
        with torch.no_grad():
            proximal = [self._logprobs(rows) for rows in self._rows]
        for rows, proximal_T in zip(self._rows, proximal, strict=True):
            is_real_BC = rows.completion_mask_BC.bool()
            advantage_T = rows.advantage_B[:, None].expand_as(is_real_BC)[is_real_BC]
            weight_T = (proximal_T - rows.sampler_BC[is_real_BC]).exp().clamp(max=CAP)
            ratio_T = (self._logprobs(rows) - proximal_T).exp()
            inside_T = ratio_T.clamp(1 - CLIP, 1 + CLIP)
            loss = -(weight_T * torch.minimum(ratio_T * advantage_T, inside_T * advantage_T)).sum() / self._tokens
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return now() - started


class Trl:
    """TRL's GRPOTrainer, which is given rollouts instead of generating them."""

    def __init__(self, policy: Path, rollouts: Sequence[TrainRollout], max_tokens: int, dtype: torch.dtype) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._rows = Rows.of(rollouts, device)
        self._at_once = max(1, max_tokens // self._rows.tokens_BS.shape[1])
        self._folder = tempfile.TemporaryDirectory(prefix="trl-")
        self._trainer: Any = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(policy, dtype=dtype),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=self._folder.name,
                use_cpu=device.type == "cpu",
                bf16=False,
                report_to=[],
                per_device_train_batch_size=4,
                num_generations=4,
                learning_rate=LEARNING_RATE,
                gradient_checkpointing=False,
                temperature=1.0,
                beta=0.0,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["w4"] * 4}),
        )
        self._model = self._trainer.model
        self._model.train()
        self._trainer.create_optimizer()
        self._trainer.current_gradient_accumulation_steps = 1
        self._tokens = self._rows.completion_mask_BC.sum()

    def _proximal(self) -> torch.Tensor:
        """[B, C]"""
        width = self._rows.completion_BC.shape[1]
        with torch.no_grad():
            found_BC: torch.Tensor = self._trainer._get_per_token_logps_and_entropies(
                self._model, self._rows.tokens_BS, self._rows.mask_BS, width, batch_size=self._at_once
            )[0]
        return found_BC

    def logprobs(self) -> list[torch.Tensor]:
        lengths = self._rows.completion_mask_BC.sum(1).tolist()
        return [row_C[:length].float().cpu() for row_C, length in zip(self._proximal(), lengths, strict=True)]

    def step(self) -> float:
        rows = self._rows
        started = now()
        proximal_BC = self._proximal()
        for first in range(0, len(rows.advantage_B), self._at_once):
            chosen = slice(first, first + self._at_once)
            loss = self._trainer._compute_loss(
                self._model,
                {
                    "prompt_ids": rows.prompt_BP[chosen],
                    "prompt_mask": rows.prompt_mask_BP[chosen],
                    "completion_ids": rows.completion_BC[chosen],
                    "completion_mask": rows.completion_mask_BC[chosen],
                    "advantages": rows.advantage_B[chosen],
                    "old_per_token_logps": proximal_BC[chosen],
                    "num_items_in_batch": self._tokens,
                },
            )
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._trainer.optimizer.step()
        self._trainer.optimizer.zero_grad()
        return now() - started


def now() -> float:
    """Seconds since the start, once the device has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of a product of two square matrices: the fastest of a few.

    A GPU gets larger matrices, and several products in a row. One of 2,048 takes an H100 17 us at its peak, which is no
    longer than the launch.
    """
    width, products = (GPU_MATRIX, GPU_PRODUCTS) if device.type == "cuda" else (MATRIX, 1)
    left, right = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    best = float("inf")
    for number in range(4):
        started = now()
        for _ in range(products):
            torch.mm(left, right, out=out)
        if number:  # the first loads the kernel
            best = min(best, now() - started)
    return 2 * products * width**3 / best


def check_agreement(contenders: dict[str, Any], most: float) -> dict[str, float]:
    """Largest difference of log-probabilities from transformers', by contender. Exits if one is too large."""
    expected = contenders["transformers"].logprobs()
    # A padded rollout has other tokens before it, and so other log-probabilities.
    compared = {name: it for name, it in contenders.items() if name not in ("transformers", "padded", "with pass")}
    found = {
        name: max(float((a.float() - b.float()).abs().max()) for a, b in zip(it.logprobs(), expected, strict=True))
        for name, it in compared.items()
    }
    if max(found.values()) > most:
        raise SystemExit(
            f"log-probabilities of the contenders must agree within {most} nats, got {found}; they do not compute the "
            "same thing"
        )
    return found


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    """Measure, print, and write the figures if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, help="Hugging Face folder; without it a random policy is made")
    parser.add_argument("--hidden", type=int, default=256, help="width of the random policy; a multiple of 128")
    parser.add_argument("--layers", type=int, default=6, help="layers of the random policy")
    parser.add_argument("--rollouts", type=int, default=16, help="rollouts in the batch; a multiple of 4")
    parser.add_argument("--longest", type=int, default=768, help="tokens of the longest completion")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--dtype", choices=AGREEMENT, default="float32")
    parser.add_argument(
        "--without-trl", action="store_true", help="leave TRL out, for example because it is not installed"
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    console = Console()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        policy = arguments.policy or make_policy(Path(scratch) / "policy", arguments.hidden, arguments.layers)
        config = read_policy_config(policy)
        dtype = getattr(torch, arguments.dtype)
        rollouts = a_batch(arguments.rollouts, arguments.longest, config.vocab_size)
        most = arguments.micro_batch_tokens
        backend = MegatronBackend(
            a_spec(policy, arguments)
        )  # one backend for both: Megatron's groups belong to the process
        backend.load_model(None)
        contenders: dict[str, Any] = {
            "packed": Specrl(backend, rollouts),
            "with pass": Specrl(backend, rollouts, has_pass=True),
            "padded": Specrl(backend, as_long_as_the_longest(rollouts)),
            "transformers": Transformers(policy, rollouts, most, dtype),
        }
        if not arguments.without_trl:
            contenders["trl"] = Trl(policy, rollouts, most, dtype)
        apart = check_agreement(contenders, AGREEMENT[arguments.dtype])
        measured, peaks = measure(contenders, arguments.rounds, dtype, console)
    lengths = [(len(item.prompt_token_ids), item.rollout.total_length) for item in rollouts]
    completions = np.array([completion for _, completion in lengths])
    forwards = 3 / POLICY_FORWARDS  # forward and backward
    flops = forwards * sum(estimate_policy_flops(config, prompt, completion) for prompt, completion in lengths)
    base = "transformers" if arguments.without_trl else "trl"
    console.print(
        f"{len(rollouts)} rollouts, completions of {completions.min()} to {completions.max()} tokens, "
        f"mean {completions.mean():.0f}; log-probabilities apart from transformers': "
        + ", ".join(f"{name} {value:.1e}" for name, value in apart.items())
    )
    console.print(a_table(measured, peaks, flops, base))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"seconds": measured, "peak_flops": peaks, "step_flops": flops}, indent=1))


def measure(
    contenders: dict[str, Any], rounds: int, dtype: torch.dtype, console: Console
) -> tuple[dict[str, list[float]], list[float]]:
    """Run one step of each contender in turns, after one to warm up, and measure the machine's peak in every round.

    Returns the seconds of every round by contender, and the peaks. Ctrl-C ends early.
    """
    measured: dict[str, list[float]] = {name: [] for name in contenders}
    peaks: list[float] = []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with console.status("warming up") as shown, suppress(KeyboardInterrupt):
        for number in range(rounds + 1):
            shown.update(f"round {number} of {rounds}" if number else "warming up")
            seconds = {name: contender.step() for name, contender in contenders.items()}
            peak = peak_flops(dtype, device)
            if number:
                for name, found in measured.items():
                    found.append(seconds[name])
                peaks.append(peak)
    if not peaks:
        raise SystemExit("no round was complete; let at least one finish")
    return measured, peaks


def a_table(measured: dict[str, list[float]], peaks: Sequence[float], flops: float, base: str) -> Table:
    """Ratios of tokens per second by round, and shares of the peak."""
    table = Table("", f"step, tokens/s against {base}", "against with pass", "share of peak")
    for name, seconds in measured.items():
        ratios = [
            [theirs / ours for ours, theirs in zip(seconds, measured[other], strict=True)]
            for other in (base, "with pass")
        ]
        shares = [flops / second / peak for second, peak in zip(seconds, peaks, strict=True)]
        table.add_row(name, *(spread(ratio) for ratio in ratios), spread(shares))
    return table


if __name__ == "__main__":
    main()
