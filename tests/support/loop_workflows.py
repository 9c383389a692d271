"""Workflows of the integration tests, named in recipes by file and function."""

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
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


async def held_up(engine: EpisodeEngine, row: Mapping[str, Any]) -> list[Turn]:
    """Generate once the folder `gate` of the row is gone, and leave a file in it meanwhile."""
    while (gate := Path(row.get("gate", "none"))).exists():
        with contextlib.suppress(FileNotFoundError):
            (gate / "waits").touch()
        await asyncio.sleep(0.1)
    return [await engine.generate(engine.prompt_ids)]
