"""The rollout worker with a scripted engine, against a fake queue that writes down what happened."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from queue_builders import connected, serving
from scripted_engine import ScriptedEngine

from areal_lite.config.recipe import parse_config
from areal_lite.errors import EngineError, LedgerError, QueueTimeout, WireError
from areal_lite.events import EventBuffer
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.runner import Workflows
from areal_lite.rollout.worker import RolloutWorker, sample_seed
from areal_lite.sample_queue.access import QueueAccess
from areal_lite.sample_queue.client import AsyncQueueClient
from areal_lite.types import Group, Lease, Prompt, Sample, Score, StopReason

T = TypeVar("T")

PATIENCE_S = 30.0
RARE_END = 10**6
"""A vocabulary in which the end-of-sequence token does not come up: every sample has the full length."""


def make_lease(number: int, **row: Any) -> Lease:
    prompt = Prompt(prompt_id=f"train/0/{number}", text="", token_ids=(number,), answer="", row=row)
    return Lease(lease_id=f"lease-{number}", group=Group(group_id=f"train/0/{number}#0", prompt=prompt), version=0)


class FakeQueue:
    """Lends `leases`, then nothing; keeps a list of what was asked.

    `errors` are raised once each, by the request they are listed under; leases in `dead` are declared dead.
    """

    def __init__(self, leases: Sequence[Lease] = (), *, dead: Sequence[str] = (), **errors: Exception) -> None:
        self.leases, self.dead, self.errors = list(leases), list(dead), errors
        self.log: list[tuple[Any, ...]] = []
        self.completed: dict[str, list[Sample]] = {}
        self.changed = asyncio.Event()

    async def lease_rollout(self, *, worker: str, limit: int, wait_s: float) -> list[Lease]:
        self._record("lease_rollout", limit)
        lent, self.leases = self.leases[:limit], self.leases[limit:]
        if not lent:
            await asyncio.sleep(wait_s)
        return lent

    async def complete_rollout(self, *, lease_id: str, samples: Sequence[Sample]) -> bool:
        self._record("complete_rollout", lease_id)
        self.completed[lease_id] = list(samples)
        return True

    async def heartbeat(self, *, worker: str, lease_ids: Sequence[str], progress: int) -> list[str]:
        self._record("heartbeat", tuple(lease_ids), progress)
        return [lease_id for lease_id in self.dead if lease_id in lease_ids]

    async def fail(self, *, lease_id: str, reason: str) -> bool:
        self._record("fail", lease_id, reason)
        return True

    async def until(self, condition: Callable[["FakeQueue"], Any]) -> None:
        while not condition(self):
            self.changed.clear()
            await self.changed.wait()

    def asked(self, op: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.log if entry[0] == op]

    def _record(self, op: str, *fields: Any) -> None:
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
        self.samplings: list[tuple[int, Sampling]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sample:
        self.samplings.append((prompt_ids[0], sampling))
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
    client: Any, engine: Any, *, samples_per_group: int = 2, workflows: Workflows | None = None, **rollout: Any
) -> tuple[RolloutWorker, EventBuffer]:
    """Two samples a group, four slots, a heartbeat every few milliseconds."""
    events, queue = EventBuffer("rollout/0"), {"samples_per_group": samples_per_group, "lease_timeout_s": 0.025}
    config = parse_config({"queue": queue, "rollout": {"slots": 4, "max_new_tokens": 8, **rollout}})
    return RolloutWorker(client, engine, config, events=events, workflows=workflows or Workflows()), events


def run(scenario: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await scenario()

    return asyncio.run(bounded())


async def serve_until(worker: RolloutWorker, client: FakeQueue, condition: Callable[[FakeQueue], Any]) -> None:
    """Run a worker until something has happened, then stop it; what ends the worker before is raised."""
    running = asyncio.create_task(worker.run())
    waiting = asyncio.create_task(client.until(condition))
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    await worker.stop()
    await running


async def settle() -> None:
    """Let everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


# --- keeping the engine full ---


def test_stragglers_hold_up_nobody() -> None:
    """No batch barrier: two samples of prompt 0 never end; 8 other groups pass through the remaining slots.

    Seen failing with `await asyncio.gather(*tasks)` over all leased groups before the next lease.
    """

    async def scenario() -> tuple[list[str], int, list[int]]:
        client, engine = FakeQueue([make_lease(n) for n in range(9)]), HeldEngine(held=[0])
        worker, _ = make_worker(client, engine)
        await serve_until(worker, client, lambda queue: len(queue.completed) == 8)
        return sorted(client.completed), engine.most_running, engine.cancelled

    completed, most_running, cancelled = run(scenario)
    assert completed == [f"lease-{n}" for n in range(1, 9)]
    assert most_running in (4, 5), "a group is leased as soon as one of its two samples has a slot"
    assert cancelled == [0, 0]


def test_a_free_slot_is_filled_at_once_and_full_ones_ask_for_nothing() -> None:
    """5 slots, 2 samples a group: first 3 groups (the sixth sample waits in the engine), then none until 2 slots free.

    Seen failing with the limit rounded down, and without the wait for a free slot.
    """

    async def scenario() -> tuple[list[Any], list[Any], int]:
        client, engine = FakeQueue([make_lease(n) for n in range(6)]), HeldEngine(held=range(6))
        worker, _ = make_worker(client, engine, slots=5)
        running = asyncio.create_task(worker.run())
        await client.until(lambda queue: len(queue.asked("heartbeat")) >= 3)
        before, most = client.asked("lease_rollout"), engine.most_running
        engine.held[1].set()
        await client.until(lambda queue: "lease-1" in queue.completed)
        await settle()
        after = client.asked("lease_rollout")
        await worker.stop()
        await running
        return before, after, most

    before, after, most = run(scenario)
    assert before == [(3,)]
    assert most == 6
    assert len(after) > 1
    assert set(after[1:]) == {(1,)}


def test_running_samples_are_told_as_events_never_more_than_slots() -> None:
    """What occupancy is made of. Seen failing with the sixth sample of five slots counted as running."""

    async def scenario() -> list[int]:
        client, engine = FakeQueue([make_lease(n) for n in range(3)]), HeldEngine(held=range(3))
        worker, events = make_worker(client, engine, slots=5)
        running = asyncio.create_task(worker.run())
        await client.until(lambda queue: len(queue.asked("heartbeat")) >= 5)
        for gate in engine.held.values():
            gate.set()
        await client.until(lambda queue: len(queue.completed) == 3)
        beats = len(client.asked("heartbeat"))
        await client.until(lambda queue: len(queue.asked("heartbeat")) >= beats + 5)
        await worker.stop()
        await running
        return [event["n"] for event in events.drain() if event["kind"] == "running"]

    counts = run(scenario)
    assert counts[0] == max(counts) == 5
    assert counts[-1] == 0


# --- what comes back ---


def test_tokens_carry_the_version_that_the_engine_stamped() -> None:
    """I3: samples that run across a publication have a span of each version, cut where the engine was paused.

    Seen failing with samples stamped by the worker with the version of their lease, and with the version at their end.
    """

    async def scenario() -> tuple[int, list[Sample], list[Any]]:
        client = FakeQueue([make_lease(0), make_lease(1)])
        engine = ScriptedEngine(vocab_size=RARE_END)
        worker, events = make_worker(client, engine, max_new_tokens=40)
        running = asyncio.create_task(worker.run())
        while engine.tokens_generated < 30:
            await asyncio.sleep(0)
        await engine.pause("recompute")
        await settle()
        tokens_before = engine.tokens_generated
        await engine.stamp(1)
        await engine.resume()
        await client.until(lambda queue: len(queue.completed) == 2)
        await worker.stop()
        await running
        samples = [sample for samples in client.completed.values() for sample in samples]
        groups = [event for event in events.drain() if event["kind"] == "group"]
        return tokens_before, samples, groups

    tokens_before, samples, groups = run(scenario)
    assert len(samples) == 4
    assert 30 <= tokens_before < 4 * 40
    assert all([span.version for span in sample.spans] == [0, 1] for sample in samples)
    assert sum(sample.spans[0].end for sample in samples) == tokens_before
    told = {event["group"]: [entry["spans"] for entry in event["samples"]] for event in groups}
    assert told["train/0/0#0"] == [[[s.version, s.start, s.end] for s in sample.spans] for sample in samples[:2]]
    assert all(event["start"] <= entry["end"] for event in groups for entry in event["samples"])


def test_groups_come_back_whole_and_in_the_order_of_their_samples() -> None:
    async def scenario() -> dict[str, list[Sample]]:
        client, engine = FakeQueue([make_lease(n) for n in range(5)]), ScriptedEngine()
        worker, _ = make_worker(client, engine, samples_per_group=3)
        await serve_until(worker, client, lambda queue: len(queue.completed) == 5)
        return client.completed

    for lease_id, samples in run(scenario).items():
        number = int(lease_id.split("-")[1])
        assert [sample.text for sample in samples] == [alone(number, index) for index in range(3)]


def alone(number: int, index: int) -> str:
    """The sample that the engine gives to one request, with nothing beside."""
    sampling = Sampling(max_new_tokens=8, temperature=1.0, seed=sample_seed(0, f"train/0/{number}#0", index))
    return run(lambda: ScriptedEngine().generate((number,), sampling)).text


def test_samples_do_not_depend_on_order_or_company() -> None:
    """The seed belongs to run, group and index alone. Seen failing with a counter as seed."""

    async def scenario(numbers: Sequence[int], slots: int) -> dict[str, list[str]]:
        client, engine = FakeQueue([make_lease(n) for n in numbers]), ScriptedEngine()
        worker, _ = make_worker(client, engine, slots=slots)
        await serve_until(worker, client, lambda queue: len(queue.completed) == len(numbers))
        return {lease_id: [sample.text for sample in samples] for lease_id, samples in client.completed.items()}

    one_by_one = run(lambda: scenario(range(6), 1))
    assert run(lambda: scenario(range(5, -1, -1), 64)) == one_by_one
    assert len({text for texts in one_by_one.values() for text in texts}) > 6


def test_seeds_differ_by_run_group_and_index_and_stay_the_same() -> None:
    """The numbers are those of BLAKE2b, `b2sum -l 32`, of `0/train/0/7#0/1`, little end first."""
    assert sample_seed(0, "train/0/7#0", 1) == int.from_bytes(bytes.fromhex("d249e758"), "little")
    seeds = {
        sample_seed(run, f"train/0/{n}#{a}", i) for run in (0, 1) for n in range(20) for a in (0, 1) for i in range(8)
    }
    assert len(seeds) == 2 * 20 * 2 * 8
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_a_row_may_set_its_own_token_limit() -> None:
    async def scenario() -> list[int]:
        client = FakeQueue([make_lease(0), make_lease(1, max_new_tokens=20)])
        worker, _ = make_worker(client, ScriptedEngine(vocab_size=RARE_END))
        await serve_until(worker, client, lambda queue: len(queue.completed) == 2)
        return [client.completed[f"lease-{n}"][0].num_tokens for n in (0, 1)]

    assert run(scenario) == [8, 20]


def test_evaluation_is_greedy_and_in_order() -> None:
    """Seen failing with the training temperature."""

    async def scenario() -> tuple[list[Sample], list[Sampling]]:
        engine = HeldEngine()
        worker, _ = make_worker(FakeQueue(), engine)
        samples = await worker.evaluate([make_lease(n).group.prompt for n in range(4)])
        return samples, [sampling for _, sampling in engine.samplings]

    samples, samplings = run(scenario)
    assert samplings == [Sampling(max_new_tokens=8, temperature=0.0)] * 4
    again, _ = run(scenario)
    assert [sample.text for sample in samples] == [sample.text for sample in again]
    assert len({sample.text for sample in samples}) == 4


# --- leases ---


def test_heartbeats_name_the_held_leases_and_the_engines_tokens() -> None:
    async def scenario() -> list[Any]:
        client, engine = FakeQueue([make_lease(0)]), HeldEngine(held=[0], vocab_size=RARE_END)
        worker, _ = make_worker(client, engine)
        running = asyncio.create_task(worker.run())
        await client.until(lambda queue: ("heartbeat", ("lease-0",), 0) in queue.log)
        engine.held[0].set()
        await client.until(lambda queue: ("heartbeat", (), 16) in queue.log)
        await worker.stop()
        await running
        return client.asked("complete_rollout")

    assert run(scenario) == [("lease-0",)]


def test_a_dead_lease_cancels_its_samples_and_frees_their_slots() -> None:
    """Seen failing with the answer of `heartbeat` ignored, and with slots freed only by samples that end well."""

    async def scenario() -> tuple[list[int], list[str], float]:
        client = FakeQueue([make_lease(n) for n in range(3)], dead=["lease-0", "lease-1"])
        engine = HeldEngine(held=[0, 1])
        worker, _ = make_worker(client, engine)
        await serve_until(worker, client, lambda queue: "lease-2" in queue.completed)
        return engine.cancelled, list(client.completed), worker.gauges()["running"]

    assert run(scenario) == ([0, 0, 1, 1], ["lease-2"], 0)


# --- failures ---


def test_a_dead_engine_ends_the_worker() -> None:
    """Its other samples are cut off, nothing is reported as failed: the leases come back by their silence.

    Seen failing with `EngineError` treated like a refused request.
    """

    async def scenario() -> tuple[list[Any], list[int]]:
        client = FakeQueue([make_lease(0), make_lease(1)])
        engine = HeldEngine(held=[0], failing={1: [EngineError("the engine-core process died")]})
        worker, _ = make_worker(client, engine)
        with pytest.raises(EngineError, match="engine-core process died"):
            await worker.run()
        return client.asked("fail") + client.asked("complete_rollout"), engine.cancelled

    asked, cancelled = run(scenario)
    assert asked == []
    assert cancelled.count(0) == 2


@pytest.mark.parametrize("num_refused", [1, 2])
def test_a_refused_request_costs_its_sample_and_nothing_else(num_refused: int) -> None:
    """Its group goes on with the others; where none is left, it fails. Seen failing with the group lost at once."""

    async def scenario() -> tuple[list[Any], dict[str, list[Sample]], list[int]]:
        client = FakeQueue([make_lease(0), make_lease(1)])
        engine = HeldEngine(failing={0: [ValueError("prompt too long")] * num_refused})
        worker, _ = make_worker(client, engine)
        running = asyncio.create_task(worker.run())
        await client.until(lambda queue: len(queue.completed) + len(queue.asked("fail")) == 2)
        await client.until(lambda queue: any(held == () for held, _ in queue.asked("heartbeat")))
        await worker.stop()
        await running
        return client.asked("fail"), client.completed, engine.cancelled

    failed, completed, cancelled = run(scenario)
    assert cancelled == []
    assert [sample.score for sample in completed["lease-1"]] == [None, None]
    if num_refused == 2:
        assert failed == [("lease-0", "generation:ValueError")]
        return
    assert failed == []
    lost, other = sorted(completed["lease-0"], key=lambda sample: not sample.is_lost)
    assert (lost.score, lost.is_lost) == (Score(failure="generation:ValueError"), True)
    assert (other.score, other.is_lost) == (None, False)


@pytest.mark.parametrize("op", ["lease_rollout", "heartbeat", "complete_rollout", "fail"])
def test_a_request_that_the_queue_does_not_answer_is_no_end(op: str) -> None:
    """Work goes on, and a result is handed in again. Seen failing with `fail` not guarded, and asked once."""

    async def scenario() -> tuple[list[str], tuple[Any, ...]]:
        client = FakeQueue([make_lease(n) for n in range(4)], **{op: QueueTimeout("no answer")})
        engine = HeldEngine(failing={0: [ValueError("refused")] * 2} if op == "fail" else None)
        worker, _ = make_worker(client, engine)
        running = asyncio.create_task(worker.run())
        await client.until(lambda queue: "lease-3" in queue.completed)
        beats = len(client.asked("heartbeat"))
        await client.until(lambda queue: len(queue.asked("heartbeat")) >= beats + 2)
        await worker.stop()
        await running
        return sorted(client.completed), client.asked("heartbeat")[-1][0]

    completed, held = run(scenario)
    assert len(completed) == 4 - (op == "fail")
    assert held == ()


def test_another_queue_is_asked_nothing_before_it_knows_what_is_held() -> None:
    """It would call the leases lost, and lend their groups anew.

    Seen failing with heartbeats, results or lease requests that do not wait, and with what is refused not let go of.
    """

    class Successor(FakeQueue):
        def __init__(self) -> None:
            super().__init__([make_lease(n) for n in range(3)])
            self.presented, self.moved = asyncio.Event(), asyncio.Event()

        def move_to(self, access: QueueAccess) -> None:
            self.moved.set()

        async def lease_rollout(self, *, worker: str, limit: int, wait_s: float) -> list[Lease]:
            if self.leases:
                return await super().lease_rollout(worker=worker, limit=limit, wait_s=wait_s)
            self._record("lease_rollout")
            await self.moved.wait()
            await asyncio.sleep(0.01)
            raise QueueTimeout("gone")

        async def present(self, *, worker: str, lease: Lease) -> bool:
            self._record("present", lease.lease_id)
            await self.presented.wait()
            return lease.lease_id == "lease-0"

    async def scenario() -> None:
        client, engine = Successor(), HeldEngine(held=[0, 1, 2])
        worker, _ = make_worker(client, engine, slots=8)
        running = asyncio.create_task(worker.run())
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
        await worker.stop()
        await running
        assert list(client.completed) == ["lease-0"]

    run(scenario)


@pytest.mark.parametrize("op", ["heartbeat", "lease_rollout", "complete_rollout"])
def test_a_queue_that_refuses_ends_the_worker(op: str) -> None:
    """Without heartbeats its work would be lent anew for ever. Seen failing with the heartbeat task not watched."""

    async def scenario() -> None:
        client = FakeQueue([make_lease(0), make_lease(1)], **{op: LedgerError("the run has ended")})
        engine = HeldEngine(held=[1])
        worker, _ = make_worker(client, engine)
        with pytest.raises(LedgerError, match="the run has ended"):
            await worker.run()

    run(scenario)


def test_a_result_the_queue_cannot_take_fails_its_lease_only() -> None:
    """An oversized group must not end one worker after another. Seen failing without the `except WireError`."""

    async def scenario() -> list[tuple[str, str]]:
        client = FakeQueue([make_lease(0)], complete_rollout=WireError("too large"))
        failed: list[tuple[str, str]] = []

        async def fail(*, lease_id: str, reason: str) -> bool:
            failed.append((lease_id, reason))
            return True

        client.fail = fail  # type: ignore[method-assign]
        worker, _ = make_worker(client, ScriptedEngine())
        running = asyncio.create_task(worker.run())
        while not failed:
            await asyncio.sleep(0.001)
        await worker.stop()
        await running
        return failed

    assert [reason for _, reason in run(scenario)] == ["refused:WireError"]


# --- stopping ---


@pytest.mark.parametrize("stage", ["before run", "waiting for work", "generating", "paused", "twice"])
def test_stop_ends_run_at_every_stage(stage: str) -> None:
    """Also while the queue keeps a request waiting. Seen failing with `stop` looked at between requests only."""

    async def scenario() -> tuple[int, list[Any]]:
        leases = [make_lease(n) for n in range(2)] if stage in ("generating", "paused") else []
        client, engine = FakeQueue(leases), HeldEngine(held=[0, 1] if stage == "generating" else [])
        if stage == "paused":
            await engine.pause("recompute")
        worker, _ = make_worker(client, engine)
        if stage == "before run":
            await worker.stop()
        running = asyncio.create_task(worker.run())
        if stage != "before run":
            await client.until(lambda queue: queue.log)
            await settle()
        await worker.stop()
        if stage == "twice":
            await worker.stop()
        await settle()
        assert running.done(), "not before the queue answers"
        await running
        return engine.running, client.asked("complete_rollout")

    assert run(scenario) == (0, [])


# --- with a real queue ---


def test_groups_reach_a_real_queue() -> None:
    """The protocol that the fake stands for is the client's."""

    async def scenario(access: QueueAccess) -> None:
        client = AsyncQueueClient(access, timeout_s=PATIENCE_S)
        worker, _ = make_worker(client, ScriptedEngine(), samples_per_group=3)
        try:
            running = asyncio.create_task(worker.run())
            while (await client.status())["counts"]["generated"] < 4:
                await asyncio.sleep(0.01)
            await worker.stop()
            await running
        finally:
            client.close()

    with serving() as access, connected(access) as plain:
        plain.open_admission()
        run(lambda: scenario(access))
        leases = plain.lease_verify(worker="verifier/0", limit=4, wait_s=0.0)
    assert [len(lease.group.samples) for lease in leases] == [3] * 4


# --- the stand-in itself ---


def test_the_scripted_engine_ends_with_the_end_token_or_at_the_limit() -> None:
    samples = [
        run(lambda seed=seed: ScriptedEngine().generate((1,), Sampling(max_new_tokens=6, temperature=1.0, seed=seed)))
        for seed in range(30)
    ]
    assert {sample.stop_reason for sample in samples} == {StopReason.STOP, StopReason.LENGTH}
    for sample in samples:
        assert (sample.token_ids[-1] == 1) == (sample.stop_reason is StopReason.STOP)
        assert 1 not in sample.token_ids[:-1]
        assert sample.num_tokens == 6 or sample.stop_reason is StopReason.STOP


def test_the_scripted_engine_scores_what_it_draws_from() -> None:
    """Nine tokens, each as likely as the others."""

    async def scenario() -> tuple[Sample, Any]:
        engine = ScriptedEngine(vocab_size=10)
        sample = await engine.generate((1,), Sampling(max_new_tokens=6, temperature=1.0, seed=3))
        return sample, await engine.score((1,), sample.token_ids.tolist())

    sample, scored = run(scenario)
    np.testing.assert_array_equal(sample.logprobs, scored)
    np.testing.assert_allclose(np.exp(scored), 1 / 9, rtol=1e-6)
