"""Sections about prompts, rewards and validation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from specrl.spec.base import (
    HUB_NAME_PATTERN,
    DecimalString,
    PathText,
    RelativePath,
    Section,
    ShortText,
    UnionSection,
    WholeNumber,
)

Positive = Annotated[WholeNumber, Field(ge=1)]
NotNegative = Annotated[WholeNumber, Field(ge=0)]

ONLY_SOURCE = "main"
"""Name of the source of a run that has a single one, `prompts.source` or `validation.source`."""

SOURCE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$"
SourceName = Annotated[str, Field(max_length=32, pattern=SOURCE_NAME)]
"""Name of a source. It is a label of metrics and a key of reports."""

MOST_SOURCES = 16
"""Longest list of sources. Lists have a limit for the API server's estimate of the cost of rules."""

LongText = Annotated[str, Field(max_length=65536)]
"""A text that the policy reads."""

RewardName = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]
"""Name of a reward. It is a label of metrics, a key of reports, and a value in data sets, such as openai/gsm8k."""

MOST_FILES = 64
"""Longest list of a data set's files. Lists have a limit for the API server's estimate of the cost of rules."""


class FieldMapping(Section):
    """Columns of a record."""

    question: ShortText = "question"
    """Column with the problem's text, or with messages: a list of objects with `role` and `content`. A last message of
    the assistant is left out. Several columns are joined by a text with their names in braces, such as
    `{Body} {Question}`. A column inside objects or lists is named by its path, here and below: `task.text`,
    `messages.-1.content`."""
    answer: ShortText = "answer"
    """Column with the verifier's reference: text, or another JSON value except null. A number is used as written, an
    object or list as its JSON text."""
    solution: ShortText | None = None
    """Column with a correct solution, for the verifier `code`. It must pass the record's tests before the run starts.
    Of a list the first solution is tried; a record without one is not checked. Null: no such column."""


class OnBadLine(StrEnum):
    FAIL = "Fail"
    SKIP = "Skip"


class FileSource(Section):
    """A JSONL or Parquet file."""

    path: Annotated[PathText, RelativePath.TO_RUN_FILE]
    """File to read. A relative path is relative to the run file's folder."""
    fields: FieldMapping = FieldMapping()
    """Column names."""
    on_bad_line: OnBadLine = OnBadLine.FAIL
    """Handling of bad records. A record is bad if it is malformed, not UTF-8, empty, longer than prompts.maxTokens, or
    has a reference that the verifier cannot use (docs/rewards.md). `Fail`: the run does not start, and the message
    names the line. `Skip`: the record is left out; the log and the run's status count such records."""


class HubSource(Section):
    """A data set by its name on the Hugging Face Hub, fetched before the run starts (docs/hub.md).

    Parquet, JSON Lines, JSON and CSV files are read. No code of the repository is run.
    """

    name: Annotated[ShortText, Field(pattern=HUB_NAME_PATTERN)]
    """Name on the hub, such as openai/gsm8k."""
    config: ShortText | None = None
    """Configuration (subset), as the data set's card names it. Null: the card's default or only one. A card with
    several and no default needs a name. Not read with `files`."""
    split: ShortText = "train"
    """Split, such as train or test. With `files` it selects nothing, and is only a part of the source's name."""
    revision: ShortText | None = None
    """Branch, tag or commit. Null: the main branch."""
    files: Annotated[tuple[PathText, ...], Field(max_length=MOST_FILES)] = ()
    """The split's files: their names in the repository, or patterns such as data/train-*.parquet. Absolute paths are
    files that were fetched before, as in the run file of a run. Empty: the data set's card or the names of its files
    say which files belong to the split."""
    fields: FieldMapping = FieldMapping()
    """Column names."""
    on_bad_line: OnBadLine = OnBadLine.FAIL
    """As for files."""

    @property
    def is_fetched(self) -> bool:
        """Whether `files` names files on this machine."""
        return bool(self.files) and all(file.startswith("/") for file in self.files)


class GeneratedSource(Section):
    """Generated problems. The same settings give the same problems on every machine."""

    family: ShortText
    """Problem family; `specrl families` lists them."""
    count: Positive
    """Number of different problems."""
    seed: WholeNumber = 0
    """Seed of the problems. Different seeds give independent problems."""
    difficulty: NotNegative = 0
    """Difficulty, with a meaning of its own in each family; higher is harder. 0: the family's default."""


class PromptSource(UnionSection):
    """Where problems come from; exactly one member."""

    jsonl: FileSource | None = None
    """A file with one JSON object per line."""
    parquet: FileSource | None = None
    """A Parquet file with one problem per row."""
    dataset: HubSource | None = None
    """A data set by its name on the Hugging Face Hub."""
    generated: GeneratedSource | None = None
    """A generated problem family."""


class PromptFormat(StrEnum):
    RAW = "Raw"
    CHAT = "Chat"


class FewShotTurn(Section):
    """An example: a user message and the assistant's answer, as the policy sees them."""

    user: LongText
    """The user message. The template is not applied to it."""
    assistant: LongText
    """The answer."""


FewShot = Annotated[tuple[FewShotTurn, ...], Field(max_length=32)]


class TrainingSource(Section):
    """One of several sources of a run."""

    name: SourceName
    """Name of the source, in metrics and for validation sources of the same name."""
    weight: Annotated[WholeNumber, Field(ge=1, le=1000)] = 1
    """Share of the source in the prompts, as a whole number. With weights 7 and 3, each ten consecutive prompts have
    seven of the one and three of the other, in a shuffled order."""
    source: PromptSource
    """Where problems come from."""
    template: LongText | None = None
    """As prompts.template, for this source. Null: prompts.template."""
    system: LongText | None = None
    """As prompts.system, for this source. Null: prompts.system."""
    few_shot: FewShot = ()
    """As prompts.fewShot, for this source. Empty: prompts.fewShot."""


class Prompts(Section):
    """The stream of prompts that the run trains on. Give `source` or `sources`."""

    source: PromptSource | None = None
    """Where problems come from. Null: from `sources`."""
    sources: Annotated[tuple[TrainingSource, ...], Field(max_length=MOST_SOURCES)] = ()
    """Several sources, which are mixed by their weights. Each source has its own epochs: its problems are asked once
    before any of them is asked again."""
    template: LongText = "{question}"
    """Prompt text; `{question}` is replaced by the problem. Other braces are kept as they are. If the question column
    has messages, the template is applied to the last user message."""
    system: LongText | None = None
    """System message, for format Chat. A record whose messages begin with a system message keeps its own. Null: none,
    unless the chat template adds one."""
    few_shot: FewShot = ()
    """Examples before the problem, for format Chat: user messages and their answers."""
    format: PromptFormat = PromptFormat.RAW
    """`Raw`: the template's text is the prompt. `Chat`: it becomes a user message in the tokenizer's chat template."""
    max_tokens: Positive = 512
    """Longest prompt, in tokens. A longer one is refused when the run starts, or skipped (onBadLine)."""
    shuffle_seed: WholeNumber = 0
    """Seed of the stream's order. Every epoch has another order."""

    @property
    def all_sources(self) -> tuple[TrainingSource, ...]:
        """All sources. A single one is named ONLY_SOURCE and has weight 1."""
        if self.source is None:
            return self.sources
        return (TrainingSource(name=ONLY_SOURCE, source=self.source),)

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources; empty if there is one, which has no name."""
        return tuple(source.name for source in self.sources)


TagName = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]
"""Name of a tag in a completion, without its angle brackets."""


class MathVerifier(Section):
    """Compares final answers mathematically (fractions, units, LaTeX) with the math-verify library."""

    answer_after: ShortText = "####"
    """The final answer follows the last occurrence of this marker. Without it, the answer is the last boxed expression
    or number. If the marker is a tag, as `<answer>`, the answer ends at `</answer>`; other verifiers do the same."""


class ExactVerifier(Section):
    """Compares final answers as text. Runs of white space count as one space. Thousands separators, a currency sign,
    delimiters of formulas and a final full stop are removed first."""

    answer_after: ShortText = "####"
    """The final answer is the first line after the last occurrence of this marker."""


class Match(StrEnum):
    WHOLE = "Whole"
    ANYWHERE = "Anywhere"


class RegexVerifier(Section):
    """Matches final answers with a regular expression."""

    answer_after: ShortText = "####"
    """The final answer is the first line after the last occurrence of this marker. Empty: the whole completion."""
    match: Match = Match.WHOLE
    """`Whole`: the expression must match the whole answer. `Anywhere`: it must match a part of it."""


class JsonPlace(StrEnum):
    WHOLE = "Whole"
    FENCED_BLOCK = "FencedBlock"


class JsonSchemaVerifier(Section):
    """Validates final answers with a JSON Schema."""

    answer_after: ShortText = ""
    """The answer follows the last occurrence of this marker. Empty: it is in the whole completion."""
    place: JsonPlace = JsonPlace.WHOLE
    """`Whole`: nothing but JSON follows the marker, in a fenced block or without one. `FencedBlock`: the answer is the
    last fenced block that is named json or has no name, and text around it is ignored."""


class PatternVerifier(Section):
    """Matches whole completions with one regular expression."""

    expression: Annotated[str, Field(min_length=1, max_length=4096)]
    """The expression, in RE2's syntax. With `(?s)` at its beginning, a dot also matches line ends."""
    match: Match = Match.WHOLE
    """`Whole`: the expression must match the whole completion, without white space around it. `Anywhere`: it must match
    a part of it."""


class TagsVerifier(Section):
    """Checks that a completion consists of tags with text in them."""

    names: Annotated[tuple[TagName, ...], Field(min_length=1, max_length=8)] = ("think", "answer")
    """The tags in their order. Each opens and closes once and has text in it. Around them is only white space."""
    first_is_open: bool = False
    """True: the prompt ends with the first opening tag, so that completions begin inside of it."""


class ValidJsonVerifier(Section):
    """Checks that a completion has valid JSON in it."""

    place: JsonPlace = JsonPlace.WHOLE
    """`Whole`: the completion is nothing but JSON, in a fenced block or without one. `FencedBlock`: its last fenced
    block that is named json or has no name is JSON, and text around it is ignored."""
    json_schema: Annotated[str | None, Field(max_length=65536)] = None
    """Text of a JSON Schema that the JSON must be valid under, as for the verifier jsonSchema. Null: any JSON."""


class Isolation(StrEnum):
    AUTO = "Auto"
    NAMESPACES = "Namespaces"
    LANDLOCK = "Landlock"


class SandboxLimits(Section):
    """Isolation and limits of the sandbox."""

    isolation: Isolation = Isolation.AUTO
    """`Auto`: `Namespaces` where the machine permits it, otherwise `Landlock`. The log, the status and the report say
    which. `Namespaces`: the program has its own processes, users, mounts and network. The machine must permit
    unprivileged namespaces. `Landlock`: needs no namespaces, but the program cannot start processes or threads or write
    files, and it can find out names of the host's files."""
    cpu_s: Positive
    """CPU seconds of each process."""
    wall_s: Positive
    """Wall seconds of one program."""
    memory_mib: Annotated[WholeNumber, Field(ge=64)] = 512
    """Address space of each process, in MiB; at most memoryMib of the pool (rewardPool or tools.pool). One answer can
    use at most this times `processes`, and `scratchMib`, and the kernel's buffers of 64 descriptors in each process:
    about 16 MiB. With `Landlock` it has one process."""
    processes: Positive = 4
    """Most processes and threads at the same time. With `Landlock` there is one, whatever this says."""
    scratch_mib: Positive = 16
    """Size of the scratch folder /tmp, and of the largest file, in MiB. The folder is in memory. With
    `Landlock` there is none."""
    output_kib: Positive
    """Longest output, in KiB."""
    packages: Annotated[PathText | None, RelativePath.TO_RUN_FILE] = None
    """Folder of Python packages that programs may import, as `pip install --target` creates it. Null: only the standard
    library."""


class CodeVerifier(SandboxLimits):
    """Isolation and limits of the sandbox."""

    cpu_s: Positive = 4
    """CPU seconds of each process, for one case of standard input or for all calls of a function."""
    wall_s: Positive = 8
    """Wall seconds for all tests of one answer, without the time in which it waited for a CPU. Must be less than
    rewardPool.timeoutS."""
    output_kib: Positive = 1024
    """Longest output, or result of a call, in KiB."""


class PythonVerifier(Section):
    """A Python function."""

    function: ShortText
    """The function, as `module:function`."""
    folder: Annotated[PathText | None, RelativePath.TO_RUN_FILE] = None
    """Folder that the module is imported from. A relative path is relative to the run file's folder. Null: the module
    is installed."""


class VerifierSection(UnionSection):
    """A verifier; exactly one member."""

    math: MathVerifier | None = None
    """Mathematical equality."""
    exact: ExactVerifier | None = None
    """Equality of text."""
    regex: RegexVerifier | None = None
    """Matches the final answer with a regular expression, the prompt's reference. It has RE2's syntax, without
    look-around and backreferences. Matching takes linear time."""
    json_schema: JsonSchemaVerifier | None = None
    """Validates a JSON answer with a JSON Schema, the prompt's reference. The draft is 2020-12, unless the schema names
    4, 6, 7 or 2019-09. Patterns have the syntax of Rust's regex crate, without look-around and backreferences, and with
    ASCII classes for digits and words. Matching takes linear time. In drafts 4, 6 and 7, patterns must also be valid
    ECMA-262. The run is refused if a schema has other patterns, or a pattern of more than 64 MiB once compiled. A
    reference that leaves the schema or is circular is refused, too. Formats are not asserted."""
    code: CodeVerifier | None = None
    """Runs the Python code of the answer's fenced block with the prompt's tests, in a sandbox of the operating system.
    References for standard input and output: `{"inputs": [...], "outputs": [...]}`. References for a function, or a
    method of the answer's class Solution: the same with `"fn_name"`, each input being a list of arguments. Tests in the
    formats of APPS, TACO, LiveCodeBench, MBPP and HumanEval, and tests in Python, are accepted, too (docs/rewards.md).
    An answer that exceeds a limit is wrong."""
    pattern: PatternVerifier | None = None
    """Matches the completion with a regular expression of the run file. It has RE2's syntax. The reference is not
    read, as by `tags` and `validJson`: these three reward a form."""
    tags: TagsVerifier | None = None
    """The completion is `<think>...</think> <answer>...</answer>`, or has other tags in this form."""
    valid_json: ValidJsonVerifier | None = None
    """The completion is JSON, or has it in a fenced block."""
    python: PythonVerifier | None = None
    """Calls your own function, `def grade(reference: str, completion: str) -> float`, in the pool's processes and
    without a sandbox. If it has a parameter `row`, it gets all columns of the record and the prompt. If it raises, the
    reward is 0, and the error is counted. It should raise `specrl.rewards.Ungraded` for failures that no answer can
    cause (docs/rewards.md)."""


class RewardTerm(Section):
    """One of several rewards."""

    name: RewardName
    """Name of the reward in reports and metrics."""
    weight: DecimalString = Field(default="1", validate_default=True)
    """Factor of the reward in the sum. A negative one makes it a penalty. 0: it is reported and not trained on."""
    verifier: VerifierSection
    """What gives the reward."""
    sources: Annotated[tuple[SourceName, ...], Field(max_length=MOST_SOURCES)] = ()
    """Sources of prompts that the reward applies to, by name. Empty: all."""
    column: ShortText | None = None
    """Column of a record that names its rewards: a name, or a list of names. The reward applies to the records whose
    column names it. A name that no reward with this column has makes the record bad. Null: the reward applies to all
    records."""


class RewardSum(Section):
    """Several rewards, each with a name and a weight. Their weighted sum is the reward of a rollout."""

    terms: Annotated[tuple[RewardTerm, ...], Field(min_length=1, max_length=16)]
    """The rewards. A rollout is graded by those that apply to its prompt, at least one. It is ungraded if any of these
    is. Each reward is reported apart, too."""


class Rewards(VerifierSection):
    """The verifier, or the sum of several; exactly one member."""

    sum: RewardSum | None = None
    """Adds several rewards, each with a name and a weight. A reward may be restricted to sources of prompts, or to
    records that name it."""

    @property
    def verifiers(self) -> tuple[VerifierSection, ...]:
        """The sections of all verifiers, in the order of the run file."""
        return (self,) if self.sum is None else tuple(term.verifier for term in self.sum.terms)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the rewards; empty if there is one, which has no name."""
        return () if self.sum is None else tuple(term.name for term in self.sum.terms)

    @property
    def needs_rows(self) -> bool:
        """Whether grading may read further columns of a record."""
        terms = self.sum.terms if self.sum is not None else ()
        has_function = any(verifier.python is not None for verifier in self.verifiers)
        return has_function or any(term.column is not None for term in terms)


class WorkerLimits(Section):
    """Worker processes outside the coordinator's event loop."""

    workers: Positive = 1
    """Number of processes."""
    timeout_s: Positive = 10
    """Time limit of one answer, in seconds, without the time in which it waited for a CPU."""
    memory_mib: Positive = 4096
    """Address space of each process, in MiB."""


class RewardPool(WorkerLimits):
    """The worker processes of verifiers, outside the coordinator's event loop."""

    timeout_s: Positive = 10
    """Time limit of grading one answer, in seconds. A verifier that exceeds it is killed, and the reward is 0. Reading
    the reference, before the run, has the same limit."""


class ValidationSampling(Section):
    """How validation completions are sampled."""

    temperature: DecimalString = Field(default="0", validate_default=True)
    """Sampling temperature: 0, which is greedy, or from 0.01 to 2. topP and topK are those of generation.sampling."""
    samples_per_prompt: Positive = 1
    """Completions per problem. The mean reward is reported with its 95 % interval over problems. If all rewards are 0
    or 1, pass@k is reported, too, for k up to this number (docs/report.md)."""
    max_tokens: Positive | None = None
    """Longest completion, in tokens. Null: generation.sampling.maxTokens."""


class ValidationSource(Section):
    """One of several sources of a validation."""

    name: SourceName
    """Name of the source. If a source of prompts.sources has this name, its template, system message and examples are
    used here, too."""
    source: PromptSource
    """Where validation problems come from."""
    limit: Positive | None = None
    """Most problems of this source. Null: validation.limit."""
    sampling: ValidationSampling | None = None
    """How completions of this source are sampled. Null: validation.sampling."""


class Validation(Section):
    """Measures the mean reward on problems that are never trained on, each time with one policy version. Give `source`
    or `sources`."""

    source: PromptSource | None = None
    """Where validation problems come from. Null: from `sources`."""
    sources: Annotated[tuple[ValidationSource, ...], Field(max_length=MOST_SOURCES)] = ()
    """Several sources. Each has its own mean reward in the reports."""
    limit: Positive = 128
    """Most problems of a source. The first ones of the source are used."""
    every_steps: Positive = 5
    """Steps between validations. The run also validates before the first and after the last step."""
    sampling: ValidationSampling = ValidationSampling()
    """How completions are sampled."""

    @property
    def all_sets(self) -> tuple[ValidationSet, ...]:
        """The set of each source. The set of a single source is named ONLY_SOURCE."""
        given = self.sources
        if self.source is not None:
            given = (ValidationSource(name=ONLY_SOURCE, source=self.source),)
        return tuple(
            ValidationSet(item.name, item.source, item.limit or self.limit, item.sampling or self.sampling)
            for item in given
        )


@dataclass(frozen=True)
class ValidationSet:
    """A validation source with its own limit and sampling, or those of the section."""

    name: str
    source: PromptSource
    limit: int
    sampling: ValidationSampling
