"""The process of one verifier worker: a pool of killable processes and the loop that feeds it.

Held-out completions have a pool of their own where the recipe names another verifier for them: a run that learns from
a learned reward is judged by a real one.
"""

import asyncio
from collections import Counter
from typing import Any

from areal_lite.actors.process import log_to_file
from areal_lite.config import Config
from areal_lite.events import Event, EventBuffer
from areal_lite.sample_queue.client import AsyncQueueClient
from areal_lite.types import Prompt, Score
from areal_lite.verify.pool import VerifierPool
from areal_lite.verify.worker import VerifierWorker

__all__ = ["VerifierActor"]


class VerifierActor:
    """Delegates to `VerifierPool` and `VerifierWorker`."""

    def __init__(self, config: Config, *, name: str, endpoint: str, log_folder: str) -> None:
        self._begin(config, name=name, endpoint=endpoint, log_folder=log_folder)

    async def begin(self, config: Config, *, name: str, endpoint: str, log_folder: str) -> None:
        """Serve a run; nothing starts yet."""
        self._begin(config, name=name, endpoint=endpoint, log_folder=log_folder)

    def _begin(self, config: Config, *, name: str, endpoint: str, log_folder: str) -> None:
        log_to_file(log_folder, name)
        self._config, self._name, self._endpoint = config, name, endpoint
        self._events = EventBuffer(name)

    async def start(self) -> None:
        """Start the pool; a verifier that cannot be loaded fails here."""
        verifier = self._config.verifier
        self._pool = self._make_pool(verifier.function, arguments=verifier.arguments)
        self._eval_pool = self._pool
        if verifier.eval_function is not None:
            self._eval_pool = self._make_pool(verifier.eval_function, arguments={})
            await self._eval_pool.start()
        await self._pool.start()
        self._client = AsyncQueueClient(self._endpoint, timeout_s=self._config.queue.lease_timeout_s)
        self._worker = VerifierWorker(
            self._client,
            self._pool,
            name=self._name,
            events=self._events,
            lease_limit=4 * verifier.processes,
            heartbeat_s=self._config.queue.lease_timeout_s / 5,
        )

    def _make_pool(self, function: str, *, arguments: dict[str, Any]) -> VerifierPool:
        verifier = self._config.verifier
        return VerifierPool(
            function,
            processes=verifier.processes,
            timeout_s=verifier.timeout_s,
            start_timeout_s=self._config.run.start_timeout_s,
            arguments=arguments,
        )

    async def run(self) -> None:
        """Serve until `release`; raises what ended the worker."""
        await self._worker.run()

    async def release(self) -> None:
        """End `run` and every process of the pool."""
        await self._worker.stop()
        await self._pool.close()
        await self._eval_pool.close()
        self._client.close()

    async def score(self, prompts: list[Prompt], completions: list[str]) -> list[Score]:
        """Score evaluation completions, one per prompt, with the evaluation's own verifier if there is one."""
        pairs = zip(prompts, completions, strict=True)
        return [score for (score,) in await asyncio.gather(*(self._eval_pool.score(p, [text]) for p, text in pairs))]

    async def collect(self) -> tuple[list[Event], dict[str, Any]]:
        """Events since the last call, and figures of this moment."""
        pools = {id(pool): pool for pool in (self._pool, self._eval_pool)}.values()
        gauges = [pool.gauges() for pool in pools]
        failures = sum((Counter(gauge["failures"]) for gauge in gauges), Counter[str]())
        # Whoever watches for stalls must see an evaluation's calls too.
        calls = sum(gauge["calls"] for gauge in gauges)
        return self._events.drain(), gauges[0] | {"calls": calls, "failures": dict(failures)}
