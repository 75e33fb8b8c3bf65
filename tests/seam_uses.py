"""Finds uses of unstable names of vllm, megatron and torch in our sources' syntax trees.

    import      of a name of vllm or megatron, which promise no stability; of torch, with an underscore in its path
    private     `x._name` on anything that is not an object of ours
    subclass    of one of their classes, and each of its methods that is overridden
    assignment  to an attribute of anything that is not an object of ours, by `=`, `setattr` or `x.__dict__[...]`

If imports, annotations or a call of a class do not show the type of `x`, it counts as theirs, because most untyped
objects in these files come from an engine. Only the last part of such a name is known; the table is searched for it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FUNCTION = "<function>"
NAMED_TUPLE = frozenset({"_asdict", "_fields", "_replace"})
PACKAGES = ("vllm", "megatron", "torch")
_IMPORTS = re.compile(rf"^\s*(from|import) .*\b({'|'.join(PACKAGES)})\b", re.MULTILINE)
BACKENDS = ("specrl.generation.vllm_backend", "specrl.trainer.megatron_backend")
"""All files of these packages count, whatever they import: objects of the engines pass through them as `Any`."""


@dataclass(frozen=True)
class SeamUse:
    """One use of an unstable name. name: the dotted name if known, otherwise `?.` and its last part."""

    name: str
    kind: str
    file: str
    line: int
    module: str

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def is_resolved(self) -> bool:
        return not self.name.startswith("?.")

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind} of {self.name}"


def find_uses(roots: Sequence[Path], relative_to: Path) -> list[SeamUse]:
    """Find all uses in Python files below the roots."""
    found: list[SeamUse] = []
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            text = file.read_text(encoding="utf-8")
            if not module.startswith(BACKENDS) and not _IMPORTS.search(text):
                continue
            tree = ast.parse(text, str(file))
            found += _FileUses(tree, module, str(file.relative_to(relative_to))).find()
    return found


@cache
def words_of(file: Path) -> frozenset[str]:
    """Collect all words of a file's code, comments and strings."""
    return frozenset(re.findall(r"\w+", file.read_text(encoding="utf-8")))


class _FileUses:
    def __init__(self, tree: ast.Module, module: str, file: str) -> None:
        self._tree = tree
        self._module = module
        self._file = file
        self._imports: dict[str, str] = {}
        self._ours = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} | {_FUNCTION}
        self._found: list[SeamUse] = []

    def find(self) -> list[SeamUse]:
        for node in ast.walk(self._tree):
            self._take_import(node)
        is_engine = any(_is_theirs(name) for name in self._imports.values())
        if not is_engine and not self._module.startswith(BACKENDS):
            return []
        self._ours -= {
            node.name for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef) and self._bases(node)
        }
        self._visit(self._tree, {})
        return self._found

    def _take_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._imports[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                self._imports[alias.asname or alias.name] = name
                if _needs_row(name):
                    self._add(name, "import", node)

    def _add(self, name: str, kind: str, node: ast.AST) -> None:
        self._found.append(SeamUse(name, kind, self._file, getattr(node, "lineno", 0), self._module))

    def _bases(self, node: ast.ClassDef) -> list[str]:
        """List dotted names of bases that are theirs, also through bases in this file."""
        found = []
        for base in node.bases:
            name = self._dotted(base)
            if name is not None and _is_theirs(name):
                found.append(name)
            elif isinstance(base, ast.Name):
                for other in ast.walk(self._tree):
                    if isinstance(other, ast.ClassDef) and other.name == base.id and other is not node:
                        found += self._bases(other)
        return found

    def _visit(self, node: ast.AST, types: dict[str, ast.expr]) -> None:
        """types: annotation or value of each local name, if one was seen."""
        if isinstance(node, ast.ClassDef):
            bases = self._bases(node)
            for base in bases:
                self._add(base, "subclass", node)
                for method in node.body:
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                        self._add(f"{base}.{method.name}", "override", method)
                        for target in (item for inner in ast.walk(method) for item in _assigned(inner)):
                            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                                self._add(f"{base}.{target.attr}", "override", target)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            arguments = node.args
            types = dict(types)
            for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                if arg.arg not in {"self", "cls"}:
                    types[arg.arg] = arg.annotation or ast.Name("Any")
            for inner in ast.walk(node):
                _learn(inner, types)
        self._check(node, types)
        for child in ast.iter_child_nodes(node):
            self._visit(child, types)

    def _check(self, node: ast.AST, types: dict[str, ast.expr]) -> None:
        for target in _assigned(node):
            if isinstance(target, ast.Attribute):
                self._attribute(target, types, "assignment")
            elif (
                isinstance(target, ast.Subscript)
                and isinstance(target.value, ast.Attribute)
                and target.value.attr == "__dict__"
            ):
                inner = target.slice
                name = inner.value if isinstance(inner, ast.Constant) else "<not a constant>"
                self._attribute(ast.Attribute(target.value.value, str(name)), types, "assignment", node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"setattr", "delattr"}:
            inner = node.args[1]
            name = inner.value if isinstance(inner, ast.Constant) else "<not a constant>"
            self._attribute(ast.Attribute(node.args[0], str(name)), types, "assignment", node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"getattr", "hasattr"}:
            inner = node.args[1]
            if isinstance(inner, ast.Constant) and _is_private(str(inner.value)):
                self._attribute(ast.Attribute(node.args[0], str(inner.value)), types, "private", node)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_private(node.attr):
            self._attribute(node, types, "private")

    def _attribute(
        self,
        target: ast.Attribute,
        types: dict[str, ast.expr],
        kind: str,
        node: ast.AST | None = None,
    ) -> None:
        name = self._dotted(target)
        where = node or target
        if name is not None:
            if _is_theirs(name):
                self._add(name, kind, where)
            return
        if self._is_ours(target.value, types):
            return
        self._add(f"?.{target.attr}", kind, where)

    def _dotted(self, node: ast.expr) -> str | None:
        """Resolve a chain of attributes to a dotted name, if it begins with an import."""
        if isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Attribute):
            before = self._dotted(node.value)
            return None if before is None else f"{before}.{node.attr}"
        return self._imports.get(node.id) if isinstance(node, ast.Name) else None

    def _is_ours(self, node: ast.expr, types: dict[str, ast.expr], depth: int = 0) -> bool:
        """Whether an object is known not to be an engine's."""
        if not isinstance(node, ast.Name) or depth > 4:
            return isinstance(node, ast.Constant)
        if node.id in {"self", "cls"} and node.id not in types:
            return True  # the test compares attributes of a subclass with those of its base
        kind = types.get(node.id)
        if kind is None:
            return node.id in self._ours
        value = kind.func if isinstance(kind, ast.Call) else kind
        if isinstance(value, ast.Name) and value.id in types and value.id != node.id:
            return self._is_ours(value, types, depth + 1)
        if isinstance(value, ast.Name) and value.id in self._ours:
            return True
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value in self._ours
        name = self._dotted(value)
        return name is not None and not _is_theirs(name) and not name.startswith("typing.")


def _learn(node: ast.AST, types: dict[str, ast.expr]) -> None:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        types[node.target.id] = node.annotation
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                types.setdefault(target.id, node.value)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        types.setdefault(node.name, ast.Constant(_FUNCTION))


def _assigned(node: ast.AST) -> Iterator[ast.expr]:
    targets: Sequence[ast.expr] = ()
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        targets = (node.target,)
    for target in targets:
        for inner in ast.walk(target):
            if isinstance(inner, ast.Attribute | ast.Subscript) and isinstance(inner.ctx, ast.Store | ast.Del):
                yield inner


def _is_theirs(name: str) -> bool:
    return name.partition(".")[0] in PACKAGES


def _is_private(part: str) -> bool:
    is_special = part.startswith("__") and part.endswith("__")
    return part.startswith("_") and not is_special and part not in NAMED_TUPLE


def _needs_row(name: str) -> bool:
    package = name.partition(".")[0]
    return package in {"vllm", "megatron"} or (package == "torch" and any(map(_is_private, name.split("."))))
