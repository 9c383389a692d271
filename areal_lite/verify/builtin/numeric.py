"""The verifier `numeric`: a number within a tolerance, whatever unit stands beside it."""

import re
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from pydantic import Field

from areal_lite.verify.builtin.final_answer import AnswerArguments, final_answer
from areal_lite.verify.builtin.notation import as_latex
from areal_lite.verify.result import any_reference

_MAX_EXPONENT = 400  # a float's range; 1e999999999 would take all memory as an exact number

_FIGURES = r"(?:\d+(?:(?:,|\{,\}|\\,)\d{3}(?!\d))+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_TIMES = r"\s*(?:[x\u00d7*\u00b7]|\\times|\\cdot)\s*"
_RAISED = r"(?:\s*\^\s*|\s+\*\*\s+|\*\*)\{?"  # the stars of **12** 3 end bold figures
_POWER = rf"(?:[eE](?P<exponent>[+-]?\d+)|{_TIMES}10{_RAISED}(?P<power>[+-]?\d+)\}}?)"
NUMBER = re.compile(
    # Not within a word or behind a power sign (m2, m^2); a minus between two numbers is an operator.
    r"(?<![\w^.\\])(?<![\^_]\{)(?<!\^-)(?<!\^\{-)(?:(?<![\d)])(?<![\d)]\s)(?P<minus>-|\u2212)\s?)?(?:[$€£]\s?|\\\$\s?)?"
    rf"(?:(?P<whole>\d+)(?:\s+(?=\d+/\d)|\s*(?=\\[dt]?frac)))?"
    rf"(?:\\[dt]?frac\{{(?P<above>-?{_FIGURES})\}}\{{(?P<below>-?{_FIGURES})\}}"
    rf"|10{_RAISED}(?P<ten>[+-]?\d+)\}}?"
    rf"|(?P<figures>{_FIGURES})(?:{_POWER}|(?!\d|\.\d|{_RAISED}[+-]?\d))(?:\s?/\s?(?P<divisor>{_FIGURES}))?)"
    r"(?P<percent>\s*(?:\\?%|percent\b))?"
)


_BETWEEN = re.compile(
    r"(?:\s|\\[,; ])*(?:\\(?:text|mathrm)\s*\{\s*)?(?!(?:and|by|is|of|or|per|times|to|x)\b)[A-Za-z]+\.?"
    r"(?:\s|[},]|\\[,; ]|and\b)*"
)
"""A unit, and what may join it to the next number of a quantity."""


class Number(NamedTuple):
    """A number as it was written."""

    value: Fraction
    is_percent: bool


def read_numbers(text: str) -> list[Number]:
    r"""Return the last number of a text, exactly, or all numbers of a quantity of several parts; empty without one.

    Example:
        >>> read_numbers("about 1,250.5 m^2")[0].value, read_numbers("1 3/4 cups")[0].value
        (Fraction(2501, 2), Fraction(7, 4))
        >>> [int(number.value) for number in read_numbers("in all 3 hours 20 minutes")], len(read_numbers("12 of 14"))
        ([3, 20], 1)
    """
    found: list[Number] = []
    start = len(text)
    for match in reversed(list(NUMBER.finditer(text))):
        unit = text[match.end() : start]
        if found and not _BETWEEN.fullmatch(unit):
            break
        if (value := value_of(match)) is not None:
            found.insert(0, Number(value, bool(match["percent"])))
            start = match.start()
            if not _BETWEEN.match(text, match.end()):
                break  # a number without a unit ends no quantity
    return found


def value_of(match: re.Match[str]) -> Fraction | None:
    """Return the number that a match of `NUMBER` stands for; None if it divides by zero or exceeds any float.

    None as well for thousands of digits, which Python refuses to read.
    """
    try:
        exponent = int(match["exponent"] or match["power"] or match["ten"] or 0)
        above = _plain(match["figures"] or match["above"] or "1")
        below = _plain(match["divisor"] or match["below"] or "1")
    except ValueError:
        return None
    if abs(exponent) > _MAX_EXPONENT or below == 0:
        return None
    size = int(match["whole"] or 0) + above * Fraction(10) ** exponent / below
    return -size if match["minus"] else size


def _plain(figures: str) -> Fraction:
    return Fraction(re.sub(r"[,{}\\]", "", figures))


class numeric(AnswerArguments):
    r"""Score 1 where the completion's number is the reference's within a tolerance, else 0.

    Read is the last number of what `\boxed{}`, `####` or "the answer is" marks, else of the whole text. Thousands
    separators, currency signs, fractions (3/4, 1 3/4, \frac{3}{4}) and powers of ten (1.5e3, 1.5 x 10^3) are
    understood. Units are left out, not converted: 5 km is 5 m. A quantity of several parts (3 hours 20 minutes) equals
    one with the same numbers.

    Example:
        >>> numeric()("", "It weighs 1,250 kg.", "1250")
        1.0
        >>> numeric()("", "9.81", "9.8"), numeric(relative=0.01)("", "9.81", "9.8")
        (0.0, 1.0)
    """

    relative: float = Field(1e-06, ge=0)
    """distance allowed, as a share of the reference's size"""
    absolute: float = Field(0.0, ge=0)
    """distance allowed, in the reference's unit; the larger of the two counts"""
    percent: Literal["either", "share", "unit"] = "either"
    """share = 75% is 0.75; unit = 75% is 75; either = share, or unit if the side without the sign is above 1"""

    @any_reference
    def __call__(self, prompt: str, completion: str, answer: str, /, **row: Any) -> float:
        """Compare the numbers; a `ValueError` where the reference has none, no fault of the completion's."""
        texts = answer, self.counted_part(completion)
        expected, given = (read_numbers(as_latex(final_answer(text).text)) for text in texts)
        if not expected:
            raise ValueError(f"the reference answer must hold a number, got {answer!r:.200}")
        return float(len(expected) == len(given) and all(map(self._are_close, expected, given)))

    def _are_close(self, expected: Number, given: Number) -> bool:
        plain = [abs(item.value) for item in (expected, given) if not item.is_percent]
        either = (100, 1) if plain and plain[0] > 1 else (100,)
        for divisor in {"either": either, "share": (100,), "unit": (1,)}[self.percent]:
            target, value = (item.value / divisor if item.is_percent else item.value for item in (expected, given))
            # As it is written: the float 0.3 is a little less than three tenths.
            allowed = max(Fraction(str(self.relative)) * abs(target), Fraction(str(self.absolute)))
            if abs(value - target) <= allowed:
                return True
        return False
