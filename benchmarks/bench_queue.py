"""Groups per second from rollout to trainer, over the sample queue, Ray's queue, and raw ZeroMQ (about 6 minutes).

    python benchmarks/bench_queue.py --repeats 3 --seconds 1

Every carrier gets the same processes, Ray actors that stay alive: two workers with half of the clients each, a trainer,
and one in the middle (Ray's queue brings its own). A client generates a group, then verifies one, in an endless round;
what it generates was made beforehand. The trainer counts what reaches it, 16 groups at a time.

    areal-lite  lease_rollout, complete_rollout, lease_verify, complete_verify; take, fetch, complete_step; with keys
    in the clear  the same without keys: nothing is encrypted
    ray         put, get, put, get through two queues of `ray.util.queue`, which keeps nothing that was read
    zeromq      the sample queue's messages with bytes in place of samples, which nobody decodes
"""

import asyncio
import collections
import itertools
import statistics
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import measuring
import numpy as np
import ray
import zmq
from ray.util.queue import Queue

from areal_lite.data.cursor import PromptCursor
from areal_lite.errors import StallError
from areal_lite.launch.bench.harness import ratios
from areal_lite.launch.run.ray_session import ray_session
from areal_lite.sample_queue.access import QueueAccess, QueueKeys
from areal_lite.sample_queue.client import AsyncQueueClient, QueueClient
from areal_lite.sample_queue.ledger import Ledger, LedgerSettings
from areal_lite.sample_queue.server import QueueServer
from areal_lite.types import Prompt, Sample, Score, StopReason, VersionSpan
from areal_lite.wire import encode

CARRIERS = ("areal-lite", "in the clear", "ray", "zeromq")
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
    """Measure groups/s through the sample queue, Ray's queue and raw ZeroMQ."""
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
        meeting = queues or ray.get(self._middle.open.remote(case))  # what workers and trainer need to find each other
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

    async def open(self, case: Case) -> Any:
        keys = QueueKeys() if case.carrier == "areal-lite" else None
        self._server = _RawServer() if case.carrier == "zeromq" else _queue_server(keys)
        return self._server.start()

    async def close(self) -> None:
        self._server.close()

    async def work(self, case: Case, meeting: Any, num_clients: int) -> None:
        work = {"ray": _ray_work, "zeromq": _raw_work}.get(case.carrier, _queue_work)
        name = ray.get_runtime_context().get_actor_id()
        await asyncio.gather(asyncio.Event().wait(), *work(meeting, name, num_clients, _make_samples(case.tokens)))

    async def train(self, case: Case, meeting: Any, measured_s: float) -> float:
        batches = {"ray": _ray_batches, "zeromq": _raw_batches}.get(case.carrier, _queue_batches)
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


def _queue_server(keys: QueueKeys | None) -> QueueServer:
    # Samples may be of any age, so that they are made once.
    settings = LedgerSettings(max_staleness=10**9, max_ahead=MAX_OUTSTANDING // GROUPS_PER_STEP - 1, on_stale="mask",
                              total_steps=10**9, groups_per_step=GROUPS_PER_STEP,
                              samples_per_group=SAMPLES_PER_GROUP)  # fmt: skip
    prompt = Prompt(prompt_id="bench", text="7+25=?" * 50, token_ids=tuple(range(100)), answer="32")
    prompts = PromptCursor([prompt] * 1000, source="bench", seed=0)
    return QueueServer(Ledger(settings), prompts, num_minibatches=1, num_ranks=1, seed=0, keys=keys)


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


def _socket(kind: int) -> "zmq.Socket[bytes]":
    # Of the process's context, which nobody ends: ending one of its own was seen waiting for ever.
    return zmq.Context.instance().socket(kind)


class _RawServer:
    """Keeps bytes in the order they came, in a thread of its own; as many under way as in the sample queue."""

    def __init__(self) -> None:
        self._room = MAX_OUTSTANDING
        self._closing, self._thread = threading.Event(), threading.Thread(target=self._serve)
        self._generated, self._ready = collections.deque[bytes](), collections.deque[bytes]()

    def start(self) -> str:
        self._socket = _socket(zmq.ROUTER)
        port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._thread.start()
        return f"tcp://127.0.0.1:{port}"

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._socket.close(linger=0)

    def _serve(self) -> None:
        waiting: list[tuple[bytes, bytes]] = []
        while not self._closing.is_set():
            if self._socket.poll(100):
                peer, op, content = self._socket.recv_multipart()
                if op == b"complete_rollout":
                    self._generated.append(content)
                waiting.append((peer, op))
            # Who cannot be answered yet asks again, in the order they came.
            asking, waiting = waiting, []
            for peer, op in asking:
                if answer := self._answer(op):
                    self._socket.send_multipart([peer, *answer])
                else:
                    waiting.append((peer, op))

    def _answer(self, op: bytes) -> list[bytes]:
        """Return the frames of an answer, none while there is nothing to answer."""
        if op == b"lease_verify":  # of a client that has generated a group itself
            self._ready.append(self._generated.popleft())
            return [self._ready[-1]]
        if op == b"take":
            size = GROUPS_PER_STEP if len(self._ready) >= GROUPS_PER_STEP else 0
            self._room += size
            return [self._ready.popleft() for _ in range(size)]
        self._room -= (is_lent := op == b"lease_rollout" and self._room > 0)
        return [b""] if is_lent or op != b"lease_rollout" else []


def _raw_work(endpoint: str, name: str, num_clients: int, samples: Any) -> Iterator[Awaitable[Any]]:
    group, scores = (encode({"fields": {"lease_id": name, "items": items}}) for items in (samples, _make_scores()))
    round_trips = ([b"lease_rollout", b""], [b"complete_rollout", group],
                   [b"lease_verify", b""], [b"complete_verify", scores])  # fmt: skip
    stopping = threading.Event()

    def work() -> None:
        poller, turns = zmq.Poller(), {}
        for _ in range(num_clients):
            socket = _socket(zmq.DEALER)
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


async def _raw_batches(endpoint: str) -> AsyncGenerator[int, None]:
    socket = _socket(zmq.DEALER)
    socket.connect(endpoint)

    def batch() -> int:
        socket.send_multipart([b"take", b""])
        return len(socket.recv_multipart())

    try:
        while True:
            yield await asyncio.to_thread(batch)
    finally:
        socket.close(linger=0)


if __name__ == "__main__":
    measuring.run(main)
