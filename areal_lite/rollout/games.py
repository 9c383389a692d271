"""Workflows of the built-in games: `multi_turn` with their step functions, as long as the row allows."""

from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.data.games import gridworld_step, guess_number_step
from areal_lite.rollout.episode import EpisodeEngine, Turn
from areal_lite.rollout.workflows import multi_turn

__all__ = ["gridworld", "guess_number"]

Messages = Sequence[Mapping[str, str]]


async def guess_number(engine: EpisodeEngine, row: Mapping[str, Any]) -> list[Turn]:
    """Play a game of guessing a number (see `guess_number_step`), `row["max_turns"]` guesses at most."""
    return await multi_turn(engine, row, step=_guess, max_turns=row["max_turns"])


async def gridworld(engine: EpisodeEngine, row: Mapping[str, Any]) -> list[Turn]:
    """Walk through a maze (see `gridworld_step`), `row["max_turns"]` moves at most."""
    return await multi_turn(engine, row, step=_move, max_turns=row["max_turns"])


# Async, so that a step of microseconds needs no thread.
async def _guess(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
    return guess_number_step(messages, row)


async def _move(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
    return gridworld_step(messages, row)
