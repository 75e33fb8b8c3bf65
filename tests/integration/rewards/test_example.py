"""The example of programs that are graded by their tests, with its own run file, source and pool."""

from __future__ import annotations

import asyncio
from pathlib import Path

from specrl.prompts import open_problem_source
from specrl.records import Prompt
from specrl.rewards.choice import check_worker_start, verifier_for
from specrl.rewards.pool import VerifierPool
from specrl.spec import load_spec

EXAMPLE = Path(__file__).parents[3] / "examples" / "04-code" / "run.yaml"

RIGHT = [
    "Here:\n```python\nprint(sum(map(int, input().split())))\n```",
    "```python\nclass Solution:\n    def is_palindrome(self, text):\n"
    "        letters = [c for c in text.lower() if c.isalpha()]\n        return letters == letters[::-1]\n```",
    "```python\ndef move_zeros(numbers):\n    numbers.sort(key=lambda number: number == 0)\n```",
    "```python\ndef divide(a, b):\n    if b == 0:\n        raise ValueError('b')\n    return a // b\n```",
]
WRONG = [
    "```python\na, b = map(int, input().split())\nprint(a - b)\n```",
    "```python\ndef is_palindrome(text):\n    return text == text[::-1]\n```",
    "```python\ndef move_zeros(numbers):\n    return sorted(numbers, key=lambda number: number == 0)\n```",
    "```python\ndef divide(a, b):\n    return a // b\n```",
]


async def test_right_answers_score_one_wrong_ones_zero_and_hostile_ones_end_without_a_score() -> None:
    # Generous limits, so that right answers pass on a loaded machine. Loops end at their processor time.
    spec = load_spec(EXAMPLE, ["rewards.code.wallS=60", "rewardPool.timeoutS=600"])
    source = open_problem_source(spec.prompts.all_sources[0].source)
    problems = source.problems
    for problem in problems:
        verifier_for(spec.rewards).check_reference(problem.answer)
    check_worker_start(verifier_for(spec.rewards), "rewards")
    prompts = [Prompt(f"p{i}", i, (1,), problem.question, problem.answer) for i, problem in enumerate(problems)]
    hostile = ["```python\nimport os\nwhile True:\n    os.fork()\n```", "```python\nwhile True: pass\n```"] * 2
    async with VerifierPool(verifier_for(spec.rewards), spec.reward_pool) as pool:
        scores = [reward.value for reward in await asyncio.gather(*map(pool.grade, prompts, hostile))]
        assert not any(scores)
        for texts, expected in ((RIGHT, 1.0), (WRONG, 0.0), (RIGHT, 1.0)):
            rewards = await asyncio.gather(*(pool.grade(*pair) for pair in zip(prompts, texts, strict=True)))
            assert [reward.value for reward in rewards] == [expected] * 4, rewards
