r"""Compares answers that math-verify would misread: numbers, times of day, quantities of several parts, lists."""

import functools
import itertools
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from areal_lite.verify.builtin.numeric import NUMBER, value_of

_CLOCK = re.compile(r"(\d{1,2}:0\d|\d{1,2}:\d\d(?=[ap]m))([ap]m)?")
"""A time of day: ratios are not written so, and 12:00 would be 12/0."""
_UNIT = re.compile(
    r"(?:\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*)\}|(?<![\\A-Za-z])([A-Za-z]{2,}(?:\s*/\s*[A-Za-z]+)?))"
    r"(?:\s*\^\s*\{?(?P<power>\d)\}?)?"
)
"""A unit, maybe a quotient of two; a power is that of the last."""
_LETTER = re.compile(r"(?<=\d)\s*([A-Za-z](?:\s*/\s*[A-Za-z]+)?)(\^\{?\d\}?)?\.?$")
"""A unit beside a quantity, else a variable."""
_JOINS = re.compile(r"^.*=|^(?:[\s,;&~$]|\\[,; ]|and\b)+|(?:[\s,;&~$.]|\\[,; ]|\band)+$")
_NAMES = {"hr": "hour", "min": "minute", "sec": "second", "in": "inch", "lb": "pound", "metre": "meter"}


def plain_equal(expected: str, given: str) -> bool | None:
    r"""Compare two answers as far as that takes no algebra; None if it does.

    The same text is equal. Decimal numbers are compared exactly, times of day by their digits and am or pm, quantities
    in units that sympy knows after conversion. If one of two quantities has several parts in other units, both must
    have the same parts, in any order. Units of single quantities are math-verify's affair, which ignores them.

    Example:
        >>> plain_equal("1e3", "1,000"), plain_equal(r"3\text{ hours }20\text{ minutes}", "200 minutes")
        (True, True)
        >>> plain_equal("5 m", "5 cm"), plain_equal("1/2", "0.5"), plain_equal("5 pears", "5 apples")
        (False, None, None)
    """
    expected, given = expected.strip("$ "), given.strip("$ ")
    numbers = plain_number(expected), plain_number(given)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if expected == given != "":
        return True
    if time := _time_of_day(expected):
        return time == _time_of_day(given)
    sides = [list(_parts(text)) for text in (expected, given)]
    for index, text in enumerate((expected, given)):
        if sides[index] == [None] and None not in sides[1 - index]:
            sides[index] = list(_parts(_LETTER.sub(r"\\text{\1}\2", text)))
    return _quantities_equal(*sides) if expected else None


def plain_number(text: str) -> Fraction | None:
    """Return the exact value of a decimal number in any notation; None for a fraction, a percentage and all else."""
    match = NUMBER.fullmatch(text.strip("$ ").removesuffix("."))
    if match is None or any(match[name] for name in ("whole", "above", "divisor", "percent")):
        return None
    return value_of(match)


def _time_of_day(text: str) -> tuple[str | Any, ...] | None:
    found = _CLOCK.fullmatch(re.sub(r"\\text|[{}~. \\]", "", text.lower()))
    return found.groups() if found else None


def _quantities_equal(wanted: list[Any], parts: list[Any]) -> bool | None:
    if None in wanted:  # the reference is something else, which several numbers with units cannot equal
        return False if len(parts) > 1 and None not in parts else None
    runs = [list(run) for is_part, run in itertools.groupby(parts, bool) if is_part]
    found = runs[-1] if runs else []  # a sentence may surround it
    if all(not isinstance(unit, str) for _, unit in (*wanted, *found)) and found:
        from areal_lite.verify.builtin.algebra import is_zero

        return is_zero([*wanted, *((-value, unit) for value, unit in found)])
    if len(wanted) == len(found) == 1 or not (len(wanted) > 1 or found):
        return None
    return sorted(wanted, key=str) == sorted(found, key=str)


def _parts(text: str) -> Iterator[tuple[Fraction, Any] | None]:
    """Yield each number of a quantity with its unit, sympy's or a word; None for whatever else is there."""
    start = 0
    for match in _UNIT.finditer(text):
        figures, word = _JOINS.sub("", text[start : match.start()]), _JOINS.sub("", match[1] or match[2] or "")
        start = match.end()
        number = NUMBER.fullmatch(figures)
        value = value_of(number) if number else None
        if figures or word:  # else it is an "and" between parts
            yield (value, _unit(word, int(match["power"] or 1))) if value is not None and word else None
    if _JOINS.sub("", text[start:]):
        yield None


@functools.cache
def _unit(word: str, power: int) -> Any:
    """Return sympy's unit of a word, or the word itself; `km/h` and `miles per hour` are quotients."""
    from areal_lite.verify.builtin.algebra import unit_named

    above, slash, below = re.sub(r"\s+per\s+|\s*/\s*", "/", word).partition("/")
    if slash:
        units = _unit(above, 1), _unit(below, power)
        return units[0] / units[1] if not any(isinstance(unit, str) for unit in units) else "/".join(map(str, units))
    single = word.lower().removesuffix("s") if len(word) > 2 else word
    if (unit := unit_named(_NAMES.get(single, single)) or unit_named(word.lower())) is not None:
        return unit**power
    return single if power == 1 else f"{single}^{power}"
