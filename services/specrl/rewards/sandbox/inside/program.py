"""Inside the sandbox: run an answer as a program. Its source is read from descriptor 3.

python program.py PACKAGES        PACKAGES: a folder of packages, or empty
"""

from __future__ import annotations

import os
import sys
import types


def main() -> None:
    """Run the answer as `__main__`; its exit status is this program's."""
    with os.fdopen(3, "rb") as file:
        source = file.read()
    if sys.argv[1]:
        sys.path.append(sys.argv[1])
    sys.argv[:] = ["answer.py"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(source, "answer.py", "exec"), module.__dict__)  # noqa: S102 - what the sandbox is for


main()
