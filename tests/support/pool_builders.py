"""A verifier pool that runs for the length of a block."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from areal_lite.config.verifier import VerifierSettings
from areal_lite.verify.pool import VerifierPool


@asynccontextmanager
async def running_pool(
    function: str, *, within_s: float, start_timeout_s: float = 60.0, **options: Any
) -> AsyncIterator[VerifierPool]:
    """Start a pool that never gives its verifier up, and close it; `within_s` only bounds how long a failure hangs."""
    settings = VerifierSettings(function=function, **{"max_failure_share": 1.0} | options)
    pool = VerifierPool(settings, start_timeout_s=start_timeout_s)
    async with asyncio.timeout(within_s):
        try:
            await pool.start()
            yield pool
        finally:
            await pool.close()
