"""The verifier `format`: whether a completion has its tags in their places. Runs in the verifier's process."""

import functools
import re
from collections.abc import Sequence
from typing import Any

from areal_lite.verify.result import prepared_by

__all__ = ["format_tags"]

_TAGS = ("think", "answer")


def _check_tags(*, tags: Sequence[str] = _TAGS) -> None:
    if isinstance(tags, str) or not tags or not all(isinstance(tag, str) for tag in tags):
        raise ValueError(f"tags must be a list of names, e.g. [think, answer], got {tags!r}")
    if wrong := [tag for tag in tags if not re.fullmatch(r"[\w-]+", tag)]:
        raise ValueError(f"a tag must be a word without brackets, got {wrong[0]!r}")
    if len(set(tags)) != len(tags):
        raise ValueError(f"tags must be different ones, got {list(tags)}")


@prepared_by(_check_tags)
def format_tags(prompt: str, completion: str, answer: str, *, tags: Sequence[str] = _TAGS, **row: Any) -> float:
    """Score 1 where the completion is made of its tags: each once, in order, nothing but white space outside, else 0.

    A template may end with the first tag, to have the model go on from there: a prompt that ends with `<think>`
    counts as the start of its completion.

    Example:
        >>> format_tags("7+5=?", "<think>12</think> <answer>12</answer>", "12")
        1.0
        >>> format_tags("7+5=?", "<answer>12</answer><think>12</think>", "12")
        0.0

    Args:
        prompt: Looked at for a first tag.
        completion: What the model wrote.
        answer: Not looked at.
        tags: Names in order; other tags are text like any other.
        **row: Not looked at.
    """
    names = tuple(tags)
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
