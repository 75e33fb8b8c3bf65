"""Canonical spellings of units and of other words behind a number.

Called by `reading.py` and `comparison.py`. The table lists units with more than one spelling. Any other word is a unit
of its own, and its plural is the same unit. Units are compared by name and never converted.
"""

from __future__ import annotations

import re

DEGREE = "degree"
PERCENT = "%"

# The key is the canonical unit; the words of the value are its other spellings, in lower case.
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

# Plurals that `_find_singular` cannot derive, and words that carry no unit, as in "18 apples in total".
_IRREGULAR = {"feet": "ft", "children": "child", "people": "person", "men": "man", "women": "woman", "mice": "mouse"}
_FILLER = {"of", "the", "a", "an", "more", "in", "total", "altogether", "each", "left", "are", "is", "were", "was"}
SYMBOLS = frozenset(
    alias for alias in _UNIT_OF if alias.isalpha() and len(alias) in (2, 3, 4) and alias not in ("am", "ton", "day")
)
"""Spellings that are a unit even without a space after the number, as in 18cm. Single letters could be variables."""


def canonical_unit(words: str) -> tuple[str, ...]:
    """Return the units of the words behind a number, in order: `square meters of carpet` is ("m^2", "carpet")."""
    # Unwrap LaTeX, then write powers as `^2` and quotients as `a/b`, without spaces.
    text = re.sub(r"\\text\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r" \1 ", words.lower())
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"degrees?\s+(?=celsius|fahrenheit)", "", text)
    text = text.replace(r"\$", "$").replace("\\cdot", " ")
    text = re.sub(r"\^\s*\{?\s*(\d)\s*\}?", r"^\1", text)
    text = re.sub(r"\s*/\s*", "/", re.sub(r"\s+(?:per|an?)\s+(?=\S)", "/", f" {text} "))
    text = re.sub(r"(?<=[^\s])\s*\^(?=\d)", "^", text)

    # "square" and "cubic" apply to the next unit, "squared" and "cubed" to the one before.
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
        # A filler word may be a unit at the end: `5 in`, not `5 in total`.
        elif word and (word not in _FILLER or (word in _UNIT_OF and place == len(spellings))):
            found.append("/".join(_find_singular(part) for part in word.split("/")) + power)
            power = ""
    return tuple(_UNIT_OF.get(unit, unit) for unit in found)


def is_known_unit(unit: str) -> bool:
    """Whether every part of the unit, powers and quotients aside, is in the table."""
    return all(part.partition("^")[0] in _SPELLINGS for part in unit.split("/"))


def _find_singular(word: str) -> str:
    base, caret, power = word.partition("^")
    if base not in _UNIT_OF:
        base = _IRREGULAR.get(base, base)
    for ending in ("es", "s"):
        stem = base.removesuffix(ending)
        # Drop "es" only if a known unit remains (inches), but "s" from any word (apples).
        if base not in _UNIT_OF and stem != base and (stem in _UNIT_OF or ending == "s"):
            base = stem if len(stem) > 1 or stem in _UNIT_OF else base
            break
    return _UNIT_OF.get(base, base) + caret + power
