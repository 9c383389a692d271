"""Episodes under the rollout worker: deadlines, cancellation, failures by reason, slots, seeds."""

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from episode_builders import Speaker, in_loop, run
from worker_builders import FakeQueue, make_lease, make_worker, running, serve_until, settle

from areal_lite.rollout.runner import Workflows
from areal_lite.rollout.worker import sample_seed
from areal_lite.rollout.workflows import multi_turn, single_turn

Messages = Sequence[Mapping[str, str]]


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

    def sync_step(messages: Messages, row: Mapping[str, Any]) -> None:
        never.wait()

    async def async_step(messages: Messages, row: Mapping[str, Any]) -> None:
        await asyncio.Event().wait()

    async def episode(engine: Any, row: Mapping[str, Any]) -> None:
        await engine.generate(engine.prompt_ids)
        await asyncio.Event().wait()

    async def scenario() -> None:
        stuck = "own" if kind == "workflow" else "multi_turn"
        honest = [make_lease(number, workflow="single_turn") for number in (1, 2)]
        client = FakeQueue([make_lease(0, workflow=stuck), *honest])
        workflows = talk(sync_step if kind == "sync step" else async_step, turn_timeout_s=0.05)
        workflows.loaded["own"] = (episode, {})
        worker, _ = make_worker(client, Speaker(lambda _: "a"), workflows=workflows)
        await serve_until(worker, client, lambda queue: len(queue.completed) == 2 and queue.asked("fail"))
        assert client.asked("fail") == [("lease-0", "workflow:TimeoutError")]
        assert sorted(client.completed) == ["lease-1", "lease-2"]

    try:
        run(scenario)
    finally:
        never.set()


@in_loop
async def test_a_slow_engine_is_no_slow_environment() -> None:
    """Generation may take as long as it takes: also paused, for two deadlines. Seen failing with a clock that runs on.

    The turn after the pause has the version stamped in it.
    """
    client, engine = FakeQueue([make_lease(0)]), Speaker(lambda _: "a")
    await engine.pause("recompute")
    worker, _ = make_worker(client, engine, workflows=talk(replies, turn_timeout_s=1.0))
    async with running(worker):
        await asyncio.sleep(2.0)
        await engine.stamp(7)
        await engine.resume()
        await client.until(lambda queue: queue.completed or queue.asked("fail"))
    assert {span.version for span in client.completed["lease-0"][0].spans} == {7, -1}


# --- cancellation ---


@pytest.mark.parametrize("kind", ["async", "sync"])
@in_loop
async def test_a_dead_lease_ends_its_episodes_with_the_step_they_are_in(kind: str) -> None:
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

    client, engine = FakeQueue([make_lease(0, stuck=True), make_lease(1)]), Speaker(lambda _: "a")
    workflows = talk(async_step if kind == "async" else sync_step)
    worker, _ = make_worker(client, engine, slots=2, max_episodes=2, workflows=workflows)
    async with running(worker):
        await client.heartbeats(3)
        assert client.asked("lease_rollout") == [(1,)], "no more episodes may be held"
        client.dead.append("lease-0")
        await client.until(lambda queue: "lease-1" in queue.completed)
        assert ended == (["cancelled", "cancelled"] if kind == "async" else [])
        let_go.set()
        while kind == "sync" and len(ended) < 2:
            await asyncio.sleep(0.001)
        await settle()
    assert list(client.completed) == ["lease-1"]
    assert worker.gauges()["running"] == 0
    assert len(engine.contexts) == 2 + 2 * 2, "one turn of each stuck sample, two of the others"


# --- slots ---


@in_loop
async def test_a_sample_that_waits_for_its_environment_frees_its_slot() -> None:
    """Two slots, four groups of two, six episodes at most: three groups wait at a time, and then speak all at once.

    Seen failing with samples that keep their slot, with episodes started although none is free, with `max_episodes`
    ignored, and with more samples than slots in the events.
    """
    gate = asyncio.Event()

    async def step(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
        await gate.wait()
        return ">", False

    client, engine = FakeQueue([make_lease(n) for n in range(4)]), Speaker(lambda _: "a")
    worker, events = make_worker(client, engine, slots=2, max_episodes=6, workflows=talk(step))
    async with running(worker):
        await client.until(lambda queue: len(engine.contexts) == 6 and len(queue.asked("heartbeat")) >= 3)
        assert client.asked("lease_rollout") == [(1,)] * 3
        assert worker.gauges()["running"] == 0
        await engine.pause("recompute")
        gate.set()
        await client.heartbeats(4)
        assert (worker.gauges()["running"], len(client.asked("lease_rollout"))) == (6, 3)
        await engine.resume()
        await client.until(lambda queue: len(queue.completed) == 4)
    assert {event["n"] for event in events.drain() if event["kind"] == "running"} <= {0, 1, 2}


# --- failures ---


@in_loop
async def test_the_traceback_is_logged_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Three groups fail alike, one otherwise. Seen failing with `logger.exception` for each."""

    def step(messages: Messages, row: Mapping[str, Any]) -> Any:
        if "odd" in row:
            return "no pair"
        raise RuntimeError(f"level {row['level']}")

    client = FakeQueue([make_lease(n, level=n) for n in range(3)] + [make_lease(3, odd=True)])
    worker, _ = make_worker(client, Speaker(lambda _: "a"), workflows=talk(step))
    with caplog.at_level(logging.ERROR):
        await serve_until(worker, client, lambda queue: len(queue.asked("fail")) == 4)
    alike = [(f"lease-{n}", "workflow:RuntimeError") for n in range(3)]
    assert sorted(client.asked("fail")) == [*alike, ("lease-3", "workflow:TypeError")]
    assert worker.gauges()["errors"]["workflow:RuntimeError"] == "workflow:RuntimeError: level 0"
    records = [record for record in caplog.records if "could not be generated" in record.message]
    assert len(records) == 4 * 2  # samples of each group
    assert sum("Traceback" in record.message for record in records) == 2
    assert "raise RuntimeError(f\"level {row['level']}\")" in caplog.text
    assert "sample 0 of group train/0/2#0 could not be generated: workflow:RuntimeError: level 2" in caplog.text
    assert "an environment's step must return (reply, done), text and bool, got 'no pair'" in caplog.text


@in_loop
async def test_a_step_that_exits_is_no_end_of_the_worker() -> None:
    """In its thread, or async. Seen failing with `except Exception` in the thread: no reply ever comes.

    Nor is one that cancels a task and awaits it. Seen failing with a group that nobody hears of again.
    """

    def step(messages: Messages, row: Mapping[str, Any]) -> Any:
        raise SystemExit(1)

    async def async_step(messages: Messages, row: Mapping[str, Any]) -> Any:
        raise SystemExit(1)

    async def cancelled_step(messages: Messages, row: Mapping[str, Any]) -> Any:
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task

    cancelled = (cancelled_step, "workflow:CancelledError")
    for own, reason in ((step, "workflow:RuntimeError"), (async_step, "workflow:SystemExit"), cancelled):
        client = FakeQueue([make_lease(0)])
        worker, _ = make_worker(client, Speaker(lambda _: "a"), workflows=talk(own))
        await serve_until(worker, client, lambda queue: queue.asked("fail"))
        assert client.asked("fail") == [("lease-0", reason)]


# --- seeds and events ---


@in_loop
async def test_later_requests_of_an_episode_have_seeds_of_their_own() -> None:
    """The first has that of a plain sample, so that single turns stay as they were; see `sample_seed`.

    BLAKE2b of `0/train/0/7#0/1/2`, by `b2sum -l 32`, little end first, is the third request's of sample 1. The group's
    event names given tokens, too. Seen failing with a counter that episodes share.
    """
    assert sample_seed(0, "train/0/7#0", 1, 0) == sample_seed(0, "train/0/7#0", 1)
    assert sample_seed(0, "train/0/7#0", 1, 2) == int.from_bytes(bytes.fromhex("c588be6f"), "little")

    engine, client = Speaker(lambda _: "a"), FakeQueue([make_lease(7)])
    worker, events = make_worker(client, engine, workflows=talk(replies, max_turns=3))
    await serve_until(worker, client, lambda queue: queue.completed)
    drawn = sorted((len(c), s.seed) for c, s in zip(engine.contexts, engine.samplings, strict=True))
    expected = [sorted(sample_seed(0, "train/0/7#0", index, call) for index in (0, 1)) for call in range(3)]
    assert [seed for _, seed in drawn] == [seed for seeds in expected for seed in seeds]
    (event,) = [event for event in events.drain() if event["kind"] == "group"]
    assert event["samples"][0].keys() == {"end", "tokens", "spans"}
    assert event["samples"][0]["spans"] == [[0, 0, 2], [-1, 2, 3], [0, 3, 5], [-1, 5, 6], [0, 6, 8]]
