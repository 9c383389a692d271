"""The verifier `format`: whether a completion has its tags in their places."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from areal_lite.config.section import Arguments


def _all_different(tags: list[str]) -> list[str]:
    if len(set(tags)) != len(tags):
        raise ValueError(f"tags must be different ones, got {tags}")
    return tags


class format_tags(Arguments):
    """Score 1 where the completion is made of its tags: each once, in order, nothing but white space outside, else 0.

    A template may end with the first tag, for the model to continue: a prompt that ends with `<think>`
    counts as the start of its completion.

    Example:
        >>> format_tags()("7+5=?", "<think>12</think> <answer>12</answer>", "12")
        1.0
        >>> format_tags()("7+5=?", "<answer>12</answer><think>12</think>", "12")
        0.0
    """

    tags: Annotated[
        list[Annotated[str, Field(pattern="^[\\w-]+$")]], Field(min_length=1), AfterValidator(_all_different)
    ] = Field(["think", "answer"])
    """names in order, without brackets; other tags are text like any other"""

    def __call__(self, prompt: str, completion: str, answer: str, /, **row: Any) -> float:
        """Compare the tags, and look at what stands outside of them."""
        opening = f"<{self.tags[0]}>"
        text = opening + completion if prompt.rstrip().endswith(opening) else completion
        # Texts outside and inside of tags by turns, with a tag after each but the last.
        pieces = re.split(rf"(</?(?:{'|'.join(self.tags)})>)", text)
        wanted = [mark for name in self.tags for mark in (f"<{name}>", f"</{name}>")]
        return float(pieces[1::2] == wanted and not "".join(pieces[::4]).strip())
