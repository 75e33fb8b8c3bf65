"""Units and other words behind a number: which are the same, and which are different.

Called by `reading.py` and `comparison.py`. The table holds what has more than one spelling; a word that is not in it is
a unit of its own, its plural aside.
"""

from __future__ import annotations

import re

DEGREE = "degree"
PERCENT = "%"

_SPELLINGS = {
    "$": "dollar usd bucks us\\$",
    "€": "euro eur",
    "£": "pound-sterling gbp",
    "¥": "yen jpy",
    "cent": "cents ¢ ct",
    DEGREE: "degrees deg ^\\circ °",
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "dm": "decimeter decimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram gm",
    "kg": "kilogram kilo",
    "lb": "lbs pound",
    "oz": "ounce",
    "ton": "tons tonne",
    "ml": "milliliter millilitre",
    "l": "liter litre",
    "gal": "gallon",
    "ms": "millisecond",
    "s": "second sec secs",
    "min": "minute mins",
    "h": "hour hr hrs",
    "day": "days",
    "week": "weeks wk",
    "month": "months",
    "year": "years yr yrs",
    "km/h": "kmh kph kmph",
    "mph": "mi/h mile/h",
    "m/s": "mps",
    "hz": "hertz",
    "n": "newton",
    "j": "joule",
    "kj": "kilojoule",
    "w": "watt",
    "kw": "kilowatt",
    "v": "volt",
    "a": "ampere amp",
    "pa": "pascal",
    "k": "kelvin",
    "celsius": "^\\circc °c c",
    "fahrenheit": "^\\circf °f f",
    "unit": "units",
    "am": "a.m. a.m",
    "pm": "p.m. p.m",
}
_UNIT_OF = {alias: unit for unit, aliases in _SPELLINGS.items() for alias in (unit, *aliases.split())}
_IRREGULAR = {"feet": "ft", "children": "child", "people": "person", "men": "man", "women": "woman", "mice": "mouse"}
_FILLER = {"of", "the", "a", "an", "more", "in", "total", "altogether", "each", "left", "are", "is", "were", "was"}
SYMBOLS = frozenset(
    alias for alias in _UNIT_OF if alias.isalpha() and len(alias) in (2, 3, 4) and alias not in ("am", "ton", "day")
)
"""Spellings that are a unit even where they touch the number, as in 18cm."""


def canonical_unit(words: str) -> tuple[str, ...]:
    """The units of a phrase behind a number, in order: `square meters of carpet` is ("m^2", "carpet")."""
    text = re.sub(r"\\text\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r" \1 ", words.lower())
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"degrees?\s+(?=celsius|fahrenheit)", "", text)
    text = text.replace(r"\$", "$").replace("\\cdot", " ")
    text = re.sub(r"\^\s*\{?\s*(\d)\s*\}?", r"^\1", text)
    text = re.sub(r"\s*/\s*", "/", re.sub(r"\s+(?:per|an?)\s+(?=\S)", "/", f" {text} "))
    text = re.sub(r"(?<=[^\s])\s*\^(?=\d)", "^", text)
    found: list[str] = []
    power = ""
    spellings = re.findall(r"[^\s,;()*_`~{}]+", text)
    for place, spelt in enumerate(spellings, 1):
        word = spelt.strip(".:!?'\"-") or spelt
        if word in ("square", "sq"):
            power = "^2"
        elif word in ("cubic", "cu"):
            power = "^3"
        elif word == "squared" and found:
            found[-1] += "^2"
        elif word == "cubed" and found:
            found[-1] += "^3"
        elif word and (
            word not in _FILLER or (word in _UNIT_OF and place == len(spellings))
        ):  # `5 in`, not `5 in total`
            found.append("/".join(_singular(part) for part in word.split("/")) + power)
            power = ""
    return tuple(_UNIT_OF.get(unit, unit) for unit in found)


def is_known(unit: str) -> bool:
    """Whether it is in the table, powers and quotients included."""
    return all(part.partition("^")[0] in _SPELLINGS for part in unit.split("/"))


def _singular(word: str) -> str:
    base, caret, power = word.partition("^")
    if base not in _UNIT_OF:
        base = _IRREGULAR.get(base, base)
    for ending in ("es", "s"):
        stem = base.removesuffix(ending)
        if base not in _UNIT_OF and stem != base and (stem in _UNIT_OF or ending == "s"):
            base = stem if len(stem) > 1 or stem in _UNIT_OF else base
            break
    return _UNIT_OF.get(base, base) + caret + power
