"""Shared by both games: rows of two splits without a common prompt, and the model's own turns."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

Split = Literal["train", "eval"]
Row = dict[str, Any]
Message = Mapping[str, str]

_DRAWS_PER_ROW = 100


def split_rows(
    draw: Callable[[random.Random], Row | None], split: Split, *, stream: str, train_size: int, eval_size: int
) -> list[Row]:
    """Draw the rows of a split, the same ones every time. Held-out rows differ; training rows may repeat.

    Args:
        draw: Makes one row, or none of this chance.
        split: No question of `eval` is in `train`.
        stream: Names the game and its seed.
        train_size: Rows of `train`.
        eval_size: Rows of `eval`.

    Raises:
        ValueError: There are too few different ones.
    """

    def draws(name: str, count: int) -> Iterator[Row]:
        # A text seed is hashed with SHA-512: the same rows on every machine and Python version. Not for ever, as there
        # may be few different ones.
        rng = random.Random(f"{stream}/{name}")
        return (row for _ in range(count * _DRAWS_PER_ROW) if (row := draw(rng)) is not None)

    held_out: dict[str, Row] = {}
    for row in draws("eval", eval_size):
        held_out.setdefault(row["question"], row)
        if len(held_out) == eval_size:
            break
    training = list(islice((row for row in draws("train", train_size) if row["question"] not in held_out), train_size))
    if len(held_out) < eval_size or (split == "train" and len(training) < train_size):
        raise ValueError(
            f"{eval_size} different held-out games and others to train on are needed, got too few. Fix: allow more "
            "different games, or lower eval_size"
        )
    return list(held_out.values()) if split == "eval" else training


def answers_of(messages: Sequence[Message]) -> list[str]:
    """Return the model's own turns; no other role's text counts."""
    return [message["content"] for message in messages if message["role"] == "assistant"]
