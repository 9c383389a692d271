"""The process of one verifier worker: pools of killable processes and the loop that feeds them.

Held-out completions have a pool of their own where the recipe names another verifier for them: a run that learns from
a learned reward is judged by a real one.
"""

import asyncio
from typing import Any

from areal_lite.actors.process import MeasuredProcess, log_to_file
from areal_lite.config.recipe import Config
from areal_lite.events import Event, EventBuffer
from areal_lite.sample_queue.access import QueueAccess
from areal_lite.sample_queue.client import AsyncQueueClient
from areal_lite.types import Prompt, Sample
from areal_lite.verify.protocol import Reply
from areal_lite.verify.verifier_set import VerifierSet
from areal_lite.verify.worker import VerifierWorker, decoder_of


class VerifierActor(MeasuredProcess):
    """Delegates to `VerifierSet` and `VerifierWorker`."""

    def __init__(self, config: Config, *, name: str, access: QueueAccess, log_folder: str, model_folder: str) -> None:
        log_to_file(log_folder, name, environment=config.run.env)
        self._config, self._access = config, access
        self._decode = decoder_of(model_folder, skip_special_tokens=config.verifier.skip_special_tokens)
        self._events = EventBuffer(name)

    async def start(self) -> None:
        """Start the pools; a verifier that cannot be loaded fails here."""
        config = self._config
        self._verifiers = VerifierSet(
            config.verifier, watch=config.reward_watch, also=config.data.chosen_verifiers, run=config.run
        )
        await self._verifiers.start()
        self._make_worker(self._access)

    async def reconnect(self, access: QueueAccess) -> tuple[int, int]:
        """Connect to the queue that replaced a dead one; see the worker's `reconnect`."""
        return await self._worker.reconnect(access)

    async def move_to(self, access: QueueAccess) -> None:
        """Drop all work for a dead queue and connect to another; then call `run`."""
        await self._worker.stop()
        self._client.close()
        self._make_worker(access)

    def _make_worker(self, access: QueueAccess) -> None:
        self._client = AsyncQueueClient(access, timeout_s=self._config.queue.lease_timeout_s)
        self._worker = VerifierWorker(
            self._client,
            self._verifiers,
            events=self._events,
            decode=self._decode,
            heartbeat_s=self._config.queue.lease_timeout_s / 5,
        )

    async def run(self) -> None:
        """Serve until `stop`; raises the error that ended the worker."""
        await self._worker.run()

    async def stop(self) -> None:
        """End `run` and every process of the pool."""
        await self._worker.stop()
        await self._verifiers.close()
        self._client.close()

    async def score(self, prompts: list[Prompt], samples: list[Sample | None]) -> list[Reply]:
        """Score held-out completions, one per prompt, with the evaluation's own verifier if there is one."""
        return await asyncio.gather(*map(self._verifiers.judge, prompts, samples))

    async def collect(self) -> tuple[list[Event], dict[str, Any]]:
        """Return the events since the last call, and the current gauges."""
        return self._events.drain(), self._verifiers.gauges()
