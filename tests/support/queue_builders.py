"""A sample queue on the loopback interface, and short ways to bring groups through it, for the tests."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import zmq
from ledger_builders import FakeClock, make_sample, make_scores, make_settings

from areal_lite.sample_queue.access import QueueAccess
from areal_lite.sample_queue.client import QueueClient
from areal_lite.sample_queue.ledger import Ledger
from areal_lite.sample_queue.server import QueueServer
from areal_lite.sample_queue.service import QueueService
from areal_lite.types import Lease, Prompt, Sample, Score

LONG_WAIT_S = 60.0
"""The deadline of requests that must be answered before it."""
SOON_S = 40.0
"""How long the tests wait for what must come before `LONG_WAIT_S`."""
SCORES = make_scores(0.0, 1.0, "timeout")
"""Of one group."""


class FakeCursor:
    """Prompts `fake/0/n` of n + 1 tokens."""

    def __init__(self) -> None:
        self.position = 0
        self.observed: list[tuple[str, float]] = []

    def next(self) -> Prompt:
        self.position += 1
        return self.get(f"fake/0/{self.position - 1}")

    def get(self, prompt_id: str) -> Prompt:
        n = int(prompt_id.split("/")[-1])
        return Prompt(prompt_id=prompt_id, text=f"{n}+1=?", token_ids=tuple(range(n + 1)), answer=f"{n + 1}")

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        self.observed.append((prompt_id, pass_rate))

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def load(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def make_queue(
    *, ledger: Ledger | None = None, cursor: Any = None, clock: Callable[[], float] | None = None, **changes: Any
) -> QueueServer:
    """A server that is not started: two groups of three samples a step, two minibatches, two ranks."""
    dealt: dict[str, Any] = {"num_minibatches": 2, "num_ranks": 2, "seed": 0}
    dealt |= {name: changes.pop(name) for name in list(dealt) if name in changes}
    options: dict[str, Any] = {"max_message_bytes": 2**20}
    options |= {name: changes.pop(name) for name in [*options, "bind", "ports"] if name in changes}
    ledger = ledger or Ledger(make_settings(**{"samples_per_group": 3} | changes), clock=clock or FakeClock())
    return QueueServer(QueueService(ledger, cursor or FakeCursor(), **dealt), **options)


@contextmanager
def serving(**changes: Any) -> Iterator[QueueAccess]:
    """Run a server; yields the controller's access to it."""
    server = make_queue(**changes)
    try:
        yield server.start()
    finally:
        server.close()


@contextmanager
def connected(access: QueueAccess) -> Iterator[QueueClient]:
    client = QueueClient(access, timeout_s=SOON_S)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def open_queue(**changes: Any) -> Iterator[QueueClient]:
    """Run a server with open admission; yields a client of its controller."""
    with serving(**changes) as access, connected(access) as client:
        client.open_admission()
        yield client


@contextmanager
def dealer(access: QueueAccess, prepare: Callable[[Any], None] = lambda _: None) -> Iterator[Any]:
    """A socket that sends given messages; `prepare` sets its options before it connects."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    if access.keys is not None:
        socket.curve_serverkey = access.server_key
        socket.curve_publickey, socket.curve_secretkey = access.keys.public, access.keys.secret
    prepare(socket)
    socket.connect(access.endpoint)
    try:
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


def await_parked(client: QueueClient, number: int) -> None:
    """Wait until the server holds this many requests back."""
    for _ in range(10_000):
        if client.status()["parked"] == number:
            return
    raise AssertionError(f"never {number} requests parked")


@contextmanager
def parked(client: QueueClient, ask: Callable[..., Any], **fields: Any) -> Iterator[Future[Any]]:
    """The answer to a request of another client, made in a thread, which the server holds back."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, wait_s=LONG_WAIT_S, **fields)
        await_parked(client, 1)
        yield answer


def make_samples(num_samples: int = 3, *, version: int = 0) -> list[Sample]:
    """Samples of 1, 2, 3, ... tokens."""
    return [make_sample(versions=[version] * length, text="x" * length) for length in range(1, num_samples + 1)]


def saved(service: QueueService) -> bytes:
    """What `QueueClient.save` returns."""
    parts = [service.save_part(part=0)]
    while part := service.save_part(part=len(parts)):
        parts.append(part)
    return b"".join(parts)


def generate(client: QueueClient, number: int) -> list[Lease]:
    leases = client.lease_rollout(worker="rollout/0", limit=number, wait_s=0.0)
    for lease in leases:
        samples = make_samples(version=lease.version)
        assert client.complete_rollout(lease_id=lease.lease_id, samples=samples)
    return leases


def verify(client: QueueClient, number: int, *, scores: Sequence[Score] = SCORES) -> list[Lease]:
    leases = client.lease_verify(worker="verifier/0", limit=number, wait_s=0.0)
    for lease in leases:
        assert client.complete_verify(lease_id=lease.lease_id, scores=scores)
    return leases


def make_ready(client: QueueClient, number: int) -> None:
    assert len(generate(client, number)) == len(verify(client, number)) == number
