"""No data that a process receives or reads from a file can make it run code.

Checked in the sources, so that it also holds for code that no test runs. Every exception is listed with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVICES = Path(__file__).parents[2] / "services" / "specrl"

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib"}
"""Modules whose loaders run code in the data."""

NAMES = {"eval", "exec", "compile", "__import__"}

CALLS = {
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "numpy.load",
    "np.load",
    "dist.broadcast_object_list",
    "dist.all_gather_object",
    "dist.gather_object",
    "dist.scatter_object_list",
    "dist.send_object_list",
    "dist.recv_object_list",
    "os.system",
    "subprocess.getoutput",
}

WORDS = {
    "allow_pickle": "numpy's pickles",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "vLLM's: its engine core then unpickles what it is sent",
    "trust_remote_code": "Python of a model's folder",
    "shell": "a shell line",
}
"""Keyword arguments and environment variables that allow it."""

ALLOWED = {
    ("drafting/eagle3/head_formats.py", "pickle"): "the class of an error that torch.load raises",
    (
        "drafting/eagle3/head_formats.py",
        "torch.load",
    ): "published heads in .bin; weights_only, which unpickles tensors alone",
    ("drafting/draft_model/model.py", "trust_remote_code"): "where it is switched off",
    ("generation/vllm_backend/arguments.py", "VLLM_ALLOW_INSECURE_SERIALIZATION"): "where it is switched off",
    ("rewards/sandbox/inside/cell.py", "exec"): "the policy's call, in its sandbox",
    ("rewards/sandbox/inside/cell.py", "eval"): "the same",
    ("rewards/sandbox/inside/cell.py", "compile"): "the same",
    ("rewards/sandbox/inside/dialect.py", "compile"): "the answer, in its sandbox",
    ("rewards/sandbox/inside/dialect.py", "__import__"): "modules of a list in the same file",
    ("rewards/sandbox/inside/functions.py", "exec"): "the answer, in its sandbox",
    ("rewards/sandbox/inside/program.py", "exec"): "the same",
    (
        "rewards/sandbox/inside/load_tests.py",
        "exec",
    ): "the tests of the user's own data, in a sandbox without an answer",
    ("rewards/sandbox/inside/load_tests.py", "compile"): "the same",
    ("rewards/sandbox/inside/tests.py", "exec"): "the tests of the user's own data, in a sandbox without an answer",
    ("rewards/sandbox/inside/tests.py", "compile"): "the same",
}


def found_in(source: str) -> Iterator[str]:
    """Find forbidden uses in one module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in NAMES or name in CALLS:
                yield name
            for keyword in node.keywords:
                is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in WORDS and not is_off:
                    yield str(keyword.arg)
        elif isinstance(node, ast.Constant) and node.value in WORDS and node.value != "shell":
            yield str(node.value)


def test_no_process_unpickles_or_evaluates_what_it_is_given() -> None:
    found = {
        (str(path.relative_to(SERVICES)), what)
        for path in sorted(SERVICES.rglob("*.py"))
        if path.parts[-3:-1] != ("api", "v1")
        for what in found_in(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED.keys(), "use safetensors, JSON or protobuf; an exception needs a reason in ALLOWED"


def test_the_one_torch_load_takes_tensors_alone() -> None:
    tree = ast.parse((SERVICES / "drafting/eagle3/head_formats.py").read_text(encoding="utf-8"))
    (call,) = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "torch.load"]
    assert {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}["weights_only"] == "True"


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from dill import loads",
        "eval(text)",
        "torch.load(path)",
        "dist.broadcast_object_list(objects, 0)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(line, shell=True)",
        'environment = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}',
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert list(found_in(line))
