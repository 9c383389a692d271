"""What `areal-lite bench queue` runs: groups from rollout to trainer over the sample queue, Ray's queue and raw ZeroMQ.

Every carrier gets the same processes, Ray actors that stay alive: two workers with half of the clients each, a trainer,
and one in the middle (Ray's queue brings its own). A client generates a group, then verifies one, in an endless round;
what it generates was made beforehand. The trainer counts what reaches it, 16 groups at a time.

    areal-lite  lease_rollout, complete_rollout, lease_verify, complete_verify; take, fetch, complete_step
    ray         put, get, put, get through two queues of `ray.util.queue`, which keeps nothing that was read
    zeromq      the sample queue's messages with bytes in place of samples, into which nobody looks
"""

import asyncio
import collections
import functools
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
import zmq
from ray.util.queue import Queue

from areal_lite.launch.bench.queue import Case, EndlessPrompts, QueueBench, make_samples, make_scores
from areal_lite.sample_queue.client import AsyncQueueClient, QueueClient
from areal_lite.sample_queue.ledger import Ledger, LedgerSettings
from areal_lite.sample_queue.server import QueueServer
from areal_lite.types import Sample, VersionSpan
from areal_lite.wire import encode

__all__ = ["QueuePeers"]

_TIMEOUT_S = 30.0
_NUM_WORKERS = 2


class QueuePeers:
    """The processes of a bench; needs a `ray_session`."""

    def __init__(self, bench: QueueBench) -> None:
        self._bench = bench
        peer = ray.remote(_Peer).options(num_cpus=0, max_concurrency=100)
        self._middle, self._trainer, *self._workers = [peer.remote(bench) for _ in range(2 + _NUM_WORKERS)]

    def measure(self, case: Case) -> float:
        """Return the groups that reached the trainer per second."""
        with self._meeting(case) as meeting:
            work = [
                worker.work.remote(case, meeting, len(range(place, case.clients, _NUM_WORKERS)))
                for place, worker in enumerate(self._workers)
            ]
            train = self._trainer.train.remote(case, meeting)
            ended, _ = ray.wait([train, *work])
            rate = ray.get(ended)[0]
            ray.get([worker.stop.remote() for worker in self._workers])
            ray.get(work)
        return float(rate)

    @contextmanager
    def _meeting(self, case: Case) -> Iterator[Any]:
        """Yield what workers and trainer need to find each other."""
        if case.contender == "ray":
            queues = [Queue(self._bench.max_outstanding, {"num_cpus": 0}) for _ in range(2)]
            yield queues
            for queue in queues:
                queue.shutdown(force=True)
        else:
            yield ray.get(self._middle.open.remote(case))
            ray.get(self._middle.close.remote())


class _Peer:
    """One process: whatever part it is given."""

    def __init__(self, bench: QueueBench) -> None:
        self._bench = bench
        self._work: asyncio.Future[Any] | None = None

    async def open(self, case: Case) -> str:
        self._server = _RawServer(self._bench) if case.contender == "zeromq" else _queue_server(self._bench)
        return str(self._server.start())

    async def close(self) -> None:
        self._server.close()

    async def work(self, case: Case, meeting: Any, num_clients: int) -> None:
        work = {"areal-lite": _queue_work, "ray": _ray_work, "zeromq": _raw_work}[case.contender]
        name = ray.get_runtime_context().get_actor_id()
        clients = work(meeting, name, num_clients, make_samples(case.tokens))
        self._work = asyncio.gather(asyncio.Event().wait(), *clients)
        with suppress(asyncio.CancelledError):
            await self._work

    async def stop(self) -> None:
        if self._work is not None:
            self._work.cancel()

    async def train(self, case: Case, meeting: Any) -> float:
        batches = {"areal-lite": _queue_batches, "ray": _ray_batches, "zeromq": _raw_batches}[case.contender]
        num_groups, started, begins = 0, 0.0, time.monotonic() + self._bench.warm_s
        async with aclosing(batches(meeting, self._bench.groups_per_step)) as sizes:
            async for size in sizes:
                now = time.monotonic()
                if started:
                    num_groups += size
                elif now > begins:
                    started = now
                if started and now - started > self._bench.measured_s:
                    break
        return num_groups / (now - started)


# The sample queue


def _queue_server(bench: QueueBench) -> QueueServer:
    settings = LedgerSettings(
        max_staleness=bench.max_staleness,
        on_stale="mask",
        groups_per_step=bench.groups_per_step,
        samples_per_group=len(make_scores()),
        total_steps=10**9,
    )
    return QueueServer(Ledger(settings), EndlessPrompts(), num_minibatches=1, num_ranks=1, seed=0)


def _queue_work(endpoint: str, name: str, num_clients: int, samples: Any) -> Iterator[Any]:
    scores = make_scores()

    @functools.lru_cache(maxsize=16)
    def of_version(version: int) -> list[Sample]:
        span = VersionSpan(version=version, start=0, end=samples[0].num_tokens)
        return [replace(sample, spans=(span,)) for sample in samples]

    async def client(worker: str) -> None:
        queue = AsyncQueueClient(endpoint, timeout_s=_TIMEOUT_S)
        try:
            await queue.open_admission()
            while True:
                for lease in await queue.lease_rollout(worker=worker, limit=1, wait_s=1.0):
                    await queue.complete_rollout(lease_id=lease.lease_id, samples=of_version(lease.version))
                for lease in await queue.lease_verify(worker=worker, limit=1, wait_s=1.0):
                    await queue.complete_verify(lease_id=lease.lease_id, scores=scores)
        finally:
            queue.close()

    return (client(f"{name}/{place}") for place in range(num_clients))


async def _queue_batches(endpoint: str, groups_per_step: int) -> AsyncGenerator[int, None]:
    queue = QueueClient(endpoint, timeout_s=_TIMEOUT_S)

    def batch(batch_id: str) -> int:
        while (info := queue.take(batch_id=batch_id, wait_s=1.0)) is None:
            pass
        assert len(queue.fetch(batch_id=batch_id, rank=0).rows) == info["num_rows"]
        queue.complete_step(batch_id=batch_id)
        return info["num_groups"]

    try:
        for step in itertools.count():
            yield await asyncio.to_thread(batch, f"step-{step}")
    finally:
        queue.close()


# Ray's queue


def _ray_work(queues: Sequence[Queue], name: str, num_clients: int, samples: Any) -> Iterator[Any]:
    generated, ready = queues
    scores = make_scores()

    async def client() -> None:
        while True:
            await generated.put_async(samples)
            await ready.put_async((await generated.get_async(), scores))

    return (client() for _ in range(num_clients))


async def _ray_batches(queues: Sequence[Queue], groups_per_step: int) -> AsyncGenerator[int, None]:
    while True:
        yield len(await asyncio.gather(*(queues[1].get_async() for _ in range(groups_per_step))))


# Raw ZeroMQ


class _RawServer:
    """Keeps bytes in the order they came, in a thread of its own; as many under way as in the sample queue."""

    def __init__(self, bench: QueueBench) -> None:
        self._bench = bench
        self._closing = threading.Event()
        self._generated: collections.deque[bytes] = collections.deque()
        self._ready: collections.deque[bytes] = collections.deque()
        self._waiting: collections.deque[tuple[bytes, bytes]] = collections.deque()
        self._outstanding = 0

    def start(self) -> str:
        # The process's context, which nobody ends: ending one of its own was seen waiting for ever.
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return f"tcp://127.0.0.1:{port}"

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._socket.close(linger=0)

    def _serve(self) -> None:
        while not self._closing.is_set():
            if self._socket.poll(100):
                peer, op, content = self._socket.recv_multipart()
                if op == b"complete_rollout":
                    self._generated.append(content)
                self._waiting.append((peer, op))
            # Who cannot be answered yet asks again, in the order they came.
            for _ in range(len(self._waiting)):
                peer, op = self._waiting.popleft()
                if (answer := self._answer(op)) is None:
                    self._waiting.append((peer, op))
                else:
                    self._socket.send_multipart([peer, *answer])

    def _answer(self, op: bytes) -> list[bytes] | None:
        """Return the frames of an answer, or None while there is nothing to answer."""
        if op == b"take":
            if len(self._ready) < self._bench.groups_per_step:
                return None
            self._outstanding -= self._bench.groups_per_step
            return [self._ready.popleft() for _ in range(self._bench.groups_per_step)]
        if op == b"lease_verify":
            if not self._generated:
                return None
            self._ready.append(self._generated.popleft())
            return [self._ready[-1]]
        if op == b"lease_rollout":
            if self._outstanding == self._bench.max_outstanding:
                return None
            self._outstanding += 1
        return [b""]


def _raw_work(endpoint: str, name: str, num_clients: int, samples: Any) -> Iterator[Any]:
    group, scores = (encode({"fields": {"lease_id": name, "items": items}}) for items in (samples, make_scores()))
    round_trips = (
        [b"lease_rollout", b""],
        [b"complete_rollout", group],
        [b"lease_verify", b""],
        [b"complete_verify", scores],
    )
    stopping = threading.Event()

    def work() -> None:
        poller, turns = zmq.Poller(), {}
        for _ in range(num_clients):
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            socket.connect(endpoint)
            poller.register(socket, zmq.POLLIN)
            turns[socket] = itertools.cycle(round_trips)
            socket.send_multipart(next(turns[socket]))
        while not stopping.is_set():
            for socket, _ in poller.poll(100):
                socket.recv_multipart()
                socket.send_multipart(next(turns[socket]))
        for socket in turns:
            socket.close(linger=0)

    async def until_stopped() -> None:
        thread = asyncio.create_task(asyncio.to_thread(work))
        try:
            await asyncio.shield(thread)
        finally:
            stopping.set()
            await thread

    return iter([until_stopped()])


async def _raw_batches(endpoint: str, groups_per_step: int) -> AsyncGenerator[int, None]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)

    def batch() -> int:
        socket.send_multipart([b"take", b""])
        return len(socket.recv_multipart())

    try:
        while True:
            yield await asyncio.to_thread(batch)
    finally:
        socket.close(linger=0)
