"""Read a record's question: a text, several columns joined, or messages. Look up columns by name or path.

Called by `columns`. Invariant: a question ends with a user message. An answer of the assistant after it is left out,
because the policy shall write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "user", "assistant")

# A name in braces within a text, such as `{Body} {Question}`.
_JOINED_COLUMN = re.compile(r"\{([^{}]+)\}")
_INDEX = re.compile(r"-?[0-9]{1,9}")

# Names of types in messages, as JSON has them.
_TYPE_NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    bytes: "bytes",
    type(None): "null",
}


@dataclass(frozen=True)
class ProblemQuestion:
    """A question as text. messages: the whole conversation; empty if it is one user message without more."""

    text: str
    messages: tuple[Mapping[str, str], ...] = ()


def type_name(value: object) -> str:
    """Return the name of a value's type, in the words of JSON."""
    return _TYPE_NAMES.get(type(value), type(value).__name__)


def look_up_column(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a path into objects and lists. Raises KeyError if there is none."""
    if name in values:
        return values[name]
    found: Any = values
    for part in name.split("."):
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, list) and _INDEX.fullmatch(part) and -len(found) <= int(part) < len(found):
            found = found[int(part)]
        else:
            raise KeyError(name)
    return found


def list_question_columns(question: str) -> list[str]:
    """List the columns of `fields.question`: those in braces, or the one that it names."""
    return _JOINED_COLUMN.findall(question) or [question]


def read_question(values: Mapping[str, Any], question: str) -> ProblemQuestion | str:
    """Read the question of a record that has its columns. Returns a message if it has a fault.

    question: as `fields.question` of the run file.
    """
    if _JOINED_COLUMN.search(question):
        return _join_columns(values, question)
    value = look_up_column(values, question)
    if isinstance(value, str):
        return ProblemQuestion(value)
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return _read_messages(question, value)
    return f"field {question!r} must be text or messages, got {type_name(value)}; it is what the policy is asked"


def _join_columns(values: Mapping[str, Any], question: str) -> ProblemQuestion | str:
    """Replace the names in braces by the text of their columns. Numbers and objects become JSON text."""
    texts: dict[str, str] = {}
    for name in list_question_columns(question):
        value = look_up_column(values, name)
        if value is None or isinstance(value, bytes):
            rule = f"must be text, a number or other JSON, got {type_name(value)}"
            return f"field {name!r} {rule}; it is a part of what the policy is asked"
        texts[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return ProblemQuestion(_JOINED_COLUMN.sub(lambda match: texts[match[1]], question))


def _read_messages(name: str, value: Sequence[Mapping[str, Any]]) -> ProblemQuestion | str:
    messages: list[dict[str, str]] = []
    for number, item in enumerate(value):
        where = f"field '{name}.{number}'"
        role = item.get("role")
        if role not in ROLES or (role == "system" and number > 0):
            rule = "must have a role of system (first only), user or assistant"
            return f"{where} {rule}, got {role!r}; correct the record"
        if item.get("tool_calls"):
            return f"{where} must have text alone, got tool_calls; leave the record out, or name a column of text"
        text = _read_content(item.get("content"))
        if text is None:
            return f"{where} must have text as its content, got {type_name(item.get('content'))}; correct the record"
        messages.append({"role": role, "content": text})
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user":
        return f"field {name!r} must have a user message before the answer, got none; correct the record"
    asked = [message for message in messages if message["role"] != "system"]
    if len(asked) > 1:
        text = "\n\n".join(f"{message['role']}: {message['content']}" for message in asked)
        return ProblemQuestion(text, tuple(messages))
    return ProblemQuestion(asked[0]["content"], tuple(messages) if len(messages) > 1 else ())


def _read_content(content: Any) -> str | None:
    """Return a message's content as text, which may be a list of text parts. None if there is something else in it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        return None
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):  # an image, for example
            return None
        texts.append(text)
    return "".join(texts)
