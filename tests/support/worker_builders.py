"""A rollout worker in the tests: leases, a fake queue, an engine that waits, and short ways to run it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from scripted_engine import ScriptedEngine

from areal_lite.config.recipe import parse_config
from areal_lite.events import EventBuffer
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.runner import Workflows
from areal_lite.rollout.worker import RolloutWorker
from areal_lite.types import Group, Lease, Prompt, Sample, Score


def make_lease(number: int, **row: Any) -> Lease:
    prompt = Prompt(prompt_id=f"train/0/{number}", text="", token_ids=(number,), answer="", row=row)
    return Lease(lease_id=f"lease-{number}", group=Group(group_id=f"train/0/{number}#0", prompt=prompt), version=0)


class FakeQueue:
    """Lends `leases`, then nothing; records each request.

    `errors` are raised once each, by the request they are listed under; leases in `dead` are declared dead.
    """

    def __init__(self, leases: Sequence[Lease] = (), **errors: Exception) -> None:
        self.leases, self.dead, self.errors = list(leases), list[str](), errors
        self.log: list[tuple[Any, ...]] = []
        self.completed: dict[str, list[Any]] = {}
        self.changed = asyncio.Event()

    async def lease_rollout(self, *, worker: str, limit: int, wait_s: float) -> list[Lease]:
        self.record("lease_rollout", limit)
        lent, self.leases = self.leases[:limit], self.leases[limit:]
        if not lent:
            await asyncio.sleep(wait_s)
        return lent

    async def complete_rollout(self, *, lease_id: str, samples: Sequence[Sample]) -> bool:
        self.record("complete_rollout", lease_id)
        self.completed[lease_id] = list(samples)
        return True

    async def complete_verify(self, *, lease_id: str, scores: Sequence[Score]) -> bool:
        self.record("complete_verify", lease_id)
        self.completed[lease_id] = list(scores)
        return True

    lease_verify = lease_rollout

    async def heartbeat(self, *, worker: str, lease_ids: Sequence[str], progress: int) -> list[str]:
        self.record("heartbeat", tuple(lease_ids), progress)
        return [lease_id for lease_id in self.dead if lease_id in lease_ids]

    async def fail(self, *, lease_id: str, reason: str) -> bool:
        self.record("fail", lease_id, reason)
        return True

    async def until(self, condition: Callable[["FakeQueue"], Any]) -> None:
        while not condition(self):
            self.changed.clear()
            await self.changed.wait()

    async def heartbeats(self, count: int) -> None:
        """Wait for further heartbeats: time in which the worker could do something else."""
        before = len(self.asked("heartbeat"))
        await self.until(lambda queue: len(queue.asked("heartbeat")) >= before + count)

    def asked(self, op: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.log if entry[0] == op]

    def record(self, op: str, *fields: Any) -> None:
        self.log.append((op, *fields))
        self.changed.set()
        if error := self.errors.pop(op, None):
            raise error


class HeldEngine(ScriptedEngine):
    """Generates the prompts in `held` only once they are let go, fails those in `failing`, and keeps count."""

    def __init__(
        self, *, held: Sequence[int] = (), failing: dict[int, list[Exception]] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.held = {number: asyncio.Event() for number in held}
        self.failing = failing or {}
        self.running, self.most_running = 0, 0
        self.cancelled: list[int] = []
        self.samplings: list[Sampling] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sample:
        self.samplings.append(sampling)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if sampling.seed is not None and (errors := self.failing.get(prompt_ids[0])):
                raise errors.pop()
            if gate := self.held.get(prompt_ids[0]):
                await gate.wait()
            return await super().generate(prompt_ids, sampling)
        except asyncio.CancelledError:
            self.cancelled.append(prompt_ids[0])
            raise
        finally:
            self.running -= 1


def make_worker(
    client: Any, engine: Any, *, workflows: Workflows | None = None, **rollout: Any
) -> tuple[RolloutWorker, EventBuffer]:
    """Two samples a group, four slots, a heartbeat every few milliseconds."""
    events, queue = EventBuffer("rollout/0"), {"samples_per_group": 2, "lease_timeout_s": 0.025}
    config = parse_config({"queue": queue, "rollout": {"slots": 4, "max_new_tokens": 8, **rollout}})
    return RolloutWorker(client, engine, config, events=events, workflows=workflows or Workflows()), events


@asynccontextmanager
async def running(worker: RolloutWorker) -> AsyncIterator[None]:
    """Run a worker within the block, and stop it; what ended it before is raised."""
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        await worker.stop()
        await task


async def serve_until(worker: RolloutWorker, client: FakeQueue, condition: Callable[[FakeQueue], Any]) -> None:
    """Run a worker until something has happened, or until it fails, which is raised."""
    async with running(worker):
        await client.until(condition)


async def settle() -> None:
    """Let everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)
