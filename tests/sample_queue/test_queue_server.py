"""The sample queue over real ZeroMQ: a group's whole path, waiting, lost workers, batches, save and restore."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgpack
import numpy as np
import pytest
from episode_builders import in_loop
from ledger_builders import FakeClock, make_sample, make_settings
from queue_builders import (
    LONG_WAIT_S,
    SCORES,
    SOON_S,
    FakeCursor,
    connected,
    generate,
    make_ready,
    make_samples,
    open_queue,
    parked,
    serving,
    verify,
)

from areal_lite.errors import CheckpointError, LedgerError
from areal_lite.sample_queue.client import AsyncQueueClient, QueueClient
from areal_lite.sample_queue.service import restore
from areal_lite.wire import SCHEMA_VERSION


@pytest.fixture
def queue() -> Iterator[QueueClient]:
    """A client of a fresh queue with open admission."""
    with open_queue() as client:
        yield client


# The whole path


async def whole_path(queue: AsyncQueueClient) -> None:
    assert await queue.lease_rollout(worker="rollout/0", limit=3, wait_s=0.0) == []  # admission is closed
    await queue.open_admission()
    leases = await queue.lease_rollout(worker="rollout/0", limit=3, wait_s=SOON_S)
    assert [lease.group.group_id for lease in leases] == ["fake/0/0#0", "fake/0/1#0", "fake/0/2#0"]
    assert leases[2].group.prompt == FakeCursor().get("fake/0/2")
    assert {(lease.version, lease.group.samples) for lease in leases} == {(0, ())}
    ids = [lease.lease_id for lease in leases]
    assert await queue.heartbeat(worker="rollout/0", lease_ids=[*ids, "unknown"], progress=7) == ["unknown"]
    for lease_id in ids:
        assert await queue.complete_rollout(lease_id=lease_id, samples=make_samples()) is True

    leases = await queue.lease_verify(worker="verifier/0", limit=8, wait_s=SOON_S)
    assert [lease.group.group_id for lease in leases] == ["fake/0/0#0", "fake/0/1#0", "fake/0/2#0"]
    assert [sample.text for sample in leases[0].group.samples] == ["x", "xx", "xxx"]
    for lease in leases:
        assert await queue.complete_verify(lease_id=lease.lease_id, scores=SCORES) is True

    rewards = {"reward_by_source": {"fake": 0.5}, "reward_parts": {}, "verifier_metrics": {}}  # 0, 1 and a failure
    assert await queue.take(batch_id="step-0", wait_s=SOON_S) == rewards
    assert await queue.take(batch_id="step-0", wait_s=0.0) == rewards
    shards = [await queue.fetch(batch_id="step-0", rank=rank) for rank in (0, 1)]
    for rank, shard in enumerate(shards):
        assert (shard.rank, shard.version) == (rank, 0)
        assert np.array_equal(shard.rewards, [[0.0, 1.0, np.nan]] * 2, equal_nan=True)
    rows = {(row.group_index, row.sample_index): row for shard in shards for row in shard.rows}
    assert len(rows) == 6
    for (group_index, sample_index), row in rows.items():
        assert row.prompt_token_ids == tuple(range(group_index + 1))
        assert row.sample.num_tokens == sample_index + 1
        assert row.sample.score == SCORES[sample_index]

    (group,) = await queue.batch_groups(batch_id="step-0", limit=1)
    assert (group.group_id, group.prompt.text, len(group.samples)) == ("fake/0/0#0", "0+1=?", 3)
    assert await queue.complete_step(batch_id="step-0") == 1
    assert await queue.complete_step(batch_id="step-0") == 1
    status = await queue.status()
    assert (status["version"], status["missing"], status["capacity"]) == (1, 1, 3)
    assert (status["counts"]["trained"], status["counts"]["ready"], status["counts"]["admitted"]) == (2, 1, 3)
    counts = await queue.abandon()
    assert (counts["trained"], counts["abandoned"], counts["outstanding"]) == (2, 1, 0)


def test_a_group_goes_from_prompt_to_trained() -> None:
    """Seen failing with work lent while admission is closed, and with a row's group taken for its sample."""
    # Actors make their client before their event loop runs.
    with serving() as access, closing(AsyncQueueClient(access, timeout_s=SOON_S)) as client:
        asyncio.run(whole_path(client))


# Waiting


def parked_and_change(kind: str, client: QueueClient, clock: FakeClock) -> tuple[str, Callable[[], Any]]:
    """Bring the queue into a state where a request must wait; return its name and what ends its waiting."""
    if kind == "admission opens":
        return "lease_rollout", client.open_admission
    client.open_admission()
    if kind == "a group is generated":
        return "lease_verify", lambda: generate(client, 1)
    if kind == "a batch is ready":
        generate(client, 2)
        return "take", lambda: verify(client, 2)
    if kind == "a step is complete":
        make_ready(client, 4)
        client.take(batch_id="a", wait_s=0.0)
        return "lease_rollout", lambda: client.complete_step(batch_id="a")
    client.lease_rollout(worker="rollout/0", limit=4, wait_s=0.0)
    return "lease_rollout", lambda: setattr(clock, "now", 11.0)


@pytest.mark.parametrize(
    "kind",
    ["admission opens", "a group is generated", "a batch is ready", "a step is complete", "a lease expires"],
)
def test_a_parked_request_is_answered_when(kind: str) -> None:
    """Seen failing with parked requests looked at only when their deadlines have passed, and with `expire` never called
    by the server.
    """
    requests = {
        "lease_rollout": {"worker": "rollout/9", "limit": 1},
        "lease_verify": {"worker": "verifier/9", "limit": 1},
        "take": {"batch_id": "b"},
    }
    clock = FakeClock()
    with serving(clock=clock) as access, connected(access) as client, connected(access) as waiting:
        name, change = parked_and_change(kind, client, clock)
        with parked(client, getattr(waiting, name), **requests[name]) as answer, closing(waiting):
            assert not answer.done()
            change()
            assert answer.result(timeout=SOON_S)


@in_loop
async def test_parked_requests_are_answered_in_the_order_they_came() -> None:
    """Seen failing with the last one looked at first."""
    with serving() as access:
        client = AsyncQueueClient(access, timeout_s=SOON_S)
        requests = [client.lease_rollout(worker=f"rollout/{i}", limit=1, wait_s=LONG_WAIT_S) for i in range(4)]
        tasks = [asyncio.ensure_future(request) for request in requests]
        await client.status()
        await client.open_admission()
        answers = await asyncio.wait_for(asyncio.gather(*tasks), SOON_S)
        assert [lease.group.group_id for (lease,) in answers] == [f"fake/0/{i}#0" for i in range(4)]
        client.close()


@in_loop
async def test_a_parked_request_ends_at_its_own_deadline_behind_another_for_the_same() -> None:
    """Seen failing with parked requests kept past their deadline, and with requests behind one that could not be
    answered passed over whatever the time is.
    """
    with serving() as access:
        client = AsyncQueueClient(access, timeout_s=SOON_S)
        wait = asyncio.create_task(client.lease_verify(worker="a", limit=1, wait_s=LONG_WAIT_S))
        await client.status()
        assert await asyncio.wait_for(client.lease_verify(worker="b", limit=1, wait_s=0.05), SOON_S) == []
        assert not wait.done()
        client.close()
        with pytest.raises(LedgerError, match="open client"):
            await wait


def test_work_is_admitted_as_it_is_asked_for_within_capacity(queue: QueueClient) -> None:
    """Two groups a step at eta 1: four outstanding at most. Seen failing with all of the capacity admitted at once."""
    assert len(queue.lease_rollout(worker="rollout/0", limit=1, wait_s=0.0)) == 1
    assert queue.status()["counts"]["admitted"] == 1
    assert len(queue.lease_rollout(worker="rollout/1", limit=99, wait_s=0.0)) == 3
    assert queue.status()["capacity"] == 0
    queue.close_admission()
    assert queue.forget(worker="rollout/0") == ["fake/0/0#0@1"]
    assert queue.lease_rollout(worker="rollout/1", limit=1, wait_s=0.0) == []


# Workers


def test_what_a_forgotten_worker_waits_for_ends_empty() -> None:
    """Seen failing with its request left parked: the dead worker was lent the next group."""
    with serving() as access, connected(access) as client, connected(access) as dead:
        with parked(client, dead.lease_rollout, worker="rollout/0", limit=1) as answer:
            assert client.forget(worker="rollout/0") == []
            client.open_admission()
            assert answer.result(timeout=SOON_S) == []
        status = client.status()
        assert status["workers"] == {}
        assert status["counts"]["admitted"] == 0


def test_status_tells_who_holds_what_since_when() -> None:
    """Seen failing: a late last request kept a dead worker's name forever."""
    clock = FakeClock()
    with open_queue(clock=clock) as client:
        client.lease_rollout(worker="rollout/0", limit=1, wait_s=0.0)
        clock.now = 3.0
        (second,) = client.lease_rollout(worker="rollout/0", limit=1, wait_s=0.0)
        client.heartbeat(worker="verifier/0", lease_ids=[], progress=0)
        clock.now = 5.0
        workers = client.status()["workers"]
        unknown = {"role": "", "heartbeat_age_s": 2.0, "leases": 0, "oldest_lease_age_s": 0.0}
        rollout = {"role": "rollout", "heartbeat_age_s": 5.0, "leases": 2, "oldest_lease_age_s": 5.0}
        assert workers == {"rollout/0": rollout, "verifier/0": unknown}
        client.complete_rollout(lease_id=second.lease_id, samples=make_samples())
        client.lease_verify(worker="verifier/0", limit=1, wait_s=0.0)
        assert client.status()["workers"]["verifier/0"]["role"] == "verify"
        client.forget(worker="rollout/0")
        assert client.status()["workers"].keys() == {"verifier/0"}
        client.lease_rollout(worker="rollout/0", limit=0, wait_s=0.0)  # sent before it died
        assert client.status()["workers"].keys() == {"verifier/0", "rollout/0"}
        clock.now = 1000.0
        client.heartbeat(worker="verifier/0", lease_ids=[], progress=0)
        assert client.status()["workers"].keys() == {"verifier/0"}


def test_progress_grows_with_what_workers_report_and_never_falls(queue: QueueClient) -> None:
    """Seen failing with the last reports summed, which fall when a worker is restarted or forgotten."""
    progress = [queue.status()["progress"]]
    for reported in (5, 5, 9, 2):  # the last by a worker that was started anew
        queue.heartbeat(worker="rollout/0", lease_ids=[], progress=reported)
        progress.append(queue.status()["progress"])
    queue.forget(worker="rollout/0")
    progress.append(queue.status()["progress"])
    assert np.diff(progress).tolist() == [5, 0, 4, 2, 0]
    queue.lease_rollout(worker="rollout/1", limit=1, wait_s=0.0)
    assert queue.status()["progress"] > progress[-1]


# Batches


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_partition_the_batch_and_may_ask_again(num_ranks: int) -> None:
    """Four groups of three samples, two minibatches. Seen failing with the rows split anew at every fetch."""
    with open_queue(groups_per_step=4, num_ranks=num_ranks) as client:
        make_ready(client, 4)
        client.take(batch_id="b", wait_s=0.0)
        places = []
        for rank in range(num_ranks):
            first, second = (client.fetch(batch_id="b", rank=rank) for _ in range(2))
            rows = [[(r.group_index, r.sample_index, r.minibatch) for r in shard.rows] for shard in (first, second)]
            assert rows[0] == rows[1]
            assert {minibatch for _, _, minibatch in rows[0]} == {0, 1}
            places += rows[0]
        assert sorted((group, sample) for group, sample, _ in places) == [(g, s) for g in range(4) for s in range(3)]
        assert Counter(minibatch for _, _, minibatch in places) == {0: 6, 1: 6}


def minibatches(seed: int) -> list[list[int]]:
    """Minibatch of each row, for two steps of a run with this seed."""
    steps = []
    with open_queue(groups_per_step=4, num_ranks=1, seed=seed) as client:
        for batch_id in ("a", "b"):
            make_ready(client, 4)
            client.take(batch_id=batch_id, wait_s=0.0)
            steps.append([row.minibatch for row in client.fetch(batch_id=batch_id, rank=0).rows])
            client.complete_step(batch_id=batch_id)
    return steps


def test_minibatches_depend_on_seed_and_version_and_nothing_else() -> None:
    """Seen failing with the run's seed alone: every step dealt its rows alike."""
    first, second = minibatches(0)
    assert first != second
    assert minibatches(0) == [first, second]
    assert minibatches(1) != [first, second]


def test_only_the_batch_that_is_taken_can_be_read(queue: QueueClient) -> None:
    make_ready(queue, 3)
    with pytest.raises(LedgerError, match="got 'a' while none is"):
        queue.fetch(batch_id="a", rank=0)
    queue.take(batch_id="a", wait_s=0.0)
    with pytest.raises(LedgerError, match="got 'b' while 'a' is"):
        queue.batch_groups(batch_id="b", limit=1)
    with pytest.raises(LedgerError, match=r"0\.\.1, got 2"):
        queue.fetch(batch_id="a", rank=2)
    queue.complete_step(batch_id="a")
    with pytest.raises(LedgerError, match="got 'a' while none is"):
        queue.fetch(batch_id="a", rank=0)


def test_a_step_completed_again_late_leaves_the_next_batch_alone(queue: QueueClient) -> None:
    """Seen failing with whatever batch is taken let go of."""
    make_ready(queue, 4)
    for batch_id in ("a", "b"):
        queue.take(batch_id=batch_id, wait_s=0.0)
        assert queue.complete_step(batch_id="a") == 1
    assert queue.fetch(batch_id="b", rank=0).version == 1


# Save and restore


def test_a_restored_queue_continues_where_it_was_saved() -> None:
    """Seen failing with the cursor's place left out of what is saved: prompts would be generated again."""
    with open_queue(groups_per_step=2, max_staleness=2) as client:
        make_ready(client, 2)
        client.take(batch_id="step-0", wait_s=0.0)
        client.complete_step(batch_id="step-0")
        make_ready(client, 3)  # two are taken, one stays ready
        client.take(batch_id="step-1", wait_s=0.0)
        (leased,) = client.lease_rollout(worker="rollout/0", limit=1, wait_s=0.0)
        saved, before = client.save(), client.status()["counts"]

    cursor = FakeCursor()
    ledger = restore(saved, settings=make_settings(samples_per_group=3, max_staleness=2), cursor=cursor)
    with serving(ledger=ledger, cursor=cursor) as access, connected(access) as client:
        status = client.status()
        assert status["version"] == 1
        assert client.lease_rollout(worker="rollout/0", limit=2, wait_s=0.0) == []  # admission is closed
        expected = {"taken": 0, "ready": 3, "leased_rollout": 0, "waiting": 1}
        assert status["counts"] == before | expected
        client.open_admission()
        again, new = client.lease_rollout(worker="rollout/0", limit=2, wait_s=0.0)
        assert again.group == leased.group
        assert again.lease_id != leased.lease_id
        assert new.group.prompt.prompt_id == "fake/0/6"
        client.take(batch_id="step-1", wait_s=0.0)
        rows = client.fetch(batch_id="step-1", rank=0).rows + client.fetch(batch_id="step-1", rank=1).rows
        assert {len(row.prompt_token_ids) for row in rows} == {3, 4}
        assert client.complete_step(batch_id="step-1") == 2


def test_a_save_is_of_one_moment_and_others_are_served_between_its_parts() -> None:
    """Seen failing with the groups read when their part is asked for, and with everything in one part."""
    sizes = {"samples_per_group": 2, "max_message_bytes": 2**26, "max_staleness": 9}
    with open_queue(**sizes) as client:
        *generated, leased = client.lease_rollout(worker="rollout/0", limit=3, wait_s=0.0)
        for lease in generated:
            samples = [make_sample(versions=[0] * 700_000)] * 2  # 11 MB
            assert client.complete_rollout(lease_id=lease.lease_id, samples=samples)
        parts = [client.save_part(part=0)]
        assert client.heartbeat(worker="rollout/0", lease_ids=[leased.lease_id], progress=1) == []
        assert client.complete_rollout(lease_id=leased.lease_id, samples=[make_sample(versions=[0])] * 2)
        while part := client.save_part(part=len(parts)):
            assert part == client.save_part(part=len(parts))  # after a lost answer
            parts.append(part)
        with pytest.raises(LedgerError, match="in order, got 7 after 2: begin with 0"):
            client.save_part(part=7)
        assert client.save() != b"".join(parts)
    assert len(parts) == 2
    ledger = restore(b"".join(parts), settings=make_settings(samples_per_group=2), cursor=FakeCursor())
    assert (ledger.counts()["generated"], ledger.counts()["waiting"]) == (2, 1)


def test_a_state_of_another_schema_version_says_how_to_go_on() -> None:
    saved = msgpack.packb([SCHEMA_VERSION - 1, {"ledger": {}, "cursor": {}}])
    with pytest.raises(CheckpointError, match=rf"{SCHEMA_VERSION}, got {SCHEMA_VERSION - 1}.*start a new run from"):
        restore(saved, settings=make_settings(), cursor=FakeCursor())
