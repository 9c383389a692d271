"""Verify functions that ship: the last number of an answer.

Named in a recipe as `areal_lite.verify.builtin:last_number`. Runs in the verifier's process.
"""

import re
from decimal import Decimal
from typing import Any

__all__ = ["final_number", "last_number"]

# A minus between two numbers is an operator. Thousands may be separated: 1,234.5
_NUMBER = re.compile(r"(?:(?<![0-9])-)?(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)")


def last_number(prompt: str, completion: str, answer: str, **row: Any) -> float:
    """Score 1 where the completion's final number equals the reference's, else 0.

    Both are read alike, so the reference may be a bare number or a whole worked solution (`... #### 72`).

    Example:
        >>> last_number("7+25=?", "7+25=32#32", "32")
        1.0

    Raises:
        ValueError: The reference holds no number; that is no fault of the completion's.
    """
    expected = final_number(answer)
    if expected is None:
        raise ValueError(f"the reference answer must hold a number, got {answer!r:.200}")
    return float(final_number(completion) == expected)


def final_number(text: str) -> Decimal | None:
    """Return the last number behind the last `#`, or of the whole text where there is no `#`.

    Example:
        >>> final_number("7+25=32;32+13=45#45"), final_number("so 1,234 in all."), final_number("45#")
        (Decimal('45'), Decimal('1234'), None)
    """
    numbers = _NUMBER.findall(text.rpartition("#")[2])
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
