"""The examples of a supervised warm-up: prompts with completions, checked and tokenized. Works without torch.

`specrl sft` counts and checks them before it starts anything (`launcher/warm_up.py`); rank 0 trains on them.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import numpy as np

from specrl.errors import DatasetInvalid
from specrl.prompts.columns import DatasetProblem
from specrl.prompts.mixing import epoch_order
from specrl.prompts.sources import ProblemSource
from specrl.prompts.stream import NamedProblems, PromptStream, load_prompts
from specrl.prompts.templates import PromptTemplate
from specrl.records import Batch, FinishReason, OutputSpan, Rollout, TrainRollout, VersionSpan
from specrl.spec import RunSpec

# Held-out examples are drawn from the shuffled order of this epoch. Training never reaches it, so the split is
# independent of the order of training.
_SPLIT_EPOCH = 1 << 32


class TrainingExamples:
    """The examples, prompts with completions: a stream to train on, and a held-out set."""

    def __init__(self, spec: RunSpec, held_out: Decimal) -> None:
        """Read and check all examples. held_out: the share that is not trained on.

        Raises DatasetInvalid, which names the line of an example that does not fit, and CheckpointInvalid when the
        policy's tokenizer cannot be read.
        """
        self._template = PromptTemplate(spec.prompts, spec.model.path)
        self._tools = spec.tools
        self._size = spec.schedule.prompts_per_step
        seed = spec.schedule.seed
        trained: list[NamedProblems] = []
        held: list[tuple[DatasetProblem, str]] = []
        for number, named in enumerate(load_prompts(spec).sources):
            source = self._drop_too_long(named, spec.model.max_length)
            order = epoch_order(len(source), seed, _SPLIT_EPOCH, number).tolist()
            count = int(len(source) * held_out)
            if count == len(source):
                raise DatasetInvalid(
                    f"examples must be more than those held out, got {len(source)}; add examples or lower --held-out"
                )
            held += [(problem, named.name) for problem in source.select_problems(sorted(order[:count])).problems]
            trained.append(replace(named, source=source.select_problems(sorted(order[count:]))))
        self.held_out = [self._build_example(problem, name, i) for i, (problem, name) in enumerate(held)]
        self._stream = PromptStream(trained, self._template, seed)

    def __len__(self) -> int:
        """Count the examples of one epoch, without the held-out ones."""
        return len(self._stream)

    def build_batch(self, step: int) -> Batch:
        """Build the batch of a step, counted from 1. It may span the end of an epoch."""
        positions = range((step - 1) * self._size, step * self._size)
        prompts = map(self._stream.prompt, positions)
        rollouts = [self._build_rollout(prompt.token_ids, prompt.answer, prompt.position) for prompt in prompts]
        return Batch(step, tuple(rollouts))

    def _drop_too_long(self, named: NamedProblems, most: int) -> ProblemSource:
        source = named.source
        lengths = [self._count_tokens(problem, named.name) for problem in source.problems]
        wrong = {
            index: f"{length} tokens with its completion, which must be at most {most} (model.maxLength)"
            for index, length in enumerate(lengths)
            if length > most
        }
        return source.without_problems(wrong) if wrong else source

    def _count_tokens(self, problem: DatasetProblem, source: str) -> int:
        row = self._build_example(problem, source, 0)
        return len(row.prompt_token_ids) + row.rollout.total_length

    def _build_example(self, problem: DatasetProblem, source: str, number: int) -> TrainRollout:
        prompt = self._template.tokenize_text(self._template.format_problem(problem, source))
        return self._build_rollout(prompt, problem.answer, number)

    def _build_rollout(self, prompt: tuple[int, ...], completion: str, number: int) -> TrainRollout:
        """Build a rollout from a given completion.

        Its log-probabilities are 0, as if it had been sampled with certainty, and its advantage is 1. Tool output is
        part of the context but not of the loss.
        """
        token_ids, outputs = self._template.tokenize_completion(completion, self._tools)
        rollout = Rollout(
            rollout_id=str(number),
            group_id=str(number),
            sample_index=0,
            token_ids_T=np.array(token_ids, dtype=np.int32),
            sampler_logprobs_T=np.zeros(len(token_ids), dtype=np.float32),
            versions=(),
            finish_reason=FinishReason.STOP,
            replica_id="",
            text="",
            seconds=0.0,
            outputs=tuple(OutputSpan(first, end) for first, end in outputs),
        )
        # A completion may start with a tool's output, and two outputs may follow each other: no turn is between them.
        versions = tuple(VersionSpan(0, first, end) for first, end in rollout.turn_spans if first < end)
        return TrainRollout(prompt, replace(rollout, versions=versions), advantage=1.0)
