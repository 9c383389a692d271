"""Workflows of the integration tests, named in recipes by file and function."""

import asyncio
from collections.abc import Mapping
from typing import Any

from areal_lite.rollout.episode import EpisodeEngine, Turn


async def straggles(engine: EpisodeEngine, row: Mapping[str, Any]) -> list[Turn]:
    """Generate at once; a row with `straggles` goes on, bit by bit, until its weights are two versions newer.

    Where its room ends first, at 8 tokens in 0.2 s or more, so does it.
    """
    if "straggles" not in row:
        return [await engine.generate(engine.prompt_ids)]
    turns: list[Turn] = []
    context = list(engine.prompt_ids)
    while engine.room > 8:
        turns.append(turn := await engine.generate(context, max_new_tokens=8, ignore_end=True))
        if turn.spans[-1].version >= turns[0].spans[0].version + 2:
            break
        context += turn.token_ids.tolist()
        await asyncio.sleep(0.2)
    return turns


async def thinks(engine: EpisodeEngine, row: Mapping[str, Any]) -> list[Turn]:
    """Generate after half a second, so that training waits for batches, on a machine of any speed."""
    await asyncio.sleep(0.5)
    return [await engine.generate(engine.prompt_ids)]
