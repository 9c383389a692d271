"""The verifier worker against a fake queue that writes down what happened (leases: test_rollout_worker.py)."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from areal_lite.errors import VerifierError
from areal_lite.events import EventBuffer
from areal_lite.types import Group, Lease, Prompt, Sample, Score, StopReason, VersionSpan
from areal_lite.verify.protocol import Reply, failed
from areal_lite.verify.worker import VerifierWorker

PATIENCE_S = 120.0


def make_lease(number, *, texts=("#2", "#3")):
    prompt = Prompt(prompt_id=f"train/0/{number}", text="1+1=?", token_ids=(1,), answer="2")
    samples = tuple(
        Sample(
            token_ids=np.zeros(1, np.int32),
            logprobs=np.zeros(1, np.float32),
            spans=(VersionSpan(version=0, start=0, end=1),),
            stop_reason=StopReason.STOP,
            text=text,
        )
        for text in texts
    )
    group = Group(group_id=f"{prompt.prompt_id}#0", prompt=prompt, samples=samples)
    return Lease(lease_id=f"lease-{number}", group=group, version=0)


class FakeQueue:
    """Lends `leases`, and keeps a list of what was asked."""

    def __init__(self, leases=()):
        self.leases, self.log, self.completed = list(leases), [], {}
        self.held, self.most_held, self.changed = set(), 0, asyncio.Event()

    async def lease_verify(self, *, worker, limit, wait_s):
        self._record("lease", limit)
        lent, self.leases = self.leases[:limit], self.leases[limit:]
        self.held |= {lease.lease_id for lease in lent}
        self.most_held = max(self.most_held, len(self.held))
        await asyncio.sleep(0 if lent else wait_s)
        return lent

    async def complete_verify(self, *, lease_id, scores):
        self.completed[lease_id] = scores
        self.held.discard(lease_id)
        self._record("complete", lease_id)
        return True

    async def heartbeat(self, *, worker, lease_ids, progress):
        self._record("heartbeat", tuple(lease_ids), progress)
        return []

    async def until(self, condition):
        while not condition(self):
            self.changed.clear()
            await self.changed.wait()

    def _record(self, *entry):
        self.log.append(entry)
        self.changed.set()


class FakePool:
    """Scores 1 where the completion is `#2`, one group after the other, once `gate` is open."""

    def __init__(self, error=None, groups_at_once=2):
        self.groups_at_once = groups_at_once
        self.gate, self.turn = asyncio.Event(), asyncio.Lock()
        self.error, self.calls = error, 0

    async def score(self, prompt, completions, *, messages):
        await self.gate.wait()
        if self.error:
            raise self.error
        async with self.turn:
            await asyncio.sleep(0.001)
        self.calls += len(completions)
        return [Reply(float(text == "#2")) if text else failed("nan", "") for text in completions]

    def gauges(self):
        return {"calls": self.calls}


def make_worker(client, pool, *, heartbeat_s=0.01):
    events = EventBuffer("verify/0")
    decode = lambda ids: "".join(map(chr, ids))  # noqa: E731
    return VerifierWorker(client, pool, events=events, decode=decode, heartbeat_s=heartbeat_s), events


def run(scenario):
    async def bounded():
        async with asyncio.timeout(PATIENCE_S):
            return await scenario()

    return asyncio.run(bounded())


def test_a_sample_that_has_a_score_keeps_it():
    """An agent's own word, and why a sample is lost. Seen failing with all samples given to the verifier."""

    async def scenario():
        lease = make_lease(0, texts=("#2", "#3", "#2"))
        own = Score(reward=0.25, parts={"brief": 0.25})
        first, second, third = lease.group.samples
        samples = (first.scored(own), second, third.scored(Score(failure="workflow:ValueError")))
        client, pool = FakeQueue([replace(lease, group=replace(lease.group, samples=samples))]), FakePool()
        worker, events = make_worker(client, pool)
        pool.gate.set()
        running = asyncio.create_task(worker.run())
        await client.until(lambda queue: queue.completed)
        await worker.stop()
        await running
        assert {event["kind"] for event in events.drain()} == {"verify"}
        return client.completed["lease-0"], worker.gauges()["calls"], own

    scores, calls, own = run(scenario)
    assert scores == [own, Score(reward=0.0), Score(failure="workflow:ValueError")]
    assert calls == 1


def test_it_never_holds_more_than_its_limit_and_pulls_again_when_there_is_room():
    """Seen failing with `limit=self._pool.groups_at_once` in every request."""

    async def scenario():
        client, pool = FakeQueue([make_lease(number) for number in range(7)]), FakePool(groups_at_once=3)
        worker, _ = make_worker(client, pool)
        running = asyncio.create_task(worker.run())
        await client.until(lambda queue: ("heartbeat", ("lease-0", "lease-1", "lease-2"), 0) in queue.log)
        lent = 7 - len(client.leases)
        pool.gate.set()
        await client.until(lambda queue: len(queue.completed) == 7)
        await worker.stop()
        await running
        return lent, client.most_held

    assert run(scenario) == (3, 3)


def test_a_broken_pool_ends_the_worker():
    """The plain error, not an exception group. Seen failing without the unwrapping in `run`."""

    async def scenario():
        client, pool = FakeQueue([make_lease(0), make_lease(1)]), FakePool(VerifierError("3 times in a row"))
        worker, _ = make_worker(client, pool)
        pool.gate.set()
        with pytest.raises(VerifierError, match="3 times in a row"):
            await worker.run()
        await worker.stop()

    run(scenario)
