"""A verifier pool that runs for the length of a block or for some batches, and prompts for it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from areal_lite.config.verifier import VerifierSettings
from areal_lite.types import Prompt
from areal_lite.verify.pool import VerifierPool
from areal_lite.verify.protocol import Reply


@asynccontextmanager
async def running_pool(function: str, *, within_s: float, **options: Any) -> AsyncIterator[VerifierPool]:
    """Start a pool that never gives its verifier up, and close it; `within_s` only bounds how long a failure hangs."""
    settings = VerifierSettings(function=function, **{"max_failure_share": 1.0} | options)
    pool = VerifierPool(settings, start_timeout_s=60.0)
    async with asyncio.timeout(within_s):
        try:
            await pool.start()
            yield pool
        finally:
            await pool.close()


def make_prompt(answer: object = "a", *, text: str = "p", **row: Any) -> Prompt:
    return Prompt(prompt_id="train/0/0", text=text, token_ids=(1,), answer=str(answer), row=row)


def replies_of(
    function: str, *batches: Sequence[str], prompt: Prompt | None = None, **options: Any
) -> tuple[list[Reply], dict[str, Any]]:
    """Score completions in one pool, one batch after another; returns the gauges of the end too."""

    async def run() -> tuple[list[Reply], dict[str, Any]]:
        async with running_pool(function, within_s=120.0, **options) as pool:
            replies = [reply for batch in batches for reply in await pool.score(prompt or make_prompt(), batch)]
            return replies, pool.gauges()

    return asyncio.run(run())
