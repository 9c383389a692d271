"""Verify functions on text, in a recipe `last_number`, `exact`, `regex` and `multiple_choice`."""

import functools
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from areal_lite.config.section import Arguments
from areal_lite.verify.builtin.final_answer import AnswerArguments, answer_text, hashes_answer, plain_text
from areal_lite.verify.result import any_reference

# A minus between two numbers is an operator. Thousands may be separated: 1,234.5
_NUMBER = re.compile(r"(?:(?<![0-9])-)?(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class last_number(Arguments):
    """Score 1 where the completion's final number equals the reference's, else 0.

    Both are read alike, so the reference may be a bare number or a whole worked solution (`... #### 72`); one without
    a number is a `ValueError`, and no fault of the completion's.

    Example:
        >>> last_number()("7+25=?", "7+25=32#32", "32")
        1.0
    """

    @any_reference
    def __call__(self, prompt: str, completion: str, answer: str, /, **row: Any) -> float:
        """Compare the numbers."""
        expected = final_number(answer)
        if expected is None:
            raise ValueError(f"the reference answer must hold a number, got {answer!r:.200}")
        return float(final_number(completion) == expected)


def final_number(text: str) -> Decimal | None:
    """Return the last number of the text that can hold the answer, or of what its last `#` or `####` marks.

    Example:
        >>> final_number("7+25=32;32+13=45#45"), final_number("so 1,234 in all."), final_number("45#")
        (Decimal('45'), Decimal('1234'), None)
    """
    marked = hashes_answer(plain_text(answer_text(text))).rpartition("#")[2]
    numbers = _NUMBER.findall(re.sub(r"\^\{?-?\d+", "", marked.replace("{,}", ",")))  # without powers, as of units
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


class exact(Arguments):
    """Score 1 where the completion is the reference, else 0.

    Example:
        >>> exact()("", " Paris ", "Paris"), exact()("", "paris", "Paris")
        (1.0, 0.0)
    """

    strip: bool = True
    """leave out white space at both ends, of both"""
    ignore_case: bool = False
    """upper and lower case are the same"""

    @any_reference
    def __call__(self, prompt: str, completion: str, answer: str, /, **row: Any) -> float:
        """Compare both as texts."""
        pair = [text.strip() if self.strip else text for text in (completion, answer)]
        first, second = (text.casefold() if self.ignore_case else text for text in pair)
        return float(first == second)


class regex(Arguments):
    r"""Score 1 where a pattern matches the completion, else 0.

    A pattern may take exponential time on some completion. What ends it is the verifier's deadline, as a failure
    `timeout`; matching holds the interpreter, so nothing in this process could.

    Example:
        >>> century = regex(pattern=r"\b19\d\d\b")
        >>> century("", "It was 1969.", ""), regex(mode="full")("", "in 1969", r"19\d\d")
        (1.0, 0.0)
    """

    pattern: re.Pattern[str] | None = None
    """for every row, in Python's syntax, flags as in (?s); null = the row's answer"""
    mode: Literal["search", "full"] = "search"
    """search = anywhere, full = the whole completion"""
    ignore_case: bool = False
    """upper and lower case are the same"""

    def __call__(self, prompt: str, completion: str, answer: str, /, **row: Any) -> float:
        """Look for the pattern; a `re.error` where the row's answer should be one and is none."""
        pattern = answer if self.pattern is None else self.pattern.pattern
        compiled = re.compile(pattern, re.IGNORECASE if self.ignore_case else 0)
        return float(bool((compiled.search if self.mode == "search" else compiled.fullmatch)(completion)))


def _letters(choices: int | Sequence[str]) -> str:
    """Return the letters that name the choices."""
    count = choices if isinstance(choices, int) else len(choices)
    if isinstance(choices, bool | str) or not 2 <= count <= len(_LETTERS):
        raise ValueError(f"choices must be a number from 2 to {len(_LETTERS)}, or as many texts, got {choices!r:.200}")
    return _LETTERS[:count]


class multiple_choice(AnswerArguments):
    r"""Score 1 where the completion's choice is the reference's, else 0.

    A statement (`\boxed{B}`, "the answer is B", "Answer: (B)", "B is correct") goes before a mention ("(B)", "B." or
    "B)" at the start of a line, a line with nothing but "B"); among several of a kind the last one wins. With the
    choices' texts given, a completion without either chooses the text it ends with. Thoughts do not count, and of
    `<answer>` tags only what the last pair holds.

    Example:
        >>> multiple_choice()("", "(A) is too small. The answer is (C), not (D).", "C")
        1.0
    """

    choices: Annotated[int | list[str], AfterValidator(lambda choices: _letters(choices) and choices)] = 5
    """how many there are, or their texts in order; a column choices of the row goes before it"""

    @any_reference
    def __call__(self, prompt: str, completion: str, answer: str, /, *, choices: Any = None, **row: Any) -> float:
        """Compare the choices; a `ValueError` where the reference is no letter, "(B)", "B. text" or a choice's text."""
        choices = self.choices if choices is None else choices
        if isinstance(choices, Mapping):  # as in ARC's rows: {"text": [...], "label": [...]}, labels A to D or 1 to 4
            answer = dict(zip(choices.get("label") or (), _LETTERS, strict=False)).get(answer.strip(), answer)
            choices = choices.get("text", ())
        letters, texts = _letters(choices), _texts(choices)
        reference = plain_text(answer_text(answer))
        expected = _named_choice(reference, letters, texts) or _stated_choice(reference, letters)
        if expected is None:
            raise ValueError(f"the reference must be one of {letters} or the text of a choice, got {answer!r:.200}")
        return float(self.chosen(completion, choices) == expected)

    def chosen(self, completion: str, choices: int | Sequence[str]) -> str | None:
        """Return the letter of a completion's choice."""
        letters, texts = _letters(choices), _texts(choices)
        text = plain_text(answer_text(self.counted_part(completion)))
        return _named_choice(text, letters, texts) or _stated_choice(text, letters) or _last_text(text, letters, texts)


def _texts(choices: int | Sequence[str]) -> Sequence[str]:
    return () if isinstance(choices, int) else tuple(map(str, choices))


def _named_choice(answer: str, letters: str, texts: Sequence[str]) -> str | None:
    """Return the letter of an answer that is a letter or a choice's text."""
    plain = answer.strip()
    if len(plain) == 1 and plain.upper() in letters:
        return plain.upper()
    matching = [letter for letter, text in zip(letters, texts, strict=False) if text.strip() == plain]
    return matching[0] if len(matching) == 1 else None


@functools.cache
def _choice_patterns(letters: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what finds statements, and what finds mentions, of a letter."""
    either = f"{letters}{letters.lower()}"
    # "the answer is a number" states no choice: a bare small letter needs an end after it.
    # "I think" states none, nor does "A or B".
    bare = rf"(?!I\s+\w)[{letters}](?![\w']|\s+or\s+[{letters}]\b)|[{letters.lower()}](?=\s*(?:[.,;:!*]|$))"
    # "option D is wrong" states no choice, "the answer is option D" and "option: D" do.
    be = r"\s+(?:is|(?:should|would|must)\s+be)(?:\s+(?:therefore|thus))?"
    word = (
        rf"(?i:answer(?:{be})?(?:\s*+:?\s*+(?:the\s+)?(?:option|choice))?|correct\s+is"
        rf"|(?:option|choice)(?:{be}|(?=\s*[:=])))"
    )
    wrapped = rf"\\(?:text|textbf|mathrm|mathbf)\{{\s*\(?([{either}])\)?\s*\}}"
    statement = re.compile(
        rf"(?m)\\f?box(?:ed)?\{{\s*(?:{wrapped}|\(?([{either}])\)?)(?![\w'])"
        rf"|\b{word}\s*+[:=]?\s*+[*_$]*+\s*+(?:\\?\(\s*([{either}])\s*\\?\)|{wrapped}|({bare}))"
        rf"|(?<![\w\\'])([{letters}])[)*_$]*\s+is\s+(?:the\s+)?(?:correct|right|best)\b"
        rf"|\b(?i:thus|so|hence|therefore|choose),?\s+[*_$]*([{letters}])[*_$]*(?=[.!]?[ \t]*$)",
    )
    mention = re.compile(
        r"(?m)"
        rf"(?<![\w\\])\(([{either}])\)|\b(?i:option|choice)\s+[*_$]*({bare})|^[*_\s]*([{letters}])(?:[.):]|[*_\s]*$)"
    )
    return statement, mention


def _stated_choice(text: str, letters: str) -> str | None:
    for pattern in _choice_patterns(letters):
        found: list[str] = [next(filter(None, match.groups())) for match in pattern.finditer(text)]
        if found:
            return found[-1].upper()
    return None


def _last_text(completion: str, letters: str, texts: Sequence[str]) -> str | None:
    """Return the letter of the longest choice's text that the completion ends with."""
    end = completion.rstrip().rstrip(".!").rstrip().casefold()
    plain = zip((text.strip().rstrip(".!").casefold() for text in texts), letters, strict=False)
    fitting = [(len(text), letter) for text, letter in plain if text and re.search(rf"(?<!\w){re.escape(text)}$", end)]
    return max(fitting)[1] if fitting else None
