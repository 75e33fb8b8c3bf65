"""Sections about what is asked and how it is judged: prompts, rewards, validation."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from specrl.spec.base import DecimalString, Section, Union

Positive = Annotated[int, Field(ge=1, strict=True)]
NotNegative = Annotated[int, Field(ge=0, strict=True)]


class FieldMapping(Section):
    """Which columns of a record hold what."""

    question: str = "question"
    """Column with the task's text."""
    answer: str = "answer"
    """Column with the verifier's reference."""


class FileSource(Section):
    """Records of a JSONL or Parquet file."""

    path: str
    """File to read. A relative path is taken from the run file's folder."""
    fields: FieldMapping = FieldMapping()
    """Column names."""


class GeneratedSource(Section):
    """Problems made on the spot, the same ones for the same settings on every machine."""

    family: str
    """Problem family; `specrl families` lists them."""
    count: Positive
    """How many different problems the source holds."""
    seed: int = 0
    """Problems of different seeds are drawn independently."""
    difficulty: NotNegative = 0
    """Family-specific; higher is harder. 0 is the family's own default."""


class PromptSource(Union):
    """Where problems come from; exactly one member."""

    jsonl: FileSource | None = None
    """One JSON object a line."""
    parquet: FileSource | None = None
    """One row a problem."""
    generated: GeneratedSource | None = None
    """A generated problem family."""


class PromptFormat(StrEnum):
    RAW = "Raw"
    CHAT = "Chat"


class Prompts(Section):
    """The stream of prompts that the run trains on."""

    source: PromptSource
    """Where problems come from."""
    template: str = "{question}"
    """Text given to the policy; `{question}` stands for the problem. Other braces are kept as they are."""
    format: PromptFormat = PromptFormat.RAW
    """`Raw` sends the template's text as it is; `Chat` wraps it as a user message in the tokenizer's chat template."""
    max_tokens: Positive = 512
    """A prompt longer than this is refused when the run starts, in tokens."""
    shuffle_seed: int = 0
    """Order of the stream. Every epoch has its own order, and any position can be sought."""


class MathVerifier(Section):
    """Compares final answers as mathematics (fractions, units, LaTeX) with the math-verify library."""

    answer_after: str = "####"
    """The final answer is what follows the last such mark; without it, the last boxed expression or number."""


class ExactVerifier(Section):
    """Compares final answers as text, white space and thousands separators aside."""

    answer_after: str = "####"
    """The final answer is the first line after the last such mark."""


class Rewards(Union):
    """The verifier (exactly one of `math`, `exact`) and the pool that runs it."""

    math: MathVerifier | None = None
    """Mathematical equality."""
    exact: ExactVerifier | None = None
    """Equality of text."""

    @property
    def kind(self) -> str:
        return "math" if self.math is not None else "exact"


class RewardPool(Section):
    """The processes that run verifiers, outside the coordinator's event loop."""

    workers: Positive = 1
    """Processes."""
    timeout_s: Positive = 10
    """Time limit of one verdict, in seconds. A verifier that exceeds it is killed, and the rollout is ungraded."""


class ValidationSampling(Section):
    """How validation completions are drawn."""

    temperature: DecimalString = Field(default="0", validate_default=True)
    """0 is greedy."""
    samples_per_prompt: Positive = 1
    """Completions per problem; accuracy is their mean."""


class Validation(Section):
    """Accuracy on problems that are never trained on, each time under one policy version."""

    source: PromptSource
    """Where validation problems come from."""
    limit: Positive = 128
    """At most this many problems, the first of the source."""
    every_steps: Positive = 5
    """Validate before the first step, after every so many, and after the last."""
    sampling: ValidationSampling = ValidationSampling()
    """How completions are drawn."""
