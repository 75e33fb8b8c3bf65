"""Tools: failures that the call causes are output that the policy reads; failures of the machine never are."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.requirements import SANDBOX

from specrl.agent_tools import Tool, tool_for
from specrl.agent_tools import ToolPool as Pool
from specrl.errors import SpecInvalid
from specrl.records import Prompt
from specrl.rewards.choice import check_worker_start
from specrl.rewards.code import time_limit
from specrl.rewards.workers import FailureKind
from specrl.spec.data import Isolation
from specrl.spec.tools import AnsweredBy, CodeTool, PythonTool, ToolPool, Tools

PROMPT = Prompt("p0", 0, (1,), "question", "4")

MODULE = """
import os, time
from specrl.rewards import Ungraded

def answer(reference, completion, call):
    if call == "raise":
        raise KeyError("no")
    if call == "nothing":
        return None
    if call == "page":
        return "first" + 10**5 * " word" + "last"
    if call == "ungraded":
        raise Ungraded("the shop is away")
    if call.startswith("killed once "):
        try:
            open(os.path.join(os.path.dirname(__file__), call), "x").close()
        except FileExistsError:
            return "alive"
        os.kill(os.getpid(), 9)
    if call == "leave":
        raise SystemExit(3)
    if call == "die":
        os._exit(3)
    if call == "hang":
        time.sleep(3600)
    return f"{call} is {'right' if call == reference else 'wrong'} after {len(completion)} characters"
"""


def an_interpreter(isolation: Isolation, **limits: int) -> Tool:
    section = {"isolation": isolation, "memory_mib": 256, "output_kib": 1, **limits}
    return tool_for(Tools(answered_by=AnsweredBy(code=CodeTool.model_validate(section))))


@pytest.fixture(scope="module", params=[Isolation.NAMESPACES, Isolation.LANDLOCK])
def isolation(request: pytest.FixtureRequest, forkable: None) -> Isolation:
    found: Isolation = request.param
    try:
        an_interpreter(found).prepare_worker()
    except SpecInvalid as error:
        SANDBOX.skip(f"{found}: {error}")
    return found


@pytest.fixture
def interpreter(isolation: Isolation) -> Tool:
    """An interpreter whose limits are out of reach, even on a loaded machine."""
    return an_interpreter(isolation, cpu_s=60, wall_s=240)


@pytest.fixture
def hurried(isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """An interpreter with a short time limit. Waits for a processor never count, however long they are."""
    monkeypatch.setattr(time_limit, "MAX_WAITING", 100)
    return an_interpreter(isolation, cpu_s=60, wall_s=2)


@pytest.mark.parametrize(
    ("call", "output"),
    [
        ("12 + 30", "42"),
        (" 12 + 30\n", "42"),
        ("x = 3\nprint(x)\nx * x", "3\n9"),
        ("x = 3", ""),
        ("None", ""),
        ("'a'", "'a'"),
        ("", ""),
        ("print(1)\n1 / 0", "1\nZeroDivisionError: division by zero (line 2)"),
        ("def f():\n    return g()\nf()", "NameError: name 'g' is not defined (line 2)"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("raise ValueError('a\\nb')", "ValueError: a\nb (line 1)"),
        ("import sys\nsys.exit(3)", "Error: the program ended with exit status 3"),
        ("print(end='so')\nimport ctypes\nctypes.string_at(0)", "Error: the program was killed by SIGSEGV"),
    ],
)
def test_a_call_is_run_as_a_cell_and_its_errors_are_output(interpreter: Tool, call: str, output: str) -> None:
    assert interpreter.answer_call("", "", call) == output


@pytest.mark.parametrize("isolation", [Isolation.NAMESPACES], indirect=True)  # Landlock alone lets it signal nobody
def test_an_unnamed_signal_is_reported_by_its_number(interpreter: Tool) -> None:
    call = "import os\nos.kill(os.getpid(), 40)"
    assert interpreter.answer_call("", "", call) == "Error: the program was killed by signal 40"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("open('/etc/hostname').read()", "Error: "),
        ("import socket\nsocket.socket(socket.AF_INET)", "Error: "),
        ("open('/specrl-tool', 'w')", "Error: "),
        ("import ctypes\nctypes.string_at(0)", "Error: the program was killed by SIGSEGV"),
        ("x = []\nwhile True: x.append(bytearray(2**20))", "MemoryError"),
        ("print('x' * 5000)", "Error: the program printed more than 1024 bytes"),
    ],
)
def test_a_hostile_call_is_confined_and_its_failure_is_output(interpreter: Tool, call: str, said: str) -> None:
    assert said in interpreter.answer_call("", "", call)


@pytest.mark.parametrize("call", ["time.sleep(1000)", "time.sleep(1.5)\nwhile True: pass"])
def test_an_endless_call_is_killed_at_its_time_limit(hurried: Tool, call: str) -> None:
    assert "Error: the program ran longer than 2 s" in hurried.answer_call("", "", f"import time\n{call}")


def test_a_busy_call_is_killed_at_its_processor_time_limit(isolation: Isolation) -> None:
    tool = an_interpreter(isolation, cpu_s=1, wall_s=240)
    call = "import os\nos.close(1)\nwhile True: pass"
    assert tool.answer_call("", "", call) == "Error: the program was killed by SIGKILL"


@pytest.fixture
def function(tmp_path: Path) -> Tools:
    (tmp_path / "my_tools.py").write_text(MODULE)
    python = PythonTool(function="my_tools:answer", folder=str(tmp_path))
    return Tools(answered_by=AnsweredBy(python=python), pool=ToolPool(timeout_s=300))


async def test_a_function_may_grade_between_turns(function: Tools) -> None:
    async with Pool(tool_for(function), function.pool) as pool:
        assert (await pool.answer_call(PROMPT, "so 4?", "4")).text == "4 is right after 5 characters"
        assert (await pool.answer_call(PROMPT, "", "5")).text == "5 is wrong after 0 characters"
    assert not pool.failures


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        ("raise", FailureKind.ERROR, "my_tools:answer must return, got KeyError at my_tools.py"),
        ("nothing", FailureKind.ERROR, "must return text, got NoneType"),
        ("leave", FailureKind.ERROR, "got SystemExit"),
        ("die", FailureKind.CRASH, "exit status 3"),
        ("hang", FailureKind.TIMEOUT, "the tool took longer than timeoutS=2"),
    ],
)
async def test_a_failure_that_the_call_causes_is_output_and_counted(
    function: Tools, call: str, kind: FailureKind, said: str
) -> None:
    """Such a call used to raise ToolFailed, and the rollout was sampled again: a policy could avoid its grade."""
    limits = ToolPool(timeout_s=2) if kind is FailureKind.TIMEOUT else function.pool
    async with Pool(tool_for(function), limits) as pool:
        output = await pool.answer_call(PROMPT, "", call)
        assert output.failure == ""
        assert output.text.startswith(f"Error: {kind}: ")
        assert said in output.text
        assert dict(pool.failures) == {kind: 2 if kind is FailureKind.CRASH else 1}
        assert (await pool.answer_call(PROMPT, "", "4")).text.startswith("4 is right"), (
            "the next call must get a working worker"
        )


async def test_a_failure_that_no_call_can_cause_gives_no_output(function: Tools) -> None:
    async with Pool(tool_for(function), function.pool) as pool:
        output = await pool.answer_call(PROMPT, "", "ungraded")
        assert output.text == ""
        assert output.failure == "ungraded: the shop is away"
        assert (await pool.answer_call(PROMPT, "", "killed once ")).text == "alive", (
            "somebody else killed the first worker"
        )


@pytest.mark.parametrize("most_tokens", [1, 256])
def test_a_long_output_of_a_function_loses_its_middle_in_the_worker(function: Tools, most_tokens: int) -> None:
    """The whole of it was tokenized on the coordinator's event loop: a page of some MB stopped it for seconds."""
    tool = tool_for(function.model_copy(update={"max_output_tokens": most_tokens}))
    page = tool.answer_call("", "", "page")
    assert len(page) == 64 * most_tokens
    assert page.startswith("first word")
    assert page.endswith("word wordlast")
    assert tool.answer_call("", "", "short") == "short is wrong after 0 characters"


def test_a_tool_that_cannot_answer_is_refused_before_the_run(function: Tools) -> None:
    check_worker_start(tool_for(function), "tools")
    python = function.answered_by.python
    assert python is not None
    missing = python.model_copy(update={"function": "my_tools:reply"})
    with pytest.raises(SpecInvalid, match=r"tools\.answeredBy\.python\.function: must be importable"):
        check_worker_start(tool_for(Tools(answered_by=AnsweredBy(python=missing))), "tools")
