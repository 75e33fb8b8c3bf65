"""Verifier `python`: a function of the user's, in the pool's processes.

Stage 3 of the loop. It is as trusted as the run file that names it: limits are the pool's, there is no sandbox.
"""

from __future__ import annotations

import importlib
import math
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from specrl.errors import Problem, SpecInvalid, VerifierFailed
from specrl.rewards.verifier import Verdict, Verifier


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
            function = _imported(self.name, self.folder)
        except Exception as error:  # whatever the user's module raises when it is loaded
            rule = f"must be importable, got {type(error).__name__}: {error}"
            remedy = f"name the module's folder in {self.path}.folder, or install it"
            raise SpecInvalid((Problem(f"{self.path}.function", rule, remedy),)) from error
        if not callable(function):
            rule = f"must be a function, got {type(function).__name__}"
            raise SpecInvalid((Problem(f"{self.path}.function", rule, "name a function of the module"),))

    def __call__(self, *arguments: str) -> Any:
        """Whatever it returns, and raises."""
        return _imported(self.name, self.folder)(*arguments)


def raised(error: Exception) -> str:
    """What a function of the user's raised, and where: not its words, which may quote a prompt or a completion.

    Those are logged at DEBUG, by the pool.
    """
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"


@dataclass(frozen=True)
class Custom(Verifier):
    """What `module:function` answers for (reference, completion): a finite number."""

    function: UserFunction

    def ready(self) -> None:
        self.function.ready()

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        name = self.function.name
        try:
            value = self.function(reference, completion)
        except Exception as error:
            raise VerifierFailed(f"{name} must answer, got {raised(error)}") from error
        if not isinstance(value, int | float):
            raise VerifierFailed(f"{name} must answer a finite number, got {type(value).__name__}")
        if not math.isfinite(value):
            raise VerifierFailed(f"{name} must answer a finite number, got {value}")
        return Verdict(float(value))


@lru_cache(maxsize=1)
def _imported(name: str, folder: str | None) -> Any:
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
