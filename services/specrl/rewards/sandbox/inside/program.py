"""Inside the sandbox: run an answer as a program. Its source is read from descriptor 3.

python program.py PACKAGES        PACKAGES: a folder of packages, or empty
"""

from __future__ import annotations

import os
import sys
import types


def main() -> None:
    """Run the answer as `__main__`; its exit status is this program's."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib is slow to load
    from dialect import compile_answer  # type: ignore[import-not-found] # lies beside this file

    del sys.path[0]
    with os.fdopen(3, "rb") as file:
        source = file.read()
    if sys.argv[1]:
        sys.path.append(sys.argv[1])
    sys.argv[:] = ["answer.py"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile_answer(source, "answer.py"), module.__dict__)  # noqa: S102 - what the sandbox is for


main()
