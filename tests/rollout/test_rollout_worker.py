"""The rollout worker with a scripted engine, against a fake queue that records what happened."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from episode_builders import in_loop, run
from scripted_engine import ScriptedEngine
from worker_builders import FakeQueue, HeldEngine, make_lease, make_worker, running, serve_until, settle

from areal_lite.errors import EngineError, LedgerError, QueueClosed, QueueTimeout, WireError
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.worker import sample_seed
from areal_lite.sample_queue.access import QueueAccess
from areal_lite.types import Lease, Score

RARE_END = 10**6
"""A vocabulary in which the end-of-sequence token does not come up: every sample has the full length."""


# --- keeping the engine full ---


@in_loop
async def test_stragglers_hold_up_nobody() -> None:
    """No batch barrier: two samples of prompt 0 never end; 8 other groups pass through the remaining slots.

    Seen failing with `await asyncio.gather(*tasks)` over all leased groups before the next lease.
    """
    client, engine = FakeQueue([make_lease(n) for n in range(9)]), HeldEngine(held=[0])
    worker, _ = make_worker(client, engine)
    await serve_until(worker, client, lambda queue: len(queue.completed) == 8)
    assert sorted(client.completed) == [f"lease-{n}" for n in range(1, 9)]
    assert engine.most_running in (4, 5), "a group is leased as soon as one of its two samples has a slot"
    assert engine.cancelled == [0, 0]


@in_loop
async def test_a_free_slot_is_filled_at_once_and_full_ones_ask_for_nothing() -> None:
    """5 slots, 2 samples a group: first 3 groups (the sixth sample waits in the engine), then none until 2 slots free.

    Events never count more samples than slots. Seen failing with the limit rounded down, without the wait for a free
    slot, and with the sixth sample counted as running.
    """
    client, engine = FakeQueue([make_lease(n) for n in range(6)]), HeldEngine(held=range(6))
    worker, events = make_worker(client, engine, slots=5)
    async with running(worker):
        await client.heartbeats(3)
        assert client.asked("lease_rollout") == [(3,)]
        assert engine.most_running == 6
        engine.held[1].set()
        await client.until(lambda queue: "lease-1" in queue.completed)
        await settle()
        _, *after = client.asked("lease_rollout")
        assert set(after) == {(1,)}
        for gate in engine.held.values():
            gate.set()
        await client.until(lambda queue: len(queue.completed) == 6)
        await client.heartbeats(5)
    counts = [event["n"] for event in events.drain() if event["kind"] == "running"]
    assert counts[0] == max(counts) == 5
    assert counts[-1] == 0


# --- what comes back ---


@in_loop
async def test_tokens_carry_the_version_that_the_engine_stamped() -> None:
    """I3: samples that run across a publication have a span of each version, cut where the engine was paused.

    Seen failing with samples stamped by the worker with the version of their lease, and with the version at their end.
    """
    client, engine = FakeQueue([make_lease(0), make_lease(1)]), ScriptedEngine(vocab_size=RARE_END)
    worker, events = make_worker(client, engine, max_new_tokens=40)
    async with running(worker):
        while engine.tokens_generated < 30:
            await asyncio.sleep(0)
        await engine.pause("recompute")
        await settle()
        tokens_before = engine.tokens_generated
        await engine.stamp(1)
        await engine.resume()
        await client.until(lambda queue: len(queue.completed) == 2)
    samples = [sample for samples in client.completed.values() for sample in samples]
    groups = [event for event in events.drain() if event["kind"] == "group"]
    assert len(samples) == 4
    assert 30 <= tokens_before < 4 * 40
    assert all([span.version for span in sample.spans] == [0, 1] for sample in samples)
    assert sum(sample.spans[0].end for sample in samples) == tokens_before
    recorded = {event["group"]: [entry["spans"] for entry in event["samples"]] for event in groups}
    assert recorded["train/0/0#0"] == [[[s.version, s.start, s.end] for s in sample.spans] for sample in samples[:2]]
    assert all(event["start"] <= entry["end"] for event in groups for entry in event["samples"])


def test_samples_do_not_depend_on_order_or_company() -> None:
    """The seed belongs to run, group and index alone, and samples stay in their order.

    Seen failing with a counter as seed.
    """

    async def texts(numbers: Sequence[int], slots: int) -> dict[str, list[str]]:
        client, engine = FakeQueue([make_lease(n) for n in numbers]), ScriptedEngine()
        worker, _ = make_worker(client, engine, slots=slots)
        await serve_until(worker, client, lambda queue: len(queue.completed) == len(numbers))
        return {lease_id: [sample.text for sample in samples] for lease_id, samples in client.completed.items()}

    async def alone(number: int, index: int) -> str:
        sampling = Sampling(max_new_tokens=8, temperature=1.0, seed=sample_seed(0, f"train/0/{number}#0", index))
        return (await ScriptedEngine().generate((number,), sampling)).text

    expected = {f"lease-{n}": [run(lambda n=n, i=i: alone(n, i)) for i in range(2)] for n in range(6)}
    assert run(lambda: texts(range(6), 1)) == run(lambda: texts(range(5, -1, -1), 64)) == expected
    assert len({text for texts in expected.values() for text in texts}) > 6


def test_seeds_differ_by_run_group_and_index_and_stay_the_same() -> None:
    """The numbers are those of BLAKE2b, `b2sum -l 32`, of `0/train/0/7#0/1`, little end first."""
    assert sample_seed(0, "train/0/7#0", 1) == int.from_bytes(bytes.fromhex("d249e758"), "little")
    seeds = {
        sample_seed(run, f"train/0/{n}#{a}", i) for run in (0, 1) for n in range(20) for a in (0, 1) for i in range(8)
    }
    assert len(seeds) == 2 * 20 * 2 * 8
    assert all(0 <= seed < 2**32 for seed in seeds)


# --- leases ---


# --- failures ---


@in_loop
async def test_a_dead_engine_ends_the_worker() -> None:
    """Its other samples are cut off, nothing is reported as failed: the leases come back by their silence.

    Seen failing with `EngineError` treated like a refused request.
    """
    client = FakeQueue([make_lease(0), make_lease(1)])
    engine = HeldEngine(held=[0], failing={1: [EngineError("the engine-core process died")]})
    worker, _ = make_worker(client, engine)
    with pytest.raises(EngineError, match="engine-core process died"):
        await worker.run()
    assert client.asked("fail") + client.asked("complete_rollout") == []
    assert engine.cancelled.count(0) == 2


@pytest.mark.parametrize("num_refused", [1, 2])
@in_loop
async def test_a_refused_request_costs_its_sample_and_nothing_else(num_refused: int) -> None:
    """Its group continues with the others; if none is left, it fails. Seen failing with the group lost at once."""
    client = FakeQueue([make_lease(0), make_lease(1)])
    engine = HeldEngine(failing={0: [ValueError("prompt too long")] * num_refused})
    worker, _ = make_worker(client, engine)
    async with running(worker):
        await client.until(lambda queue: len(queue.completed) + len(queue.asked("fail")) == 2)
        await client.until(lambda queue: any(held == () for held, _ in queue.asked("heartbeat")))
    assert engine.cancelled == []
    assert [sample.score for sample in client.completed["lease-1"]] == [None, None]
    if num_refused == 2:
        assert client.asked("fail") == [("lease-0", "generation:ValueError")]
        return
    assert client.asked("fail") == []
    lost, other = sorted(client.completed["lease-0"], key=lambda sample: not sample.is_lost)
    assert (lost.score, lost.is_lost) == (Score(failure="generation:ValueError"), True)
    assert (other.score, other.is_lost) == (None, False)


@pytest.mark.parametrize("op", ["lease_rollout", "heartbeat", "complete_rollout", "fail"])
@in_loop
async def test_a_request_that_the_queue_does_not_answer_is_no_end(op: str) -> None:
    """Work continues, and a result is sent again. Seen failing with `fail` not guarded, and sent once."""
    client = FakeQueue([make_lease(n) for n in range(4)], **{op: QueueTimeout("no answer")})
    engine = HeldEngine(failing={0: [ValueError("refused")] * 2} if op == "fail" else None)
    worker, _ = make_worker(client, engine)
    async with running(worker):
        await client.until(lambda queue: "lease-3" in queue.completed)
        await client.heartbeats(2)
    assert len(client.completed) == 4 - (op == "fail")
    assert client.asked("heartbeat")[-1][0] == ()


class Successor(FakeQueue):
    """A queue that stops lending, and whose place another one takes."""

    def __init__(self) -> None:
        super().__init__([make_lease(n) for n in range(3)])
        self.presented, self.moved = asyncio.Event(), asyncio.Event()

    def move_to(self, access: QueueAccess) -> None:
        self.moved.set()

    async def lease_rollout(self, *, worker: str, limit: int, wait_s: float) -> list[Lease]:
        if self.leases:
            return await super().lease_rollout(worker=worker, limit=limit, wait_s=wait_s)
        self.record("lease_rollout")
        await self.moved.wait()
        await asyncio.sleep(0.01)
        raise QueueTimeout("gone")

    async def present(self, *, worker: str, lease: Lease) -> bool:
        self.record("present", lease.lease_id)
        await self.presented.wait()
        return lease.lease_id == "lease-0"


@in_loop
async def test_another_queue_is_asked_nothing_before_it_knows_what_is_held() -> None:
    """It would call the leases lost, and lend their groups again.

    Seen failing with heartbeats, results or lease requests that do not wait, and with refused leases still held.
    """
    client, engine = Successor(), HeldEngine(held=[0, 1, 2])
    worker, _ = make_worker(client, engine, slots=8)
    async with running(worker):
        await client.until(lambda queue: len(queue.asked("lease_rollout")) > 1 and len(queue.asked("heartbeat")) > 1)
        del client.log[:]
        moving = asyncio.create_task(worker.reconnect(QueueAccess("tcp://another")))
        engine.held[0].set()
        await asyncio.sleep(0.1)  # 20 heartbeats
        assert {entry[0] for entry in client.log} == {"present"}
        client.presented.set()
        assert await moving == (1, 2)
        await client.until(lambda queue: queue.completed)
        await settle()
        assert set(engine.cancelled) == {1, 2}
    assert list(client.completed) == ["lease-0"]


@pytest.mark.parametrize("op", ["heartbeat", "lease_rollout", "complete_rollout"])
@in_loop
async def test_a_queue_that_refuses_ends_the_worker(op: str) -> None:
    """Without heartbeats its work would be lent again forever. Seen failing with the heartbeat task not watched."""
    client = FakeQueue([make_lease(0), make_lease(1)], **{op: LedgerError("refused")})
    worker, _ = make_worker(client, HeldEngine(held=[1]))
    with pytest.raises(LedgerError, match="refused"):
        await worker.run()


@in_loop
async def test_a_queue_that_has_closed_ends_the_worker_without_an_error() -> None:
    """On a busy machine the queue closes before a worker is asked to stop. Seen failing with a traceback at the end."""
    client = FakeQueue([make_lease(0)], lease_rollout=QueueClosed("the run has ended"))
    worker, _ = make_worker(client, ScriptedEngine())
    await worker.run()


@in_loop
async def test_a_result_the_queue_cannot_take_fails_its_lease_only() -> None:
    """An oversized group must not end one worker after another. Seen failing without the `except WireError`."""
    client = FakeQueue([make_lease(0)], complete_rollout=WireError("too large"))
    worker, _ = make_worker(client, ScriptedEngine())
    await serve_until(worker, client, lambda queue: queue.asked("fail"))
    assert client.asked("fail") == [("lease-0", "refused:WireError")]


# --- stopping ---


@pytest.mark.parametrize("stage", ["before run", "waiting for work", "generating", "paused", "twice"])
@in_loop
async def test_stop_ends_run_at_every_stage(stage: str) -> None:
    """Also while the queue keeps a request waiting. Seen failing with `stop` checked between requests only."""
    leases: list[Any] = [make_lease(n) for n in range(2)] if stage in ("generating", "paused") else []
    client, engine = FakeQueue(leases), HeldEngine(held=[0, 1] if stage == "generating" else [])
    if stage == "paused":
        await engine.pause("recompute")
    worker, _ = make_worker(client, engine)
    if stage == "before run":
        await worker.stop()
    task = asyncio.create_task(worker.run())
    if stage != "before run":
        await client.until(lambda queue: queue.log)
        await settle()
    await worker.stop()
    if stage == "twice":
        await worker.stop()
    await settle()
    assert task.done(), "not before the queue answers"
    await task
    assert (engine.running, client.asked("complete_rollout")) == (0, [])
