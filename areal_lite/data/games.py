"""The built-in tasks of several turns: guessing a number, and walking through a maze.

Each is a list of tasks and a step function `step(messages, row) -> (reply, done)` that knows nothing but its arguments:
it plays the whole game again from the model's words. Called by the data sources, by the workflows of the same names
(`rollout/games.py`), and, for the rules, by the verifiers of the same names (`verify/builtin/games.py`).

The prompts are short enough for a tiny model of single characters; `data.template` can tell a larger one the rules.
"""

import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from areal_lite.config.sections import GridworldConfig, GuessConfig
from areal_lite.data.maze import MOVES, Maze, draw_maze, read_maze
from areal_lite.data.prompts import Task
from areal_lite.errors import ConfigError

__all__ = [
    "answers_of",
    "gridworld_step",
    "gridworld_tasks",
    "guess_number_step",
    "guess_number_tasks",
    "read_guess",
    "read_move",
]

_DRAWS_PER_TASK = 100

Split = Literal["train", "eval"]
Message = Mapping[str, str]


def guess_number_tasks(settings: GuessConfig, split: Split) -> list[Task]:
    """Make the games of a split, the same ones for the same settings; no range of `eval` occurs in `train`.

    The prompt `17-63?` names a range within 1 to `max_number`, of at least two numbers; the number is `answer`, which
    the model never sees. The demonstration halves the range with each guess.

    Raises:
        ConfigError: The settings allow too few different ranges.
    """

    def draw(rng: random.Random) -> Task:
        low, high = sorted(rng.sample(range(1, settings.max_number + 1), 2))
        number = rng.randint(low, high)
        row = {"low": low, "high": high, "max_turns": settings.max_turns}
        shown = _bisection(low, high, number, max_turns=settings.max_turns)
        return Task(origin="guess_number", prompt=f"{low}-{high}?", answer=str(number), row=row, demonstration=shown)

    stream = f"guess_number/{settings.seed}"
    return _split(
        draw,
        split,
        stream=stream,
        train_size=settings.train_size,
        eval_size=settings.eval_size,
        remedy=f"guess_number.max_number={settings.max_number}: raise it",
    )


def guess_number_step(messages: Sequence[Message], row: Mapping[str, Any]) -> tuple[str, bool]:
    """Answer the last guess: `<` where the number is smaller, `>` where it is larger, `?` to what is no number.

    Args:
        messages: The turns so far.
        row: With `answer`, the number.

    Returns:
        The reply, and whether the game is over, because the guess was right.
    """
    guess, number = read_guess(answers_of(messages)[-1]), int(row["answer"])
    if guess is None:
        return "?", False
    return ("=", True) if guess == number else ("<" if number < guess else ">", False)


def gridworld_tasks(settings: GridworldConfig, split: Split) -> list[Task]:
    """Make the mazes of a split, the same ones for the same settings; no maze of `eval` occurs in `train`.

    The prompt is the maze with a `?` behind it (see `maze.py`), its goal within `max_turns` moves. `answer` and
    demonstration are a shortest way.

    Raises:
        ConfigError: The settings allow too few different mazes.
    """
    walls = min(settings.walls, settings.size**2 - 2)

    def draw(rng: random.Random) -> Task | None:
        maze = draw_maze(rng, size=settings.size, walls=walls)
        if not 0 < maze.distances().get(maze.find("S"), 0) <= settings.max_turns:
            return None
        way = maze.shortest_way()
        row = {"maze": str(maze), "max_turns": settings.max_turns}
        return Task(origin="gridworld", prompt=f"{maze}?", answer=way, row=row, demonstration=_walk(maze, way))

    return _split(
        draw,
        split,
        stream=f"gridworld/{settings.seed}",
        train_size=settings.train_size,
        eval_size=settings.eval_size,
        remedy=f"gridworld.size={settings.size}, walls={settings.walls} and max_turns={settings.max_turns}: raise size "
        "or max_turns, or lower walls",
    )


def gridworld_step(messages: Sequence[Message], row: Mapping[str, Any]) -> tuple[str, bool]:
    """Make the last move, and tell what is in the cell that it goes to; `?` to what is no move.

    Args:
        messages: The turns so far; every move of the model's is made again.
        row: With `maze`.

    Returns:
        `.`, `S` or `G` for the cell walked to, `#` for a wall, which holds the walker; and whether the goal is reached.
    """
    maze = read_maze(row["maze"])
    cell, seen = maze.find("S"), "?"
    for answer in answers_of(messages):
        move = read_move(answer)
        cell, seen = (cell, "?") if move is None else maze.step(cell, move)
    return seen, seen == "G"


def answers_of(messages: Sequence[Message]) -> list[str]:
    """Return what the model said, turn by turn. Nobody else's words count for anything."""
    return [message["content"] for message in messages if message["role"] == "assistant"]


def read_guess(text: str) -> int | None:
    """Return the last whole number of a turn; None where there is none of at most nine digits."""
    numbers = re.findall("[0-9]+", text)
    return int(numbers[-1]) if numbers and len(numbers[-1]) < 10 else None


def read_move(text: str) -> str | None:
    """Return the last of the capital letters U, D, L and R in a turn; None where there is none."""
    return next((character for character in reversed(text) if character in MOVES), None)


def _bisection(low: int, high: int, number: int, *, max_turns: int) -> tuple[Message, ...]:
    turns: list[Message] = []
    for _ in range(max_turns):
        guess = (low + high) // 2
        turns.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            break
        low, high = (low, guess - 1) if number < guess else (guess + 1, high)
        turns.append({"role": "environment", "content": "<" if number < guess else ">"})
    return tuple(turns)


def _walk(maze: Maze, way: str) -> tuple[Message, ...]:
    turns: list[Message] = []
    cell = maze.find("S")
    for move in way:
        cell, seen = maze.step(cell, move)
        turns += [{"role": "assistant", "content": move}, {"role": "environment", "content": seen}]
    return tuple(turns[:-1])


def _split(
    draw: Callable[[random.Random], Task | None],
    split: Split,
    *,
    stream: str,
    train_size: int,
    eval_size: int,
    remedy: str,
) -> list[Task]:
    """Draw tasks: held-out ones differ from each other, and their prompts are no training ones, which may repeat."""

    def draws(name: str, count: int) -> Iterator[Task]:
        # A text seed is hashed with SHA-512: the same tasks on every machine and Python version. Not for ever, as
        # settings may allow only few.
        rng = random.Random(f"{stream}/{name}")
        return (task for _ in range(count * _DRAWS_PER_TASK) if (task := draw(rng)) is not None)

    held_out: dict[str, Task] = {}
    for task in draws("eval", eval_size):
        held_out.setdefault(task.prompt, task)
        if len(held_out) == eval_size:
            break
    training = (task for task in draws("train", train_size) if task.prompt not in held_out)
    tasks = list(held_out.values()) if split == "eval" else list(itertools.islice(training, train_size))
    if len(held_out) < eval_size or len(tasks) < (eval_size if split == "eval" else train_size):
        raise ConfigError(
            f"{eval_size} different held-out games and others to train on are needed, got too few with {remedy}, or "
            "lower eval_size"
        )
    return [replace(task, origin=f"{task.origin} {split} game {index}") for index, task in enumerate(tasks)]
