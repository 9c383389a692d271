"""The verifier `format`: whether a completion has its tags in their places."""

import functools
import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from areal_lite.config.section import Arguments
from areal_lite.verify.result import with_arguments


def _all_different(tags: list[str]) -> list[str]:
    if len(set(tags)) != len(tags):
        raise ValueError(f"tags must be different ones, got {tags}")
    return tags


class FormatArguments(Arguments):
    """Of `format`."""

    tags: Annotated[
        list[Annotated[str, Field(pattern="^[\\w-]+$")]], Field(min_length=1), AfterValidator(_all_different)
    ] = Field(["think", "answer"])
    """names in order, without brackets; other tags are text like any other"""


@with_arguments(FormatArguments)
def format_tags(prompt: str, completion: str, answer: str, arguments: FormatArguments, /, **row: Any) -> float:
    """Score 1 where the completion is made of its tags: each once, in order, nothing but white space outside, else 0.

    A template may end with the first tag, to have the model go on from there: a prompt that ends with `<think>`
    counts as the start of its completion.

    Example:
        >>> format_tags("7+5=?", "<think>12</think> <answer>12</answer>", "12", FormatArguments())
        1.0
        >>> format_tags("7+5=?", "<answer>12</answer><think>12</think>", "12", FormatArguments())
        0.0
    """
    names = tuple(arguments.tags)
    opening = f"<{names[0]}>"
    text = opening + completion if prompt.rstrip().endswith(opening) else completion
    wanted = [mark for name in names for mark in (f"<{name}>", f"</{name}>")]
    tag, outside = _patterns(names)
    return float(tag.findall(text) == wanted and outside.fullmatch(text) is not None)


@functools.cache
def _patterns(names: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what finds the tags, and the shape of a text that has each of them once."""
    either = "|".join(map(re.escape, names))
    shape = r"\s*".join(rf"<{name}>(?:.*)</{name}>" for name in map(re.escape, names))
    return re.compile(rf"</?(?:{either})>"), re.compile(rf"\s*{shape}\s*", re.DOTALL)
