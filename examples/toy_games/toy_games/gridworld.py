"""Walking through a maze one move a turn: the prompt is the maze (see `maze.py`) with a `?` behind it."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.rollout.episode import EpisodeEngine, Turn
from areal_lite.rollout.workflows import multi_turn
from areal_lite.verify.result import VerifyResult
from toy_games.maze import MOVES, Maze, draw_maze, read_maze
from toy_games.rounds import Message, Row, Split, answers_of, split_rows


def rows(
    split: Split,
    *,
    size: int = 4,
    walls: int = 3,
    max_turns: int = 12,
    train_size: int = 2048,
    eval_size: int = 64,
    seed: int = 0,
) -> list[Row]:
    """Make the tasks of a split, the same ones for the same arguments; no maze of `eval` occurs in `train`.

    The goal lies within `max_turns` moves. `answer` and demonstration are a shortest way.

    Args:
        split: `train` or `eval`.
        size: Rows and columns.
        walls: Blocked cells; the goal stays reachable.
        max_turns: Moves allowed.
        train_size: Training mazes.
        eval_size: Held-out mazes.
        seed: Of both splits.

    Raises:
        ValueError: There are too few different mazes.
    """

    def draw(rng: random.Random) -> Row | None:
        maze = draw_maze(rng, size=size, walls=min(walls, size**2 - 2))
        if not 0 < maze.distances().get(maze.find("S"), 0) <= max_turns:
            return None
        way = maze.shortest_way()
        return {
            "question": f"{maze}?",
            "answer": way,
            "maze": str(maze),
            "max_turns": max_turns,
            "workflow": "gridworld",
            "demonstration": _turns_of(maze, way),
        }

    return split_rows(draw, split, stream=f"gridworld/{seed}", train_size=train_size, eval_size=eval_size)


async def walk(engine: EpisodeEngine, row: Mapping[str, Any]) -> list[Turn]:
    """Walk through a maze, `row["max_turns"]` moves at most."""
    return await multi_turn(engine, row, step=step, max_turns=row["max_turns"])


async def step(messages: Sequence[Message], row: Mapping[str, Any]) -> tuple[str, bool]:
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


def read_move(text: str) -> str | None:
    """Return the last of the capital letters U, D, L and R in a turn; None where there is none."""
    return next((character for character in reversed(text) if character in MOVES), None)


def score(
    prompt: str,
    completion: str,
    answer: str,
    *,
    maze: str,
    max_turns: int,
    messages: Sequence[Message] | None = None,
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
    turns = ([completion] if messages is None else answers_of(messages))[:max_turns]
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


def _ends_of_turns(messages: Sequence[Message] | None, completion: str) -> list[int]:
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


def _turns_of(maze: Maze, way: str) -> list[Message]:
    turns: list[Message] = []
    cell = maze.find("S")
    for move in way:
        cell, seen = maze.step(cell, move)
        turns += [{"role": "assistant", "content": move}, {"role": "environment", "content": seen}]
    return turns[:-1]
