"""A queue that replaces a dead one: it starts from a copy of its state, and workers present what they hold."""

import asyncio
import contextlib
import threading
import time
from random import Random
from typing import Any, Literal

import pytest
from ledger_builders import make_sample, make_settings
from queue_builders import SOON_S, FakeCursor, connected, make_queue, saved
from scripted_engine import ScriptedEngine

from areal_lite.config.recipe import parse_config
from areal_lite.events import EventBuffer
from areal_lite.leases import LeaseWorker
from areal_lite.rollout.runner import Workflows
from areal_lite.rollout.worker import RolloutWorker
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


class Scorer(LeaseWorker):
    """A verifier that takes a moment for a group, eight at a time."""

    def _room(self) -> int:
        return 8 - len(self._held)

    async def _ask(self, limit: int) -> list[Lease]:
        return await self._client.lease_verify(worker=self._name, limit=limit, wait_s=1.0)

    def _progress(self) -> int:
        return 0

    async def _serve(self, lease: Lease) -> None:
        await asyncio.sleep(0.1)
        scores = [Score(reward=1.0)] * len(lease.group.samples)
        await self._deliver(lease, lambda: self._client.complete_verify(lease_id=lease.lease_id, scores=scores))


class Clock:
    """Real time, until its queue is to stand still, as that of a stopped process does."""

    def __init__(self) -> None:
        self.goes = threading.Event()
        self.goes.set()

    def __call__(self) -> float:
        self.goes.wait()
        return time.monotonic()


async def trained_by_workers() -> tuple[list[str], tuple[int, int], int]:
    """Train with two workers of 16 slots at eta 3, 8 groups of 2 samples a step; the queue dies once.

    Returns:
        Prompts trained, leases kept and lost, and tokens generated.
    """
    changes: dict[str, Any] = {"max_staleness": 3, "groups_per_step": 8, "total_steps": 6}
    ledger_settings, clock = make_settings(**changes), Clock()
    server = make_queue(ledger=Ledger(ledger_settings, clock=clock), num_ranks=1)
    access = server.start()
    config = parse_config({"queue": {"samples_per_group": 2}, "rollout": {"slots": 16, "max_new_tokens": 20}})
    engines = [ScriptedEngine(token_s=0.02, vocab_size=10**6) for _ in range(2)]
    clients = [AsyncQueueClient(access, timeout_s=1.0) for _ in range(3)]
    workers: list[LeaseWorker] = [
        RolloutWorker(client, engine, config, events=EventBuffer(f"rollout/{n}"), workflows=Workflows())
        for n, (client, engine) in enumerate(zip(clients, engines, strict=False))
    ]
    workers.append(Scorer(clients[2], name="verifier/0", heartbeat_s=0.05))
    trained, copy, kept = list[str](), b"", (0, 0)
    with contextlib.ExitStack() as opened:
        opened.callback(lambda: server.close())
        opened.callback(clock.goes.set)
        for client in clients:
            opened.callback(client.close)
        queue = opened.enter_context(connected(access))
        queue.open_admission()
        running = [asyncio.create_task(worker.run()) for worker in workers]
        for step in range(1, 7):
            async with asyncio.timeout(SOON_S):
                while queue.take(batch_id=f"{step}", wait_s=0.0) is None:
                    await asyncio.sleep(0.01)
            assert queue.fetch(batch_id=f"{step}", rank=0).version == step - 1
            trained += [group.group_id for group in queue.batch_groups(batch_id=f"{step}", limit=8)]
            copy = queue.save()
            await asyncio.sleep(0.1)
            held = sum(worker["leases"] for worker in queue.status()["workers"].values())
            if step > 1 and not any(kept) and held >= 8:
                clock.goes.clear()
                await asyncio.sleep(3.0)  # longer than a request is waited for: results are kept
                cursor = FakeCursor()
                ledger = restore(copy, settings=ledger_settings, cursor=cursor, keep_batch=True)
                dead, server = server, make_queue(ledger=ledger, cursor=cursor, num_ranks=1)
                opened.callback(dead.close)
                opened.callback(clock.goes.set)
                queue.move_to(access := server.start())
                queue.take(batch_id=f"{step}", wait_s=0.0)
                sums = zip(*[await worker.reconnect(access) for worker in workers], strict=True)
                kept = tuple(map(sum, sums))  # type: ignore[assignment]
                clock.goes.set()
                dead.close()
                queue.open_admission()
            queue.complete_step(batch_id=f"{step}")
            for engine in engines:
                await engine.stamp(step)
        async with asyncio.timeout(SOON_S):
            for worker in workers:
                await worker.stop()
            await asyncio.gather(*running)
        assert queue.status()["counts"]["trained"] == 48
    return trained, kept, sum(engine.tokens_generated for engine in engines)


@pytest.mark.slow
def test_workers_keep_what_they_hold_and_what_they_have_done_while_there_was_no_queue() -> None:
    """Over ZeroMQ; no token is generated in vain. Seen failing with results that are handed in as often as any request
    or before what is held was presented, and with nothing presented."""
    trained, (kept, lost), tokens = asyncio.run(trained_by_workers())
    assert len(trained) == len(set(trained)) == 48
    assert kept + lost >= 8
    assert lost <= 2
    assert tokens <= (48 + lost) * 40
