"""Tasks before they are tokenised, made of rows."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_lite.config.data import REFERENCES, RESERVED_COLUMNS
from areal_lite.data.encode import chat_messages
from areal_lite.errors import WireError
from areal_lite.wire import decode, encode

_OPTIONAL_COLUMNS = ("verifier", "workflow", "max_new_tokens")
"""Columns with a meaning of their own; an empty cell, such as tables have, is no word at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt before it is tokenised.

    Example: `Task(origin="train.jsonl:17", prompt="7+25=?", answer="32", row={"level": 2})`
    """

    origin: str
    """Where it came from, for messages."""
    prompt: str
    """Text of the prompt column; empty where it holds messages."""
    answer: str
    """Text of the answer column."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """A chat that the model is to continue, in place of a text."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The other columns."""
    demonstration: Sequence[Mapping[str, str]] | str | None = None
    """A worked completion; or the turns of an episode as `{"role": "assistant" or "environment", "content": ...}`."""


def make_task(
    row: Mapping[str, Any], *, origin: str, prompt_column: str, answer_column: str, demonstration: Any = None
) -> Task:
    """Take a row of a file apart.

    Args:
        origin: Names the row in messages.
        prompt_column: Column with the prompt, a non-empty text or a list of chat messages.
        answer_column: Column with the reference answer, a text or a number, or with a list of them, of which each is
            right: the first is the answer, and all are in the column `REFERENCES`.

    Raises:
        ValueError: The row is none of the kind, or holds what cannot travel between processes.
    """
    prompt, answer = (row.get(column) for column in (prompt_column, answer_column))
    try:
        messages, text = (tuple(chat_messages(prompt)), "") if isinstance(prompt, list) else ((), prompt)
    except ValueError as error:
        raise ValueError(f"column {prompt_column!r}: {error}") from error
    if not isinstance(text, str) or not (messages or text.strip()):
        raise ValueError(
            f"column {prompt_column!r} must hold a non-empty text or a list of messages, got {prompt!r:.60}"
        )
    answers = answer if isinstance(answer, list) else [answer]
    if not answers or not all(isinstance(one, str | int) or _is_finite(one) for one in answers):
        raise ValueError(
            f"column {answer_column!r} must hold a text or a finite number, or some in a list, got {answer!r:.60}"
        )
    references = list(map(str, answers))
    others = {
        name: value
        for name, value in row.items()
        if name not in (prompt_column, answer_column) and not (value is None and name in _OPTIONAL_COLUMNS)
    }
    if clash := [name for name in RESERVED_COLUMNS if name in others]:
        raise ValueError(
            f"column {clash[0]!r} has the name of a verifier argument: rename it with data.columns, or make it "
            "data.prompt_column or data.answer_column"
        )
    if isinstance(answer, list):
        others[REFERENCES] = references
    for name, value in {prompt_column: prompt, answer_column: references, **others}.items():  # now, not amid a run
        try:
            kept = decode(encode({name: value}))[name]
            json.dumps(kept)  # neither bytes nor arrays: samples.jsonl could not hold them
        except (WireError, TypeError) as error:
            raise ValueError(
                f"column {name!r} holds what cannot travel between processes, {value!r:.60} "
                f"({error.__cause__ or error}): make it text, numbers, or lists and mappings of them, or remove it"
            ) from error
        if name in others:
            others[name] = kept  # a number of numpy's is one of Python's, wherever the row is used
    return Task(
        origin=origin, prompt=text, messages=messages, answer=references[0], row=others, demonstration=demonstration
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
