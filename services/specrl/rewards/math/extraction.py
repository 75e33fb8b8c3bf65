"""Where the answer of a completion is: the procedure that docs/rewards.md describes.

Called by `verifier.Math` for completions and references alike. Invariant: time is linear in the text. The text that is
found here is read as mathematics by `reading.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from specrl.rewards.math.notation import FUNCTION_NAMES, replace_unicode

LONGEST_ANSWER = 1000
"""In letters. A longer answer is not understood; the longest references of published data sets have about 300."""
_TAIL = 4000
"""Letters at the end of a completion in which the last number is looked for."""
_SHORT = 100
"""Letters of a completion that is an answer and nothing else, as `D` or `x + y`."""
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s{0,9}")
_JOINS_BOXES = re.compile(
    r"[\s$]*(?:[,;]?\s*(?:or|and)\b|[,;]?\s*\\text\s*\{\s*(?:or|and)\s*\}|[,;])[\s$]*(?:[a-zA-Z]\s*=\s*)?"
)
"""What joins two boxes into one answer, as in `x = \\boxed{6}` or `x = \\boxed{7}`."""
_JOINED_BOXES = 20
_ANSWER_IS = re.compile(
    r"\b(?:answers?|(?:correct|right|best) (?:option|choice))\b[^.\n]{0,60}?(?:\b(?:is|are)(?=\b|n['’]t\b)|[:=])"
    r"|\b(?:respuesta|réponse|antwort|risposta|resposta|ответ)\b[^.\n]{0,60}?(?:\b(?:es|est|ist|lautet|è|é)\b|[:=—-])"
    r"|(?:答案|答え|정답)\s{0,4}(?:是|为|為|は|은|[:=：])",
    re.IGNORECASE,
)
_CALCULATION = re.compile(r"<<[^<>\n]{0,200}>>")
"""GSM8K's notes of what its calculator did, in `$<<48/2=24>>24`."""
_SENTENCE_END = re.compile(r"\.(?=\s+[^\W\d_]|\s*$)|\?(?=\s|$)|;(?=\s+[^\W\d_]{2}|\s*$)|。|,?\s+(?:because|since)\b")
_CLAUSE_END = re.compile(r"\.(?=\s|$)|[!?;](?=\s|$)|[,(。\n]")
_NUMBERED_HEADING = re.compile(
    r"\b(?:step|part|case|question|problem|exercise|section|method|example|solution|approach|task)\s+\d+\b", re.I
)
_MATHEMATICS = re.compile(r"[\d$\\^=<>|√π∞±½⅓¼¾]")
_OPTION = re.compile(r"\W*(?:(?i:option|choice)\W+)?(?:[A-J]\b|\([a-j]\))")
_LETTERS = re.compile(r"(?<![\\a-zA-Z])[^\W\d_]{3,}")
_ENVIRONMENT = re.compile(r"\\(begin|end)\{(?:equation|align|aligned|gather|multline|displaymath|eqnarray)\*?\}")
_INLINE = re.compile(r"\$[^$\n]{1,400}\$|\\\((?:[^\\\n]|\\[^)]){1,400}\\\)")
_BOLD = re.compile(r"\*\*(?![\w(-])|(?<![\w)])\*\*")
"""Two stars between numbers are a power."""
_POWER_OF_UNIT = re.compile(r"\s(?:[cdkm]?m|in|ft|yd|mi|units?|inches|feet|meters?|miles)\^\{?[23]")
_ONE_MORE_NUMBER = re.compile(r"(\S*\d\S*)\s{1,3}(?:or|and)\s{1,3}\$?$", re.I)
_DISPLAY_BRACKET = re.compile(r"(?<!\\)\\[\[\]]")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_WHOLE_OF_MIXED = re.compile(r"(?<![\w.])[-+]?\d+\s(?=\d+/\d)")
"""The 3 of `3 1/2`."""
_THOUSANDS_BEFORE = re.compile(r"(?<![\w.,])[-+$€£]?\d{1,3}(?: \d{3})*(?: (?=\d{3}(?!\d)))$")
"""The 10 of `10 000`."""

Span = tuple[int, int]


def find_answer(text: str, mark: str) -> str | None:
    """The text of the answer; None where there is none, or where its box is not closed.

    With a mark: the last box after the last mark, else the first line after it, else, where that line is a heading, the
    next formula below it. Without one: the last box, else what follows the last "answer is", else the last display
    formula, else the last number. An empty mark stands before the whole text.
    """
    text = _CALCULATION.sub("", text)
    if mark.startswith("<"):
        text = text.removesuffix(mark.replace("<", "</", 1))  # <answer>11</answer>
    _, _, after_thoughts = text.rpartition("</think>")
    if after_thoughts.strip():
        text = after_thoughts
    _, found, after = text.rpartition(mark) if mark else ("", "yes", text)
    if _BOX.search(after if found else text):
        answer = last_box(after if found else text)
    elif found:
        answer = _after_mark(after)
    else:
        answer = _after_statement(text) or last_display(text) or last_number(text)
    if answer is None or not answer.strip() or len(answer) > LONGEST_ANSWER:
        return None
    return answer.strip()


def last_box(text: str) -> str | None:
    """The content of the last box. Boxes that "or", "and" or a comma joins are one answer. None: it is not closed."""
    joined: list[str] = []
    next_start = len(text)
    for match in reversed(list(_BOX.finditer(text))):
        content = _braced(text, match.end())
        if content is None:
            break
        end = content[1] + 1
        if joined and end > next_start:  # it holds the box that was found
            continue
        if joined and not _JOINS_BOXES.fullmatch(text, end, next_start):
            break
        joined.append(text[slice(*content)].strip())
        next_start = match.start()
        if len(joined) > _JOINED_BOXES:
            break
    return " or ".join(reversed(joined)) if joined else None


def last_display(text: str) -> str | None:
    """The content of the last display formula: between `$$`, in `\\[ \\]`, or in an environment."""
    spans = [spans[-1] for spans in _displays(text) if spans]
    return text[slice(*max(spans, key=lambda span: span[1]))].strip() if spans else None


def first_display(text: str) -> str | None:
    """The content of the first display formula."""
    spans = [spans[0] for spans in _displays(text) if spans]
    return text[slice(*min(spans))].strip() if spans else None


def last_number(text: str) -> str | None:
    """The last number with all that belongs to it: the formula or word that it stands in, and its unit.

    Without any number: the last formula in the line, or a completion that is short enough to be nothing but an answer.

    A number before it that "or" or "and" joins to it belongs to it, too: then there are two candidates.
    """
    tail = _BOLD.sub("", replace_unicode(text[-_TAIL:]))
    numbers = _POWER_OF_UNIT.sub(lambda power: "^" * len(power.group()), tail)
    place = max((match.start() for match in re.finditer(r"\d", numbers)), default=None)
    if place is None:
        formulas = _INLINE.findall(tail)
        return formulas[-1] if formulas else tail.strip() if len(tail) <= _SHORT else None
    start, end = _formula_or_word(tail, place)
    while joined := _ONE_MORE_NUMBER.search(tail, max(0, start - 60), start):
        start = joined.start(1)
    stop = _CLAUSE_END.search(tail, end)
    return tail[start : stop.start() if stop else len(tail)].strip(" *_`")


def is_heading(line: str) -> bool:
    """Whether a line announces an answer and holds none: words, and no mathematics but the number of a step."""
    words, steps = _NUMBERED_HEADING.subn("", replace_unicode(line))
    if _MATHEMATICS.search(words) or _OPTION.match(words):
        return False
    return steps > 0 or any(word.lower() not in FUNCTION_NAMES for word in _LETTERS.findall(words))


def _after_mark(after: str) -> str | None:
    line, _, below = after.strip().partition("\n")
    if _opens_display(line):
        return first_display(after)
    line = line.strip()
    statement = _ANSWER_IS.match(line.lstrip("*_ "))
    announced = line.lstrip("*_ ")[statement.end() :].strip("*_: ") if statement else line
    if announced and not is_heading(announced):
        return announced
    return _below_heading(below)


def _below_heading(below: str) -> str | None:
    """The first display formula; without one the next line, if that is nothing but mathematics."""
    formula = first_display(below)
    if formula is not None:
        return formula
    line = below.strip().partition("\n")[0]
    return None if _LETTERS.search(line) else line


def _after_statement(text: str) -> str | None:
    statement = None
    for statement in _ANSWER_IS.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    if statement is None:
        return None
    after = text[statement.end() :].lstrip(" \t*_:")
    line, _, below = after.partition("\n")
    if _opens_display(line):
        return first_display(after)
    end = _SENTENCE_END.search(line)
    stated = line[: end.start()] if end else line
    if stated.strip(" *_:") and not is_heading(stated):
        return stated
    return _below_heading(below) if not stated.strip(" *_:") or stated.rstrip(" *_").endswith(":") else None


def _opens_display(line: str) -> bool:
    opening = line.lstrip()
    return opening.startswith(("$$", r"\[")) or _ENVIRONMENT.match(opening) is not None


def _displays(text: str) -> Iterator[list[Span]]:
    """The display formulas of each kind in order, as spans of their contents."""
    marks = [match.span() for match in re.finditer(r"\$\$", text)]
    yield [(opening[1], closing[0]) for opening, closing in zip(marks[::2], marks[1::2], strict=False)]
    yield _paired(text, _DISPLAY_BRACKET, lambda match: match.group() == r"\[")
    yield _paired(text, _ENVIRONMENT, lambda match: match.group(1) == "begin")


def _paired(text: str, border: re.Pattern[str], opens: Callable[[re.Match[str]], bool]) -> list[Span]:
    """Spans between an opening border and the closing one after it."""
    spans: list[Span] = []
    opening: int | None = None
    for match in border.finditer(text):
        if opens(match):
            opening = match.end() if opening is None else opening
        elif opening is not None:
            spans.append((opening, match.start()))
            opening = None
    return spans


def _braced(text: str, start: int) -> Span | None:
    """The span between the brace at `start` and the one that closes it; of one character where there is no brace."""
    if text[start : start + 1] != "{":
        return (start, start + 1) if text[start : start + 1].isalnum() else None
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return start + 1, match.start()
    return None


def _formula_or_word(text: str, place: int) -> Span:
    """The inline formula that holds this place; else the word, from white space to white space, without punctuation."""
    for match in _INLINE.finditer(text):
        if match.start() <= place < match.end():
            return match.span()
    start, end = place, place + 1
    while start and not text[start - 1].isspace():
        start -= 1
    while end < len(text) and not text[end].isspace():
        end += 1
    while text[end - 1] in ".,;:!?*_`\"'":
        end -= 1
    while text[start] in "*_`\"'":
        start += 1
    if text.count(")", start, end) > text.count("(", start, end):
        opening = text.rfind("(", max(0, start - 200), start)
        inside = text[opening + 1 : end]
        if opening >= 0 and "," in inside and not _LETTERS.search(inside):
            return opening, end
        end = text.rfind(")", start, end)
    if text[start] == "(" and text.count("(", start, end) > text.count(")", start, end):
        start += 1
    mixed = _WHOLE_OF_MIXED.search(text, max(0, start - 12), start + 12)
    if mixed and mixed.end() == start:
        start = mixed.start()
    group = _THOUSANDS_BEFORE.search(text, max(0, start - 24), start)
    if group:
        start = group.start()
    return start, end


def find_reference(reference: str, mark: str) -> str:
    """The answer of a reference: what follows its last mark, else its last box, else all of it."""
    _, found, after = reference.rpartition(mark) if mark else ("", "", "")
    text = after if found else reference
    if _BOX.search(text):
        return last_box(text) or ""
    return text.strip().partition("\n")[0].strip() if found else text.strip()
