r"""The verifier `math`: equal in mathematics, not in letters; docs/verifiers.md shows where it agrees with people."""

import functools
import re
from importlib.metadata import version
from typing import Any

from pydantic import Field

from areal_lite.errors import VerifierError
from areal_lite.verify.builtin.final_answer import AnswerArguments, FinalAnswer, final_answer
from areal_lite.verify.builtin.notation import as_latex
from areal_lite.verify.builtin.numeric import NUMBER, value_of
from areal_lite.verify.builtin.plain import plain_equal, plain_number
from areal_lite.verify.result import any_reference, prepared_by

_DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[")
_THIN_SPACE = re.compile(r"(?<=\d)\\[,;!:]\s*(?=\d{3}(?!\d))")
_MIXED_NUMBER = re.compile(r"(?<![\w./^}])(\d+)\s+(\d+)/(\d+)(?![\w./])")
_COMMANDS = re.compile(r"\\(?:text|mathrm|mathbf|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(
    r"(?!(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|arc|abs|max|min|det|inf|infty|oo)\b)[A-Za-z]{3,}"
    r"|\b(?:is|it|of|so|to|we)\b"
)
_LIST = re.compile(r"[-\s\d.\\{}()\[\]$]*,[-\s\d,.\\{}()\[\]$]*")
"""Numbers with commas between them: beside it a completion's 100,200 is no thousand."""
_TEXT = re.compile(r"\\(?:text|mbox)\s*\{[^{}]*\}")
_WITH_UNIT = re.compile(r"(\S+)\s+([A-Za-z][A-Za-z /]*)")
_FACTOR = re.compile(r"\b(?:hundred|thousand|[mbtr]+illion|dozen|squared|cubed|factorial)\b")
_JOIN = re.compile(r"\\(?:text|mbox)\s*\{\s*(?:and|or)\s*\}")
_ANTLR = "4.13.2"
"""The version whose grammar math-verify is tried with; with older ones 9% is not 9, nor 50% a half."""


@functools.cache
def _library() -> Any:
    """Return `algebra`, which imports math-verify."""
    if (found := version("antlr4-python3-runtime")) != _ANTLR:
        package = f"antlr4-python3-runtime=={_ANTLR}"
        raise VerifierError(f"the verifier math needs {package}, got {found}, with which verdicts differ: install it")
    from areal_lite.verify.builtin import algebra

    return algebra


# The first parse builds tables for a second.
@prepared_by(lambda self: _library().parsed("\\boxed{\\frac{1}{2}}"))
class math(AnswerArguments):
    r"""Score 1 where the completion's final answer equals the reference's, else 0.

    `final_answer` finds it. The same text is equal; numbers, times and quantities are compared exactly (`plain_equal`),
    everything else by math-verify. Its time limits are off, as the verifier's deadline kills the process in which it
    runs: an expression that never finishes is a failure `timeout`.

    Example:
        >>> math()("7+5=?", "7+5=12, so \\boxed{12}", "#### 12")
        1.0
        >>> math()("", "The answer is $0.5$.", "\\frac{1}{2}")
        1.0
    """

    decimals: int = Field(6, ge=0, le=15)
    """places to which decimals must agree; a number that rounds to 0 there, to three significant figures"""

    @any_reference
    def __call__(self, prompt: str, completion: str, answer: str, /, **row: Any) -> float:
        """Compare the answers; an error where the reference holds nothing to compare, or math-verify raises."""
        expected, given = (
            found._replace(text=as_latex(found.text))
            for found in (final_answer(answer), final_answer(self.counted_part(completion)))
        )
        if _LIST.fullmatch(expected.text) and plain_number(expected.text) is None and plain_number(given.text):
            given = given._replace(text=given.text.replace(",", ", "))
        return float(self._are_equal(expected, given))

    def _are_equal(self, expected: FinalAnswer, given: FinalAnswer) -> bool:
        if (equal := plain_equal(expected.text, given.text)) is not None:
            return equal
        library = _library()
        target = library.parsed(_expression(expected))
        if not target:
            raise ValueError(f"the reference must hold an expression, got {expected.text!r:.200}")
        pieces = _pieces(expected), _pieces(given)
        if max(map(len, pieces)) > 1:
            return len(pieces[0]) == len(pieces[1]) and all(map(self._are_equal, *pieces))
        found = library.parsed(_expression(given))
        return bool(found) and bool(library.equal(target, found, self.decimals))


def _pieces(answer: FinalAnswer) -> list[FinalAnswer]:
    r"""Return the expressions between words where math-verify reads the first alone: it cuts off a unit at the end,
    and takes for that all from the first `\text{}` on.
    """
    text = _JOIN.sub(",", answer.text)
    pieces = [piece.strip(" ,.") for piece in _TEXT.split(text)] if re.search(_TEXT.pattern + "$", text) else []
    return [FinalAnswer(piece, "boxed") for piece in pieces if piece]


def _expression(found: FinalAnswer) -> str:
    r"""Return a text that math-verify finds the expression in.

    It takes what a box holds as LaTeX, whole; in other texts it looks for `$...$` and numbers, and would find 2 in
    2x+1. So all but prose goes into a box. Three ways of writing numbers that it does not know are written out.
    """
    text = NUMBER.sub(_percentage, _THIN_SPACE.sub("", found.text))
    if (quantity := _WITH_UNIT.fullmatch(text)) and plain_number(quantity[1]) is not None:
        number, unit = quantity.groups()
        text = number if _WORD.search(unit) and not _FACTOR.search(unit) else text  # else multiplied by its letters
    text = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text)
    prose = _WORD.search(_COMMANDS.sub(" ", text)) or _DELIMITED.search(text)
    return text if prose and found.mark != "boxed" else f"\\boxed{{{text}}}"


def _percentage(number: re.Match[str]) -> str:
    r"""Return a mixed number or a fraction in percent as math-verify reads it: 2 1/2 % is `\frac{5}{2}\%`."""
    value = value_of(number) if number["percent"] and (number["whole"] or number["divisor"]) else None
    return number[0] if value is None else rf"\frac{{{value.numerator}}}{{{value.denominator}}}\%"
