"""Verifiers of the built-in games. They play the game again from the model's own words, and believe nothing else.

The environment's replies in a transcript are not read: whoever writes "you won" has won nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.data.games import answers_of, read_guess, read_move
from areal_lite.data.maze import Maze, read_maze
from areal_lite.verify.result import VerifyResult

__all__ = ["gridworld", "guess_number", "optimal_return"]

Messages = Sequence[Mapping[str, str]]


def guess_number(
    prompt: str,
    completion: str,
    answer: str,
    *,
    max_turns: int,
    messages: Messages | None = None,
    discount: float = 0.9,
    **row: Any,
) -> VerifyResult:
    """Score a game: `discount ** (k - 1)` where guess `k` was the first right one, 0 where none of `max_turns` was.

    Args:
        prompt: Not read.
        completion: Read as the only turn where there are no messages.
        answer: The number.
        max_turns: Guesses that count, from the row.
        messages: The turns.
        discount: What a further guess leaves of the reward, 0..1.
        row: Not read.
    """
    guesses = [read_guess(text) for text in _turns(messages, completion)[:max_turns]]
    number = int(answer)
    if number not in guesses:
        return VerifyResult(0.0, parts={"found": 0.0}, metrics={"guesses": len(guesses)})
    needed = guesses.index(number) + 1
    return VerifyResult(discount ** (needed - 1), parts={"found": 1.0}, metrics={"guesses": needed})


def gridworld(
    prompt: str,
    completion: str,
    answer: str,
    *,
    maze: str,
    max_turns: int,
    messages: Messages | None = None,
    move_cost: float = 0.02,
    **row: Any,
) -> VerifyResult:
    """Score a walk: 1 for reaching the goal, and `-move_cost` where each turn ends, as a step reward.

    Turns without a move and bumps into walls cost as much as others. Reward and step rewards together are the walk's
    return; the metric `of_optimum` is that return over the largest there is, 1 for a shortest way.

    Args:
        prompt: Not read.
        completion: The text of the whole episode: step rewards count its characters.
        answer: Not read; the optimum is computed from the maze.
        maze: The maze, from the row.
        max_turns: Turns that count, from the row.
        messages: The turns.
        move_cost: Of one turn, in units of the goal's reward.
        row: Not read.

    Raises:
        ValueError: The maze is none, or even a shortest way costs as much as the goal pays.
    """
    world = read_maze(maze)
    optimum = optimal_return(world, move_cost=move_cost, max_turns=max_turns)
    if optimum <= 0:
        raise ValueError(f"move_cost must leave a way to the goal worth walking, got {move_cost} in {maze}: lower it")
    turns = _turns(messages, completion)[:max_turns]
    needed = _moves_to_goal(world, turns)
    goal, spent = float(needed is not None), turns[:needed]
    ends = _ends_of_turns(messages, completion)[: len(spent)] if completion else []
    return VerifyResult(
        goal - move_cost * (len(spent) - len(ends)),  # turns that all were empty have no character to end at
        parts={"goal": goal, "moves": -move_cost * len(spent)},
        step_rewards=[(end, -move_cost) for end in ends],
        metrics={"moves": len(spent), "of_optimum": (goal - move_cost * len(spent)) / optimum},
    )


def optimal_return(maze: Maze, *, move_cost: float, max_turns: int) -> float:
    """Return the largest return of a walk: `1 - move_cost * d` for the shortest way `d`, if that is short enough.

    Args:
        maze: The maze.
        move_cost: Of one turn, above 0.
        max_turns: Turns after which the walk ends; every one that does not reach the goal is spent.
    """
    distance = maze.distances().get(maze.find("S"))
    if distance is None or distance > max_turns:
        return -move_cost * max_turns
    return 1.0 - move_cost * distance


def _moves_to_goal(maze: Maze, turns: Sequence[str]) -> int | None:
    cell = maze.find("S")
    for number, text in enumerate(turns, start=1):
        if (move := read_move(text)) is None:
            continue
        cell, seen = maze.step(cell, move)
        if seen == "G":
            return number
    return None


def _turns(messages: Messages | None, completion: str) -> list[str]:
    return [completion] if messages is None else answers_of(messages)


def _ends_of_turns(messages: Messages | None, completion: str) -> list[int]:
    """Return the character behind each turn of the model's, by finding the turns in the text one after another.

    A chat template's words lie in between. An empty turn ends where the one before did, but never before the first
    character.
    """
    if messages is None:
        return [len(completion)]
    ends, position = [], 0
    for message in messages:
        found = completion.find(message["content"], position)
        position = (position if found < 0 else found) + len(message["content"])
        if message["role"] == "assistant":
            ends.append(min(max(position, 1), len(completion)))
    return ends
