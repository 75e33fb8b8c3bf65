"""Verifiers `pattern`, `tags` and `validJson`: rewards for the form of a completion, whatever its reference.

Called by `pool.VerifierPool`. Invariants: a reference is never read, so none is refused. Time is linear in the
completion, since completions may be hostile. Settings that cannot be used are refused by `prepare_worker`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specrl.errors import SpecInvalid, SpecProblem, VerifierFailed
from specrl.rewards.text.json_answers import JsonPlace, extract_json_text, parse_json, replace_surrogates
from specrl.rewards.text.patterns import compile_pattern, compile_schema
from specrl.rewards.verifier import Verdict, Verifier


class FormatVerifier(Verifier):
    """A verifier of a form. It looks for no answer and reads no reference."""

    extracts: ClassVar[bool] = False
    checks_references: ClassVar[bool] = False


@dataclass(frozen=True)
class Pattern(FormatVerifier):
    """Gives 1 if the completion matches an expression of RE2, else 0.

    is_whole: whether the expression must match all of the completion, or any part of it. White space around the
    completion is ignored. path: the section of the run file, for messages.
    """

    expression: str
    is_whole: bool
    path: str

    def prepare_worker(self) -> None:
        try:
            compile_pattern(self.expression)
        except VerifierFailed as error:
            rule, _, remedy = str(error).removeprefix("a regular expression ").rpartition("; ")
            raise SpecInvalid((SpecProblem(f"{self.path}.expression", rule, remedy),)) from error

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        pattern = compile_pattern(self.expression)
        text = replace_surrogates(completion.strip())
        found = pattern.fullmatch(text) if self.is_whole else pattern.search(text)
        return Verdict(0.0, None, "no match") if found is None else Verdict(1.0, None, "matches")


@dataclass(frozen=True)
class Tags(FormatVerifier):
    """Gives 1 to `<think>...</think> <answer>...</answer>` with nothing around it, for names of the user's, else 0.

    Every tag occurs exactly once, in the order of `names`, with text inside. Between and around them is nothing but
    white space. first_is_open: the prompt ends with the first opening tag, so the completion begins inside of it.
    """

    names: tuple[str, ...]
    first_is_open: bool

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        text = f"<{self.names[0]}>{completion}" if self.first_is_open else completion
        wanted = [tag for name in self.names for tag in (f"<{name}>", f"</{name}>")]
        found = re.findall("|".join(map(re.escape, wanted)), text)
        if found != wanted:
            missing = next((tag for tag in wanted if tag not in found), None)
            return Verdict(0.0, None, f"no {missing}" if missing else "a tag is repeated or in the wrong order")
        rest = text
        for name in self.names:
            before, _, rest = rest.partition(f"<{name}>")
            inside, _, rest = rest.partition(f"</{name}>")
            if before.strip():
                return Verdict(0.0, None, f"text before <{name}>")
            if not inside.strip():
                return Verdict(0.0, None, f"nothing in <{name}>")
        if rest.strip():
            return Verdict(0.0, None, f"text after </{self.names[-1]}>")
        return Verdict(1.0, None, "has all tags")


@dataclass(frozen=True)
class ValidJson(FormatVerifier):
    """Gives 1 if the completion has JSON in its place, valid under a schema of the run file if there is one, else 0.

    schema: text of a JSON Schema, or None for any JSON. path: the section of the run file, for messages.
    """

    place: JsonPlace
    schema: str | None
    path: str

    def prepare_worker(self) -> None:
        try:
            compile_schema("true" if self.schema is None else self.schema)
        except VerifierFailed as error:
            rule, _, remedy = str(error).removeprefix("the reference ").rpartition("; ")
            remedy = remedy.replace("data set", "schema")
            raise SpecInvalid((SpecProblem(f"{self.path}.jsonSchema", rule, remedy),)) from error

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        try:
            answer = parse_json(extract_json_text(completion, self.place))
        except (ValueError, RecursionError):
            return Verdict(0.0, None, "no JSON in its place")
        if self.schema is not None and not compile_schema(self.schema).is_valid(answer):
            return Verdict(0.0, None, "JSON, but not valid under the schema")
        return Verdict(1.0, None, "valid JSON")
