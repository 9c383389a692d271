"""The rollout worker's loop: keep one engine full, without a batch barrier.

Consumes leases of prompts from the sample queue, one whenever the engine has a free slot. Produces groups, each as soon
as its last sample ends, and heartbeats that name the leases held (`leases.py`). Waits for room, for the queue's answer,
and for the engine.
"""

import asyncio
import functools
import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from areal_lite.config.recipe import Config
from areal_lite.errors import EpisodeError
from areal_lite.events import EventBuffer, now
from areal_lite.leases import LeaseWorker
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.runner import Workflows, complete_greedily
from areal_lite.types import Lease, Prompt, Sample

if TYPE_CHECKING:
    from areal_lite.rollout.vllm_engine import VllmEngine
    from areal_lite.sample_queue.client import AsyncQueueClient

_LEASE_WAIT_S = 1.0
_OCCUPANCY_RESOLUTION_S = 0.005


def sample_seed(run_seed: int, group_id: str, sample_index: int, call: int = 0) -> int:
    """Return the seed of one request: with the same weights, it always draws the same tokens.

    Args:
        run_seed: `run.seed`.
        group_id: The attempt included.
        sample_index: 0..G-1.
        call: Number of the request in the sample's episode; 0 does not change the seed.
    """
    name = f"{run_seed}/{group_id}/{sample_index}" + (f"/{call}" if call else "")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


class RolloutWorker(LeaseWorker):
    """Leases prompts, generates groups, returns them.

    Every sample is an episode of its prompt's workflow, and takes a slot only while the engine works on it. While some
    wait for their environments, others are started, up to `max_episodes`. A sample that comes back and finds no slot
    waits in the engine; nothing is leased meanwhile.
    """

    def __init__(
        self,
        client: "AsyncQueueClient",
        engine: "VllmEngine",
        config: Config,
        *,
        events: EventBuffer,
        workflows: Workflows,
    ) -> None:
        """Take the name of the events' lane at the queue."""
        super().__init__(client, name=events.lane, heartbeat_s=config.queue.lease_timeout_s / 5)
        self._engine, self._events, self._workflows = engine, events, workflows
        self._samples_per_group, self._run_seed = config.queue.samples_per_group, config.run.seed
        self._slots, self._max_episodes = config.rollout.slots, config.rollout.most_episodes
        self._counted: Any = SimpleNamespace(
            generate=self._generate, tokenizer=engine.tokenizer, text_of=engine.text_of
        )
        limit, temperature = config.rollout.max_new_tokens, config.rollout.temperature
        self._sampling = Sampling(max_new_tokens=limit, temperature=temperature)
        self._running = self._episodes = self._emitted_running = 0
        self._emit_pending = False

    async def stop(self) -> None:
        """Drop all leases, and end `run` and the endpoint that agents call; idempotent."""
        await super().stop()
        await self._workflows.endpoint.close()

    async def evaluate(self, prompts: Sequence[Prompt]) -> list[Sample | None]:
        """Run the episodes of prompts greedily, beside other work of the engine; None for one that failed."""
        return await complete_greedily(
            self._engine, prompts, max_new_tokens=self._sampling.max_new_tokens, workflows=self._workflows
        )

    def gauges(self) -> dict[str, Any]:
        """Return the current figures, and the first error of each reason for which episodes failed."""
        return {
            "running": self._running,
            "tokens": self._engine.tokens_generated,
            "errors": self._workflows.errors,
            "unconstrained": dict(self._workflows.endpoint.unconstrained),
            "context_tokens": self._engine.context_tokens,
            "cached_tokens": self._engine.cached_tokens,
        }

    def _room(self) -> int:
        room = min(self._slots - self._running, self._max_episodes - self._episodes)
        return -(-room // self._samples_per_group)

    async def _ask(self, limit: int) -> list[Lease]:
        leases: list[Lease] = await self._client.lease_rollout(worker=self._name, limit=limit, wait_s=_LEASE_WAIT_S)
        started = len(leases) * self._samples_per_group
        self._count_running(started, episodes=started)  # until their first requests count themselves
        return leases

    def _progress(self) -> int:
        return self._engine.tokens_generated

    async def _serve(self, lease: Lease) -> None:
        """Generate one group. Episodes that fail leave lost samples; if all fail, so does the group."""
        group, started = lease.group, now()
        tasks = [
            asyncio.ensure_future(self._sample(group.group_id, group.prompt, i)) for i in range(self._samples_per_group)
        ]
        asyncio.get_running_loop().call_soon(
            self._count_running, -self._samples_per_group
        )  # after their first requests
        try:
            ended = await asyncio.gather(*tasks)
            self._emit_group(group.group_id, started, ended)
        finally:
            for task in tasks:
                task.cancel()
        samples = [sample for sample, _ in ended]
        if all(sample.is_lost for sample in samples):
            score = samples[0].score
            hand_in = functools.partial(self._client.fail, reason=(score and score.failure) or "lost")
        else:
            hand_in = functools.partial(self._client.complete_rollout, samples=samples)
        await self._deliver(lease, functools.partial(hand_in, lease_id=lease.lease_id))

    async def _sample(self, group_id: str, prompt: Prompt, index: int) -> tuple[Sample, float]:
        seed_of = functools.partial(sample_seed, self._run_seed, group_id, index)
        try:
            sample = await self._workflows.sample(self._counted, prompt, sampling=self._sampling, seed_of=seed_of)
        except EpisodeError as error:
            self._workflows.log(error, f"sample {index} of group {group_id}")
            sample = Sample.lost(error.reason)
        finally:
            self._count_running(0, episodes=-1)
        return sample, now()

    async def _generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sample:
        self._count_running(1)
        try:
            return await self._engine.generate(prompt_ids, sampling)
        finally:
            self._count_running(-1)

    def _count_running(self, change: int, *, episodes: int = 0) -> None:
        self._running += change
        self._episodes += episodes
        if not self._emit_pending:
            self._emit_pending = True
            asyncio.get_running_loop().call_later(_OCCUPANCY_RESOLUTION_S, self._emit_running)

    def _emit_running(self) -> None:
        # Delayed: while an environment answers within milliseconds, no other sample should start.
        self._room_changed.set()
        self._emit_pending = False
        # Samples beyond the slots wait in the engine: the rest of a group, and those that come back.
        running = min(self._running, self._slots)
        if running != self._emitted_running:
            self._emitted_running = running
            self._events.emit("running", n=running)

    def _emit_group(self, group_id: str, started: float, samples: Sequence[tuple[Sample, float]]) -> None:
        entries: list[dict[str, Any]] = []
        for sample, ended in samples:
            spans = [[span.version, span.start, span.end] for span in sample.spans]
            entries.append({"end": round(ended, 4), "tokens": sample.num_tokens, "spans": spans})
        self._events.emit("group", group=group_id, start=started, samples=entries)
