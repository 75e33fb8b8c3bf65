"""The table of seams is complete, has no unused row, and matches the installed packages.

The mutants at the end show what the table detects: a renamed symbol, a changed signature, a changed body, and a use
without a row. None of the three packages is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from tests.seam_uses import SeamUse, find_uses, words_of
from tools import gpu_pins
from tools.gpu_pins import ROOT
from tools.seam_reader import NotFound, Reader
from tools.seam_table import FOUND_BY_SYNTAX, SEAMS, Seam, Use

from specrl.seams.versions import DISTRIBUTIONS, EXPECTED, GPU_SEAMS, installed_version

SOURCES = (ROOT / "services", ROOT / "operators")


def find_unlisted(uses: Sequence[SeamUse], seams: Sequence[Seam]) -> list[str]:
    """Uses without a row in the table, each with its file and line."""
    return [
        f"{use} must be in tools/seam_table.py"
        for use in uses
        if not any(_is_of(use, seam) for seam in seams) and not (use.kind == "override" and not _is_upstream(use.name))
    ]


def find_unused(seams: Sequence[Seam], uses: Sequence[SeamUse]) -> list[str]:
    """Rows that no source uses, and modules of rows that do not use them."""
    return [
        f"{seam.name} is not used in {where}"
        for seam in seams
        for where in seam.where
        if words_of(_file(where)).isdisjoint({seam.last_name, *seam.looks_for})
        or (seam.use in FOUND_BY_SYNTAX and not any(_is_of(use, seam, where) for use in uses))
    ]


def _is_of(use: SeamUse, seam: Seam, where: str | None = None) -> bool:
    modules = seam.where if where is None else (where,)
    is_named = use.name == seam.name if use.is_resolved else use.last in {seam.last_name, *seam.looks_for}
    return is_named and use.module.removeprefix("specrl.") in modules


def _file(where: str) -> Path:
    path = ROOT / "services" / "specrl" / where.replace(".", "/")
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"


def _is_upstream(name: str) -> bool:
    """Whether a method or attribute of our subclass overrides an upstream one. Public names of torch do not count."""
    last = name.rpartition(".")[2]
    if name.startswith("torch.") and (last.endswith("__") or not last.startswith("_")):
        return False
    try:
        _readers()[name.partition(".")[0]].find(name)
    except NotFound:
        return False
    return True


@cache
def _readers() -> dict[str, Reader]:
    return gpu_pins.installed_readers()


@cache
def collect_uses() -> tuple[SeamUse, ...]:
    return tuple(find_uses(SOURCES, ROOT))


def test_every_use_of_an_unstable_name_is_in_the_table() -> None:
    assert find_unlisted(collect_uses(), SEAMS) == []


def test_every_row_of_the_table_is_used_where_it_says() -> None:
    assert find_unused(SEAMS, collect_uses()) == []


def test_no_name_is_in_the_table_twice() -> None:
    assert len({seam.name for seam in SEAMS}) == len(SEAMS)


def test_installed_packages_are_what_our_code_expects() -> None:
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    for key, found in gpu_pins.read_installed(_readers()).items():
        assert key in expected, f"{key} is not supported: compare it, then run `make seams`"
        told = gpu_pins.find_differences(expected[key]["seams"], found["seams"])
        assert told == {}, f"{key} differs from the supported version: see docs/seams.md"
        assert set(expected[key]["seams"]) == set(found["seams"]), "the table has changed: run `make seams`"


def test_a_name_may_be_missing_upstream_only_with_a_reason() -> None:
    for file in (EXPECTED, GPU_SEAMS):
        for key, pin in json.loads(file.read_text(encoding="utf-8")).items():
            reasons = {seam.name: seam.absent for seam in SEAMS}
            missing = [name for name, row in pin["seams"].items() if row["kind"] == "absent" and not reasons[name]]
            assert missing == [], key


def test_names_that_we_add_do_not_exist_upstream() -> None:
    added = [seam for seam in SEAMS if seam.use is Use.ADDS]
    assert added
    for file in (EXPECTED, GPU_SEAMS):
        pins = gpu_pins.group_by_package(json.loads(file.read_text(encoding="utf-8")))
        for seam in added:
            assert pins[seam.package_name][1][seam.name] == {"kind": "absent"}


def test_the_listed_parameters_exist_in_every_supported_version() -> None:
    for file in (EXPECTED, GPU_SEAMS):
        pins = gpu_pins.group_by_package(json.loads(file.read_text(encoding="utf-8")))
        for seam in SEAMS:
            if seam.only:
                found = pins[gpu_pins.MODULES[seam.package_name]][1][seam.name]["signature"].split(", ")
                assert sorted(found) == sorted(seam.only), seam.name


def test_every_difference_of_the_gpu_pins_is_explained() -> None:
    page = (ROOT / "docs" / "seams.md").read_text(encoding="utf-8")
    for key, names in gpu_pins.changed_names().items():
        _, _, section = page.partition(f"\n### {key}\n")
        rows = section.partition("\n#")[0]
        told = [line.split("`")[1] for line in rows.splitlines() if line.startswith("| `")]
        assert sorted(told) == sorted(names), f"docs/seams.md must explain exactly these of {key}"


def test_the_versions_in_the_cpu_lock_are_supported() -> None:
    versions = {key.partition("==")[::2] for key in json.loads(EXPECTED.read_text(encoding="utf-8"))}
    assert versions == {(package, installed_version(package)) for package in DISTRIBUTIONS}


# -- mutants ---------------------------------------------------------------------------------------------------------

UPSTREAM = '''\
class Scheduler:
    """The class of vLLM."""

    def schedule(self, now, *, is_forced=False):
        """Old words."""
        return now + 1

from vllm.inner import helper as offered
'''
INNER = "def helper(a, b=2):\n    return a * b\n"


class Sources:
    """A package vllm in memory."""

    def __init__(self, text: str) -> None:
        self._files = {"vllm/__init__.py": "", "vllm/core.py": text, "vllm/inner.py": INNER}

    def read(self, path: str) -> str | None:
        return self._files.get(path)


@pytest.fixture
def synthetic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rows = (
        Seam("vllm.core.Scheduler.schedule", Use.READS, ("a",), body=True),
        Seam("vllm.core.offered", Use.IMPORTS, ("a",)),
    )
    monkeypatch.setattr(gpu_pins, "SEAMS", rows)
    return iter(())


def compare_package(after: str) -> dict[str, str]:
    """Differences that are reported for a changed package."""
    before, now = (gpu_pins.describe_seams(Reader(Sources(text), "vllm")) for text in (UPSTREAM, after))
    return gpu_pins.find_differences(before, now)


@pytest.mark.usefixtures("synthetic")
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("def schedule", "def schedule_step", "kind: function -> absent"),
        ("helper as offered", "helper as given", "kind: function -> absent"),
        (
            "is_forced=False",
            "is_forced=True",
            "signature: self, now, *, is_forced=False -> self, now, *, is_forced=True",
        ),
        ("now, *, is_forced", "now, *, is_urgent", "is_urgent=False"),
        ("now + 1", "now + 2", "another body"),
    ],
)
def test_a_renamed_symbol_a_changed_signature_and_a_changed_body_are_reported(old: str, new: str, told: str) -> None:
    assert old in UPSTREAM
    (text,) = compare_package(UPSTREAM.replace(old, new)).values()
    assert told in text


@pytest.mark.usefixtures("synthetic")
def test_docstrings_comments_and_positions_are_not_compared() -> None:
    assert compare_package("\n\n# moved\n" + UPSTREAM.replace("Old words", "New words")) == {}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("from vllm.v1.secret import Thing", "import of vllm.v1.secret.Thing"),
        ("from torch._inner import thing", "import of torch._inner.thing"),
        ("class Mine(config.Theirs): ...", "subclass of vllm.config.Theirs"),
        ("config.default = 3", "assignment of vllm.config.default"),
        ("setattr(config, 'default', 3)", "assignment of vllm.config.default"),
        ("config.__dict__['default'] = 3", "assignment of vllm.config.default"),
        ("x = config._hidden", "private of vllm.config._hidden"),
        ("def f(runner): runner._state", "private of ?._state"),
        ("def f(runner): getattr(runner, '_state', None)", "private of ?._state"),
        ("def f(runner): runner.method = print", "assignment of ?.method"),
        ("def f(runner):\n    for name in 'ab': setattr(runner, name, 1)", "assignment of ?.<not a constant>"),
    ],
)
def test_a_use_without_a_row_is_reported_with_its_line(tmp_path: Path, line: str, told: str) -> None:
    package = tmp_path / "specrl" / "generation" / "vllm_backend"
    package.mkdir(parents=True)
    (package / "new.py").write_text(f"from vllm import config\n\n{line}\n")
    uses = [use for use in find_uses([tmp_path], tmp_path) if use.name != "vllm.config"]
    (text,) = find_unlisted(uses, SEAMS)
    number = 2 + (line.count("\n") or 0) + 1
    assert text == f"specrl/generation/vllm_backend/new.py:{number}: {told} must be in tools/seam_table.py"


def test_our_own_objects_are_not_seams(tmp_path: Path) -> None:
    package = tmp_path / "specrl" / "generation" / "vllm_backend"
    package.mkdir(parents=True)
    source = "class Ours: ...\n\ndef f(a: Ours) -> None:\n    a.x = 1\n    b = Ours()\n    b._y = a._x\n"
    (package / "new.py").write_text(source)
    assert find_uses([tmp_path], tmp_path) == []


def test_an_unused_row_is_reported() -> None:
    row = Seam(
        "vllm.v1.core.sched.scheduler.Scheduler.gone", Use.OVERRIDES, ("generation.vllm_backend.extensions.scheduler",)
    )
    assert find_unused([row], collect_uses()) == [
        f"{row.name} is not used in generation.vllm_backend.extensions.scheduler"
    ]
