r"""Where a worked solution says its answer: in the last `\boxed{}`, behind `####`, or behind "the answer is"."""

import re
from typing import NamedTuple

_ANSWER_IS = re.compile(r"\banswer\b\W{0,4}(?:(?:is|are|as|equals)\b|:|=)\s*:?", re.IGNORECASE)
_BOX = re.compile(r"\\f?boxed\s*\{")


class FinalAnswer(NamedTuple):
    """What a text gives as its answer."""

    text: str
    """Without what marked it, and without a full stop behind it."""
    mark: str
    """What it was found by: `boxed`, `####`, `answer is`, or nothing, where it is the whole text."""


def final_answer(text: str) -> FinalAnswer:
    r"""Find what a worked solution says its answer is.

    A box goes before `####`, and that before words; of several of a kind the last one wins. A box that never closes
    is no box.

    Example:
        >>> final_answer("so $x=\\boxed{\\frac{1}{2}}$ in all.")
        FinalAnswer(text='\\frac{1}{2}', mark='boxed')
        >>> final_answer("7+5=12\n#### 12").text, final_answer("The answer is 12. I am sure.").text
        ('12', '12')
    """
    if (boxed := _last_box(text)) is not None:
        return FinalAnswer(boxed, "boxed")
    if "####" in text:
        return FinalAnswer(_tidy(text.rpartition("####")[2]), "####")
    if statements := list(_ANSWER_IS.finditer(text)):
        return FinalAnswer(_first_sentence(text[statements[-1].end() :]), "answer is")
    return FinalAnswer(_tidy(text), "")


def _last_box(text: str) -> str | None:
    for start in reversed([match.end() for match in _BOX.finditer(text)]):
        if (end := _closing_brace(text, start)) is not None:
            return text[start:end].strip()
    return None


def _closing_brace(text: str, start: int) -> int | None:
    """Return where the brace closes that was opened before `start`."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


def _first_sentence(text: str) -> str:
    """Cut at a line's end, or at a full stop that ends a sentence, but not within `$...$`."""
    line = text.strip().partition("\n")[0]
    end = re.search(r"[.!?](?=\s+[A-Z]|\s*$)", line)
    if end and line[: end.start()].count("$") % 2 == 0:
        line = line[: end.start()]
    return _tidy(line)


def _tidy(text: str) -> str:
    return re.sub(r"[.\s*]+$", "", text.strip()).lstrip("*: \t")
