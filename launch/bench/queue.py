"""`areal-lite bench queue`: groups per second from rollout to trainer, over the sample queue, Ray's queue, raw ZeroMQ.

Every carrier gets the same processes, Ray actors that stay alive: two workers with half of the clients each, a trainer,
and one in the middle (Ray's queue brings its own). A client generates a group, then verifies one, in an endless round;
what it generates was made beforehand. The trainer counts what reaches it, 16 groups at a time.

    areal-lite  lease_rollout, complete_rollout, lease_verify, complete_verify; take, fetch, complete_step; with keys
    in the clear  the same without keys: nothing is encrypted
    ray         put, get, put, get through two queues of `ray.util.queue`, which keeps nothing that was read
    zeromq      the sample queue's messages with bytes in place of samples, into which nobody looks
"""

import asyncio
import collections
import itertools
import statistics
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import zmq
from ray.util.queue import Queue

from areal_lite.data.cursor import PromptCursor
from areal_lite.errors import StallError
from areal_lite.launch.bench.harness import finish, in_turns, ratios, target
from areal_lite.record.columns import CARRIERS
from areal_lite.sample_queue.access import QueueAccess, QueueKeys
from areal_lite.sample_queue.client import AsyncQueueClient, QueueClient
from areal_lite.sample_queue.ledger import Ledger, LedgerSettings
from areal_lite.sample_queue.server import QueueServer
from areal_lite.sample_queue.service import QueueService, Traffic
from areal_lite.types import Prompt, Sample, Score, StopReason, VersionSpan
from areal_lite.wire import encode

SAMPLES_PER_GROUP = 8
_TIMEOUT_S = 30.0
_NUM_WORKERS = 2


class Case(NamedTuple):
    """One measurement: who carries groups of which size for how many clients."""

    contender: str
    tokens: int
    """Of each of the 8 samples of a group."""
    clients: int
    """Connections that generate and verify, spread over at most two processes."""


@dataclass(frozen=True, kw_only=True)
class QueueBench:
    """Settings of the bench."""

    repeats: int
    measured_s: float
    warm_s: float = 0.5
    """Seconds of each measurement that do not count."""
    tokens: tuple[int, ...] = (1000, 50)
    clients: tuple[int, ...] = (1, 8, 64)
    groups_per_step: int = 16
    """Groups that the trainer takes at once."""
    max_outstanding: int = 9 * groups_per_step
    """Groups under way at most."""


def bench(settings: QueueBench, *, out: Path) -> int:
    """Measure every case once per repeat, the contenders of a case side by side."""
    from areal_lite.launch.run.train import ray_session

    with ray_session():
        measured = in_turns(cases(settings), repeats=settings.repeats, measure=QueuePeers(settings).measure)
    rows = summarise(measured)
    # Five times Ray's queue where groups are as long as real ones.
    ours = [row for row in rows if row["contender"] == "areal-lite" and row["tokens"] == 1000]
    over = "queue over ray.util.queue.Queue, 8 x 1,000 tokens, {} clients"
    targets = [target(over.format(row["clients"]), row["over"]["ray"], at_least=5.0) for row in ours]
    targets += cost_targets(_make_samples(1), repeats=settings.repeats)
    return finish("queue", "groups from rollout to trainer", rows, settings=asdict(settings), out=out, targets=targets)


def cases(settings: QueueBench) -> list[Case]:
    """Return what is measured, the contenders of a case side by side."""
    sizes = itertools.product(settings.tokens, settings.clients)
    return [Case(contender, *size) for size in sizes for contender in CARRIERS]


def summarise(measured: Mapping[Case, Sequence[float]]) -> list[dict[str, Any]]:
    """Return a row per case: groups/s of all repeats, their median, and the ratios to the others'."""
    return [
        {
            **case._asdict(),
            "groups_per_s": list(rates),
            "median": statistics.median(rates),
            "over": {
                other: ratios(rates, measured[case._replace(contender=other)])
                for other in CARRIERS
                if other != case.contender
            },
        }
        for case, rates in measured.items()
    ]


class QueuePeers:
    """The processes of a bench; needs a `ray_session`."""

    def __init__(self, settings: QueueBench) -> None:
        self._settings = settings
        peer = ray.remote(_Peer).options(num_cpus=0, max_concurrency=100)
        self._middle, self._trainer, *self._workers = [peer.remote(settings) for _ in range(2 + _NUM_WORKERS)]

    def measure(self, case: Case) -> float:
        """Return the groups that reached the trainer per second."""
        room, is_ray = self._settings.max_outstanding, case.contender == "ray"
        queues = [Queue(room, {"num_cpus": 0}) for _ in range(2)] if is_ray else []
        meeting = queues or ray.get(self._middle.open.remote(case))  # what workers and trainer need to find each other
        shares = [len(range(place, case.clients, _NUM_WORKERS)) for place in range(_NUM_WORKERS)]
        work = [one.work.remote(case, meeting, share) for one, share in zip(self._workers, shares, strict=True)]
        training = self._trainer.train.remote(case, meeting)
        ended, _ = ray.wait([training, *work])
        rate = ray.get(ended)[0]
        for one in work:
            ray.cancel(one)
        if len(ray.wait(work, num_returns=len(work), timeout=_TIMEOUT_S)[1]):
            raise StallError(f"the clients of {case.contender} must end within {_TIMEOUT_S:g} s, and did not")
        for queue in queues:
            queue.shutdown(force=True)
        if not is_ray:
            ray.get(self._middle.close.remote())
        return float(rate)


class _Peer:
    """One process: whatever part it is given."""

    def __init__(self, settings: QueueBench) -> None:
        self._settings = settings

    async def open(self, case: Case) -> Any:
        keys = QueueKeys() if case.contender == "areal-lite" else None
        self._server = _RawServer(self._settings) if case.contender == "zeromq" else _queue_server(self._settings, keys)
        return self._server.start()

    async def close(self) -> None:
        self._server.close()

    async def work(self, case: Case, meeting: Any, num_clients: int) -> None:
        work = {"ray": _ray_work, "zeromq": _raw_work}.get(case.contender, _queue_work)
        name = ray.get_runtime_context().get_actor_id()
        await asyncio.gather(asyncio.Event().wait(), *work(meeting, name, num_clients, _make_samples(case.tokens)))

    async def train(self, case: Case, meeting: Any) -> float:
        batches = {"ray": _ray_batches, "zeromq": _raw_batches}.get(case.contender, _queue_batches)
        num_groups, started, begins = 0, 0.0, time.monotonic() + self._settings.warm_s
        async with aclosing(batches(meeting, self._settings.groups_per_step)) as sizes:
            async for size in sizes:
                now = time.monotonic()
                if started:
                    num_groups += size
                elif now > begins:
                    started = now
                if started and now - started > self._settings.measured_s:
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


def _queue_server(settings: QueueBench, keys: QueueKeys | None) -> QueueServer:
    # Samples may be of any age, so that they are made once.
    ledger = LedgerSettings(max_staleness=10**9, max_ahead=settings.max_outstanding // settings.groups_per_step - 1,
                            on_stale="mask", total_steps=10**9, groups_per_step=settings.groups_per_step,
                            samples_per_group=SAMPLES_PER_GROUP)  # fmt: skip
    return QueueServer(Ledger(ledger), _prompts(), num_minibatches=1, num_ranks=1, seed=0, keys=keys)


def _prompts() -> PromptCursor:
    prompt = Prompt(prompt_id="bench", text="7+25=?" * 50, token_ids=tuple(range(100)), answer="32")
    return PromptCursor([prompt] * 1000, source="bench", seed=0)


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


async def _queue_batches(access: QueueAccess, groups_per_step: int) -> AsyncGenerator[int, None]:
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


async def _ray_batches(queues: Sequence[Queue], groups_per_step: int) -> AsyncGenerator[int, None]:
    while True:
        yield len(await asyncio.gather(*(queues[1].get_async() for _ in range(groups_per_step))))


def _socket(kind: int) -> "zmq.Socket[bytes]":
    # Of the process's context, which nobody ends: ending one of its own was seen waiting for ever.
    return zmq.Context.instance().socket(kind)


class _RawServer:
    """Keeps bytes in the order they came, in a thread of its own; as many under way as in the sample queue."""

    def __init__(self, settings: QueueBench) -> None:
        self._groups_per_step, self._room = settings.groups_per_step, settings.max_outstanding
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
            size = self._groups_per_step if len(self._ready) >= self._groups_per_step else 0
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


async def _raw_batches(endpoint: str, groups_per_step: int) -> AsyncGenerator[int, None]:
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


NUM_WORKERS = 512
FEW, MANY = 64, NUM_WORKERS * 64
_CALLS_A_TURN = 50
_SPARE = 10_000
"""Steps' worth of groups that measuring may add."""


def cost_targets(samples: list[Sample], *, repeats: int, few: int = FEW, many: int = MANY) -> list[dict[str, Any]]:
    """Return how many times the cost at `few` groups outstanding each call has at `many`, with 512 workers in both."""
    services = {number: service_with(number, samples) for number in (few, many)}
    cases = [(name, number) for name in CALLS for number in services]

    def measure(case: tuple[str, int]) -> float:
        times, call = [], partial(CALLS[case[0]], services[case[1]], samples)
        for _ in range(_CALLS_A_TURN):
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    measured = in_turns(cases, repeats=repeats, measure=measure)
    over = f"queue: {{}} with {many} groups outstanding over {few}, {NUM_WORKERS} workers"
    return [target(over.format(name), ratios(measured[name, many], measured[name, few]), at_most=3.0) for name in CALLS]


def service_with(num_outstanding: int, samples: list[Sample]) -> QueueService:
    """Return a queue with so many groups lent, waiting for a verifier and ready, a third each, and one straggler.

    No batch may be taken without the straggler, which is due: `take` has to look at those that would be left behind.
    """
    max_staleness = num_outstanding // 4 + _SPARE
    settings = LedgerSettings(max_staleness=max_staleness, on_stale="wait", total_steps=10**9, groups_per_step=4,
                              samples_per_group=len(samples), lease_timeout_s=1e9)  # fmt: skip
    ledger = Ledger(settings)
    ledger.admit("straggler")
    (lent,) = ledger.lease_rollout("straggler", limit=1)
    ledger.complete_rollout(lent.lease_id, samples)
    ledger = Ledger.restore(settings, ledger.state() | {"version": max_staleness})
    ledger.lease_verify("straggler", limit=1)
    service = QueueService(ledger, _prompts(), num_minibatches=1, num_ranks=1, seed=0, traffic=Traffic())
    service.open_admission()
    for place in range(NUM_WORKERS):
        service.heartbeat(worker=_worker(place), lease_ids=[], progress=0)
    for place in range(num_outstanding):
        (lease,) = service.lease_rollout(worker=_worker(place), limit=1, wait_s=0.0)
        if place % 3:
            service.complete_rollout(lease_id=lease.lease_id, samples=samples)
        if place % 3 == 2:
            _verify(service)
    return service


def _worker(place: int) -> str:
    return f"rollout/{place % NUM_WORKERS}"


def _verify(service: QueueService) -> None:
    (lease,) = service.lease_verify(worker=_worker(0), limit=1, wait_s=0.0)
    service.complete_verify(lease_id=lease.lease_id, scores=[Score(reward=1.0)] * len(lease.group.samples))


def _round_trip(service: QueueService, samples: list[Sample]) -> None:
    (lease,) = service.lease_rollout(worker=_worker(0), limit=1, wait_s=0.0)
    service.heartbeat(worker=_worker(0), lease_ids=[lease.lease_id], progress=1)
    service.complete_rollout(lease_id=lease.lease_id, samples=samples)
    _verify(service)


CALLS: dict[str, Callable[[QueueService, list[Sample]], object]] = {
    "a group's five calls": _round_trip,
    "a refused take": lambda service, _: service.take(batch_id="step", wait_s=0.0),
    "status": lambda service, _: service.status(),
    "a look at the leases": lambda service, _: service.expire(),
}
"""What is measured, by name."""
