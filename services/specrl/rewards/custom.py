"""Verifier `python`: calls a user's function in the processes of the verifier pool.

The function is trusted like the run file that names it: the pool limits its time and memory, but there is no sandbox.
If the function raises, the reward is 0, since an answer may cause any exception. The exception to that rule is
`specrl.rewards.Ungraded`, which samples the rollout again. `choice` builds this verifier; `agent_tools.tool` uses
`UserFunction` for tools.
"""

from __future__ import annotations

import difflib
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

from specrl.errors import SpecInvalid, SpecProblem
from specrl.rewards.judging import read_message
from specrl.rewards.verifier import Verdict, Verifier

_TRL_PARAMETERS = {"prompts", "completions", "completion_ids"}
"""Parameters of TRL's reward functions, which are called once per batch. They identify a function written for TRL."""


@dataclass(frozen=True)
class UserFunction:
    """A function named `module:function`, imported on its first call in each process.

    folder: added to `sys.path` before the import; None if the module is installed.
    path: the section of the run file that names the function, for messages.
    """

    name: str
    folder: str | None
    path: str

    def prepare_worker(self) -> None:
        """Import the function. Raises SpecInvalid with the reason if that fails."""
        if self.folder is not None and not Path(self.folder).is_dir():
            rule = f"must be a folder, got {self.folder}"
            raise SpecInvalid((SpecProblem(f"{self.path}.folder", rule, "check the path, or leave it out"),))
        try:
            function = self.imported_function
        except BaseException as error:  # a user's module may raise anything on import, SystemExit included
            raise SpecInvalid((self._build_import_problem(error),)) from error
        if not callable(function):
            rule = f"must be a function, got {type(function).__name__}"
            raise SpecInvalid((SpecProblem(f"{self.path}.function", rule, "name a function of the module"),))

    @property
    def imported_function(self) -> Any:
        """The object that the name refers to. Raises whatever importing its module raises."""
        return _import_function(self.name, self.folder)

    def _build_import_problem(self, error: BaseException) -> SpecProblem:
        place = _locate_import_error(error)
        where = f" at {place}" if place else ""
        rule = f"must be importable, got {type(error).__name__}{where}: {read_message(error)}"
        remedy = "correct the module" if place else self._advise_missing_module()
        if not place and isinstance(error, AttributeError):  # the module was found, but has no such function
            close = difflib.get_close_matches(str(error.name), dir(error.obj), n=1)
            remedy = f"did you mean {close[0]}?" if close else "name one of its functions"
        return SpecProblem(f"{self.path}.function", rule, remedy)

    def _advise_missing_module(self) -> str:
        """Advise on a module that was not found, by the modules of the folder, if one is named."""
        path, _, function = self.name.partition(":")
        if path.endswith(".py"):
            return f"write {path.removesuffix('.py')}:{function}"
        if self.folder is None:
            return f"name the module's folder in {self.path}.folder, or install it"
        module = path.partition(".")[0]
        close = difflib.get_close_matches(module, (file.stem for file in Path(self.folder).glob("*.py")), n=1)
        if close:
            return f"did you mean {close[0]}?"
        return f"{self.folder} has no {module}.py; add it, or name the folder that has it in {self.path}.folder"


@dataclass(frozen=True)
class Custom(Verifier):
    """Rewards a completion with the number that the user's function returns.

    The function takes (reference, completion) or (reference, completion, row).
    """

    extracts: ClassVar[bool] = False
    checks_references: ClassVar[bool] = False
    function: UserFunction

    def prepare_worker(self) -> None:
        self.function.prepare_worker()
        _find_row_parameter(self.function)

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        parameter = _find_row_parameter(self.function)
        positional = [row] if parameter == "" else []
        named = {parameter: row} if parameter else {}
        result = self.function.imported_function(reference, completion, *positional, **named)
        return _build_verdict(self.function.name, result)


def _build_verdict(name: str, value: object) -> Verdict:
    """Turn the function's result into a verdict. bool and NumPy's scalars are numbers; text, None and lists are not."""
    if not isinstance(value, Real | Decimal | np.bool_):
        return _reject_result(name, type(value).__name__)
    try:
        number = float(value)
    except OverflowError:  # int and Fraction raise it where float arithmetic would give inf
        number = math.inf
    try:
        return Verdict(number)
    except ValueError:  # not finite in float32
        return _reject_result(name, "NaN" if math.isnan(number) else "Infinity", str(number))


def _reject_result(name: str, what: str, value: str = "") -> Verdict:
    rule = f"{name} must return a number that is finite in float32, got {value or what}"
    return Verdict(0.0, reason=rule, error=f"Returned{what[:1].upper()}{what[1:]} at {name}")


@lru_cache(maxsize=16)  # as many as a run may have
def _find_row_parameter(function: UserFunction) -> str | None:
    """Find the parameter that takes the row: its name, "" for the third positional one, None if there is none.

    A function asks for the row with a parameter called `row`, or with a third parameter without a default. A third
    parameter with a default is the function's own option. *args and **kwargs do not ask for the row.
    Raises SpecInvalid if the function cannot be called with reference and completion.
    """
    try:
        signature = inspect.signature(function.imported_function)
    except (TypeError, ValueError):  # many built-in functions have no signature to inspect
        return None
    found = signature.parameters
    if _TRL_PARAMETERS & found.keys():
        rule = f"must take (reference, completion) or (reference, completion, row), got TRL's signature {signature}"
        remedy = (
            "write def grade(reference: str, completion: str, row: dict) -> float; it is called once per completion, "
            "and row holds the columns that TRL passes by name"
        )
        raise SpecInvalid((SpecProblem(f"{function.path}.function", rule, remedy),))
    positional = [p for p in found.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    third = positional[2] if len(positional) > 2 else None
    row = found.get("row")

    # A parameter named `row` wins over the position, but the first two always take reference and completion.
    parameter: str | None = None
    if row is not None and row.kind in (row.POSITIONAL_OR_KEYWORD, row.KEYWORD_ONLY) and row not in positional[:2]:
        parameter = "row"
    elif third is not None and third.default is third.empty:
        parameter = ""

    # Bind a call as `Custom.grade` will make it, so that a wrong signature is refused before the run.
    try:
        signature.bind("", "", *([{}] if parameter == "" else []), **({parameter: {}} if parameter else {}))
    except TypeError as error:
        rule = f"must take (reference, completion) or (reference, completion, row), got {signature}"
        remedy = "change the function's parameters, or give the others defaults"
        raise SpecInvalid((SpecProblem(f"{function.path}.function", rule, remedy),)) from error
    return parameter


@lru_cache(maxsize=16)
def _import_function(name: str, folder: str | None) -> Any:
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)  # first, so that an installed module of the same name does not win
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _locate_import_error(error: BaseException) -> str:
    """Return `file:line` of the failing import in the user's module; "" if the module itself was not found."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    # Drop our own frames and the import machinery's: what is left belongs to the module, if it was found at all.
    theirs = [(file, line) for file, line in places if file != __file__ and not file.startswith("<frozen importlib")]
    outside = [(file, line) for file, line in theirs if file != importlib.__file__]
    return f"{outside[-1][0]}:{outside[-1][1]}" if outside else ""
