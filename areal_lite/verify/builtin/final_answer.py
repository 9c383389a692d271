r"""Where a text gives its answer: in `<answer>` tags, in the last `\boxed{}`, after `####` or after "the answer is"."""

import re
from typing import NamedTuple

from pydantic import Field

from areal_lite.config.section import Arguments

_ANSWER_IS = re.compile(r"\banswer\b\W{0,4}(?:(?:is|are|as|equals)\b|:|=)\s*:?", re.IGNORECASE)
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_THOUGHT = re.compile(r"<(think|thinking)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_THOUGHT_END = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
_MARKUP = re.compile(r"</\w+>|<[A-Za-z][\w-]+>|<[|\uff5c][^<>]*[|\uff5c]>")
"""Other tags, and special tokens such as </s> and <|im_end|>: math-verify drops a number beside them."""
_PLAIN = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | dict.fromkeys([0x2010, 0x2011, 0x2212, 0x2013], "-")
"""ASCII for full-width characters, and for the signs that stand for a minus."""
_NUMBERED = re.compile(r"####\s*(?=[^\w\n]{0,4}\d)(?!\W*\d+[.):][ \t]*\**[A-Za-z])([^\n]*)")
"""Has a line with a number in front, but no heading such as `1. Add`."""
_REMARK = re.compile(
    r"\s(?:\((?:[^A-Za-z()]*\)|[A-Za-z]{2,}\s)|(?:as|because|since|so)\b|(?<=[A-Za-z]\s)(?:in|for|from|after)\s+\d)"
)
"""Where a remark begins that may hold other numbers; but `1 in 8` is a whole answer."""
_COMMENT = re.compile(r"\W*(?:correct|right|consistent|reasonable|in)\b[^\d\\$.\n]*(?:\.|$)", re.MULTILINE)
"""What may follow "the answer is" without being an answer."""
_DISPLAY = re.compile(r"(?:\$\$(.+?)\$\$|\\\[(.+?)\\\])[ \t.]*$", re.DOTALL | re.MULTILINE)
_BETWEEN = re.compile(r"[\s${}]|\\(?:text|quad|[()\[\],;: ])")
"""What may stand beside the word or sign that makes two boxes one list."""


class AnswerArguments(Arguments):
    """What verifiers that look for a final answer have in common."""

    behind: str | None = Field(None, min_length=1)
    """of a completion only what follows the last of these counts, such as </think>; without one it scores 0"""

    def counted_part(self, completion: str) -> str:
        """Return what counts of a completion."""
        if self.behind is None:
            return completion
        _, mark, rest = completion.rpartition(self.behind)
        return rest if mark else ""


class FinalAnswer(NamedTuple):
    """What a text gives as its answer."""

    text: str
    """Without what marked it, and without a full stop after it."""
    mark: str
    """What it was found by: `boxed`, `####`, `answer is`, or nothing, where it is the whole text."""


def plain_text(text: str) -> str:
    """Return a text without tags and special tokens, and with ASCII for full-width characters and minus signs."""
    return _MARKUP.sub(" ", text).translate(_PLAIN)


def without_thoughts(text: str) -> str:
    """Return what follows the last thought, and what precedes thoughts whose tags are both there."""
    return _THOUGHT_END.split(_THOUGHT.sub(" ", text))[-1]


def answer_text(text: str) -> str:
    """Return the part of a text that can hold the answer.

    Thoughts are left out: what `<think>` tags hold, what precedes a `</think>` whose opening tag the prompt held, and
    what follows a `<think>` that never closes. Of the rest, what the last pair of `<answer>` tags holds, if there is an
    `<answer>`; nothing if none closes.

    Example:
        >>> answer_text("<think>3 tries give 13</think><answer>12</answer>"), answer_text("<answer>1")
        ('12', '')
    """
    text = without_thoughts(text)
    if tagged := _TAGGED.findall(text):
        return str(tagged[-1])
    return "" if "<answer>" in text.lower() else text


def final_answer(text: str) -> FinalAnswer:
    r"""Find the answer that a worked solution gives, within its `answer_text`.

    A box goes before `####`, and that before words; of several of a kind the last one wins, but boxes that a comma,
    "and" or "or" joins are one answer. A box that never closes is no box; if no other closes, there is no answer.

    Example:
        >>> final_answer("so $x=\\boxed{\\frac{1}{2}}$ in all.")
        FinalAnswer(text='\\frac{1}{2}', mark='boxed')
        >>> final_answer("7+5=12\n#### 12").text, final_answer("The answer is 12. I am sure.").text
        ('12', '12')
    """
    text = plain_text(answer_text(text))
    if (boxes := _last_boxes(text)) or _BOX.search(text):
        return FinalAnswer(", ".join(dict.fromkeys(map(_tidy, boxes))), "boxed")
    if "####" not in text and (statements := [match.end() for match in _ANSWER_IS.finditer(text)]):
        answers = [end for end in statements if not _COMMENT.match(text, end)] or statements
        return FinalAnswer(_first_sentence(text[answers[-1] :]), "answer is")
    return FinalAnswer(hashes_answer(text), "####" if "####" in text else "")


def hashes_answer(text: str) -> str:
    """Return what follows the last `####`, or the text without one; of a line with a number in front, no remark."""
    line = _NUMBERED.match(text, max(text.rfind("####"), 0))
    return _first_sentence(_REMARK.split(line[1])[0]) if line else _tidy(text.rpartition("####")[2])


def _last_boxes(text: str) -> list[str]:
    """Return what the last box holds, and before it those of the same list."""
    boxes: list[str] = []
    next_start = 0
    for box in reversed(list(_BOX.finditer(text))):
        if (end := _closing_brace(text, box.end())) is None:
            continue
        if boxes and _BETWEEN.sub("", text[end + 1 : next_start]) not in (",", ";", "and", "or", ",and", ",or"):
            break
        boxes.insert(0, text[box.end() : end].strip())
        next_start = box.start()
    return boxes


def _closing_brace(text: str, start: int) -> int | None:
    """Return where the brace closes that was opened before `start`."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


def _first_sentence(text: str) -> str:
    """Cut at a line's end, or at a full stop that ends a sentence, but not within `$...$`; a display is read whole."""
    text = text.lstrip("*_`: \t\n")
    if display := _DISPLAY.match(text):
        return _tidy(display[1] or display[2])
    line = text.partition("\n")[0].rstrip()
    end = re.search(r"[.!?](?=\s+[A-Z]|\s*$)", line)
    if end and line[: end.start()].count("$") % 2 == 0:
        line = line[: end.start()]
    return _tidy(line)


def _tidy(text: str) -> str:
    """Leave out what decorates an answer: spaces, LaTeX's among them, emphasis, and punctuation at the end."""
    return text.strip().lstrip("*_`: \t").rstrip(".,;:*_` \t\n").removesuffix("\\").rstrip()
