"""The verifier `numeric`: a number within a tolerance, whatever unit stands beside it."""

import re
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

from areal_lite.verify.builtin.final_answer import final_answer
from areal_lite.verify.result import prepared_by

__all__ = ["numeric", "read_number"]

_Percent = Literal["share", "unit"]
_MAX_EXPONENT = 400  # a float's range; 1e999999999 would take all memory as an exact number

_FIGURES = r"(?:\d+(?:(?:,|\{,\}|\\,)\d{3}(?!\d))+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_TIMES = r"\s*(?:[x\u00d7*\u00b7]|\\times|\\cdot)\s*"
_POWER = rf"(?:[eE](?P<exponent>[+-]?\d+)|{_TIMES}10\s*(?:\^|\*\*)\s*\{{?(?P<power>[+-]?\d+)\}}?)"
_NUMBER = re.compile(
    # Not within a word or behind a power sign (m2, m^2); a minus between two numbers is an operator.
    r"(?<![\w^.\\])(?:(?<![\d)])(?<![\d)]\s)(?P<minus>-|\u2212)\s?)?(?:[$€£]\s?|\\\$\s?)?"
    rf"(?:(?P<whole>\d+)\s+(?=\d+/\d))?"
    rf"(?:\\[dt]?frac\{{(?P<above>{_FIGURES})\}}\{{(?P<below>{_FIGURES})\}}"
    rf"|(?P<figures>{_FIGURES}){_POWER}?(?:\s?/\s?(?P<divisor>{_FIGURES}))?)"
    r"(?P<percent>\s*(?:\\?%|percent\b))?"
)


class Number(NamedTuple):
    """A number as it was written."""

    value: Fraction
    is_percent: bool


def read_number(text: str) -> Number | None:
    r"""Return the last number of a text, exactly; None where there is none.

    Example:
        >>> read_number("about 1,250.5 m^2").value, read_number("1 3/4 cups").value, read_number("-2.5e-1").value
        (Fraction(2501, 2), Fraction(7, 4), Fraction(-1, 4))
    """
    for match in reversed(list(_NUMBER.finditer(text))):
        if (value := _value(match)) is not None:
            return Number(value, bool(match["percent"]))
    return None


def _value(match: re.Match[str]) -> Fraction | None:
    """Return what a match says; None for a division by zero, and for what is beyond any float."""
    exponent = int(match["exponent"] or match["power"] or 0)
    above, below = _plain(match["figures"] or match["above"]), _plain(match["divisor"] or match["below"] or "1")
    if abs(exponent) > _MAX_EXPONENT or below == 0:
        return None
    size = int(match["whole"] or 0) + above * Fraction(10) ** exponent / below
    return -size if match["minus"] else size


def _plain(figures: str) -> Fraction:
    return Fraction(re.sub(r"[,{}\\]", "", figures))


def _check(*, relative: float = 1e-6, absolute: float = 0.0, percent: _Percent = "share") -> None:
    for name, value in (("relative", relative), ("absolute", absolute)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be a number from 0 up, got {value!r}")
    if percent not in get_args(_Percent):
        raise ValueError(f"percent must be share or unit, got {percent!r}")


@prepared_by(_check)
def numeric(
    prompt: str,
    completion: str,
    answer: str,
    *,
    relative: float = 1e-6,
    absolute: float = 0.0,
    percent: _Percent = "share",
    **row: Any,
) -> float:
    r"""Score 1 where the completion's number is the reference's within a tolerance, else 0.

    Read is the last number of what `\boxed{}`, `####` or "the answer is" marks, else of the whole text. Thousands
    separators, currency signs, fractions (3/4, 1 3/4, \frac{3}{4}) and powers of ten (1.5e3, 1.5 x 10^3) are
    understood. Units are left out, not converted: 5 km is 5 m.

    Example:
        >>> numeric("", "It weighs 1,250 kg.", "1250"), numeric("", "75%", "0.75"), numeric("", "9.81", "9.8")
        (1.0, 1.0, 0.0)
        >>> numeric("", "9.81", "9.8", relative=0.01)
        1.0

    Args:
        prompt: Not looked at.
        completion: What the model wrote.
        answer: The reference, read in the same way.
        relative: Distance allowed, as a share of the reference's size.
        absolute: Distance allowed, in the reference's unit; the larger of the two counts.
        percent: `share` = 75% is 0.75; `unit` = 75% is 75.
        **row: Not looked at.

    Raises:
        ValueError: The reference holds no number; that is no fault of the completion's.
    """
    expected, given = (read_number(final_answer(text).text) for text in (answer, completion))
    if expected is None:
        raise ValueError(f"the reference answer must hold a number, got {answer!r:.200}")
    if given is None:
        return 0.0
    target, value = (
        item.value / 100 if item.is_percent and percent == "share" else item.value for item in (expected, given)
    )
    # As it is written: the float 0.3 is a little less than three tenths.
    allowed = max(Fraction(str(relative)) * abs(target), Fraction(str(absolute)))
    return float(abs(value - target) <= allowed)
