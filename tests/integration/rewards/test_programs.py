"""Programs as models write them are graded by tests of published formats, in the real sandbox and both isolations."""

# ruff: noqa: E501 - a completion is read best on one line

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.requirements import SANDBOX
from tests.small_process import HostedVerifier, SmallProcess

from specrl.errors import SpecInvalid
from specrl.rewards.code import Code
from specrl.rewards.code.sandbox_runner import SandboxOptions
from specrl.spec.data import CodeVerifier, Isolation

SUM = json.dumps({"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]})
ADD = json.dumps({"fn_name": "add", "inputs": [[1, 2], [30, 4]], "outputs": [3, 34]})
ASSERTS = "assert add(1, 2) == 3\nassert add(30, 4) == 34\n"
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
FUNCTION = "def add(a, b):\n    return a + b\n"
METHOD = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b\n"


@pytest.fixture(scope="module")
def process() -> Iterator[SmallProcess]:
    """The process that grades."""
    found = SmallProcess()
    yield found
    found.close()


@pytest.fixture(scope="module", params=[Isolation.NAMESPACES, Isolation.LANDLOCK])
def judge(request: pytest.FixtureRequest, process: SmallProcess) -> HostedVerifier:
    limits = {"isolation": request.param, "cpu_s": 3, "wall_s": 6, "memory_mib": 512, "output_kib": 256}
    sandbox = SandboxOptions.from_section(CodeVerifier.model_validate(limits), "rewards.code")
    found = HostedVerifier(Code(sandbox), process)
    try:
        found.prepare_worker()
    except SpecInvalid as error:
        SANDBOX.skip(f"{request.param}: {error}")
    return found


def fenced(*blocks: str, language: str = "python") -> str:
    return "\n\nThen:\n\n".join(f"```{language}\n{block}\n```" for block in blocks)


@pytest.mark.parametrize(
    ("tests", "completion"),
    [
        (SUM, fenced(PROGRAM) + "\nIt prints:\n```\n3\n```"),
        (SUM, fenced(PROGRAM) + "\nInput:\n```text\n1 2\n```\nOutput:\n```text\n3\n```"),
        (SUM, fenced(PROGRAM, "print(1 + 2)  # for the first example")),
        (SUM, fenced(PROGRAM) + "\nRun it:\n```bash\npython a.py\n```"),
        (SUM, fenced(PROGRAM, "import io, sys\nsys.stdin = io.StringIO('1 2')\na, b = map(int, input().split())\nprint('test', a + b)")),
        (SUM, fenced(PROGRAM, "a, b = map(int, input().split())")),
        (SUM, fenced(PROGRAM, "def solve():\n    a, b = map(int, input().split())\n    print(a + b)")),
        (SUM, fenced("print(3)", PROGRAM)),
        (SUM, fenced(PROGRAM.replace("+", "-"), PROGRAM)),
        (SUM, fenced(PROGRAM, "O(1)")),
        (SUM, fenced(PROGRAM, "import sys\nfrom math import gcd")),
        (SUM, fenced(PROGRAM, "a, b = ...\nprint(a +")),
        (SUM, fenced(PROGRAM.replace("+", "-")) + "</think>" + fenced(PROGRAM)),
        (ADD, fenced(FUNCTION, "print(add(1, 2))")),
        (ADD, fenced(FUNCTION, "assert add(1, 2) == 3")),
        (ADD, fenced(FUNCTION, "import unittest\nclass TestAdd(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)")),
        (ADD, fenced(FUNCTION, "def add(a, b):\n    ...")),
        (ADD, fenced('def add(a, b):\n    """Add."""\n    pass', FUNCTION)),
        (ADD, fenced(FUNCTION.replace("+", "-"), FUNCTION)),
        (ADD, fenced(FUNCTION, "def subtract(a, b):\n    return a - b")),
        (ADD, fenced("add = lambda a, b: a + b", "add(1, 2)")),
        (ADD, fenced(METHOD, "Solution().add(1, 2)")),
        (ADD, fenced(METHOD, METHOD.replace("return a + b", "pass"))),
        (ADD, "1. Add:\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n2. Done: `add(1, 2)`."),
        (ASSERTS, fenced(FUNCTION, "print(add(1, 2))")),
        (ASSERTS, fenced(FUNCTION, "5")),
        (ASSERTS + "assert sub(3, 1) == 2", fenced(FUNCTION + "def sub(a, b):\n    return a - b", FUNCTION)),
        (ASSERTS, fenced(FUNCTION)[: -len("\n```")]),
    ],
)  # fmt: skip
def test_the_program_is_the_last_block_that_does_what_the_tests_need(
    judge: HostedVerifier, tests: str, completion: str
) -> None:
    """The last Python block used to be graded, even if it was the program's output, an example or a test."""
    assert judge.compute_reward(tests, completion) == 1.0


@pytest.mark.parametrize(
    ("tests", "completion"),
    [
        (SUM, fenced(PROGRAM, PROGRAM.replace("+", "-"))),
        (ADD, fenced(FUNCTION, FUNCTION.replace("+", "-"))),
        (SUM, fenced(PROGRAM, language="c")),
        (SUM, "<think>" + fenced(PROGRAM) + " or else"),
        (ADD, fenced("gcd = 3", "print(gcd)")),
    ],
)
def test_a_later_program_replaces_an_earlier_one(judge: HostedVerifier, tests: str, completion: str) -> None:
    assert judge.compute_reward(tests, completion) == 0.0


def test_choosing_among_hostile_blocks_ends_and_takes_the_last(judge: HostedVerifier) -> None:
    """Blocks are parsed in the sandbox, since hostile text can make the parser use any time and memory."""
    hostile = [
        "(" * 10**5,
        "-" * 10**5 + "1",
        "x" + ".x" * 10**5,
        "[" * 90 + "]" * 90,
        "\x00",
        "f'{" * 200,
        "a = " * 10**4,
    ]
    assert judge.compute_reward(SUM, fenced(*hostile, PROGRAM)) == 1.0
    assert judge.compute_reward(SUM, fenced(PROGRAM, *hostile)) in (0.0, 1.0)


@pytest.mark.parametrize(
    "ending", ["exit()", "exit(0)", "quit()", "quit(0)", "sys.exit()", "raise SystemExit", "os._exit(0)"]
)
def test_a_program_may_call_exit_and_quit(judge: HostedVerifier, ending: str) -> None:
    """The sandbox starts Python without `site`, which would define `exit` and `quit`."""
    program = f"import os, sys\nn = int(input())\nif n % 2:\n    print('odd', flush=True)\n    {ending}\nprint('even', flush=True)"
    tests = json.dumps({"inputs": ["3\n", "4\n"], "outputs": ["odd", "even"]})
    assert judge.compute_reward(tests, program) == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "if __name__ == '__main__':\n    a, b = map(int, input().split())\n    print(a + b)",
        "def main():\n    a, b = map(int, input().split())\n    print(a + b)\nmain()",
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "import sys\ninput = sys.stdin.readline\na, b = map(int, input().split())\nsys.stdout.write(str(a + b))",
        "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
        "import os\nprint(sum(map(int, os.read(0, 100).split())))",
        "print(sum(map(int, open(0).read().split())))",
        "import fileinput\nfor line in fileinput.input():\n    print(sum(map(int, line.split())))",
        "while True:\n    try:\n        print(sum(map(int, input().split())))\n    except EOFError:\n        break",
        "import sys\nsys.setrecursionlimit(10 ** 6)\ndef f(n):\n    return n and 1 + f(n - 1)\nf(20000)\nprint(sum(map(int, input().split())))",
        "def f(n):\n    return n and 1 + f(n - 1)\nf(20000)\nprint(sum(map(int, input().split())))",
        "print(Counter(a=sum(map(int, input().split())))['a'] + floor(0.5) + len(list(permutations([1]))) - 1)",
        "a, b = map(int, sys.stdin.readline().split())\nprint(reduce(operator.add, [a, b]))",
        "len(str(10 ** 10000))\nprint(sum(map(int, input().split())))",
        "copyright, credits, license, help\nprint(sum(map(int, input().split())))",
    ],
)  # fmt: skip
def test_names_that_public_judges_import_are_available(judge: HostedVerifier, program: str) -> None:
    assert judge.compute_reward(SUM, fenced(program)) == 1.0


def test_a_program_may_run_in_a_thread_with_a_large_stack(judge: HostedVerifier) -> None:
    program = "import threading\nthreading.stack_size(2 ** 27)\ndef main():\n    print(sum(map(int, input().split())))\nthread = threading.Thread(target=main)\nthread.start()\nthread.join()"
    expected = 1.0 if judge.code.sandbox.limits.isolation is Isolation.NAMESPACES else 0.0  # Landlock has no threads
    assert judge.compute_reward(SUM, program) == expected


@pytest.mark.parametrize(
    ("tests", "answer"),
    [
        ({"fn_name": "f", "inputs": [[[3, 1, 2]]], "outputs": [[1, 2, 3]]}, "class Solution:\n    def f(self, x: List[int]) -> Optional[List[int]]:\n        return sorted(x)"),
        ({"fn_name": "f", "inputs": [[4, 6], [3, 5]], "outputs": [2, 1]}, "def f(a, b):\n    return gcd(a, b)"),
        ({"fn_name": "f", "inputs": [[[3, 1, 2]]], "outputs": [1]}, "@lru_cache(None)\ndef g(x):\n    return x\ndef f(x):\n    heapq.heapify(x)\n    return g(heappop(x))"),
        ({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]}, "def f(x):\n    return x"),
        ({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]}, "def f(x):\n    return [x]"),
        ({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[1, 2]]}, "def f(a, b):\n    return a, b"),
        ({"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [2]}, "def f(d):\n    return d[1]"),
        ({"fn_name": "f", "inputs": ["[1, 2]\n3"], "outputs": ["6"]}, "class Solution:\n    def f(self, x, n):\n        return sum(x) + n"),
        ({"public_test_cases": json.dumps([{"input": "[1]\n2", "output": "3", "testtype": "functional"}]), "metadata": json.dumps({"func_name": "f"})}, "class Solution:\n    def f(self, x, n):\n        return x[0] + n"),
        ({"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"}, "def f(x):\n    return x + 1"),
        ({"test": "def check(candidate):\n    assert candidate(x=1) == 2", "entry_point": "Solution().f"}, "class Solution:\n    def f(self, x):\n        return x + 1"),
        ({"test_list": ["assert f(1) == 2"], "test_setup_code": ""}, "def f(x):\n    return x + 1"),
        ("from solution import f\n\ndef test_f():\n    assert f(1) == 2\n", "def f(x):\n    return x + 1"),
        ("import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.one = 1\n    def test_f(self): self.assertEqual(f(self.one), 2)\n", "def f(x):\n    return x + 1"),
        ("class TestF:\n    def test_f(self): assert f(1) == 2\n", "def f(x):\n    return x + 1"),
    ],
)  # fmt: skip
def test_functions_are_called_as_published_data_sets_assume(judge: HostedVerifier, tests: object, answer: str) -> None:
    reference = tests if isinstance(tests, str) else json.dumps(tests)
    judge.try_reference(reference, fenced(answer))
    assert judge.compute_reward(reference, fenced(answer)) == 1.0
    wrong = answer.replace("return ", "return not ")
    assert judge.compute_reward(reference, fenced(wrong)) == 0.0, "the tests are called"


@pytest.mark.parametrize(
    ("tests", "answer"),
    [
        ({"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}, "x = gcd"),
        ({"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}, "def f(): return gcd"),
        ("assert gcd(4, 6) == 2", "x = gcd"),
        ({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]}, "def f(x):\n    return x if x == 1 else [x]"),
        ({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[1, 2]]}, "def f(a, b):\n    return a"),
        ({"fn_name": "fib", "inputs": [[90]], "outputs": [2880067194370816120]}, "def fib(n):\n    p = (1 + 5 ** 0.5) / 2\n    return round((p ** n - (1 - p) ** n) / 5 ** 0.5)"),
        ({"fn_name": "half", "inputs": [[1000000001]], "outputs": [500000000]}, "def half(n):\n    return n / 2"),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [{"1": 5}]}, "def f(x):\n    return {1: 7, '1': 5}"),
    ],
)  # fmt: skip
def test_an_almost_right_program_is_wrong(judge: HostedVerifier, tests: object, answer: str) -> None:
    assert judge.compute_reward(tests if isinstance(tests, str) else json.dumps(tests), fenced(answer)) == 0.0
