"""Episodes under the rollout worker: deadlines, cancellation, failures by reason, slots, seeds."""

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from episode_builders import PATIENCE_S, TOKENIZER, Speaker, run
from ledger_builders import FakeClock, make_settings
from queue_builders import connected, serving
from scripted_engine import ScriptedEngine
from test_rollout_worker import FakeQueue, make_lease, make_worker, serve_until, settle

from areal_lite.rollout.runner import Workflows
from areal_lite.rollout.worker import sample_seed
from areal_lite.rollout.workflows import multi_turn, single_turn
from areal_lite.sample_queue.access import QueueAccess
from areal_lite.sample_queue.client import AsyncQueueClient
from areal_lite.types import Sample

Messages = Sequence[Mapping[str, str]]

SOON_S = 0.05


def talk(step: Any, *, turn_timeout_s: float = 10.0, max_turns: int = 2) -> Workflows:
    """Workflow `multi_turn` with a step function of the test's own."""
    loaded = {"single_turn": (single_turn, {}), "multi_turn": (multi_turn, {"step": step, "max_turns": max_turns})}
    return Workflows(default="multi_turn", loaded=loaded, turn_timeout_s=turn_timeout_s)


def replies(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
    return ">", False


# --- deadlines ---


@pytest.mark.parametrize("kind", ["sync step", "async step", "workflow"])
def test_an_environment_that_hangs_fails_its_group_and_nothing_else(kind: str) -> None:
    """Only the first group hangs; those beside it come back. A deadline for every kind of code that may hang.

    The others have workflows without an environment, so that no busy machine makes them late.

    Seen failing, by the test's own timeout, without `in_time`, and for `workflow` with a clock that never runs.
    """
    never = threading.Event()

    def sync_step(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
        never.wait()
        return ">", False

    async def async_step(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
        await asyncio.Event().wait()
        return ">", False

    async def episode(engine: Any, row: Mapping[str, Any]) -> list[Any]:
        segments = [await engine.generate(engine.prompt_ids)]
        await asyncio.Event().wait()
        return segments

    async def scenario() -> tuple[list[Any], list[str]]:
        stuck = "own" if kind == "workflow" else "multi_turn"
        honest = [make_lease(number, workflow="single_turn") for number in (1, 2)]
        client = FakeQueue([make_lease(0, workflow=stuck), *honest])
        workflows = talk(sync_step if kind == "sync step" else async_step, turn_timeout_s=SOON_S)
        workflows.loaded["own"] = (episode, {})
        worker, _ = make_worker(client, Speaker(lambda _: "a"), workflows=workflows)
        await serve_until(worker, client, lambda queue: len(queue.completed) == 2 and queue.asked("fail"))
        return client.asked("fail"), sorted(client.completed)

    try:
        assert run(scenario) == ([("lease-0", "workflow:TimeoutError")], ["lease-1", "lease-2"])
    finally:
        never.set()


def test_a_slow_engine_is_no_slow_environment() -> None:
    """Generation may take as long as it takes: also paused, for ten deadlines.

    Seen failing with a clock that goes on.
    """

    async def step(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
        return ">", False

    async def scenario() -> list[str]:
        client, engine = FakeQueue([make_lease(0)]), Speaker(lambda _: "a")
        await engine.pause("recompute")
        worker, _ = make_worker(client, engine, workflows=talk(step, turn_timeout_s=SOON_S))
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(10 * SOON_S)
        await engine.resume()
        await client.until(lambda queue: queue.completed or queue.asked("fail"))
        await worker.stop()
        await running
        return list(client.completed)

    assert run(scenario) == ["lease-0"]


def test_an_environment_may_take_longer_than_a_lease_lasts() -> None:
    """Its worker's heartbeats keep the lease for many times its length, and other groups come and go meanwhile.

    Seen failing with heartbeats that name no lease.
    """
    clock, beats, settings = FakeClock(), list[list[str]](), make_settings()

    async def scenario(access: QueueAccess) -> None:
        is_over = asyncio.Event()

        async def step(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
            if row["prompt"] == "0+1=?":
                await is_over.wait()
            return ">", False

        class Client(AsyncQueueClient):
            async def heartbeat(self, **named: Any) -> list[str]:
                beats.append(await self._call("heartbeat", **named))
                clock.now += 0.6 * settings.lease_timeout_s
                return beats[-1]

        client = Client(access, timeout_s=PATIENCE_S)
        worker, _ = make_worker(
            client,
            Speaker(lambda _: "a"),
            samples_per_group=3,
            slots=12,
            workflows=talk(step, turn_timeout_s=PATIENCE_S),
        )
        try:
            running = asyncio.create_task(worker.run())
            while len(beats) < 20 or (await client.status())["counts"]["generated"] < 3:
                await asyncio.sleep(0.01)
            assert not any("fake/0/0#0@1" in dead for dead in beats), "the lease was lost"
            is_over.set()
            while (await client.status())["counts"]["generated"] < 4:
                await asyncio.sleep(0.01)
            await worker.stop()
            await running
        finally:
            client.close()

    with serving(clock=clock) as access, connected(access) as plain:
        plain.open_admission()
        run(lambda: scenario(access))
        groups = {lease.group.group_id for lease in plain.lease_verify(worker="verifier/0", limit=4, wait_s=0.0)}
    assert "fake/0/0#0" in groups


# --- cancellation ---


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_dead_lease_ends_its_episodes_with_the_step_they_are_in(kind: str) -> None:
    """An async step is cancelled; a thread cannot be, and its result goes nowhere. The slots are free at once.

    Seen failing with `asyncio.shield` around the step.
    """
    ended: list[str] = []
    let_go = threading.Event()

    async def async_step(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
        if "stuck" in row:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")
        return ">", False

    def sync_step(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
        if "stuck" in row:
            let_go.wait()
            ended.append("returned")
        return ">", False

    async def scenario() -> tuple[list[str], list[str], float, int]:
        client = FakeQueue([make_lease(0, stuck=True), make_lease(1)])
        engine = Speaker(lambda _: "a")
        workflows = talk(async_step if kind == "async" else sync_step)
        worker, _ = make_worker(client, engine, slots=2, max_episodes=2, workflows=workflows)
        running = asyncio.create_task(worker.run())
        await client.until(lambda queue: len(queue.asked("heartbeat")) >= 3)
        assert client.asked("lease_rollout") == [(1,)], "no more episodes may be held"
        client.dead.append("lease-0")
        await client.until(lambda queue: "lease-1" in queue.completed)
        before = list(ended)
        let_go.set()
        while kind == "sync" and len(ended) < 2:
            await asyncio.sleep(0.001)
        await settle()
        await worker.stop()
        await running
        return before, list(client.completed), worker.gauges()["running"], len(engine.contexts)

    before, completed, still_running, requests = run(scenario)
    assert before == (["cancelled", "cancelled"] if kind == "async" else [])
    assert completed == ["lease-1"]
    assert still_running == 0
    assert requests == 2 + 2 * 2, "one turn of each stuck sample, two of the others"


# --- slots ---


def test_a_sample_that_waits_for_its_environment_frees_its_slot() -> None:
    """Two slots, four groups of two, six episodes at most: three groups wait at a time, and then speak all at once.

    What the engine does is told as events. Seen failing with samples that keep their slot, with episodes begun where
    none is free, with `max_episodes` not looked at, and with more samples told than slots.
    """

    async def scenario() -> None:
        gate = asyncio.Event()

        async def step(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
            await gate.wait()
            return ">", False

        client, engine = FakeQueue([make_lease(n) for n in range(4)]), Speaker(lambda _: "a")
        worker, events = make_worker(client, engine, slots=2, max_episodes=6, workflows=talk(step))
        running = asyncio.create_task(worker.run())
        await client.until(lambda queue: len(engine.contexts) == 6 and len(queue.asked("heartbeat")) >= 3)
        assert client.asked("lease_rollout") == [(1,)] * 3
        assert worker.gauges()["running"] == 0
        await engine.pause("recompute")
        gate.set()
        beats = len(client.asked("heartbeat"))
        await client.until(lambda queue: len(queue.asked("heartbeat")) > beats + 3)
        assert (worker.gauges()["running"], len(client.asked("lease_rollout"))) == (6, 3)
        await engine.resume()
        await client.until(lambda queue: len(queue.completed) == 4)
        await worker.stop()
        await running
        assert {event["n"] for event in events.drain() if event["kind"] == "running"} <= {0, 1, 2}

    run(scenario)


# --- failures ---


def test_the_traceback_is_logged_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Three groups fail alike, one otherwise. Seen failing with `logger.exception` for each."""

    def step(messages: Messages, row: Mapping[str, Any]) -> Any:
        if "odd" in row:
            return "no pair"
        raise RuntimeError(f"level {row['level']}")

    async def scenario() -> tuple[list[Any], Any]:
        leases = [make_lease(n, level=n) for n in range(3)] + [make_lease(3, odd=True)]
        client = FakeQueue(leases)
        worker, _ = make_worker(client, Speaker(lambda _: "a"), workflows=talk(step))
        await serve_until(worker, client, lambda queue: len(queue.asked("fail")) == 4)
        return client.asked("fail"), worker.gauges()["errors"]

    with caplog.at_level(logging.ERROR):
        failed, errors = run(scenario)
    assert sorted(failed) == [
        *((f"lease-{n}", "workflow:RuntimeError") for n in range(3)),
        ("lease-3", "workflow:TypeError"),
    ]
    assert errors["workflow:RuntimeError"] == "workflow:RuntimeError: level 0"
    records = [record for record in caplog.records if "could not be generated" in record.message]
    assert len(records) == 4 * 2  # samples of each group
    traced = [record for record in records if "Traceback" in record.message]
    assert len(traced) == 2
    assert "raise RuntimeError(f\"level {row['level']}\")" in caplog.text
    assert "sample 0 of group train/0/2#0 could not be generated: workflow:RuntimeError: level 2" in caplog.text
    assert "an environment's step must return (reply, done), text and bool, got 'no pair'" in caplog.text


def test_a_step_that_exits_is_no_end_of_the_worker() -> None:
    """In its thread, or async. Seen failing with `except Exception` in the thread: nobody ever answers."""

    def step(messages: Messages, row: Mapping[str, Any]) -> Any:
        raise SystemExit(1)

    async def async_step(messages: Messages, row: Mapping[str, Any]) -> Any:
        raise SystemExit(1)

    async def scenario(step: Any) -> list[Any]:
        client = FakeQueue([make_lease(0)])
        worker, _ = make_worker(client, Speaker(lambda _: "a"), workflows=talk(step))
        await serve_until(worker, client, lambda queue: queue.asked("fail"))
        return client.asked("fail")

    assert run(lambda: scenario(step)) == [("lease-0", "workflow:RuntimeError")]
    assert run(lambda: scenario(async_step)) == [("lease-0", "workflow:SystemExit")]


# --- seeds and events ---


def test_later_requests_of_an_episode_have_seeds_of_their_own() -> None:
    """The first has that of a plain sample, so that single turns stay as they were; see `sample_seed`.

    BLAKE2b of `0/train/0/7#0/1/2`, by `b2sum -l 32`, little end first, is the third request's of sample 1.
    """
    assert sample_seed(0, "train/0/7#0", 1, 0) == sample_seed(0, "train/0/7#0", 1)
    assert sample_seed(0, "train/0/7#0", 1, 2) == int.from_bytes(bytes.fromhex("c588be6f"), "little")

    async def scenario() -> list[tuple[int, int | None]]:
        engine = Speaker(lambda _: "a")
        client = FakeQueue([make_lease(7)])
        worker, _ = make_worker(client, engine, workflows=talk(replies, max_turns=3))
        await serve_until(worker, client, lambda queue: queue.completed)
        return sorted((len(c), s.seed) for c, s in zip(engine.contexts, engine.samplings, strict=True))

    def seeds(call: int) -> list[int]:
        return sorted(sample_seed(0, "train/0/7#0", index, call) for index in (0, 1))

    told = run(scenario)
    assert [seed for _, seed in told] == [*seeds(0), *seeds(1), *seeds(2)]
    assert len({seed for _, seed in told}) == 6


def test_the_group_event_tells_given_tokens_too() -> None:
    async def scenario() -> list[Any]:
        client = FakeQueue([make_lease(0)])
        worker, events = make_worker(client, Speaker(lambda _: "a"), workflows=talk(replies))
        await serve_until(worker, client, lambda queue: queue.completed)
        return [event for event in events.drain() if event["kind"] == "group"]

    (event,) = run(scenario)
    assert event["samples"][0].keys() == {"end", "tokens", "spans"}
    assert event["samples"][0]["spans"] == [[0, 0, 2], [-1, 2, 3], [0, 3, 5]]


def test_samples_of_several_turns_do_not_depend_on_company() -> None:
    """One group alone and six at once draw the same tokens, with a random engine.

    Seen failing with a counter that episodes share.
    """

    async def scenario(numbers: Sequence[int], slots: int) -> dict[str, list[list[int]]]:
        client = FakeQueue([make_lease(n + 3) for n in numbers])
        engine = ScriptedEngine(vocab_size=40, tokenizer=TOKENIZER)
        worker, _ = make_worker(client, engine, slots=slots, workflows=talk(replies, max_turns=4))
        await serve_until(worker, client, lambda queue: len(queue.completed) == len(numbers))
        return {lease: [tokens(sample) for sample in samples] for lease, samples in client.completed.items()}

    def tokens(sample: Sample) -> list[int]:
        return sample.token_ids.tolist()

    assert run(lambda: scenario(range(6), 1)) == run(lambda: scenario(range(5, -1, -1), 64))
