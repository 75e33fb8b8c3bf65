"""The graders that `verifiers.py --accuracy` compares: ours, math-verify, TRL's and verl's.

Each `make` function returns a grader; it is called in the process that grades, and imports what that grader needs.
Every grader gets the whole completion. It gets the reference in the form that its documentation asks for: `bare_answer`
extracts the answer of a worked solution, as TRL's and verl's data preparation does before a run.

verl (Apache-2.0) is no dependency of ours. Install it without its dependencies into a folder outside the checkout, with
the two packages that two of its rewards import (MIT and Apache-2.0), and name the folder:

    pip install --no-deps --target FOLDER verl==0.9.1 pylatexenc mathruler
    python benchmarks/verifiers.py --accuracy --verl FOLDER
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from answer_accuracy import Grader

_VERL_SOURCES = {
    "verl gsm8k": "openai/gsm8k",
    "verl math": "lighteval/MATH",
    "verl dapo": "math_dapo",
    "verl prime": "numina_olympiads",
    "verl geo3k": "hiyouga/geometry3k",
}
"""verl selects a reward by the name of the data set."""


def makers(verl: Path | None) -> dict[str, Callable[[], Grader]]:
    """Makers of graders by the name in the table. verl's are left out without the folder that it is installed in."""
    found = {"ours": make_ours, "math-verify": make_math_verify, "TRL": make_trl}
    if verl is not None:
        found |= {name: partial(make_verl, verl, source) for name, source in _VERL_SOURCES.items()}
        found["verl math_verify"] = partial(make_verl_math_verify, verl)
    return found


def make_ours() -> Grader:
    """Make our grader, `math`, with the class that workers of a run use."""
    from specrl.errors import VerifierFailed
    from specrl.rewards.choice import verifier_for
    from specrl.spec.data import MathVerifier, Rewards

    def grade(reference: str, completion: str, mark: str) -> float | None:
        verifier = verifier_for(Rewards(math=MathVerifier(answer_after=mark)))
        try:
            verifier.check_reference(reference)
        except VerifierFailed:
            return None
        return verifier.compute_reward(reference, completion)

    return grade


def make_math_verify() -> Grader:
    """Make math-verify's grader with its defaults. Its README asks for LaTeX between dollar signs."""
    from math_verify import parse, verify

    def grade(reference: str, completion: str, mark: str) -> float | None:
        gold = parse(f"${bare_answer(reference)}$")
        return float(verify(gold, parse(completion))) if gold else None

    return grade


def make_trl() -> Grader:
    """Make TRL's accuracy_reward, which returns None for a reference that math-verify cannot read."""
    from trl.rewards import accuracy_reward

    def grade(reference: str, completion: str, mark: str) -> float | None:
        rewards: list[float | None] = accuracy_reward(
            [[{"role": "assistant", "content": completion}]], [f"${bare_answer(reference)}$"]
        )
        return rewards[0]

    return grade


def make_verl(folder: Path, source: str) -> Grader:
    """Make the grader that verl uses for a data set. An answer counts as right above half of its highest reward."""
    scores = _verl_module(folder, "verl.utils.reward_score")

    def grade(reference: str, completion: str, mark: str) -> float | None:
        answer = bare_answer(reference)
        if source == "openai/gsm8k":
            answer = answer.replace(",", "")  # as verl's examples/data_preprocess/gsm8k.py does
        score = scores.default_compute_score(source, completion, answer)
        return float((score["score"] if isinstance(score, dict) else score) > 0.5)

    return grade


def make_verl_math_verify(folder: Path) -> Grader:
    """Make verl's own math-verify grader, which its users can choose in place of the default."""
    module = _verl_module(folder, "verl.utils.reward_score.math_verify")

    def grade(reference: str, completion: str, mark: str) -> float | None:
        # compute_score calls this in a process pool to bound its time; here the whole process is bounded
        return float(module._verify_in_subprocess(rf"\boxed{{{bare_answer(reference)}}}", completion))

    return grade


def _verl_module(folder: Path, name: str) -> ModuleType:
    """Import a module of verl. Its parent packages are stubs, because importing them needs Ray and tensordict."""
    # Last on the path, so that nothing in that folder replaces a package of this environment.
    sys.path.append(str(folder))
    for package in ("verl", "verl.utils"):
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(folder / package.replace(".", "/"))]
    return importlib.import_module(name)


def bare_answer(reference: str) -> str:
    """Extract the answer of a worked solution: the text after the last `####`, or the last box; otherwise the whole
    reference.
    """
    if "####" in reference:
        return reference.rpartition("####")[2].strip()
    boxed = re.search(r"(?s).*\\boxed\{(.*)\}", reference)
    return boxed.group(1) if boxed else reference
