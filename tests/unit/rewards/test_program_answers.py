"""Code blocks that may be a completion's program are found in the forms that models write."""

from __future__ import annotations

import pytest

from specrl.rewards.code.answers import find_program_blocks

DOCUMENTED = 'def f():\n    """\n    ```\n    f()\n    ```\n    """\n'


@pytest.mark.parametrize(
    ("completion", "blocks"),
    [
        ("print(1)", ["print(1)"]),
        ("So:\n```python\nprint(1)\n```\nDone.", ["print(1)\n"]),
        ("```\nprint(1)\n```", ["print(1)\n"]),
        ("```py\nprint(1)\n```\nor\n```Python3\nprint(2)\n```", ["print(1)\n", "print(2)\n"]),
        ("```python\nprint(1)\n```\n```text\noutput\n```", ["print(1)\n", "output\n"]),
        ("```python\nprint(1)\n```\n```bash\npython a.py\n```", ["print(1)\n"]),
        ("```python\nprint(1)\n```\n```python\nprint(2", ["print(1)\n", "print(2\n"]),
        ("```python\nprint(1)\n\nBetter:\n```python\nprint(2)\n```", ["print(1)\n\nBetter:\n", "print(2)\n"]),
        ("~~~python\nprint(1)\n~~~", ["print(1)\n"]),
        ("````python\ns = '''\n```\n'''\n````", ["s = '''\n```\n'''\n"]),
        ("```{.python .numberLines}\nprint(1)\n```", ["print(1)\n"]),
        ("```{python}\nprint(1)\n```", ["print(1)\n"]),
        ("```python title=a.py\nprint(1)\n```", ["print(1)\n"]),
        ("```python:a.py\nprint(1)\n```", ["print(1)\n"]),
        ("```PYTHON\r\nprint(1)\r\n```\r\n", ["print(1)\n"]),
        ("```pypy3\nprint(1)\n```", ["print(1)\n"]),
        ("```python3.11\nprint(1)\n```", ["print(1)\n"]),
        ("```plain\nprint(1)\n```", ["print(1)\n"]),
        ("```c\nint main() {}\n```", []),
        ("```c++\nint main() {}\n```\n```json\n{}\n```\n```pytb\nE\n```\n```pycon\n>>> 1\n```", []),
        ("Use ```print``` here.\nprint(1)", ["Use ```print``` here.\nprint(1)"]),
        ("```print(1)```\n```python\nprint(2)\n```", ["print(2)\n"]),
        ("1. So:\n   ```python\n   if 1:\n       print(1)\n   ```", ["if 1:\n    print(1)\n"]),
        ("\t```python\n\tif 1:\n\t\tprint(1)\n\t```", ["if 1:\n\tprint(1)\n"]),
        ("  ```python\n\tprint(1)\n  ```", ["print(1)\n"]),
        ("   ```python\nprint(1)\n   ```", ["print(1)\n"]),
        ("```python\n    print(1)\n    print(2)\n```", ["print(1)\nprint(2)\n"]),
        ("- ```python\n  print(1)\n  ```", ["print(1)\n"]),
        ("10) ```python\n    print(1)\n    ```\n", ["print(1)\n"]),
        ("> ```python\n> if 1:\n>     print(1)\n> ```", ["if 1:\n    print(1)\n"]),
        ("> > ```python\n> > print(1)\n> > ```", ["print(1)\n"]),
        (f"```python\n{DOCUMENTED}```", [DOCUMENTED]),
        ("<think>\n```python\nprint(1)\n```\n</think>\n```python\nprint(2)\n```", ["print(2)\n"]),
        ("```python\nprint(1)\n```\n</think>\n```python\nprint(2)\n```", ["print(2)\n"]),
        ("<think>\n```python\nprint(1)\n```\nwait", []),
        ("<think>easy</think>print(1)", ["print(1)"]),
        ("```python", []),
        ("```python\n\n```", []),
        ("", []),
        (" \n ", []),
    ],
)  # fmt: skip
def test_python_blocks_are_found_as_models_write_them(completion: str, blocks: list[str]) -> None:
    assert find_program_blocks(completion) == blocks


@pytest.mark.parametrize(
    "completion",
    ["`" * 10**6, "```\n" * 10**5, "> " * 10**5 + "```", "\t" * 10**6 + "```", "1. " * 10**5, "</think>" * 10**5],
)
def test_any_text_is_read_in_linear_time(completion: str) -> None:
    find_program_blocks(completion * 2)
