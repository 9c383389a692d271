"""Tasks of the recipe `smollm_cpu`: the largest of a few two-digit numbers."""

import math
import random
from typing import Any

from areal_lite.config.data import Split
from areal_lite.errors import ConfigError

_NUMBERS = range(10, 100)
# The largest stands in the middle: after an example with it at the end the model only ever names the last number.
_EXAMPLE = [
    {"role": "system", "content": "Name the largest number."},
    {"role": "user", "content": "41, 90, 17"},
    {"role": "assistant", "content": "90"},
]


def largest(
    split: Split, *, count: int = 3, train_size: int = 4096, eval_size: int = 200, seed: int = 0
) -> list[dict[str, Any]]:
    """Make the rows of a split: chats with one worked example, after which the model names the largest number.

    All questions differ, so that none held out is trained on.

    Args:
        count: Numbers in a question, all different.
        seed: Of both splits.

    Raises:
        ConfigError: There are too few different questions.

    >>> row = largest("eval")[0]
    >>> row["question"][-1], row["answer"]
    ({'role': 'user', 'content': '59, 63, 15'}, '63')
    """
    if not 1 <= count <= len(_NUMBERS):
        raise ConfigError(f"data.arguments.count must be 1 to {len(_NUMBERS)}, got {count}. Fix: correct it")
    if (most := math.perm(len(_NUMBERS), count)) < eval_size + train_size:
        raise ConfigError(
            f"data.arguments must allow {eval_size} held-out questions and {train_size} others, got count={count}, of "
            f"which there are {most}: raise count, or lower train_size or eval_size"
        )
    rng, questions = random.Random(seed), dict[tuple[int, ...], None]()
    while len(questions) < eval_size + train_size:
        questions[tuple(rng.sample(_NUMBERS, count))] = None
    chosen = list(questions)[:eval_size] if split == "eval" else list(questions)[eval_size:]
    return [
        {
            "question": [*_EXAMPLE, {"role": "user", "content": ", ".join(map(str, numbers))}],
            "answer": str(max(numbers)),
        }
        for numbers in chosen
    ]
