"""Verifier `python`: a function of the user's, in the pool's processes.

Stage 3 of the loop. It is as trusted as the run file that names it: limits are the pool's, there is no sandbox. What it
raises is a verdict of 0, since an answer may cause any exception; all but `specrl.rewards.Ungraded`.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from specrl.errors import Problem, SpecInvalid
from specrl.rewards.verifier import Verdict, Verifier

_TRL = {"prompts", "completions", "completion_ids"}
"""Parameters of TRL's reward functions, which are called once for a batch."""
_LONGEST_WORDS = 300
"""Letters of what a module says when it cannot be imported."""


@dataclass(frozen=True)
class UserFunction:
    """`module:function`, imported where it is first called; `path` is where the run file names it."""

    name: str
    folder: str | None
    path: str

    def ready(self) -> None:
        """Import the function. Raises SpecInvalid with the reason when it is not there."""
        if self.folder is not None and not Path(self.folder).is_dir():
            rule = f"must be a folder, got {self.folder}"
            raise SpecInvalid((Problem(f"{self.path}.folder", rule, "check the path, or leave it out"),))
        try:
            function = self.imported
        except BaseException as error:  # whatever the user's module raises when it is loaded, SystemExit too
            raise SpecInvalid((self._refusal(error),)) from error
        if not callable(function):
            rule = f"must be a function, got {type(function).__name__}"
            raise SpecInvalid((Problem(f"{self.path}.function", rule, "name a function of the module"),))

    @property
    def imported(self) -> Any:
        """What the name stands for. Raises whatever its module raises when it is loaded."""
        return _imported(self.name, self.folder)

    def __call__(self, *arguments: str) -> Any:
        """Whatever it returns, and raises."""
        return self.imported(*arguments)

    def _refusal(self, error: BaseException) -> Problem:
        words = " ".join(str(error)[:_LONGEST_WORDS].split())
        place = _place_of_import(error)
        if place:
            rule, remedy = f"must be importable, got {type(error).__name__} at {place}: {words}", "correct the module"
        else:
            rule = f"must be importable, got {type(error).__name__}: {words}"
            remedy = f"name the module's folder in {self.path}.folder, or install it"
        return Problem(f"{self.path}.function", rule, remedy)


@dataclass(frozen=True)
class Custom(Verifier):
    """The number that `module:function` returns for (reference, completion), or for (reference, completion, row)."""

    extracts: ClassVar[bool] = False
    function: UserFunction

    def ready(self) -> None:
        self.function.ready()
        _row_parameter(self.function)

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        parameter = _row_parameter(self.function)
        positional = [row] if parameter == "" else []
        named = {parameter: row} if parameter else {}
        return _verdict(self.function.name, self.function.imported(reference, completion, *positional, **named))


def _verdict(name: str, value: object) -> Verdict:
    """What the function returned, if it is one number: bool and NumPy's numbers are, text, None and lists are not."""
    if not isinstance(value, Real | Decimal | np.bool_):
        return _no_number(name, type(value).__name__)
    try:
        number = float(value)
    except OverflowError:  # an integer that is too large for any float
        number = math.inf
    try:
        return Verdict(number)
    except ValueError:
        return _no_number(name, "NaN" if math.isnan(number) else "Infinity", str(number))


def _no_number(name: str, what: str, value: str = "") -> Verdict:
    rule = f"{name} must return a number that is finite in float32, got {value or what}"
    return Verdict(0.0, reason=rule, error=f"Returned{what[:1].upper()}{what[1:]} at {name}")


@lru_cache(maxsize=1)
def _row_parameter(function: UserFunction) -> str | None:
    """The parameter that takes the row, "" for the third positional one; None when the function does not ask for it.

    It asks by a parameter `row`, or by a third one that must be given. A third one with a default is an option of its
    own, and *args and **kwargs ask for nothing. Raises SpecInvalid when it does not take reference and completion.
    """
    try:
        signature = inspect.signature(function.imported)
    except (TypeError, ValueError):  # a built-in function need not have one
        return None
    found = signature.parameters
    if _TRL & found.keys():
        rule = f"must take (reference, completion) or (reference, completion, row), got TRL's signature {signature}"
        remedy = (
            "write def grade(reference: str, completion: str, row: dict) -> float: it is called once for each "
            "completion, and row has the columns that TRL gives by name"
        )
        raise SpecInvalid((Problem(f"{function.path}.function", rule, remedy),))
    positional = [p for p in found.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    third = positional[2] if len(positional) > 2 else None
    row = found.get("row")
    parameter: str | None = None
    if row is not None and row.kind in (row.POSITIONAL_OR_KEYWORD, row.KEYWORD_ONLY) and row not in positional[:2]:
        parameter = "row"
    elif third is not None and third.default is third.empty:
        parameter = ""
    try:
        signature.bind("", "", *([{}] if parameter == "" else []), **({parameter: {}} if parameter else {}))
    except TypeError as error:
        rule = f"must take (reference, completion) or (reference, completion, row), got {signature}"
        remedy = "change the function's parameters, or give the others defaults"
        raise SpecInvalid((Problem(f"{function.path}.function", rule, remedy),)) from error
    return parameter


@lru_cache(maxsize=1)
def _imported(name: str, folder: str | None) -> Any:
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _place_of_import(error: BaseException) -> str:
    """File and line of the module, or of what it imports; empty when the module itself was not found."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    theirs = [(file, line) for file, line in places if file != __file__ and not file.startswith("<frozen importlib")]
    outside = [(file, line) for file, line in theirs if file != importlib.__file__]
    return f"{outside[-1][0]}:{outside[-1][1]}" if outside else ""
