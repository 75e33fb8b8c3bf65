"""Reads the definitions of an upstream package without importing it, from an installed folder or from a wheel.

Names are resolved as Python resolves them: through modules, re-exports (`from x import y`, `*`), classes and their
bases, and attributes that methods set on `self`. For a compiled module its `.pyi` is read. `tools/gpu_pins.py` and the
tests of `specrl.seams` call it.

A definition is described by a kind (function, class, attribute), a signature and a hash. These do not depend on
comments, docstrings, line numbers or the Python that reads. `ast.dump` would: it differs between 3.12 and 3.13.
"""

from __future__ import annotations

import ast
import hashlib
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Protocol

Node = ast.stmt | ast.alias
Functions = (ast.FunctionDef, ast.AsyncFunctionDef)
MAX_PARAMETERS = 30
"""A longer signature is not recorded, because it changes with every version; see `Seam.only`."""
MANY = "(many)"


class Files(Protocol):
    """The files of one distribution."""

    def read(self, path: str) -> str | None:
        """Return the text of a file by its path below site-packages; None if it does not exist."""


@dataclass(frozen=True)
class InstalledFiles:
    """Files below a folder that is on sys.path."""

    root: Path

    def read(self, path: str) -> str | None:
        file = self.root / path
        return file.read_text(encoding="utf-8") if file.is_file() else None


class WheelFiles:
    """Files inside a wheel."""

    def __init__(self, wheel: Path) -> None:
        self._zip = zipfile.ZipFile(wheel)
        self._names = frozenset(self._zip.namelist())

    def read(self, path: str) -> str | None:
        return self._zip.read(path).decode("utf-8") if path in self._names else None


def installed_files(distribution: str) -> InstalledFiles:
    """Return the files of an installed distribution. Raises PackageNotFoundError."""
    return InstalledFiles(Path(str(metadata.distribution(distribution).locate_file(""))))


@dataclass(frozen=True)
class Found:
    """A definition. A function may have several nodes: overloads, or branches of an `if`."""

    kind: str
    signature: str
    nodes: tuple[ast.AST, ...]

    @property
    def body(self) -> str:
        """Short hash of the syntax trees, equal for equal code."""
        text = "\n".join(_dump(node) for node in self.nodes)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class NotFound(LookupError):
    """A name that the package does not define."""


@dataclass(frozen=True)
class _Scope:
    """A module or a class: nodes by the name that they define. stars: modules of its `import *`. node: of a class."""

    module: str
    nodes: dict[str, list[ast.AST]]
    stars: tuple[str, ...] = ()
    node: ast.ClassDef | None = None


class Reader:
    """Reads one package, given by its importable name. Each file is parsed once."""

    def __init__(self, files: Files, package: str) -> None:
        self._files = files
        self.package = package
        self._module = cache(self._read_module)
        self._class = cache(_class_scope)

    def find(self, name: str, only: Sequence[str] = ()) -> Found:
        """Find the definition of a dotted name. only: parameters to put in its signature. Raises NotFound."""
        module, rest = self._split(name)
        scope: _Scope | None = self._module(module)
        nodes: list[ast.AST] = []
        for number, part in enumerate(rest):
            if scope is None:
                raise NotFound(f"{name}: {rest[number - 1]} is neither a module nor a class")
            scope, nodes = self._member(scope, part, name)
        return self._describe(scope, nodes, only)

    def _split(self, name: str) -> tuple[str, list[str]]:
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            if self._module(module) is not None:
                return module, parts[length:]
        raise NotFound(f"{name}: there is no module {parts[0]}")

    def _read_module(self, name: str) -> _Scope | None:
        if name.partition(".")[0] != self.package:
            return None  # another package: installed beside this one perhaps, but not in the same wheel
        path = name.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py", f"{path}.pyi", f"{path}/__init__.pyi"):
            text = self._files.read(file)
            if text is not None:
                package = name if "/__init__.py" in file else name.rpartition(".")[0]
                return _scope(name, package, _parse(text, file).body)
        return None

    def _member(self, scope: _Scope, part: str, wanted: str) -> tuple[_Scope | None, list[ast.AST]]:
        """Resolve a name in a scope. Returns it as a scope, None if it is neither module nor class, and its nodes."""
        nodes = scope.nodes.get(part, [])
        if not nodes and scope.node is None:
            inner = self._module(f"{scope.module}.{part}")
            if inner is not None:
                return inner, []
            for star in scope.stars:
                module = self._module(star)
                if module is not None:
                    try:
                        return self._member(module, part, wanted)
                    except NotFound:
                        continue
        if not nodes and scope.node is not None:
            for base in scope.node.bases:
                try:
                    found = self._base(scope, base)
                    return self._member(found, part, wanted)
                except NotFound:
                    continue
        if not nodes:
            raise NotFound(f"{wanted}: {scope.module} has no {part}")
        imports = [node for node in nodes if isinstance(node, _Import)]
        if len(imports) == len(nodes):
            return self._imported(imports[0], wanted)
        defined: list[ast.AST] = [node for node in nodes if not isinstance(node, _Import)]
        classes = [node for node in defined if isinstance(node, ast.ClassDef)]
        return (self._class(scope.module, classes[-1]) if classes else None), defined

    def _imported(self, item: _Import, wanted: str) -> tuple[_Scope | None, list[ast.AST]]:
        inner = self._module(".".join(filter(None, (item.module, item.name))))
        if inner is not None:
            return inner, []
        module = self._module(item.module)
        if module is None or not item.name:
            return None, [item]
        return self._member(module, item.name, wanted)

    def _base(self, scope: _Scope, base: ast.expr) -> _Scope:
        if isinstance(base, ast.Subscript):
            base = base.value
        parts = ast.unparse(base).split(".")
        found: _Scope | None = self._module(scope.module)
        for part in parts:
            if found is None:
                break
            found, _ = self._member(found, part, ".".join(parts))
        if found is None or found.node is None:
            raise NotFound(f"{scope.module}: base {ast.unparse(base)} is not a class of this package")
        return found

    def _describe(self, scope: _Scope | None, nodes: list[ast.AST], only: Sequence[str]) -> Found:
        if scope is not None and scope.node is None:
            return Found("module", "", ())
        if scope is not None and scope.node is not None:
            return Found("class", _cut(self._class_parameters(scope), only), (scope.node,))
        if isinstance(nodes[0], _Import):  # of another package
            return Found("import", ".".join(filter(None, (nodes[0].module, nodes[0].name))), ())
        functions = [node for node in nodes if isinstance(node, Functions)]
        if functions:
            signatures = dict.fromkeys(_cut(_parameters(node.args), only) for node in functions)
            return Found("function", " | ".join(signatures), tuple(functions))
        return Found("attribute", "", tuple(nodes))

    def _class_parameters(self, scope: _Scope) -> list[str]:
        """List the parameters of `__init__`, or the fields of a dataclass or named tuple.

        Bases outside the package are ignored.
        """
        assert scope.node is not None
        own = scope.nodes.get("__init__", [])
        functions = [node for node in own if isinstance(node, Functions)]
        if functions:
            return [item for node in functions for item in _parameters(node.args)]
        inherited: list[str] = []
        for base in scope.node.bases:
            try:
                inherited += self._class_parameters(self._base(scope, base))
            except NotFound:
                continue
        fields = [
            ast.unparse(node.target) + ("" if node.value is None else f"={_short(node.value)}")
            for node in scope.node.body
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
        ]
        return [*inherited, *fields]


class _Import(ast.AST):
    """A name that a module imports from `module`; `name` is empty if it imports the module itself."""

    _fields = ()

    def __init__(self, module: str, name: str) -> None:
        super().__init__()
        self.module = module
        self.name = name


def _parse(text: str, file: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in upstream docstrings
        return ast.parse(text, file)


def _scope(name: str, package: str, body: Sequence[ast.stmt]) -> _Scope:
    nodes: dict[str, list[ast.AST]] = {}
    stars: list[str] = []
    for node in _flat(body):
        if isinstance(node, ast.ImportFrom):
            module = _absolute(node, package)
            for alias in node.names:
                if alias.name == "*":
                    stars.append(module)
                else:
                    nodes.setdefault(alias.asname or alias.name, []).append(_Import(module, alias.name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                module = alias.name if alias.asname else alias.name.partition(".")[0]
                nodes.setdefault(alias.asname or module, []).append(_Import(module, ""))
        else:
            for bound in _bound(node):
                nodes.setdefault(bound, []).append(node)
    return _Scope(name, nodes, tuple(stars))


def _class_scope(module: str, node: ast.ClassDef) -> _Scope:
    nodes: dict[str, list[ast.AST]] = {}
    for item in _flat(node.body):
        for bound in _bound(item):
            nodes.setdefault(bound, []).append(item)
    for method in node.body:
        if isinstance(method, Functions):
            for inner in ast.walk(method):
                for target in _targets(inner):
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        nodes.setdefault(target.attr, []).append(inner)
    return _Scope(module, nodes, (), node)


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a scope, also those inside `if`, `try` and `with`."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(node, part, ()):
                    yield from _flat(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])
        else:
            yield node


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (*Functions, ast.ClassDef)):
        yield node.name
    for target in _targets(node):
        if isinstance(target, ast.Name):
            yield target.id


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple | ast.List) else (target,)
    elif isinstance(node, ast.AnnAssign):
        yield node.target


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, *(node.module.split(".") if node.module else ())])


def _parameters(args: ast.arguments) -> list[str]:
    """List parameters with kinds and defaults, without annotations."""
    found: list[str] = []
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    for number, (arg, default) in enumerate(zip(positional, defaults, strict=True)):
        found.append(arg.arg + ("" if default is None else f"={_short(default)}"))
        if args.posonlyargs and number + 1 == len(args.posonlyargs):
            found.append("/")
    if args.vararg is not None:
        found.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        found.append("*")
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(arg.arg + ("" if default is None else f"={_short(default)}"))
    if args.kwarg is not None:
        found.append(f"**{args.kwarg.arg}")
    return found


def _cut(parameters: list[str], only: Sequence[str]) -> str:
    """Format a signature. only: parameters that our code passes by name; then order and defaults do not matter."""
    if only:
        names = {item.partition("=")[0] for item in parameters}
        return ", ".join(sorted(names.intersection(only)))
    return MANY if len(parameters) > MAX_PARAMETERS else ", ".join(parameters)


def _short(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _dump(node: object) -> str:
    """Format a syntax tree as text, without docstrings, positions and empty fields."""
    if isinstance(node, list):
        return f"[{', '.join(_dump(item) for item in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if (
            name == "body"
            and isinstance(node, (*Functions, ast.ClassDef))
            and ast.get_docstring(node, False) is not None
        ):
            value = value[1:]  # noqa: PLW2901 - the docstring
        if value is None or value == [] or name in {"type_comment", "kind", "ctx"}:
            continue
        fields.append(f"{name}={_dump(value)}")
    return f"{type(node).__name__}({', '.join(fields)})"
