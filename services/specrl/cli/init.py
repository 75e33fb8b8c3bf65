"""`specrl init`: writes a commented run file for a policy and a data set.

It looks at both: columns, lengths of prompts, chat template, context length. All other settings have cautious values,
with comments. The file is an ordinary run file from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specrl.cli.command_exit import report_unwritable
from specrl.cli.options import refuse_existing
from specrl.errors import DatasetInvalid, RunInvalid
from specrl.files import write_text
from specrl.hub.client import Repository, RepositoryKind
from specrl.hub.data_sets import DataSetWish, fetch_data_set
from specrl.hub.fetching import FetchDisplay
from specrl.hub.gguf_models import GgufWish, convert_gguf
from specrl.hub.models import ModelWish, fetch_model
from specrl.launcher.terminal.check_progress import open_fetch_display
from specrl.launcher.terminal.view import choose_view
from specrl.models import ModelFolder, read_model_folder
from specrl.models.model_folder import has_chat_template
from specrl.prompts.columns import DatasetRecord
from specrl.prompts.questions import list_question_columns
from specrl.prompts.sources import ProblemSource, open_problem_source, read_json_records
from specrl.prompts.table_rows import find_table_format, read_first_row
from specrl.prompts.templates import PromptTemplate
from specrl.spec import load_spec
from specrl.spec.base import is_gguf, is_hub_name
from specrl.spec.data import (
    MOST_FILES,
    FieldMapping,
    FileSource,
    HubSource,
    OnBadLine,
    PromptFormat,
    Prompts,
    PromptSource,
)
from specrl.spec.yaml_input import quote_yaml

# Names that published data sets use, the most usual ones first.
QUESTION_COLUMNS = ("question", "problem", "prompt", "messages", "query", "instruction", "input")
ANSWER_COLUMNS = (
    *("answer", "final_answer", "ground_truth", "reward_model.ground_truth", "solution", "target", "label", "output"),
    "response",
)
LAST_ANSWER = "{question}.-1.content"  # the assistant's last message in a column of messages

PROMPT_STEP = 32  # prompts.maxTokens is a multiple of it, with some room above the longest prompt
COMPLETION_TOKENS = 512  # the usual length of a short chain of thought
DRAFT_TOKENS = 3
CHAT_TEMPLATE = "{question}\nThink step by step. End with a line that has only #### and the answer."

Column = Annotated[str | None, typer.Option(metavar="NAME", help="Column. Default: found by its usual names.")]


def write_run_file(  # noqa: PLR0913, PLR0917 - one argument per option
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="The policy: a Hugging Face folder, a GGUF file, or OWNER/NAME on the hub."),
    ],
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="The data set, a .jsonl or .parquet file.")] = None,
    data_set: Annotated[
        str | None, typer.Option(metavar="NAME", help="Instead, a data set on the hub, as OWNER/NAME.")
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="NAME", help="With --data-set: its configuration.")] = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="With --data-set: its split.")] = "train",
    out: Annotated[Path, typer.Option(metavar="FILE", help="The run file to write.")] = Path("run.yaml"),
    question: Column = None,
    answer: Column = None,
) -> None:
    """Write a commented run file for a policy and a data set.

    Looks at both: columns, lengths of prompts, chat template, context length. What is named on the hub is fetched
    first. `specrl run --dry-run` then checks the file, and shows what the run would begin with.
    """
    if (data is None) == (data_set is None):
        raise typer.BadParameter("give either --data FILE or --data-set NAME")
    refuse_existing(out)
    if not out.parent.is_dir():
        raise RunInvalid(f"--out must be in an existing folder, got {out}; make {out.parent} first")
    with open_fetch_display(choose_view(Console(), is_plain=False)) as display:
        path, name = locate_policy(model, display)
        folder = read_model_folder(path, "--model")
        given: Path | HubSource
        if data is not None:
            given = first_file = data
        else:
            assert data_set is not None
            given = fetch_source(data_set, config, split, display)
            first_file = Path(given.files[0])
    columns = read_columns(first_file)
    asked = choose_column("--question", question, QUESTION_COLUMNS, columns)
    answers = (*ANSWER_COLUMNS, LAST_ANSWER.replace("{question}", asked))
    fields = FieldMapping(question=asked, answer=choose_column("--answer", answer, answers, columns))
    problems = open_problem_source(build_source(given, fields))
    text = render_run_file(describe_data(folder, given, fields, problems), name)
    with report_unwritable("--out", out):
        write_text(out, text)
    load_spec(out)  # a file that this version would refuse is a bug here
    left_out = f", {len(problems.skipped)} records left out" if problems.skipped else ""
    typer.echo(f"{out}: {len(problems)} problems{left_out}; see what it says, then")
    typer.echo(f"    specrl run --dry-run {out}\n    specrl run {out}")


def locate_policy(model: str, display: FetchDisplay) -> tuple[Path, str | None]:
    """Return the folder of the policy, and what the run file should name instead of the folder.

    A GGUF file is converted, and a model on the hub is fetched. Raises FetchFailed and CheckpointInvalid.
    """
    path = Path(model)
    if is_gguf(model):
        return convert_gguf(GgufWish(path, "--model"), display).folder, str(path.absolute())
    if path.exists() or not is_hub_name(model):
        return path, None
    return fetch_model(ModelWish(Repository(RepositoryKind.MODEL, model, None, "--model")), display).folder, model


def fetch_source(name: str, config: str | None, split: str, display: FetchDisplay) -> HubSource:
    """Fetch a data set's split. Returns it as a source with its files. Raises FetchFailed."""
    wish = DataSetWish(Repository(RepositoryKind.DATA_SET, name, None, "--data-set"), config, split, (), MOST_FILES)
    listing, files = fetch_data_set(wish, display)
    paths = tuple(str(listing.folder / file) for file in files)
    return HubSource(name=name, config=config, split=split, files=paths)


def read_columns(data: Path) -> list[str]:
    """Return the columns of a data set's first record, with paths to those inside objects.

    A column of messages that end with the assistant's has the path of that message, too. Raises DatasetInvalid if the
    file cannot be read.
    """
    try:
        kind = find_table_format(str(data))
        if kind is not None:
            return list(list_record_columns(read_first_row(str(data), kind)))
        _, record = next(read_json_records(str(data), answer=""), (0, DatasetRecord({}, None)))
        if isinstance(record, str):  # why it is malformed
            raise ValueError(record)
        return list(list_record_columns(record.values))
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise DatasetInvalid(
            f"--data must be a .jsonl file with an object per line, or a .parquet file, got {data}: {error}; "
            "check the path"
        ) from error


def list_record_columns(record: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the name of each member, and the paths below objects and to an assistant's last message."""
    for name, value in record.items():
        place = f"{path}{name}"
        yield place
        if isinstance(value, Mapping):
            yield from list_record_columns(value, f"{place}.")
        elif isinstance(value, list) and value and _is_answer(value[-1]):
            yield LAST_ANSWER.replace("{question}", place)


def _is_answer(message: object) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def choose_column(option: str, named: str | None, usual: Sequence[str], columns: Sequence[str]) -> str:
    """Return the column that the user named, or one with a usual name. Raises DatasetInvalid if there is none."""
    known = ", ".join(columns) or "none"
    if named is not None:
        unknown = [name for name in list_question_columns(named) if name not in columns]
        if unknown:
            raise DatasetInvalid(
                f"{option} must be a column of the data set, got {', '.join(unknown)}; its columns: {known}"
            )
        return named
    by_lower_case = {column.lower(): column for column in reversed(columns)}
    found = next((by_lower_case[name] for name in usual if name in by_lower_case), None)
    if found is None:
        raise DatasetInvalid(
            f"the data set must have a column named {', '.join(usual[:-1])} or {usual[-1]}, got {known}; "
            f"name one with {option}"
        )
    return found


def build_source(data: Path | HubSource, fields: FieldMapping) -> PromptSource:
    """Return the data set as a source that leaves out malformed records."""
    if isinstance(data, HubSource):
        return PromptSource(dataset=data.model_copy(update={"fields": fields, "on_bad_line": OnBadLine.SKIP}))
    file = FileSource(path=str(data), fields=fields, on_bad_line=OnBadLine.SKIP)
    return PromptSource(parquet=file) if data.suffix == ".parquet" else PromptSource(jsonl=file)


@dataclass(frozen=True)
class StarterFacts:
    """Facts about policy and data set that the file is made from. Lengths are in tokens."""

    folder: ModelFolder
    data: Path | HubSource
    fields: FieldMapping
    problems: ProblemSource
    prompts: Prompts
    longest_prompt: int
    context: int


def describe_data(
    folder: ModelFolder, data: Path | HubSource, fields: FieldMapping, problems: ProblemSource
) -> StarterFacts:
    """Find out whether prompts are chats, and how long they are. Raises CheckpointInvalid for a broken tokenizer."""
    source = build_source(data, fields)
    prompts = Prompts(source=source, format=PromptFormat.RAW)
    if has_chat_template(folder.path):
        prompts = Prompts(source=source, format=PromptFormat.CHAT, template=CHAT_TEMPLATE)
    template = PromptTemplate(prompts, str(folder.path))
    unfit = next(filter(None, map(template.find_fault, problems.problems)), "")
    if unfit:
        raise DatasetInvalid(f"{folder.path} must have a chat template: {unfit}")
    texts = template.format_all(problems.problems)
    return StarterFacts(
        folder=folder,
        data=data,
        fields=fields,
        problems=problems,
        prompts=prompts,
        longest_prompt=max(len(ids) for ids in template.tokenize_all(texts)),
        context=folder.config_number("max_position_embeddings") or 4096,
    )


def render_run_file(facts: StarterFacts, model_name: str | None = None) -> str:
    """Render the run file. model_name: of a policy that was fetched from the hub."""
    drafts_and_one = DRAFT_TOKENS + 1
    prompt_tokens = -(-facts.longest_prompt * 5 // 4 // PROMPT_STEP) * PROMPT_STEP
    prompt_tokens = min(max(PROMPT_STEP, prompt_tokens), facts.context // 2)
    completion_tokens = min(COMPLETION_TOKENS, facts.context - prompt_tokens - drafts_and_one)
    kind = "dataset" if isinstance(facts.data, HubSource) else build_source(facts.data, facts.fields).kind
    is_chat = facts.prompts.format is PromptFormat.CHAT
    has_numbers = all(any(digit.isdigit() for digit in problem.answer) for problem in facts.problems.problems)
    verifier, verdict = ("math", "compares numbers and formulas") if has_numbers else ("exact", "compares text")
    prompts_per_step = min(8, len(facts.problems))
    fields = f"{{question: {quote_yaml(facts.fields.question)}, answer: {quote_yaml(facts.fields.answer)}}}"
    return f"""\
# Written by `specrl init`. docs/run-file.md lists every field; those that are not here have defaults.
name: {make_run_name(facts.data.name.rpartition("/")[2] if isinstance(facts.data, HubSource) else facts.data.stem)}
model:
  path: {quote_yaml(model_name or facts.folder.path.resolve())}
  dtype: Auto  # bfloat16 on GPUs and on CPUs with bfloat16 units, else float32
  maxLength: {prompt_tokens + completion_tokens + drafts_and_one}  # prompt, completion, drafted tokens and one more
prompts:
  source:
    {kind}:
{render_place(facts.data)}
      fields: {fields}
      onBadLine: Skip  # leaves out malformed records; Fail refuses the file
  template: {quote_yaml(facts.prompts.template)}
  format: {facts.prompts.format.value}  # {"the tokenizer's chat template" if is_chat else "it has no chat template"}
  maxTokens: {prompt_tokens}  # the longest prompt has {facts.longest_prompt}
rewards:
  {verifier}: {{answerAfter: "####"}}  # {verdict}; docs/rewards.md has others, and your own function
generation:
  replicas: 1
  sampling: {{temperature: 1, maxTokens: {completion_tokens}}}
  speculation:
    eagle3: {{numDraftTokens: {DRAFT_TOKENS}}}  # a fresh drafter, initialised on the policy's own rollouts
trainer:
  optimizer: {{learningRate: 1e-6, warmupSteps: 5}}  # usual for whole models; 1e-5 and more with lora or tiny ones
schedule:
  steps: 50
  promptsPerStep: {prompts_per_step}
  groupSize: 8  # rollouts of each prompt
  maxPolicyLag: 1  # generation may run one step ahead of training
# Problems that are not trained on show whether the policy learns:
# validation:
#   source: {{{kind}: {{{render_validation(facts.data)}, fields: {fields}}}}}
#   everySteps: 10
"""


def render_place(data: Path | HubSource) -> str:
    """Render the lines that say where the data set is."""
    if isinstance(data, Path):
        return f"      path: {quote_yaml(data.resolve())}"
    lines = [f"      name: {quote_yaml(data.name)}"]
    lines += [] if data.config is None else [f"      config: {quote_yaml(data.config)}"]
    return "\n".join([*lines, f"      split: {quote_yaml(data.split)}"])


def render_validation(data: Path | HubSource) -> str:
    """Render an example of where problems for validation may be."""
    if isinstance(data, Path):
        return f"path: validation{data.suffix}"
    config = "" if data.config is None else f", config: {quote_yaml(data.config)}"
    return f"name: {quote_yaml(data.name)}{config}, split: test"


def make_run_name(name: str) -> str:
    """Make a valid run name from the data set's name."""
    letters = "".join(char if char.isascii() and char.isalnum() else "-" for char in name.lower())
    name = letters.strip("-")[:30].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")
