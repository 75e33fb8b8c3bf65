"""Hand-written YAML: read a file's documents, parse `path=value` overrides, convert pydantic's errors to Problems.

Used for run files (`load.py`) and the simulator's scenarios (`simulator/scenarios/scenario_file.py`). Both are sections
in camelCase that reject unknown fields.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from specrl.errors import SpecInvalid, SpecProblem
from specrl.files import read_text
from specrl.spec.base import Location, Section, find_field, find_section, walk_section_types

YAML_ERRORS = (yaml.YAMLError, ValueError, OverflowError, RecursionError)
"""Exceptions of PyYAML for unreadable input. ValueError: a date with 13 months, or bytes that are not UTF-8.
OverflowError: a time zone that leads out of the calendar. RecursionError: thousands of nested brackets."""

MOST_VALUES = 100_000
"""Values in a document, each alias counted with all that it stands for. Eleven lines of aliases would make 10^10."""

_MOST_NUMBER_LETTERS = 100
"""Letters of a number or a date. PyYAML reads 1:30 to the base 60, in quadratic time."""

_NOT_ASCII = re.compile("[^ -~]")  # in JSON only inside of quotes

_WITHOUT_DOT = re.compile(r'"(?:[^"\\]|\\.)*"|(?<![.\d])(\d+)e')
"""In JSON: a text as a whole, or the digits of a number with an exponent but no dot, such as 1e-05. YAML reads that as
text."""

_NO_TEXT = re.compile("[\0\ud800-\udfff]")

_NUMBERS = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}

_REMEDIES = {
    "missing": "add it",
    "greater_than": "raise it",
    "greater_than_equal": "raise it",
    "less_than": "lower it",
    "less_than_equal": "lower it",
    "enum": "use one of the values listed",
    "int_parsing": "write a whole number",
    "int_type": "write a whole number",
    "int_from_float": "write a whole number",
    "float_parsing": "write a number",
    "float_type": "write a number",
    "bool_parsing": "write true or false",
    "string_type": "write text",
    "string_too_long": "shorten it",
    "string_too_short": "write text",
    "too_long": "remove some",
    "value_error": "write it as the rule says",
    "model_type": "write a mapping of its fields",
    "model_attributes_type": "write a mapping of its fields",
}
"""Remedy by pydantic's error type. Other types get the caller's fallback."""

ELSEWHERE = {
    "adam_beta1": "trainer.optimizer.beta1",
    "adam_beta2": "trainer.optimizer.beta2",
    "adam_epsilon": "trainer.optimizer.epsilon",
    "beta": "trainer.loss.referenceKl.coefficient",
    "bf16": "model.dtype",
    "clip_grad": "trainer.optimizer.clipNorm",
    "clip_ratio_high": "trainer.loss.clipHigh",
    "clip_ratio_low": "trainer.loss.clipLow",
    "dataset_name": "prompts.source.dataset.name",
    "dtype": "model.dtype",
    "epsilon_high": "trainer.loss.clipHigh",
    "eval_steps": "validation.everySteps",
    "gradient_checkpointing": "trainer.recompute",
    "kl_loss_coef": "trainer.loss.referenceKl.coefficient",
    "lora_alpha": "trainer.lora.alpha",
    "lora_r": "trainer.lora.rank",
    "lr": "trainer.optimizer.learningRate",
    "lr_scheduler_type": "trainer.optimizer.decay",
    "lr_warmup_steps": "trainer.optimizer.warmupSteps",
    "max_completion_length": "generation.sampling.maxTokens",
    "max_grad_norm": "trainer.optimizer.clipNorm",
    "max_new_tokens": "generation.sampling.maxTokens",
    "max_num_seqs": "generation.maxLiveRollouts",
    "max_num_steps": "schedule.steps",
    "max_prompt_length": "prompts.maxTokens",
    "max_response_length": "generation.sampling.maxTokens",
    "max_staleness": "schedule.maxPolicyLag",
    "max_steps": "schedule.steps",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "model_revision": "model.revision",
    "n": "schedule.groupSize",
    "num_generations": "schedule.groupSize",
    "num_generations_per_prompt": "schedule.groupSize",
    "num_iterations": "trainer.optimizer.updatesPerStep",
    "num_prompts_per_step": "schedule.promptsPerStep",
    "num_train_epochs": "schedule.steps",
    "per_device_train_batch_size": "schedule.promptsPerStep",
    "ppo_epochs": "trainer.optimizer.updatesPerStep",
    "ppo_mini_batch_size": "schedule.promptsPerStep",
    "report_to": "telemetry.sinks.wandb",
    "reward_funcs": "rewards.python.function",
    "reward_weights": "rewards.sum.terms.weight",
    "save_steps": "checkpoint.everySteps",
    "save_total_limit": "checkpoint.keep",
    "tensor_model_parallel_size": "generation.tensorParallel",
    "total_training_steps": "schedule.steps",
    "train_batch_size": "schedule.promptsPerStep",
    "train_files": "prompts.source.parquet.path",
    "vllm_tensor_parallel_size": "generation.tensorParallel",
    "warmup_steps": "trainer.optimizer.warmupSteps",
}
"""Names in other frameworks, with the field of a run file that they stand for. docs/coming-from.md has all of them."""

_VERBS = ("match", "have")
"""First words of pydantic's rules that follow "must" instead of "must be"."""


class _BoundedLoader(yaml.SafeLoader):
    """The safe loader, which makes plain values only, and not more than `most_values`."""

    most_values = MOST_VALUES

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._composed = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._composed += 1
        if self._composed > self.most_values:  # without going on to the end of the file
            raise self._refuse(f"more than {self.most_values} values")
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode):
            if node.tag in _NUMBERS and len(node.value) > _MOST_NUMBER_LETTERS:
                raise self._refuse(f"a number of {len(node.value)} letters in line {node.start_mark.line + 1}")
            if _NO_TEXT.search(node.value):
                raise self._refuse(f"a NUL or half of a surrogate pair in line {node.start_mark.line + 1}")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # of a tag: !!bool x, !!int ''
            kind = node.tag.rpartition(":")[2]
            got = f"{str(node.value)[:100]!r} as {kind} in line {node.start_mark.line + 1}"
            raise self._refuse(got) from error

    def construct_document(self, node: yaml.Node) -> Any:
        self._count_values(node, {})
        return super().construct_document(node)

    def _count_values(self, node: yaml.Node, counted: dict[yaml.Node, int]) -> int:
        """Count the values below a node. counted: of each node that is done; 0 of those that contain this one."""
        if node in counted:
            if counted[node] == 0:
                raise self._refuse(f"an alias of what it lies in, in line {node.start_mark.line + 1}")
            return counted[node]
        counted[node] = 0
        below: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            below = node.value
        elif isinstance(node, yaml.MappingNode):
            below = [item for pair in node.value for item in pair]
        found = 1 + sum(self._count_values(item, counted) for item in below)
        if found > self.most_values:
            raise self._refuse(f"aliases that stand for more than {self.most_values} values")
        counted[node] = found
        return found

    @staticmethod
    def _refuse(problem: str) -> yaml.YAMLError:
        return yaml.constructor.ConstructorError(problem=problem)


class _CardLoader(_BoundedLoader):
    """For cards of data sets, some of which list a file for each of thousands of configurations."""

    most_values = 10 * MOST_VALUES


class _UniqueKeyLoader(_BoundedLoader):
    """Also refuses a key that is given twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        given: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in given:
                place = f"line {key.start_mark.line + 1}"
                raise yaml.constructor.ConstructorError(problem=f"{key.value} twice in one section, again in {place}")
            given.add(key.value)
        return super().construct_mapping(node, deep)


def _describe_fault(error: BaseException) -> str:
    """Say in one line what is wrong and where. The library's own text has a picture of the line, in several lines."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        where = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        return f"{error.problem} in {where}" + (f", {error.context}" if error.context else "")
    return " ".join(str(error).split())


def read_documents(path: Path) -> list[Any]:
    """Read the YAML documents of a file. Raises SpecInvalid if it cannot be read or is not YAML."""
    try:
        return list(yaml.load_all(read_text(path), Loader=_UniqueKeyLoader))
    except OSError as error:
        problem = SpecProblem(str(path), f"must be a readable file, got {error.strerror}", "check the path")
        raise SpecInvalid((problem,)) from error
    except YAML_ERRORS as error:
        reason = _describe_fault(error)
        raise SpecInvalid((SpecProblem(str(path), f"must be YAML, got {reason}", "fix the syntax"),)) from error


def parse_yaml(text: str) -> Any:
    """Parse one YAML document. Raises YAML_ERRORS."""
    return _parse(_BoundedLoader(text))


def quote_yaml(value: Any) -> str:
    """Write a value in one line of ASCII that YAML reads as the same value. Other types than JSON's become text.

    YAML reads JSON, except that it takes the two halves of a character above U+FFFF, which JSON escapes one by one, for
    two characters. It reads all characters in its own notation, with eight digits.
    """
    text = json.dumps(value, default=str, ensure_ascii=False)
    text = _WITHOUT_DOT.sub(lambda found: f"{found[1]}.0e" if found[1] else found[0], text)
    return _NOT_ASCII.sub(lambda found: f"\\U{ord(found[0]):08x}", text)


def parse_card(text: str) -> Any:
    """Parse the YAML at the head of a data set's card. Raises YAML_ERRORS."""
    return _parse(_CardLoader(text))


def _parse(loader: _BoundedLoader) -> Any:
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


@dataclass(frozen=True)
class Override:
    """An override `a.b.c=value` of a command line. text: the value as written; value: the value parsed as YAML."""

    keys: tuple[str, ...]
    text: str
    value: Any

    @property
    def dotted_path(self) -> str:
        return ".".join(self.keys)

    def set_in(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Set the field in `raw`, in place. Returns the mapping that contains it, or the item of a list.

        Sections on the path that are missing, or are not mappings, become mappings. An item of a list is named by its
        number, from 0. Raises SpecInvalid if the list has no such item.
        """
        *parents, last = self.keys
        place: Any = raw
        for key in parents:
            index = self._find_index(place, key)
            if isinstance(place, dict):
                place.setdefault(index, {})
            if not isinstance(place[index], dict | list):
                place[index] = {}
            place = place[index]
        place[self._find_index(place, last)] = self.value
        return place if isinstance(place, dict) else {}

    def _find_index(self, place: dict[str, Any] | list[Any], key: str) -> Any:
        """Return a key of a mapping as it is, and one of a list as the number of an item that is there."""
        if isinstance(place, dict):
            return key
        if not key.isdecimal() or int(key) >= len(place):
            rule = f"must name an item of a list of {len(place)} by its number, from 0, got {key}"
            remedy = "use one of these numbers, or change the file"
            raise SpecInvalid((SpecProblem(f"--set {self.dotted_path}", rule, remedy),))
        return int(key)


def parse_override(override: str, example: str) -> Override:
    """Parse an override. Raises SpecInvalid if path or value is missing (its remedy shows `example`) or is not YAML."""
    path, separator, text = override.partition("=")
    keys = tuple(path.split("."))
    if not separator or not all(keys):
        raise SpecInvalid((SpecProblem("--set", f"must be path=value, got {override!r}", f"as in {example}"),))
    try:
        value = parse_yaml(text)
    except YAML_ERRORS as error:
        raise SpecInvalid((SpecProblem(f"--set {path}", f"must be YAML, got {text!r}", "quote the value"),)) from error
    return Override(keys, text, value)


def convert_error(detail: ErrorDetails, model: type[Section], fallback: str) -> SpecProblem:
    """Convert pydantic's error about an instance of `model`. fallback: remedy for error types that have none here."""
    location = detail["loc"]
    kind = detail["type"]
    remedy = _REMEDIES.get(kind, fallback)
    if kind == "missing":
        return SpecProblem(format_location(location), "must be given", remedy)
    if kind == "extra_forbidden":
        return report_unknown_field(model, location)
    if kind == "int_type" and isinstance(detail["input"], str) and detail["input"].strip().isdecimal():
        remedy = "leave out the quotes"
    # Pydantic's messages become rules: "Input should be greater than 0" is "must be greater than 0".
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    message = message.removeprefix("String should ").removeprefix("Tuple should ")
    rule = message if message.startswith("must") else f"must {'' if message.startswith(_VERBS) else 'be '}{message}"
    # A whole section would be unreadable in a message, so only its type is shown.
    shown = detail["input"] if not isinstance(detail["input"], dict | list) else type(detail["input"]).__name__
    return SpecProblem(format_location(location), f"{rule}, got {shown!r}", remedy)


def report_unknown_field(model: type[Section], location: Location) -> SpecProblem:
    """Build the problem of an unknown field.

    It suggests the field that another framework calls so, and the section's field with the closest name.
    """
    *parents, last = location
    field = find_field(model, parents)
    section = model if not parents else find_section(field) if field is not None else None
    names = [str(field.alias) for field in section.model_fields.values()] if section is not None else []
    name = to_camel(str(last))  # a name as in Python is the same field
    close = [
        path
        for other, path in ELSEWHERE.items()
        if to_camel(other) == name and find_field(model, path.split(".")) is not None
    ]
    found = {path.rpartition(".")[2] for path in close}
    close += [similar for similar in difflib.get_close_matches(name, names, n=1) if similar not in found]
    if not close:
        places = walk_section_types(model)
        close = [
            f"{path}.{name}".removeprefix(".")
            for path, other in places
            if any(field.alias == name for field in other.model_fields.values())
        ]
    remedy = f"did you mean {' or '.join(close[:3])}?" if close else "remove it"
    return SpecProblem(format_location(location), "is not a field here", remedy)


def format_location(location: Sequence[int | str]) -> str:
    """Format a location as in messages: `a.b.0.c`."""
    return ".".join(str(part) for part in location)
