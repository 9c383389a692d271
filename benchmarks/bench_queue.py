"""Groups per second from rollout to trainer, over the sample queue and over Ray's queue (about 3 minutes).

    python benchmarks/bench_queue.py --repeats 3 --seconds 1

Every carrier gets the same processes, Ray actors that stay alive: two workers with half of the clients each, a trainer,
and one in the middle (Ray's queue brings its own). A client generates a group, then verifies one, in an endless round;
what it generates was made beforehand. The trainer counts what reaches it, 16 groups at a time.

    areal-lite  lease_rollout, complete_rollout, lease_verify, complete_verify; take, fetch, complete_step; encrypted
    ray         put, get, put, get through two queues of `ray.util.queue`, which keeps nothing that was read
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import measuring
import numpy as np
import ray
from ray.util.queue import Queue

from areal_lite.data.cursor import PromptCursor
from areal_lite.errors import StallError
from areal_lite.launch.bench.harness import ratios
from areal_lite.launch.run.ray_session import ray_session
from areal_lite.sample_queue.access import QueueAccess
from areal_lite.sample_queue.client import AsyncQueueClient, QueueClient
from areal_lite.sample_queue.ledger import Ledger, LedgerSettings
from areal_lite.sample_queue.server import QueueServer
from areal_lite.sample_queue.service import QueueService
from areal_lite.types import Prompt, Sample, Score, StopReason, VersionSpan

CARRIERS = ("areal-lite", "ray")
SAMPLES_PER_GROUP, GROUPS_PER_STEP = 8, 16
MAX_OUTSTANDING = 9 * GROUPS_PER_STEP
"""Groups under way at most."""
WARM_S = 0.5
"""Seconds of each measurement that do not count."""
_TIMEOUT_S = 30.0
_NUM_WORKERS = 2


class Case(NamedTuple):
    """One measurement: the carrier of groups of a size for a number of clients."""

    carrier: str
    tokens: int
    """Of each of the 8 samples of a group."""
    clients: int
    """Connections that generate and verify, spread over two processes."""


def main(
    repeats: measuring.Repeats = 5,
    seconds: measuring.Seconds = 2.0,
    tokens: list[int] = [1000, 50],  # noqa: B006  # typer copies it
    clients: list[int] = [1, 8, 64],  # noqa: B006
    out: measuring.Out = Path("runs/bench-queue"),
) -> None:
    """Measure groups/s through the sample queue and through Ray's queue."""
    cases = [Case(carrier, *size) for size in itertools.product(tokens, clients) for carrier in CARRIERS]
    with ray_session():
        measured = measuring.in_turns(cases, repeats=repeats, measure=QueuePeers(seconds).measure)
    rows = summarise(measured)
    over = "queue over ray.util.queue.Queue, 8 x 1,000 tokens, {clients} clients"
    targets = [
        measuring.target(over.format(**row), row["areal-lite"]["over"]["ray"], at_least=5.0)
        for row in rows
        if row["tokens"] == 1000
    ]
    settings = {"repeats": repeats, "measured_s": seconds, "warm_s": WARM_S, "max_outstanding": MAX_OUTSTANDING}
    measuring.finish("queue", "groups from rollout to trainer", rows, settings=settings, out=out, targets=targets)


def summarise(measured: Mapping[Case, Sequence[float]]) -> list[dict[str, Any]]:
    """Return a row per size: of each carrier groups/s of all repeats, their median, and the ratios to the others."""
    rows: dict[Any, dict[str, Any]] = {}
    for case, rates in measured.items():
        others = [other for other in CARRIERS if other != case.carrier]
        over = {other: ratios(rates, measured[case._replace(carrier=other)]) for other in others}
        row = rows.setdefault(case[1:], {"tokens": case.tokens, "clients": case.clients})
        row[case.carrier] = {"groups_per_s": list(rates), "median": statistics.median(rates), "over": over}
    return list(rows.values())


class QueuePeers:
    """The processes of the benchmark; needs a `ray_session`."""

    def __init__(self, measured_s: float) -> None:
        self._measured_s, peer = measured_s, ray.remote(_Peer).options(num_cpus=0, max_concurrency=100)
        self._middle, self._trainer, *self._workers = [peer.remote() for _ in range(2 + _NUM_WORKERS)]

    def measure(self, case: Case) -> float:
        """Return the groups that reached the trainer per second."""
        is_ray = case.carrier == "ray"
        queues = [Queue(MAX_OUTSTANDING, {"num_cpus": 0}) for _ in range(2)] if is_ray else []
        meeting = queues or ray.get(self._middle.open.remote())  # what workers and trainer need to find each other
        shares = [len(range(place, case.clients, _NUM_WORKERS)) for place in range(_NUM_WORKERS)]
        work = [one.work.remote(case, meeting, share) for one, share in zip(self._workers, shares, strict=True)]
        training = self._trainer.train.remote(case, meeting, self._measured_s)
        ended, _ = ray.wait([training, *work])
        rate = ray.get(ended)[0]
        for one in work:
            ray.cancel(one)
        if len(ray.wait(work, num_returns=len(work), timeout=_TIMEOUT_S)[1]):
            raise StallError(f"the clients of {case.carrier} must end within {_TIMEOUT_S:g} s, and did not")
        for queue in queues:
            queue.shutdown(force=True)
        if not is_ray:
            ray.get(self._middle.close.remote())
        return float(rate)


class _Peer:
    """One process: whatever part it is given."""

    async def open(self) -> QueueAccess:
        self._server = _queue_server()
        return self._server.start()

    async def close(self) -> None:
        self._server.close()

    async def work(self, case: Case, meeting: Any, num_clients: int) -> None:
        work: Any = _ray_work if case.carrier == "ray" else _queue_work
        name = ray.get_runtime_context().get_actor_id()
        await asyncio.gather(asyncio.Event().wait(), *work(meeting, name, num_clients, _make_samples(case.tokens)))

    async def train(self, case: Case, meeting: Any, measured_s: float) -> float:
        batches: Any = _ray_batches if case.carrier == "ray" else _queue_batches
        num_groups, started, begins = 0, 0.0, time.monotonic() + WARM_S
        async with aclosing(batches(meeting)) as sizes:
            async for size in sizes:
                now = time.monotonic()
                if started:
                    num_groups += size
                elif now > begins:
                    started = now
                if started and now - started > measured_s:
                    break
        return num_groups / (now - started)


def _make_samples(tokens: int) -> list[Sample]:
    """Return a group of samples of so many tokens, with a text of four characters a token."""
    rng = np.random.default_rng(0)
    return [
        Sample(
            token_ids=rng.integers(0, 150_000, tokens, dtype=np.int32),
            logprobs=-rng.random(tokens, dtype=np.float32),
            spans=(VersionSpan(version=0, start=0, end=tokens),),
            stop_reason=StopReason.STOP,
            text="word" * tokens,
        )
        for _ in range(SAMPLES_PER_GROUP)
    ]


def _make_scores() -> list[Score]:
    return [Score(reward=float(place % 2), parts={"correct": float(place % 2)}) for place in range(SAMPLES_PER_GROUP)]


def _queue_server() -> QueueServer:
    # Samples may be of any age, so that they are made once.
    settings = LedgerSettings(max_staleness=10**9, max_ahead=MAX_OUTSTANDING // GROUPS_PER_STEP - 1, on_stale="mask",
                              total_steps=10**9, groups_per_step=GROUPS_PER_STEP,
                              samples_per_group=SAMPLES_PER_GROUP)  # fmt: skip
    prompt = Prompt(prompt_id="bench", text="7+25=?" * 50, token_ids=tuple(range(100)), answer="32")
    prompts = PromptCursor([prompt] * 1000, source="bench", seed=0)
    service = QueueService(Ledger(settings), prompts, num_minibatches=1, num_ranks=1, seed=0)
    return QueueServer(service)


def _queue_work(access: QueueAccess, name: str, num_clients: int, samples: Any) -> Iterator[Awaitable[Any]]:
    scores = _make_scores()

    async def client(worker: str) -> None:
        queue = AsyncQueueClient(access, timeout_s=_TIMEOUT_S)
        try:
            await queue.open_admission()
            while True:
                for lease in await queue.lease_rollout(worker=worker, limit=1, wait_s=1.0):
                    await queue.complete_rollout(lease_id=lease.lease_id, samples=samples)
                for lease in await queue.lease_verify(worker=worker, limit=1, wait_s=1.0):
                    await queue.complete_verify(lease_id=lease.lease_id, scores=scores)
        finally:
            queue.close()

    return (client(f"{name}/{place}") for place in range(num_clients))


async def _queue_batches(access: QueueAccess) -> AsyncGenerator[int, None]:
    queue = QueueClient(access, timeout_s=_TIMEOUT_S)

    def batch(batch_id: str) -> int:
        while queue.take(batch_id=batch_id, wait_s=1.0) is None:
            pass
        assert len(queue.fetch(batch_id=batch_id, rank=0).rows) == GROUPS_PER_STEP * SAMPLES_PER_GROUP
        queue.complete_step(batch_id=batch_id)
        return GROUPS_PER_STEP

    try:
        for step in itertools.count():
            yield await asyncio.to_thread(batch, f"step-{step}")
    finally:
        queue.close()


def _ray_work(queues: Sequence[Queue], name: str, num_clients: int, samples: Any) -> Iterator[Awaitable[Any]]:
    generated, ready = queues
    scores = _make_scores()

    async def client() -> None:
        while True:
            await generated.put_async(samples)
            await ready.put_async((await generated.get_async(), scores))

    return (client() for _ in range(num_clients))


async def _ray_batches(queues: Sequence[Queue]) -> AsyncGenerator[int, None]:
    while True:
        yield len(await asyncio.gather(*(queues[1].get_async() for _ in range(GROUPS_PER_STEP))))


if __name__ == "__main__":
    measuring.run(main)
