"""Checks that a page of decisions lists every public name that a change took away.

    python -m tools.public_names BASE PAGE

Compares the product's sources at commit BASE with those of this checkout. Public names are modules, and their classes,
functions, methods, fields and constants. A name with a leading underscore is private, with all names inside of it. PAGE
is a Markdown file. A row `| old | new |` names the old one as `module:Class.method`, and a moved module as `module`.
Prints the names that are missing from PAGE, and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tools.events import ROOTS

GENERATED = "services/specrl/api/"
ROW = re.compile(r"^\| `([^`]+)` \| (?:`([^`]+)`|\(gone\)) \|$")


def read_tree(files: dict[str, str]) -> set[str]:
    """Public names of the modules in `files`, which maps paths below the source roots to texts."""
    names = set()
    for path, text in files.items():
        module = path.split("/", 1)[1].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if not any(part.startswith("_") for part in module.split(".")):
            names |= {module, *(f"{module}:{name}" for name in find_names(ast.parse(text).body))}
    return names


def find_names(body: list[ast.stmt], owner: str = "") -> Iterator[str]:
    """Public names that these statements of a module or class define, with those inside of public classes."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found = [name]
            case ast.AnnAssign(target=ast.Name(id=name)):
                found = [name]
            case ast.Assign(targets=targets):
                found = [target.id for target in targets if isinstance(target, ast.Name)]
            case _:
                continue
        public = [name for name in found if not name.startswith("_")]
        yield from (owner + name for name in public)
        if isinstance(statement, ast.ClassDef) and public:
            yield from find_names(statement.body, f"{owner}{statement.name}.")


def read_commit(commit: str) -> dict[str, str]:
    """The sources at a commit, by path."""
    archive = subprocess.run(["git", "archive", commit, *ROOTS], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [m for m in tar if m.name.endswith(".py") and not m.name.startswith(GENERATED)]
        return {m.name: (tar.extractfile(m) or io.BytesIO()).read().decode() for m in members}


def read_checkout() -> dict[str, str]:
    """The sources of this checkout, by path."""
    paths = [path for root in ROOTS for path in sorted(Path(root).rglob("*.py"))]
    return {str(path): path.read_text(encoding="utf-8") for path in paths if not str(path).startswith(GENERATED)}


def read_page(text: str) -> dict[str, str]:
    """Old name to new name of the page's rows; "" for a name that is gone."""
    return {match[1]: match[2] or "" for match in map(ROW.match, text.splitlines()) if match}


def move(name: str, renamed: dict[str, str]) -> str:
    """`name` as the page has it; without a row of its own, with its module and its class renamed as the page says."""
    if name in renamed:
        return renamed[name]
    module, _, rest = name.partition(":")
    parts = rest.split(".") if rest else []
    new_module = renamed.get(module, module)
    if not new_module:
        return ""
    new_parts: list[str] = []
    for count, part in enumerate(parts, 1):
        entry = renamed.get(f"{module}:{'.'.join(parts[:count])}")
        if entry == "":
            return ""
        new_parts.append(part if entry is None else entry.rpartition(".")[2].rpartition(":")[2])
    return f"{new_module}:{'.'.join(new_parts)}" if parts else new_module


def main() -> None:
    """Command line."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    renamed = read_page(Path(sys.argv[2]).read_text(encoding="utf-8"))
    before = read_tree(read_commit(sys.argv[1]))
    after = read_tree(read_checkout())
    known = after | {""}  # "": the page says that the name is gone
    missing = sorted(name for name in before - after if move(name, renamed) not in known)
    invented = sorted(new for new in renamed.values() if new and new not in after)
    for name in missing:
        print(f"not in the page: {name}")
    for name in invented:
        print(f"no such name: {name}")
    sys.exit(bool(missing or invented))


if __name__ == "__main__":
    main()
