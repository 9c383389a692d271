"""A queue that replaces a dead one: it starts from a copy of its state, and workers present what they hold."""

import asyncio
from contextlib import closing
from random import Random
from typing import Any, Literal

import pytest
from episode_builders import in_loop
from ledger_builders import make_sample, make_settings
from queue_builders import SOON_S, FakeCursor, connected, saved, serving
from worker_builders import HeldEngine, make_worker, running

from areal_lite.sample_queue.access import QueueAccess
from areal_lite.sample_queue.client import AsyncQueueClient
from areal_lite.sample_queue.ledger import Ledger
from areal_lite.sample_queue.service import QueueService, restore
from areal_lite.types import Lease, Score

STEPS, GROUPS, SAMPLES = 8, 3, 2
WORKERS = ["one", "two"]


class Run:
    """A run without processes that checks itself: its queue dies at any moment, again and again.

    A token's number says which generation it comes from, and so does the score; a copy is made of the queue's state
    once a batch is taken and at any moment after.
    """

    def __init__(self, on_stale: Literal["mask", "wait", "drop"], eta: int, seed: int) -> None:
        self.settings = make_settings(
            max_staleness=eta, on_stale=on_stale, groups_per_step=GROUPS, samples_per_group=SAMPLES, total_steps=STEPS
        )
        self.random, self.version, self.taken, self.copy = Random(seed), 0, "", b""
        self.held: dict[str, tuple[str, Lease]] = {}
        self.late: list[Lease] = []
        self.trained: list[str] = []
        self.batch: list[Any] = []
        self.num_generated = self.num_kept = self.num_held = self.num_deaths = 0
        self.begin(Ledger(self.settings), FakeCursor())
        self.queue.open_admission()

    def begin(self, ledger: Ledger, cursor: FakeCursor) -> None:
        options: dict[str, Any] = {"num_minibatches": 1, "num_ranks": 1, "seed": 0}
        self.ledger, self.queue = ledger, QueueService(ledger, cursor, **options)

    def lease(self) -> None:
        worker, limit = self.random.choice(WORKERS), self.random.randint(1, 4)
        ask = self.random.choice([self.queue.lease_rollout, self.queue.lease_verify])
        for lease in ask(worker=worker, limit=limit, wait_s=0.0):
            assert lease.lease_id not in self.held
            self.held[lease.lease_id] = worker, lease

    def hand_in(self) -> None:
        """Of a group that is held, or once more of one that is not; some answers are lost."""
        if not (held := [lease for _, lease in self.held.values()] + self.late[-1:]):
            return
        lease = self.random.choice(held)
        is_held = self.ledger.find_lease(lease.lease_id) is not None
        if self.random.random() < 0.8:
            self.held.pop(lease.lease_id, None)
        if lease.group.samples:
            scores = [Score(reward=float(sample.token_ids[0])) for sample in lease.group.samples]
            taken = self.queue.complete_verify(lease_id=lease.lease_id, scores=scores)
        elif self.random.random() < 0.1:
            taken = self.queue.fail(lease_id=lease.lease_id, reason="reason")
        else:
            samples = [self.generate(lease) for _ in range(SAMPLES)]
            taken = self.queue.complete_rollout(lease_id=lease.lease_id, samples=samples)
        assert taken == is_held
        self.late.append(lease)

    def generate(self, lease: Lease) -> Any:
        versions = sorted(self.random.randint(lease.version, self.version) for _ in range(3))
        sample = make_sample(versions=[self.random.choice(versions[:1]), *versions])
        self.num_generated += 1
        sample.token_ids[:] = self.num_generated
        return sample

    def train(self) -> None:
        if self.taken:
            self.queue.complete_step(batch_id=self.taken)
            self.version += 1
            self.trained += [group.prompt_id for group in self.batch]
            self.taken, self.batch = "", []
        elif self.queue.take(batch_id=f"step-{self.version + 1}", wait_s=0.0):
            self.taken = f"step-{self.version + 1}"
            self.note_batch()
            self.copy = saved(self.queue)

    def note_batch(self) -> None:
        batch = self.ledger.take(self.taken)
        assert batch is not None
        self.batch = list(batch.groups)
        for group in self.batch:
            for sample in group.samples:
                assert sample.total_reward == sample.token_ids[0]  # the score of these tokens, and of no others
            age = self.version - group.oldest_version
            assert age <= self.settings.max_staleness or self.settings.on_stale == "mask"

    def copy_queue(self) -> None:
        if self.copy:
            self.copy = saved(self.queue)

    def lose_worker(self) -> None:
        """Its heartbeats did not come for a while: it goes on, and does not know."""
        self.queue.forget(worker=self.random.choice(WORKERS))

    def drop(self, lease_ids: list[str]) -> None:
        self.late += [self.held.pop(lease_id)[1] for lease_id in lease_ids]

    def beat(self) -> None:
        for worker in WORKERS:
            mine = [lease_id for lease_id, (holder, _) in self.held.items() if holder == worker]
            self.drop(self.queue.heartbeat(worker=worker, lease_ids=mine, progress=0))

    def die(self) -> None:
        """What `Cluster._replace_queue` does: once for each batch."""
        if not self.copy:
            return
        copy, self.copy = self.copy, b""
        self.num_deaths += 1
        cursor, taken_before = FakeCursor(), [group.group_id for group in self.batch]
        self.begin(restore(copy, settings=self.settings, cursor=cursor, keep_batch=True), cursor)
        if self.taken:
            self.queue.take(batch_id=self.taken, wait_s=0.0)
            self.note_batch()
            assert [group.group_id for group in self.batch] == taken_before
        else:
            self.queue.complete_step(batch_id=f"step-{self.version}")
        held = self.random.sample(list(self.held.values()), len(self.held))
        kept = [self.queue.present(worker=worker, lease=lease) for worker, lease in held]
        self.num_kept, self.num_held = self.num_kept + sum(kept), self.num_held + len(kept)
        self.drop([lease.lease_id for (_, lease), is_kept in zip(held, kept, strict=True) if not is_kept])
        for worker, lease in held:
            assert not self.queue.present(worker=worker, lease=lease)
        assert self.queue.lease_verify(worker="early", limit=99, wait_s=0.0) == []
        self.queue.open_admission()
        for lease in self.late:
            assert not self.queue.present(worker="one", lease=lease)

    def check(self) -> None:
        counts = self.ledger.counts()
        totals = {name: number for name, number in counts.items() if "(" not in name}
        outstanding = totals.pop("outstanding")
        assert totals.pop("admitted") == sum(totals.values())
        eta = min(self.settings.max_staleness + 1, STEPS - self.ledger.version)
        assert outstanding <= max(eta * GROUPS, GROUPS * bool(self.taken))
        assert self.ledger.version == self.version
        assert counts["trained"] == len(self.trained) == len(set(self.trained)) == self.version * GROUPS
        known = sum(self.ledger.find_lease(lease_id) is not None for lease_id in self.held)
        assert counts["leased_rollout"] + counts["leased_verify"] == known


@pytest.mark.parametrize("on_stale", ["mask", "wait", "drop"])
def test_nothing_is_lost_or_doubled_when_the_queue_dies_again_and_again(on_stale: Any) -> None:
    """I1 and I2. The run comes to its end, and every group in it has ended in one way.

    Seen failing with a copy whose lease ids are given anew, with leases of groups that are another's taken, with a
    group that keeps its turn, with the age that the new queue thinks, with prompts that are not drawn again, and with
    verification that is lent before all have presented what they hold.
    """
    num_deaths = num_kept = num_held = 0
    for seed in range(60):
        run = Run(on_stale, seed % 4, seed)
        actions = [run.lease, run.hand_in] * 12 + [run.train, run.copy_queue] * 4 + [run.beat, run.lose_worker]
        while run.version < STEPS:
            (run.die if run.random.random() < 0.05 else run.random.choice(actions))()
            run.check()
        assert run.queue.abandon()["outstanding"] == 0
        num_deaths += run.num_deaths
        num_kept, num_held = num_kept + run.num_kept, num_held + run.num_held
    assert num_deaths > 200
    assert num_kept > 0.75 * num_held


@pytest.mark.slow
@in_loop
async def test_a_worker_keeps_what_it_holds_and_what_it_has_done_while_there_was_no_queue() -> None:
    """Over ZeroMQ; no token is generated in vain. Seen failing with results that are handed in as often as any request
    or before what is held was presented, and with nothing presented."""
    engine, cursor, settings = HeldEngine(held=[0], vocab_size=10**6), FakeCursor(), make_settings()
    with (
        serving(samples_per_group=2) as access,
        connected(access) as queue,
        closing(AsyncQueueClient(access, timeout_s=1.0)) as client,
    ):
        queue.open_admission()
        worker, _ = make_worker(client, engine, slots=9)  # with room for more than there is
        async with running(worker), asyncio.timeout(SOON_S):
            while engine.running < 8:
                await asyncio.sleep(0.01)
            copy = queue.save()
            client.move_to(QueueAccess("tcp://127.0.0.1:9"))  # nobody's
            engine.held[0].set()
            await asyncio.sleep(3.0)  # longer than a request is waited for, twice: results are kept
            ledger = restore(copy, settings=settings, cursor=cursor, keep_batch=True)
            with serving(ledger=ledger, cursor=cursor) as another, connected(another) as successor:
                assert await worker.reconnect(another) == (4, 0)
                while successor.status()["counts"]["generated"] < 4:
                    await asyncio.sleep(0.01)
                await worker.stop()
    assert engine.tokens_generated == 4 * 2 * 8
