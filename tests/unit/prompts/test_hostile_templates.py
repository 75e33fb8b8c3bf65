"""A chat template of a stranger ends, whatever it does, and says why it was refused.

It is rendered by a worker as by transformers (`limited_worker`).
"""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from specrl.errors import CheckpointInvalid
from specrl.prompts import DatasetProblem, PromptTemplate, limited_process, templates
from specrl.spec.data import FewShotTurn, GeneratedSource, PromptFormat, Prompts, PromptSource

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}" + "{% endfor %}" * 3
DOUBLING = "{% set a = namespace(s='a') %}{% for i in range(100) %}{% set a.s = a.s + a.s %}{% endfor %}"
MEMORY = "more than 256 MiB of memory"


@pytest.fixture(autouse=True)
def tight_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_RENDER_S", 1)
    monkeypatch.setattr(templates, "_RENDER_MIB", 256)
    monkeypatch.setattr(limited_process, "STALLED_S", 120.0)  # only a worker without a limit takes so long


def a_policy(policy_path: Path, folder: Path, template: str) -> PromptTemplate:
    shutil.copytree(policy_path, folder)
    (folder / "chat_template.jinja").write_text(template)
    source = PromptSource(generated=GeneratedSource(family="ledger", count=1))
    prompts = Prompts(source=source, format=PromptFormat.CHAT, few_shot=(FewShotTurn(user="u", assistant="a"),))
    return PromptTemplate(prompts, str(folder))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ENDLESS, "more than 1 s of processor time"),
        (DOUBLING, MEMORY),
        ("{{ 'a' * 10**10 }}", MEMORY),
        ("{{ 'a'.center(10**9) }}", MEMORY),
        ("{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "maximum recursion depth"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[9].content.x }}", "UndefinedError"),
        ("{% include 'x' %}", "no loader"),
        (r"{{ '\ud800' }}", "surrogates not allowed"),
    ],
    ids=[
        *("loops", "doubles", "multiplies", "pads", "nests", "recurses"),
        *("reads Python's classes", "divides by zero", "reads what is not there", "includes", "is no Unicode"),
    ],
)
def test_template_without_an_end_is_refused(policy_path: Path, tmp_path: Path, template: str, reason: str) -> None:
    """A template in a downloaded folder stopped the coordinator for ever, or ended it for lack of memory."""
    ours = a_policy(policy_path, tmp_path / "policy", template)
    with pytest.raises(CheckpointInvalid, match=rf"must render messages of the roles user, .*got .*{reason}") as caught:
        ours.format_problem(DatasetProblem("a", "1"))
    assert len(str(caught.value).splitlines()) == 1


def test_another_worker_follows_one_that_ended(policy_path: Path, tmp_path: Path) -> None:
    ours = a_policy(policy_path, tmp_path / "policy", "{{ 'a' * (10 ** messages[-1].content | int) }}")
    with pytest.raises(CheckpointInvalid, match=MEMORY):
        ours.format_all([DatasetProblem("1", "1"), DatasetProblem("10", "1")])
    assert ours.format_problem(DatasetProblem("1", "1")) == "a" * 10


def test_template_is_rendered_as_by_transformers(policy_path: Path, tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}\n  {% for message in messages %}\n{% if loop.index > 2 %}{% break %}{% endif %}"
        "{{ message | tojson }}{{ message | tojson(indent=2) }}"
        "{% generation %}x{{ message.content }}{% endgeneration %}"
        "{% endfor %}{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ eos_token }}<{{ '\u00e9<>' | tojson }}>"
    )
    ours = a_policy(policy_path, tmp_path / "policy", template)
    chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "<q>"}]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "policy")
    expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.format_all([DatasetProblem("<q>", "1")] * 3) == [expected] * 3


def test_environment_of_transformers_is_the_one_that_was_read() -> None:
    """If this fails, compare `limited_worker.compile_template` with transformers' function, then update the digest."""
    source = inspect.getsource(chat_template_utils._cached_compile_jinja_template)
    assert xxhash.xxh3_64_hexdigest(source.encode()) == "a8f1ae8299e337c0"


def test_worker_imports_one_library_and_ends_with_its_input() -> None:
    """It starts in a fifth of a second, where transformers takes two; and it never outlives its coordinator."""
    worker = Path(templates.__file__).with_name("limited_worker.py")
    script = (
        "import sys; sys.argv = ['', 'templates', '256', '1']; import json, runpy; "
        f"runpy.run_path({str(worker)!r}, run_name='__main__'); "
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})), file=sys.stderr)"
    )
    start = json.dumps({"template": "a", "variables": {}, "today": "2024-07-26", "most_letters": 9}).encode()
    given = len(start).to_bytes(8) + start
    done = subprocess.run([sys.executable, "-c", script], input=given, capture_output=True, check=True, timeout=60)
    imported = set(json.loads(done.stderr))
    assert "jinja2" in imported
    assert not imported & {"transformers", "numpy", "specrl", "pyarrow", "pydantic"}
