r"""The verifier `math`: equal in mathematics, not in letters; docs/verifiers.md shows where it agrees with people."""

import functools
import logging
import re
from decimal import Decimal
from importlib.metadata import version
from typing import Any

from pydantic import Field

from areal_lite.errors import VerifierError
from areal_lite.verify.builtin.final_answer import AnswerArguments, FinalAnswer, final_answer
from areal_lite.verify.result import any_reference, prepared_by

_PLAIN_NUMBER = re.compile(r"\\?\$?\s*(-?)\s*\\?\$?\s*(\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+)?(\.\d+)?\.?")
_DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[")
_THIN_SPACE = re.compile(r"(?<=\d)\\[,;!:]\s*(?=\d{3}(?!\d))")
_MIXED_NUMBER = re.compile(r"(?<![\w./^}])(\d+)\s+(\d+)/(\d+)(?![\w./])")
_COMMANDS = re.compile(r"\\(?:text|mathrm|mathbf|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"(?!(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|arc|abs|max|min|det|inf|infty|oo)\b)[A-Za-z]{3,}")
_CLOCK = re.compile(r"\d{1,2}:0\d")
"""A time of day: nobody writes a ratio so, and 12:00 would be 12/0."""
_ANTLR = "4.13.2"
"""The version whose grammar math-verify is tried with; with older ones 9% is not 9, nor 50% a half."""


# The first parse builds tables for a second.
@prepared_by(lambda self: _parse("\\boxed{\\frac{1}{2}}"))
class math(AnswerArguments):
    r"""Score 1 where the completion's final answer equals the reference's, else 0.

    The final answer is what the last `\boxed{}` holds, else what stands behind `####`, else behind "the answer is",
    else the last expression. The same text is equal, two plain numbers are compared exactly, everything else by
    math-verify. Its time limits are off, as the verifier's deadline kills the process in which it runs: an expression
    that would take for ever is a failure `timeout`.

    Example:
        >>> math()("7+5=?", "7+5=12, so \\boxed{12}", "#### 12")
        1.0
        >>> math()("", "The answer is $0.5$.", "\\frac{1}{2}")
        1.0
    """

    decimals: int = Field(6, ge=0, le=15)
    """places to which decimals must agree"""

    @any_reference
    def __call__(self, prompt: str, completion: str, answer: str, /, **row: Any) -> float:
        """Compare the answers; an error where the reference holds nothing to compare, or math-verify raises."""
        expected, given = final_answer(answer), final_answer(self.said_in(completion))
        numbers = _plain_number(expected.text), _plain_number(given.text)
        if None not in numbers:
            return float(numbers[0] == numbers[1])
        texts = expected.text.strip("$ "), given.text.strip("$ ")
        if texts[0] == texts[1] != "" or _CLOCK.fullmatch(texts[0]):
            return float(texts[0] == texts[1])
        target = _parse(_expression(expected))
        if not target:
            raise ValueError(f"the reference must hold an expression, got {answer!r:.200}")
        found = _parse(_expression(given))
        return float(bool(found) and _equal(target, found, self.decimals))


def _plain_number(text: str) -> Decimal | None:
    match = _PLAIN_NUMBER.fullmatch(text.strip())
    if match is None or not (match[2] or match[3]):
        return None
    whole = re.sub(r"[,{}]", "", match[2] or "")
    return Decimal(match[1] + whole + (match[3] or ""))


def _expression(found: FinalAnswer) -> str:
    r"""Return a text that math-verify finds the expression in.

    It takes what a box holds as LaTeX, whole; in other texts it looks for `$...$` and numbers, and would find 2 in
    2x+1. So all but prose goes into a box. Two ways of writing numbers that it does not know are written out.
    """
    text = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", _THIN_SPACE.sub("", found.text))
    prose = _WORD.search(_COMMANDS.sub(" ", text)) or _DELIMITED.search(text)
    return text if prose and found.mark != "boxed" else f"\\boxed{{{text}}}"


@functools.cache
def _library() -> tuple[Any, Any, Any]:
    """Return math-verify's `parse` and `verify`, and what to look for."""
    if (found := version("antlr4-python3-runtime")) != _ANTLR:
        package = f"antlr4-python3-runtime=={_ANTLR}"
        raise VerifierError(f"the verifier math needs {package}, got {found}, with which verdicts differ: install it")
    import math_verify  # type: ignore[import-untyped]  # without types

    # It warns, once, that its time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    config = (math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig())
    return math_verify.parse, math_verify.verify, config


def _parse(text: str) -> list[Any]:
    """Return what math-verify reads: an expression and its text, or the text alone where it is no mathematics."""
    parse, _, config = _library()
    return parse(text, extraction_config=config, parsing_timeout=None, raise_on_error=True)  # type: ignore[no-any-return]


def _equal(target: list[Any], found: list[Any], decimals: int) -> bool:
    _, verify, _ = _library()
    options = {"float_rounding": decimals, "allow_set_relation_comp": True}
    return bool(verify(target, found, **options, timeout_seconds=None, raise_on_error=True))
