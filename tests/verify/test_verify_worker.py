"""The verifier worker against a fake queue that writes down what happened (leases: test_rollout_worker.py)."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from episode_builders import in_loop
from ledger_builders import make_sample
from worker_builders import FakeQueue, make_lease, running, serve_until

from areal_lite.errors import VerifierError
from areal_lite.events import EventBuffer
from areal_lite.types import Lease, Sample, Score
from areal_lite.verify.protocol import Reply
from areal_lite.verify.worker import VerifierWorker

RIGHT, WRONG = (make_sample(text=text) for text in ("#2", "#3"))


def generated(number: int, *samples: Sample) -> Lease:
    lease = make_lease(number)
    return replace(lease, group=replace(lease.group, samples=samples))


class FakePool:
    """Takes three groups at once; scores 1 where the completion is `#2`, or fails: a group for each of its `turns`."""

    groups_at_once = 3

    def __init__(self, *, turns: int = 9, error: Exception | None = None) -> None:
        self.turns, self.error, self.calls = asyncio.Semaphore(turns), error, 0

    async def score(self, prompt: Any, completions: Sequence[str], *, messages: Any) -> list[Reply]:
        await self.turns.acquire()
        if self.error:
            raise self.error
        self.calls += len(completions)
        return [Reply(float(text == "#2")) for text in completions]

    def is_watched(self, group_id: str) -> bool:
        return group_id.endswith("1")

    async def watch(self, prompt: Any, samples: Sequence[Sample]) -> list[dict[str, float]]:
        return [{"watch/length": float(sample.num_tokens)} for sample in samples]

    def gauges(self) -> dict[str, Any]:
        return {"calls": self.calls}


def make_worker(client: Any, pool: Any) -> tuple[Any, EventBuffer]:
    events = EventBuffer("verify/0")
    return VerifierWorker(client, pool, events=events, decode=str, heartbeat_s=0.01), events


@in_loop
async def test_a_sample_that_has_a_score_keeps_it() -> None:
    """An agent's own reward, and why a sample is lost. Seen failing with all samples given to the verifier."""
    own, lost = Score(reward=0.25, parts={"brief": 0.25}), Score(failure="workflow:ValueError")
    client, pool = FakeQueue([generated(0, RIGHT.scored(own), WRONG, RIGHT.scored(lost))]), FakePool()
    worker, events = make_worker(client, pool)
    await serve_until(worker, client, lambda queue: queue.completed)
    assert client.completed == {"lease-0": [own, Score(reward=0.0), lost]}
    assert pool.calls == 1
    assert [(event["kind"], event["scored_by_workflow"]) for event in events.drain()] == [("verify", [0])]


class LateQueue(FakeQueue):
    """Another worker has scored the group by now."""

    async def complete_verify(self, *, lease_id: str, scores: Sequence[Score]) -> bool:
        await super().complete_verify(lease_id=lease_id, scores=scores)
        return False


@in_loop
async def test_scores_that_the_queue_ignores_are_no_event() -> None:
    """Seen failing: the report counted the group twice."""
    client = LateQueue([generated(0, RIGHT)])
    worker, events = make_worker(client, FakePool())
    await serve_until(worker, client, lambda queue: queue.completed)
    assert events.drain() == []


@in_loop
async def test_a_watched_group_has_further_metrics_and_the_same_rewards() -> None:
    """The second group is watched, but not its lost sample. Seen failing with the watched reward as a reward's part."""
    groups = [[RIGHT, WRONG], [RIGHT, RIGHT.scored(Score(failure="workflow:ValueError"))]]
    leases = [generated(number, *samples) for number, samples in enumerate(groups)]
    leases = [replace(one, group=replace(one.group, group_id=f"g{at}")) for at, one in enumerate(leases)]
    client = FakeQueue(leases)
    worker, events = make_worker(client, FakePool())
    await serve_until(worker, client, lambda queue: len(queue.completed) == 2)
    length = float(RIGHT.num_tokens)
    watched = Score(reward=1.0, metrics={"watch/length": length})
    assert client.completed["lease-0"] == [Score(reward=1.0), Score(reward=0.0)]
    assert client.completed["lease-1"] == [watched, Score(failure="workflow:ValueError")]
    found = {event["group_id"]: event.get("watched") for event in events.drain()}
    assert found == {"g0": None, "g1": {"length": {"0": length}}}


@in_loop
async def test_it_never_holds_more_than_its_limit_and_pulls_again_when_there_is_room() -> None:
    """Seen failing with `limit=self._pool.groups_at_once` in every request."""
    client, pool = FakeQueue([generated(number, RIGHT) for number in range(7)]), FakePool(turns=0)
    worker, _ = make_worker(client, pool)
    async with running(worker):
        await client.heartbeats(3)
        assert client.asked("heartbeat")[-1][0] == ("lease-0", "lease-1", "lease-2")
        pool.turns.release()
        await client.until(lambda queue: len(queue.asked("lease_rollout")) == 2)
        await client.heartbeats(2)
        assert len(client.asked("heartbeat")[-1][0]) == 3


@in_loop
async def test_a_broken_pool_ends_the_worker() -> None:
    """The plain error, not an exception group. Seen failing without the unwrapping in `run`."""
    pool = FakePool(error=VerifierError("3 times in a row"))
    worker, _ = make_worker(FakeQueue([generated(0, RIGHT), generated(1, RIGHT)]), pool)
    with pytest.raises(VerifierError, match="3 times in a row"):
        await worker.run()
    await worker.stop()
