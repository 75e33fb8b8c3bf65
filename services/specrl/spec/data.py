"""Sections about what is asked and how it is judged: prompts, rewards, validation."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from specrl.spec.base import DecimalString, PathText, Section, ShortText, Union

Positive = Annotated[int, Field(ge=1, strict=True)]
NotNegative = Annotated[int, Field(ge=0, strict=True)]


class FieldMapping(Section):
    """Which columns of a record hold what."""

    question: ShortText = "question"
    """Column with the task's text."""
    answer: ShortText = "answer"
    """Column with the verifier's reference: text, or any other JSON value but null. A number counts as it is written,
    an object or a list as its JSON text, so that tests and schemas need no quotes."""
    solution: ShortText | None = None
    """Column with the data's own solution, which must pass the record's tests before the run starts; for `code`. Of a
    list the first is tried; a record where it is null or empty has none. Null: no such column."""


class OnBadLine(StrEnum):
    FAIL = "Fail"
    SKIP = "Skip"


class FileSource(Section):
    """Records of a JSONL or Parquet file."""

    path: PathText
    """File to read. A relative path is taken from the run file's folder."""
    fields: FieldMapping = FieldMapping()
    """Column names."""
    on_bad_line: OnBadLine = OnBadLine.FAIL
    """What becomes of a record that is malformed, not UTF-8, empty, longer than prompts.maxTokens, or has a reference
    that the verifier cannot use (docs/rewards.md). `Fail`: nothing starts, and the message has its line. `Skip`: it is
    left out, and how many are is logged and in the run's status."""


class GeneratedSource(Section):
    """Problems made on the spot, the same ones for the same settings on every machine."""

    family: ShortText
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
    template: Annotated[str, Field(max_length=65536)] = "{question}"
    """Text given to the policy; `{question}` stands for the problem. Other braces are kept as they are."""
    format: PromptFormat = PromptFormat.RAW
    """`Raw` sends the template's text as it is; `Chat` wraps it as a user message in the tokenizer's chat template."""
    max_tokens: Positive = 512
    """A prompt longer than this is refused when the run starts, in tokens."""
    shuffle_seed: int = 0
    """Order of the stream. Every epoch has its own order, and any position can be sought."""


class MathVerifier(Section):
    """Compares final answers as mathematics (fractions, units, LaTeX) with the math-verify library."""

    answer_after: ShortText = "####"
    """The final answer is what follows the last such mark; without it, the last boxed expression or number."""


class ExactVerifier(Section):
    """Compares final answers as text, white space and thousands separators aside."""

    answer_after: ShortText = "####"
    """The final answer is the first line after the last such mark."""


class Match(StrEnum):
    WHOLE = "Whole"
    ANYWHERE = "Anywhere"


class RegexVerifier(Section):
    """Where the answer is that must match."""

    answer_after: ShortText = "####"
    """The final answer is the first line after the last such mark. Empty: the whole completion."""
    match: Match = Match.WHOLE
    """`Whole`: the expression must match all of the answer. `Anywhere`: a part of it."""


class JsonSchemaVerifier(Section):
    """Where the answer is that must be valid."""

    answer_after: ShortText = ""
    """The answer is what follows the last such mark, a fenced block or bare. Empty: the whole completion."""


class Isolation(StrEnum):
    NAMESPACES = "Namespaces"
    LANDLOCK = "Landlock"


class SandboxLimits(Section):
    """What the sandbox keeps apart, and its limits."""

    isolation: Isolation = Isolation.NAMESPACES
    """`Namespaces`: processes, users, mounts and network of its own, which the machine must permit. `Landlock` accepts
    less: no processes, threads or files of its own, and the names of the host's files can be probed."""
    cpu_s: Positive
    """Processor seconds of each process."""
    wall_s: Positive
    """Seconds for one program."""
    memory_mib: Annotated[int, Field(ge=64, strict=True)] = 512
    """Address space of each process, in MiB; times `processes`, what one answer can take at most."""
    processes: Positive = 4
    """Processes and threads at once."""
    scratch_mib: Positive = 16
    """Size of the scratch folder /tmp, which is memory, in MiB; also of the largest file."""
    output_kib: Positive
    """Longest output, in KiB."""
    packages: PathText | None = None
    """Folder of Python packages that programs may import, as `pip install --target` makes it. Null: the standard
    library alone."""


class CodeVerifier(SandboxLimits):
    """What the sandbox keeps apart, and its limits."""

    cpu_s: Positive = 4
    """Processor seconds of each process, in one case of standard input or all calls of a function."""
    wall_s: Positive = 8
    """Seconds for all tests of one answer, less what it waited for a processor. Less than rewardPool.timeoutS."""
    output_kib: Positive = 1024
    """Longest output, or result of a call, in KiB."""


class PythonVerifier(Section):
    """Where the function is."""

    function: ShortText
    """The function as `module:function`."""
    folder: PathText | None = None
    """Folder that the module is imported from. A relative path is taken from the run file's folder. Null: installed."""


class Rewards(Union):
    """The verifier; exactly one member."""

    math: MathVerifier | None = None
    """Mathematical equality."""
    exact: ExactVerifier | None = None
    """Equality of text."""
    regex: RegexVerifier | None = None
    """Matches the final answer with a regular expression, the prompt's reference. RE2's syntax: its time is linear in
    the answer, and it has neither look-around nor backreferences."""
    json_schema: JsonSchemaVerifier | None = None
    """Validates an answer in JSON with a JSON Schema, the prompt's reference: draft 2020-12 unless it names 4, 6, 7 or
    2019-09. Patterns have the syntax of Rust's regex crate, but only ASCII digits and letters count as digits and
    words: their time is linear in the answer, and they have neither look-around nor backreferences. In drafts 4, 6 and
    7 they must be valid in ECMA-262, too. Schemas with other patterns, with patterns of more than 64 MiB once compiled,
    or with references that lead out of the schema or back to themselves are refused before the run. Formats are not
    asserted."""
    code: CodeVerifier | None = None
    """Runs the answer's Python, a fenced block of it, with the prompt's tests in a sandbox of the operating system. The
    reference is `{"inputs": [...], "outputs": [...]}` for standard input and output; the same with `"fn_name"` and a
    list of arguments for each input for a function, or a method of the answer's class Solution; tests as APPS, TACO,
    LiveCodeBench, MBPP and HumanEval have them; or tests in Python, which call the answer with plain data
    (docs/rewards.md). An answer that breaks a limit is wrong."""
    python: PythonVerifier | None = None
    """Calls a function of one's own, `def grade(reference: str, completion: str) -> float`, in the pool's processes and
    without a sandbox. One that has a parameter `row` is given the record's other columns, and the prompt. What it
    raises is a reward of 0, and counted; it raises `specrl.rewards.Ungraded` for what no answer can cause
    (docs/rewards.md)."""


class WorkerLimits(Section):
    """Processes outside the coordinator's event loop."""

    workers: Positive = 1
    """Processes."""
    timeout_s: Positive = 10
    """Time limit of one answer, in seconds, less what it waited for a processor."""
    memory_mib: Positive = 4096
    """Address space of each process, in MiB."""


class RewardPool(WorkerLimits):
    """The processes that run verifiers, outside the coordinator's event loop."""

    timeout_s: Positive = 10
    """Time limit of one verdict, in seconds. A verifier that exceeds it is killed, and the reward is 0: the reference
    alone had been read in that time."""


class ValidationSampling(Section):
    """How validation completions are drawn."""

    temperature: DecimalString = Field(default="0", validate_default=True)
    """0 is greedy."""
    samples_per_prompt: Positive = 1
    """Completions per problem. Their mean reward is told with its 95 % interval over problems; where all rewards are 0
    or 1, also pass@k for k up to them (docs/report.md)."""


class Validation(Section):
    """Mean reward on problems that are never trained on, each time under one policy version."""

    source: PromptSource
    """Where validation problems come from."""
    limit: Positive = 128
    """At most this many problems, the first of the source."""
    every_steps: Positive = 5
    """Validate before the first step, after every so many, and after the last."""
    sampling: ValidationSampling = ValidationSampling()
    """How completions are drawn."""
