"""The processes of a run with one engine that plain requests can fill too, for `bench_rollout` and `bench_handover`.

Nothing trains: the trainer ranks only publish.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from areal_lite.actors.calls import result
from areal_lite.actors.rollout import RolloutActor
from areal_lite.config.recipe import Config
from areal_lite.data.prompts import load_sources
from areal_lite.events import Event, EventBuffer
from areal_lite.launch.run.cluster import Cluster
from areal_lite.launch.run.places import places_for
from areal_lite.rollout.engine import Interrupt, Sampling
from areal_lite.rollout.runner import load_workflows
from areal_lite.rollout.vllm_engine import request_params
from areal_lite.weights.handover import hand_over

_LANE = "rollout/0"
MakeRequests = Callable[[Config, Any], Iterator[tuple[list[int], Sampling]]]
"""From the recipe and the engine's tokenizer to prompts and samplings, without end."""


@contextmanager
def one_engine(config: Config, *, model_folder: Path, logs: Path) -> Iterator["OneEngine"]:
    """Start the processes of a run, and stop them at the end of the block; needs a `ray_session`."""
    logs = logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    prompts = load_sources(config, AutoTokenizer.from_pretrained(model_folder), "train")
    kept: dict[str, Any] = {"queue_state": None, "prompts": prompts, "rollout_actor": _Rollout}
    with places_for(config, logs=logs, report=lambda _: None) as places:
        cluster = Cluster(places, model_folder=model_folder, **kept)
        try:
            cluster.start(checkpoint=None, on_progress=lambda _: None)
            yield OneEngine(config, cluster)
        finally:
            cluster.stop()


class OneEngine:
    """The engine and what surrounds it."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        self._config, self.cluster, self._actor = config, cluster, cluster.engines.handles[_LANE]

    def ask(self, method: str) -> Any:
        """Call a method of the rollout actor, and wait for its result."""
        return result(getattr(self._actor, method).remote())

    @contextmanager
    def filled(self, make_requests: MakeRequests, in_flight: int, *, alone: bool) -> Iterator[Any]:
        """Keep so many requests in flight (see `_Rollout.fill`); yield a reference that is ready when this fails."""
        filling = self._actor.fill.remote(make_requests, in_flight, alone=alone)
        yield filling
        self.ask("empty")
        result(filling)

    @contextmanager
    def serving_queue(self) -> Iterator[Any]:
        """Let a rollout worker fill the engine; yield a reference that is ready when this fails."""
        self.ask("begin_worker")
        serving = self._actor.run.remote()
        self.ask("resume")
        yield serving
        self.ask("end_worker")
        result(serving)
        self.cluster.queue.forget(worker=_LANE)

    def publish(self, *, version: int, interrupt: Interrupt, stamp_ledger: Callable[[], None]) -> list[Event]:
        """Publish the trainer's weights again, wait until the engine resumes, and return the hand-over's events."""
        events = EventBuffer("handover")
        hand_over(
            self.cluster.engines,
            publish=self.cluster.publish,
            staged=self._config.weights.staged,
            stamp_ledger=stamp_ledger,
            version=version,
            interrupt=interrupt,
            events=events,
        )
        self.cluster.engines.finish()
        return events.drain()


class _Rollout(RolloutActor):
    """A rollout actor with one worker after another, whose engine can also be filled without one."""

    async def count(self) -> tuple[int, float]:
        """Tokens so far, and seconds of this process's clock."""
        return self._engine.tokens_generated, time.monotonic()

    async def begin_worker(self) -> None:
        """Make another worker for the engine that is there."""
        self._make_worker(self._access, load_workflows(self._config))

    async def run(self) -> None:
        """Serve until `end_worker`."""
        self._serving = asyncio.ensure_future(super().run())
        await self._serving

    async def end_worker(self) -> None:
        """End `run` and every request; the engine stays, paused and empty."""
        await self._worker.stop()
        self._client.close()
        await self._until_resumed()
        await self._engine.reset()
        if hasattr(self, "_serving"):
            await asyncio.wait([self._serving])

    async def fill(self, make_requests: MakeRequests, in_flight: int, *, alone: bool) -> None:
        """Keep so many requests in flight until `empty`, and discard the results.

        A later call continues with the requests of the first. `alone`: vLLM is called directly, without our engine.
        """
        if not hasattr(self, "_requests"):
            self._requests = enumerate(make_requests(self._config, self._engine.tokenizer))
        await self._engine.resume()
        self._filling = asyncio.gather(*(self._one_in_flight(alone) for _ in range(in_flight)))
        with suppress(asyncio.CancelledError):
            await self._filling

    async def empty(self) -> None:
        """End `fill`; the engine stays, paused and empty."""
        self._filling.cancel()
        await self._engine.reset()

    async def _one_in_flight(self, alone: bool) -> None:
        for number, (prompt_ids, sampling) in self._requests:
            if not alone:
                await self._engine.generate(prompt_ids, sampling)
                continue
            prompt, settings = {"prompt_token_ids": prompt_ids}, request_params(sampling.fields)
            async for _ in self._engine._llm.generate(prompt, settings, f"alone-{number}"):
                pass
