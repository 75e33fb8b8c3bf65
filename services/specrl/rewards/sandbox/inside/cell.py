"""Inside the sandbox: run a call as a notebook does a cell. Its source is read from descriptor 3.

python cell.py PACKAGES        PACKAGES: a folder of packages, or empty

The output is everything that the call prints, then one line with the value of its last expression or its exception.
"""

from __future__ import annotations

import ast
import os
import sys
import traceback
import types


def main() -> None:
    """Run the cell as `__main__`. The exit status is 0 even if it raised, because the output has the exception."""
    with os.fdopen(3, "rb") as file:
        source = file.read().decode(errors="replace").strip()
    if sys.argv[1]:
        sys.path.append(sys.argv[1])
    sys.argv[:] = ["call.py"]
    os.dup2(1, 2)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        run_cell(source, module)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the edge of a process: whatever the call raises is its output
        sys.stdout.flush()
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "call.py"]
        place = f" (line {lines[-1]})" if lines else ""
        what = error.msg if isinstance(error, SyntaxError) else error
        sys.stdout.write(f"{type(error).__name__}: {what}{place}\n")


def run_cell(source: str, module: types.ModuleType) -> None:
    """Execute all of it, and show the last statement's value if it is an expression and not None."""
    tree = ast.parse(source, "call.py")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "call.py", "exec"), module.__dict__)  # noqa: S102 - what the sandbox is for
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "call.py", "eval"), module.__dict__)  # noqa: S307 - as above
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


main()
