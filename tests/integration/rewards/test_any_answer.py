"""Whatever a policy writes, every verifier returns a verdict, every tool returns an output, and the pool survives.

Verifiers and tools come from the unions of the run file's models, so a new one without a case here fails the tests.
`make fuzz` tries more examples.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.border.fuzzing import fuzz
from tests.integration.rewards.hostile_texts import LONGEST_TEXTS, hostile_texts, programs
from tests.requirements import SANDBOX

from specrl.agent_tools import ToolPool, tool_for
from specrl.errors import SpecInvalid
from specrl.records import Prompt
from specrl.rewards.choice import verifier_for
from specrl.rewards.pool import VerifierPool
from specrl.spec.data import Isolation, RewardPool, Rewards, VerifierSection
from specrl.spec.tools import AnsweredBy, Tools
from specrl.spec.tools import ToolPool as ToolLimits

ISOLATIONS = (Isolation.NAMESPACES, Isolation.LANDLOCK)
WAIT_S = 600
"""Longest wait for one verdict, far above the pool's own limits even on a loaded machine."""
LIMITS = {"cpu_s": 1, "wall_s": 30, "memory_mib": 256, "output_kib": 256}
"""An endless loop ends after 1 s of processor time. A program may wait for a processor for four times 30 s."""
POOL = {"workers": 1, "timeout_s": 60}
"""One worker, since the tests ask one question at a time."""
MODULE = """
import ast
import json

def grade(reference, completion, row):
    if completion.strip() == reference:
        return 1.0
    return json.loads(completion) if len(completion) % 2 else ast.literal_eval(completion)

def answer(reference, completion, call):
    return call.upper()
"""
SUM = json.dumps({"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]})
ADD = json.dumps({"fn_name": "add", "inputs": [[1, 2], [30, 4]], "outputs": [3, 34]})
ASSERTS = "assert add(1, 2) == 3\nassert add(30, 4) == 34\n"
A_PROGRAM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"


@dataclass(frozen=True)
class Case:
    """Settings of the run file, references, and a right answer to the first reference."""

    settings: dict[str, Any]
    references: tuple[str, ...] = ("",)
    right: str = ""
    is_own: bool = True
    """Whether the verifier is specrl's own, which must keep its limits by itself. A user's function may be killed."""


MATHS = ("7", "\\frac{1}{2}", "\\sqrt{2}", "(1, 2)", "[0, \\infty)", "\\{1, 2\\}", "18^\\circ", "40\\%", "x^2 + 1")
VERIFIERS = {
    "math": [Case({"math": {}}, MATHS, "#### 7")],
    "exact": [Case({"exact": {}}, ("7", "New York", "#### 1,000"), "#### 7")],
    "regex": [Case({"regex": {"match": "Whole"}}, ("7", r"(a+)+", r"(.*)(.*)(.*)x", r"\p{L}+"), "#### 7")],
    "json_schema": [
        Case(
            {"json_schema": {}},
            (
                "true", '{"multipleOf": 0.01}', '{"uniqueItems": true}', '{"const": {"a": [0.1]}}',
                '{"type": "array", "items": {"$ref": "#"}}', '{"patternProperties": {"^(a+)+$": false}}',
                '{"anyOf": [{"type": "number", "minimum": 0.5}, {"contains": {"const": 1}}]}',
            ),
            "7",
        )
    ],
    "code": [
        Case({"code": LIMITS | {"isolation": isolation}}, (SUM, ADD, ASSERTS), A_PROGRAM) for isolation in ISOLATIONS
    ],
    "pattern": [Case({"pattern": {"expression": "((a+)+|(.*)(.*)(.*)x|7)"}}, right="7")],
    "tags": [
        Case({"tags": {}}, right="<think>7</think><answer>7</answer>"),
        Case({"tags": {"names": ["think"], "first_is_open": True}}, right="7</think>"),
    ],
    "valid_json": [
        Case({"valid_json": {"place": "FencedBlock", "json_schema": '{"uniqueItems": true}'}}, right="```\n7")
    ],
    "python": [Case({"python": {"function": "my_rewards:grade"}}, ("7",), "7", is_own=False)],
}  # fmt: skip
TOOLS = {
    "code": [Case({"code": LIMITS | {"isolation": isolation}}) for isolation in ISOLATIONS],
    "python": [Case({"python": {"function": "my_rewards:answer"}}, is_own=False)],
}


def named(cases: dict[str, list[Case]], *kinds: str) -> list[Any]:
    return [pytest.param(case, id=f"{kind}-{place}") for kind in kinds for place, case in enumerate(cases[kind])]


RUN = ("code",)
"""Verifiers that run a text as a program, which costs about a thousand times as much as reading it."""
READ = tuple(kind for kind in VERIFIERS if kind not in RUN)


def test_every_verifier_and_tool_has_a_case() -> None:
    assert set(VERIFIERS) == set(VerifierSection.model_fields)
    assert set(TOOLS) == set(AnsweredBy.model_fields)


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Return a function that runs a coroutine in an event loop that lives as long as the pools."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield lambda question: asyncio.run_coroutine_threadsafe(question, loop).result(WAIT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@dataclass(frozen=True)
class Judged:
    """A started pool, its case, and the function that runs its coroutines."""

    pool: Any
    case: Case
    ask: Callable[[Coroutine[Any, Any, Any]], Any]


def started(make: Callable[[], Any], case: Case, ask: Callable[..., Any]) -> Judged:
    pool = make()
    try:
        ask(pool.start())
    except SpecInvalid as error:
        SANDBOX.skip(f"{case.settings}: {error}")
    return Judged(pool, case, ask)


def settings_of(case: Case, folder: Path) -> dict[str, Any]:
    (folder / "my_rewards.py").write_text(MODULE)
    return {
        kind: section | ({"folder": str(folder)} if kind == "python" else {}) for kind, section in case.settings.items()
    }


@pytest.fixture(scope="module")
def judged(request: pytest.FixtureRequest, ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    """A pool of one verifier. At the end, it must still accept the right answer."""
    case: Case = request.param
    rewards = Rewards.model_validate(settings_of(case, tmp_path_factory.mktemp("code")))
    found = started(lambda: VerifierPool(verifier_for(rewards), RewardPool(**POOL)), case, ask)
    yield found
    try:
        assert grade(found, case.references[0], case.right).value == 1.0, "the pool is not alive afterwards"
    finally:
        ask(found.pool.close())


@pytest.fixture(scope="module", params=named(TOOLS, *TOOLS))
def answering(request: pytest.FixtureRequest, ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    case: Case = request.param
    answered_by = AnsweredBy.model_validate(settings_of(case, tmp_path_factory.mktemp("code")))
    found = started(lambda: ToolPool(tool_for(Tools(answered_by=answered_by)), ToolLimits(**POOL)), case, ask)
    yield found
    try:
        assert found.ask(found.pool.answer_call(a_prompt(""), "", "'abc'.upper()")).failure == ""
    finally:
        ask(found.pool.close())


def a_prompt(reference: str) -> Prompt:
    return Prompt("p0", 0, (1,), "question", reference, {"points": 1})


def grade(judged: Judged, reference: str, text: str) -> Any:
    return judged.ask(judged.pool.grade(a_prompt(reference), text))


def check_verdict(judged: Judged, reference: str, text: str) -> None:
    reward = grade(judged, reference, text)
    assert reward.value is not None, reward.failure
    assert math.isfinite(np.float32(reward.value))
    assert not (reward.value and (reward.error or reward.lacks_answer))
    if judged.case.is_own:
        assert reward.error not in ("timeout", "crash"), f"{reward.reason}: {text[:200]!r}"


@pytest.mark.parametrize("judged", named(VERIFIERS, *READ), indirect=True)
@fuzz(100)
@given(data=st.data())
def test_any_answer_has_a_verdict_in_time(judged: Judged, data: st.DataObject) -> None:
    """Texts such as a long run of digits and a tower of powers used to leave their rollouts ungraded."""
    reference = data.draw(st.sampled_from(judged.case.references))
    check_verdict(judged, reference, data.draw(hostile_texts))


@pytest.mark.parametrize("judged", named(VERIFIERS, *RUN), indirect=True)
@fuzz(8)
@given(data=st.data())
def test_any_program_has_a_verdict_in_time(judged: Judged, data: st.DataObject) -> None:
    """A forged frame used to leave its rollout ungraded. test_hostile_answers.py has the cases that were found."""
    reference = data.draw(st.sampled_from(judged.case.references))
    check_verdict(judged, reference, data.draw(hostile_texts | programs))


@pytest.mark.parametrize("judged", named(VERIFIERS, *VERIFIERS), indirect=True)
def test_a_very_long_answer_has_a_verdict_in_time(judged: Judged) -> None:
    """Reading a completion takes linear time. The texts have 2 MB, for which quadratic time would exceed the limit.

    `make fuzz` uses 10 MB. Programs are tried with few texts, since the sandbox's limits bound what running them costs.
    """
    is_run = "code" in judged.case.settings
    for name in ("fences", "halves") if is_run else LONGEST_TEXTS:
        check_verdict(judged, judged.case.references[0], LONGEST_TEXTS[name])


@fuzz(8)
@given(call=hostile_texts | programs)
def test_any_call_of_a_tool_has_an_output_in_time(answering: Judged, call: str) -> None:
    prompt = a_prompt("7")
    completion = f"<tool>{call}</tool>"
    output = answering.ask(answering.pool.answer_call(prompt, completion, call))
    assert output.failure == ""
