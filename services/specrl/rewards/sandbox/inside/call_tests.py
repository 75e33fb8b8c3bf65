"""Inside the sandbox: call tests that are functions or methods, as pytest and unittest do."""

from __future__ import annotations

import types
from typing import Any


def call_test_functions(module: types.ModuleType) -> None:
    """Call each function `test...` that needs no argument, and each such method `test...` of test classes.

    For tests that only define functions. Raises what they raise.
    """
    for name, found in list(module.__dict__.items()):
        if name.startswith("test") and isinstance(found, types.FunctionType) and not _has_required_parameters(found):
            found()
        elif isinstance(found, type) and found.__module__ == module.__name__:
            _call_methods(found)


def _call_methods(kind: type) -> None:
    is_unittest = any(base.__module__.startswith("unittest") for base in kind.__mro__)
    if not (kind.__name__.startswith("Test") or is_unittest):
        return
    before, after = ("setUp", "tearDown") if is_unittest else ("setup_method", "teardown_method")
    for name in [name for name in dir(kind) if name.startswith("test")]:
        case = kind(name) if is_unittest else kind()
        for step in (before, name, after):
            method = getattr(case, step, None)
            if method is not None and not _has_required_parameters(method):
                method()


def _has_required_parameters(function: Any) -> bool:
    """Whether it has parameters that must be given, as pytest's fixtures are."""
    own = getattr(function, "__func__", function)
    code = getattr(own, "__code__", None)
    given = len(own.__defaults__ or ()) + (own is not function)
    return code is None or code.co_argcount > given or code.co_kwonlyargcount > len(own.__kwdefaults__ or ())
