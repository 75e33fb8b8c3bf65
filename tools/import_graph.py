"""Measures the imports inside each package: children, imports between modules, upward imports, and import cycles.

    python -m tools.import_graph [PATH ...]

A room is a module or folder directly in a package. An arrow is an import between two modules of the package. Upward
arrows are those that must be removed before the children of every folder can be ordered with all imports pointing down.
A circle is a set of modules that import one another. Imports under TYPE_CHECKING count, because readers follow them.

PATH: source roots to measure instead of this checkout's, such as those of an older commit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOTS = {"services": "specrl", "operators": "specrl_operator"}
HEAD = ("package", "rooms", "fullest folder", "modules", "arrows", "arrows up", "circles")


@dataclass(frozen=True)
class PackageGraph:
    """Measures of one package. fullest: most modules in one of its folders."""

    name: str
    rooms: int
    fullest: int
    modules: int
    arrows: int
    arrows_up: int
    circles: int

    def as_row(self) -> str:
        """Format as a row of a Markdown table."""
        values = (self.rooms, self.fullest, self.modules, self.arrows, self.arrows_up, self.circles)
        return f"| `{self.name}` | " + " | ".join(map(str, values)) + " |"


def measure_package(graph: grimp.ImportGraph, package: str) -> PackageGraph:
    """Measure the package with this dotted name."""
    modules = {package, *graph.find_descendants(package)}
    arrows = {module: graph.find_modules_directly_imported_by(module) & modules - {module} for module in modules}
    folders = {module for module in modules if graph.find_children(module)} | {package}
    flat = [sum(child not in folders for child in graph.find_children(folder)) for folder in folders]
    return PackageGraph(
        name=package,
        rooms=len(graph.find_children(package)),
        fullest=max(flat),
        modules=len(modules) - len(folders),
        arrows=sum(map(len, arrows.values())),
        arrows_up=sum(len(graph.nominate_cycle_breakers(folder)) for folder in folders),
        circles=sum(1 for _ in find_circles(arrows)),
    )


def find_circles(arrows: dict[str, set[str]]) -> Iterator[set[str]]:
    """Yield the strongly connected components with more than one module."""
    reachable = {module: _reach(arrows, module) for module in arrows}
    seen: set[str] = set()
    for module in sorted(arrows):
        circle = {other for other in reachable[module] if module in reachable[other]}
        if circle and module not in seen:
            seen |= circle
            yield circle


def _reach(arrows: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for following in arrows[waiting.pop()] - found:
            found.add(following)
            waiting.append(following)
    return found


def measure_roots(roots: list[Path]) -> Iterator[PackageGraph]:
    """Measure every package directly below specrl, and the operator as one. The roots must be on sys.path."""
    for root in roots:
        name = ROOTS[root.name]
        graph = grimp.build_graph(name, cache_dir=None)
        packages = [child for child in graph.find_children(name) if graph.find_children(child)]
        for package in [name] if root.name == "operators" else sorted(packages):
            if not package.endswith(".api"):
                yield measure_package(graph, package)


def main() -> None:
    """Print a Markdown table."""
    here = Path(__file__).parents[1]
    roots = [Path(argument).resolve() for argument in sys.argv[1:]] or [here / name for name in ROOTS]
    sys.path[:0] = [str(root) for root in roots]
    print("| " + " | ".join(HEAD) + " |")
    print("|---|" + "--:|" * (len(HEAD) - 1))
    for measured in measure_roots(roots):
        print(measured.as_row())


if __name__ == "__main__":
    main()
