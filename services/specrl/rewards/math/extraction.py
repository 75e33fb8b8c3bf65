"""Find the text of the answer in a completion or reference, by the rules of docs/rewards.md ("Where the answer is").

Called by `grading.py`. `reading.py` then reads the text as mathematics. Invariant: time is linear in the text, so every
pattern below is bounded or cannot backtrack far.
"""

from __future__ import annotations

import re

from specrl.rewards.math.notation import FUNCTION_NAMES, replace_unicode
from specrl.rewards.text.final_answer import cut_at_closing_tag

LONGEST_ANSWER = 1000
"""Characters of the longest answer that is understood. References of published data sets have at most about 300."""

_TAIL = 4000
"""Characters at the end of a completion that are searched for the last number."""

_SHORT = 100
"""Most characters of a completion that consists of an answer alone, such as `D` or `x + y`."""
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s{0,9}")
_JOINS_BOXES = re.compile(
    r"[\s$]*(?:[,;]?\s*(?:or|and)\b|[,;]?\s*\\text\s*\{\s*(?:or|and)\s*\}|[,;])[\s$]*(?:[a-zA-Z]\s*=\s*)?"
)
"""Text between two boxes that joins them into one answer, as in `x = \\boxed{6}` or `x = \\boxed{7}`."""

_JOINED_BOXES = 20  # bounds the work on a completion that is full of boxes

# Statements such as `the answer is` and `correct option:`, in English first. The second line has Spanish, French,
# German, Italian, Portuguese and Russian, the third Chinese, Korean and Japanese.
_ANSWER_IS = re.compile(
    r"\b(?:answers?|(?:correct|right|best) (?:option|choice))\b[^.\n]{0,60}?(?:\b(?:is|are)(?=\b|n['’]t\b)|[:=])"
    r"|\b(?:respuesta|réponse|antwort|risposta|resposta|ответ)\b[^.\n]{0,60}?(?:\b(?:es|est|ist|lautet|è|é)\b|[:=—-])"
    r"|(?:答案|答え|정답)\s{0,4}(?:是|为|為|は|은|[:=：])",
    re.IGNORECASE,
)
_CALCULATION = re.compile(r"<<[^<>\n]{0,200}>>")
"""GSM8K's calculator annotations, as in `$<<48/2=24>>24`."""

# A full stop ends a sentence only before a word, so that decimals do not end one. A clause ends at commas, too.
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
"""Markdown's bold. Two stars between numbers are a power and stay."""
_POWER_OF_UNIT = re.compile(r"\s(?:[cdkm]?m|in|ft|yd|mi|units?|inches|feet|meters?|miles)\^\{?[23]")
_ONE_MORE_NUMBER = re.compile(r"(\S*\d\S*)\s{1,3}(?:or|and)\s{1,3}\$?$", re.I)
_DISPLAY_BRACKET = re.compile(r"(?<!\\)\\([\[\]])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_WHOLE_OF_MIXED = re.compile(r"(?<![\w.])[-+]?\d+\s(?=\d+/\d)")
"""The 3 of `3 1/2`."""
_THOUSANDS_BEFORE = re.compile(r"(?<![\w.,])[-+$€£]?\d{1,3}(?: \d{3})*(?: (?=\d{3}(?!\d)))$")
"""The 10 of `10 000`."""

Span = tuple[int, int]


def find_answer(text: str, mark: str) -> str | None:
    """Return the text of the answer, or None if there is none or its box is not closed.

    If the text has the mark: the last box after the last mark, else the first line after it. If that line is only a
    heading, the next formula below it. If the text lacks the mark: the last box, else what follows the last "answer
    is", else the last display formula, else the last number. An empty mark stands before the whole text.
    """
    text = _CALCULATION.sub("", text)
    if mark.startswith("<"):  # the prompt may end with the tag <answer>, so that the text has the closing one alone
        text = text.removesuffix(mark.replace("<", "</", 1))
    _, _, after_thoughts = text.rpartition("</think>")
    if after_thoughts.strip():
        text = after_thoughts
    _, found, after = text.rpartition(mark) if mark else ("", "yes", text)
    after = cut_at_closing_tag(after, mark)
    if _BOX.search(after if found else text):
        answer = last_box(after if found else text)
    elif found:
        answer = _find_after_mark(after)
    else:
        answer = _find_after_statement(text) or last_display(text) or last_number(text)
    if answer is None or not answer.strip() or len(answer) > LONGEST_ANSWER:
        return None
    return answer.strip()


def last_box(text: str) -> str | None:
    """Return the content of the last box, or None if it is not closed.

    Boxes joined by "or", "and" or a comma are one answer: a list, which is wrong for a single value.
    """
    joined: list[str] = []
    next_start = len(text)
    for match in reversed(list(_BOX.finditer(text))):
        content = _find_braced(text, match.end())
        if content is None:
            break
        end = content[1] + 1
        if joined and end > next_start:  # this box contains the one found before
            continue
        if joined and not _JOINS_BOXES.fullmatch(text, end, next_start):
            break
        joined.append(text[slice(*content)].strip())
        next_start = match.start()
        if len(joined) > _JOINED_BOXES:
            break
    return " or ".join(reversed(joined)) if joined else None


def last_display(text: str) -> str | None:
    """Return the content of the last display formula: between `$$`, in `\\[ \\]`, or in an environment."""
    spans = _find_displays(text)
    return text[slice(*max(spans, key=lambda span: span[1]))].strip() if spans else None


def first_display(text: str) -> str | None:
    """Return the content of the first display formula."""
    spans = _find_displays(text)
    return text[slice(*min(spans))].strip() if spans else None


def last_number(text: str) -> str | None:
    """Return the last number with everything that belongs to it: its formula or word, and its unit.

    If "or" or "and" joins it to a number before it, that number belongs to it, too. Without any number, return the last
    inline formula, or the whole completion if it is short enough to be an answer alone.
    """
    tail = _BOLD.sub("", replace_unicode(text[-_TAIL:]))
    # Hide the 2 of `cm^2`, which is not the last number, without moving any character.
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
    """Whether a line announces an answer but holds none: it has words, and no mathematics except a step's number."""
    words, steps = _NUMBERED_HEADING.subn("", replace_unicode(line))
    if _MATHEMATICS.search(words) or _OPTION.match(words):
        return False
    return steps > 0 or any(word.lower() not in FUNCTION_NAMES for word in _LETTERS.findall(words))


def _find_after_mark(after: str) -> str | None:
    line, _, below = after.strip().partition("\n")
    if _opens_display(line):
        return first_display(after)
    line = line.strip()
    statement = _ANSWER_IS.match(line.lstrip("*_ "))
    announced = line.lstrip("*_ ")[statement.end() :].strip("*_: ") if statement else line
    if announced and not is_heading(announced):
        return announced
    return _find_below_heading(below)


def _find_below_heading(below: str) -> str | None:
    """Return the first display formula, else the next line if it is nothing but mathematics."""
    formula = first_display(below)
    if formula is not None:
        return formula
    line = below.strip().partition("\n")[0]
    return None if _LETTERS.search(line) else line


def _find_after_statement(text: str) -> str | None:
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
    return _find_below_heading(below) if not stated.strip(" *_:") or stated.rstrip(" *_").endswith(":") else None


def _opens_display(line: str) -> bool:
    opening = line.lstrip()
    return opening.startswith(("$$", r"\[")) or _ENVIRONMENT.match(opening) is not None


def _find_displays(text: str) -> list[Span]:
    """Return the spans of the contents of all display formulas, grouped by kind."""
    marks = [match.span() for match in re.finditer(r"\$\$", text)]
    spans = [(opening[1], closing[0]) for opening, closing in zip(marks[::2], marks[1::2], strict=False)]
    return spans + _pair_delimiters(text, _DISPLAY_BRACKET, "[") + _pair_delimiters(text, _ENVIRONMENT, "begin")


def _pair_delimiters(text: str, border: re.Pattern[str], opens: str) -> list[Span]:
    """Return the spans between each opening delimiter and the next closing one.

    opens: the first group of an opening delimiter's match.
    """
    spans: list[Span] = []
    opening: int | None = None
    for match in border.finditer(text):
        if match.group(1) == opens:
            opening = match.end() if opening is None else opening
        elif opening is not None:
            spans.append((opening, match.start()))
            opening = None
    return spans


def _find_braced(text: str, start: int) -> Span | None:
    """Return the span inside the braces that open at `start`, or of one character if there is no brace (`\\boxed5`)."""
    if text[start : start + 1] != "{":
        return (start, start + 1) if text[start : start + 1].isalnum() else None
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return start + 1, match.start()
    return None


def _formula_or_word(text: str, place: int) -> Span:
    """Return the span of the inline formula around `place`, else of the word around it without punctuation."""
    for match in _INLINE.finditer(text):
        if match.start() <= place < match.end():
            return match.span()

    # The word reaches from white space to white space; drop punctuation and Markdown at its ends.
    start = place
    end = place + 1
    while start and not text[start - 1].isspace():
        start -= 1
    while end < len(text) and not text[end].isspace():
        end += 1
    while text[end - 1] in ".,;:!?*_`\"'":
        end -= 1
    while text[start] in "*_`\"'":
        start += 1

    # `(3, 4)`: the word is `4)`, so extend it to the opening parenthesis. In `(see 4)`, cut the parenthesis instead.
    if text.count(")", start, end) > text.count("(", start, end):
        opening = text.rfind("(", max(0, start - 200), start)
        inside = text[opening + 1 : end]
        if opening >= 0 and "," in inside and not _LETTERS.search(inside):
            return opening, end
        end = text.rfind(")", start, end)
    if text[start] == "(" and text.count("(", start, end) > text.count(")", start, end):
        start += 1

    # `3 1/2` and `10 000` continue to the left of the white space.
    mixed = _WHOLE_OF_MIXED.search(text, max(0, start - 12), start + 12)
    if mixed and mixed.end() == start:
        start = mixed.start()
    group = _THOUSANDS_BEFORE.search(text, max(0, start - 24), start)
    if group:
        start = group.start()
    return start, end


def find_reference(reference: str, mark: str) -> str:
    """Return the answer of a reference: the text after its last mark, else its last box, else all of it."""
    _, found, after = reference.rpartition(mark) if mark else ("", "", "")
    text = after if found else reference
    if _BOX.search(text):
        return last_box(text) or ""
    return text.strip().partition("\n")[0].strip() if found else text.strip()
