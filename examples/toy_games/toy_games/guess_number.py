"""Guessing a number: `17-63?` names a range, and each guess is answered with `<`, `>` or `?`.

The prompt is short enough for a tiny model of single characters; `data.template` can tell a larger one the rules.
"""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.rollout.episode import EpisodeEngine, Turn
from areal_lite.rollout.workflows import multi_turn
from areal_lite.verify.result import VerifyResult
from toy_games.rounds import Message, Row, Split, answers_of, split_rows


def rows(
    split: Split,
    *,
    max_number: int = 99,
    max_turns: int = 8,
    train_size: int = 2048,
    eval_size: int = 64,
    seed: int = 0,
) -> list[Row]:
    """Make the games of a split, the same ones for the same arguments; no range of `eval` occurs in `train`.

    The number, which the model never sees, is `answer`. The demonstration halves the range with each guess.

    Args:
        split: `train` or `eval`.
        max_number: Numbers are 1 to this.
        max_turns: Guesses allowed.
        train_size: Training games.
        eval_size: Held-out games.
        seed: Of both splits.

    Raises:
        ValueError: There are too few different ranges.
    """

    def draw(rng: random.Random) -> Row:
        low, high = sorted(rng.sample(range(1, max_number + 1), 2))
        number = rng.randint(low, high)
        return {
            "question": f"{low}-{high}?",
            "answer": str(number),
            "low": low,
            "high": high,
            "max_turns": max_turns,
            "workflow": "guess_number",
            "demonstration": _bisection(low, high, number, max_turns=max_turns),
        }

    return split_rows(draw, split, stream=f"guess_number/{seed}", train_size=train_size, eval_size=eval_size)


async def play(engine: EpisodeEngine, row: Mapping[str, Any]) -> list[Turn]:
    """Play a game, `row["max_turns"]` guesses at most."""
    return await multi_turn(engine, row, step=step, max_turns=row["max_turns"])


# Async, so that a step of microseconds needs no thread.
async def step(messages: Sequence[Message], row: Mapping[str, Any]) -> tuple[str, bool]:
    """Answer the last guess: `<` where the number is smaller, `>` where it is larger, `?` to what is no number.

    Returns:
        The reply, and whether the game is over, because the guess was right.
    """
    guess, number = read_guess(answers_of(messages)[-1]), int(row["answer"])
    if guess is None:
        return "?", False
    return ("=", True) if guess == number else ("<" if number < guess else ">", False)


def score(
    prompt: str,
    completion: str,
    answer: str,
    *,
    max_turns: int,
    messages: Sequence[Message] | None = None,
    discount: float = 0.9,
    **row: Any,
) -> VerifyResult:
    """Score a game: `discount ** (k - 1)` where guess `k` was the first right one, 0 where none of `max_turns` was.

    The environment's replies are not read: a model that writes "you won" has won nothing.

    Args:
        prompt: Not read.
        completion: Read as the only turn if there are no messages.
        answer: The number.
        max_turns: Guesses that count, from the row.
        messages: The turns.
        discount: Factor of the reward for each further guess, 0..1.
        row: Not read.
    """
    turns = [completion] if messages is None else answers_of(messages)
    guesses = [read_guess(text) for text in turns[:max_turns]]
    number = int(answer)
    if number not in guesses:
        return VerifyResult(0.0, parts={"found": 0.0}, metrics={"guesses": len(guesses)})
    needed = guesses.index(number) + 1
    return VerifyResult(discount ** (needed - 1), parts={"found": 1.0}, metrics={"guesses": needed})


def read_guess(text: str) -> int | None:
    """Return the last whole number of a turn; None where there is none of at most nine digits."""
    numbers = re.findall("[0-9]+", text)
    return int(numbers[-1]) if numbers and len(numbers[-1]) < 10 else None


def _bisection(low: int, high: int, number: int, *, max_turns: int) -> list[Message]:
    turns: list[Message] = []
    for _ in range(max_turns):
        guess = (low + high) // 2
        turns.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            break
        low, high = (low, guess - 1) if number < guess else (guess + 1, high)
        turns.append({"role": "environment", "content": "<" if number < guess else ">"})
    return turns
