"""The sample queue when something is wrong: bad messages, lost answers, a server or a client that goes away."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import msgpack
import pytest
import zmq
from episode_builders import in_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_builders import FakeClock, make_settings
from queue_builders import (
    LONG_WAIT_S,
    SOON_S,
    FakeCursor,
    connected,
    dealer,
    make_queue,
    open_queue,
    parked,
    serving,
)

from areal_lite.errors import ConfigError, LedgerError, QueueClosed, QueueError, QueueTimeout, WireError
from areal_lite.network import listen
from areal_lite.sample_queue import server as server_module
from areal_lite.sample_queue.access import QueueAccess
from areal_lite.sample_queue.client import AsyncQueueClient, QueueClient
from areal_lite.sample_queue.leases import RunningClock
from areal_lite.sample_queue.ledger import Ledger
from areal_lite.types import Prompt
from areal_lite.wire import SCHEMA_VERSION, decode, encode

BIND = "tcp://127.0.0.1"
NOBODY = QueueAccess(f"{BIND}:9")
MAX_BYTES = 10_000
Client = type[QueueClient | AsyncQueueClient]


def ask(socket: Any, *frames: bytes) -> dict[str, Any]:
    """Send frames, return the answer to them."""
    socket.send_multipart(frames)
    assert socket.poll(1000 * SOON_S), "no answer"
    request_id, answer = socket.recv_multipart()
    assert request_id == frames[0]
    content = decode(answer)
    assert isinstance(content, dict)
    return content


def request(op: Any, **fields: Any) -> bytes:
    return encode({"op": op, "fields": fields})


# Messages that are refused


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b"only"], "2 frames, got 1"),
        ([b"id", b"\xffgarbage"], "msgpack"),
        ([b"id", encode({"op": "status"})], "{op, fields}"),
        ([b"id", msgpack.packb([SCHEMA_VERSION + 1, {}])], f"{SCHEMA_VERSION}, got {SCHEMA_VERSION + 1}"),
        ([b"id", request("expire")], "got 'expire'"),
        ([b"id", request("__init__")], "got '__init__'"),
        ([b"id", request(["status"])], "Expected `str`, got `array`"),
        ([b"id", request("take", batch_id="b")], r"take takes the fields \(batch_id, wait_s\)"),
        ([b"id", request("status", verbose=True)], "unknown field `verbose`"),
        ([b"id", request("complete_rollout", lease_id="x", samples=[1])], r"`int` - at .*samples\[0\]"),
    ],
)
def test_what_is_no_request_is_refused(frames: list[bytes], message: str) -> None:
    """Seen failing with any method of the service taken for a request, and with each check left out."""
    with serving() as access, dealer(access) as socket:
        answer = ask(socket, *frames)
        assert answer["error"] == "WireError"
        assert re.search(message, answer["message"])
        assert ask(socket, b"id", request("status"))["result"]["version"] == 0


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Any]:
    with serving() as access, dealer(access) as socket:
        yield socket


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=3))
@settings(deadline=None, max_examples=50)
def test_random_messages_are_answered_and_never_the_last(fuzzed: Any, frames: list[bytes]) -> None:
    """Seen failing with refusals not caught where messages are read."""
    assert ask(fuzzed, *frames)["error"] == "WireError"
    assert ask(fuzzed, b"id", request("status"))["result"]["version"] == 0


def test_a_message_far_over_the_limit_costs_its_sender_the_connection_and_nobody_else() -> None:
    with serving(max_message_bytes=MAX_BYTES) as access, connected(access) as other:
        with dealer(access) as socket:
            socket.send_multipart([b"id", bytes(3 * 2**20)])
            assert other.status()["version"] == 0
            assert not socket.poll(100)
        assert other.status()["version"] == 0


def test_a_client_refuses_to_send_what_is_far_over_the_limit() -> None:
    """Seen failing: the connection was cut, and the call was late; its worker sent it again forever."""
    with serving(max_message_bytes=MAX_BYTES) as access, connected(access) as client:
        with pytest.raises(WireError, match=rf"{MAX_BYTES} bytes, got 3\d+: send less, or raise queue.max_message_mb"):
            client.fail(lease_id="x" * 3 * 2**20, reason="")
        assert client.status()["version"] == 0


def test_a_wait_has_a_limit_and_one_of_strange_length_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with the request's own `wait_s`."""
    monkeypatch.setattr(server_module, "_MAX_WAIT_S", 0.2)
    with serving() as access, dealer(access) as socket:
        for wait_s in (float("nan"), -1.0, float("inf"), 1e9):
            lease = request("lease_verify", worker="w", limit=1, wait_s=wait_s)
            assert ask(socket, b"id", lease) == {"result": []}


def test_heartbeats_that_arrived_while_the_server_was_busy_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with leases looked at before the messages that wait."""
    clock, sockets, make = FakeClock(), list[Any](), zmq.Context.socket
    monkeypatch.setattr(
        zmq.Context, "socket", lambda *given, **named: sockets.append(make(*given, **named)) or sockets[-1]
    )

    class SlowCursor(FakeCursor):
        def next(self) -> Prompt:
            if self.position == 1:
                sockets[0].poll(1000 * SOON_S)  # in the server's thread, until the heartbeat has arrived
                clock.now = 11.0
            return super().next()

    with serving(cursor=SlowCursor(), clock=clock) as access, dealer(access) as socket:
        ask(socket, b"1", request("open_admission"))
        (held,) = ask(socket, b"2", request("lease_rollout", worker="w", limit=1, wait_s=0.0))["result"]
        socket.send_multipart([b"3", request("lease_rollout", worker="w", limit=1, wait_s=0.0)])
        socket.send_multipart([b"4", request("heartbeat", worker="w", lease_ids=[held["lease_id"]], progress=0)])
        assert len(decode(socket.recv_multipart()[1])["result"]) == 1
        assert decode(socket.recv_multipart()[1])["result"] == []


def test_no_lease_ends_for_the_time_in_which_the_queue_was_frozen() -> None:
    """Those of dead workers end later. Seen failing with the machine's clock: three freezes failed the prompts."""
    clock = FakeClock()
    ledger = Ledger(make_settings(lease_timeout_s=1.5), clock=RunningClock(clock))
    ledger.admit("a")
    (lease,) = ledger.lease_rollout("w", limit=1)
    clock.now = 3600.0
    assert ledger.expire() == []
    clock.now += 1.0
    assert ledger.expire() == [lease.lease_id]
    assert isinstance(Ledger(make_settings()).clock, RunningClock)


def test_a_mistake_of_our_own_is_told_logged_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    """Seen failing with only `ArealLiteError` caught: the server's thread ends and every client times out."""

    class BrokenCursor(FakeCursor):
        def next(self) -> Prompt:
            raise KeyError("row 7")

    with open_queue(cursor=BrokenCursor()) as client:
        with pytest.raises(LedgerError, match="KeyError: 'row 7'"):
            client.lease_rollout(worker="rollout/0", limit=1, wait_s=LONG_WAIT_S)
        assert client.status()["version"] == 0
    assert "this is a bug in areal-lite" in caplog.text


# Answers that do not come


def call(kind: Client, access: QueueAccess, op: str, *, timeout_s: float, **fields: Any) -> Any:
    """Make one request with a client of its own."""
    with closing(kind(access, timeout_s=timeout_s)) as client:
        answer = getattr(client, op)(**fields)
        return asyncio.run(answer) if kind is AsyncQueueClient else answer


@pytest.mark.parametrize("kind", [QueueClient, AsyncQueueClient])
def test_a_client_of_nobody_times_out_by_name(kind: Client) -> None:
    with pytest.raises(QueueTimeout, match=r"127\.0\.0\.1:9 .*take"):
        call(kind, NOBODY, "take", timeout_s=0.05, batch_id="b", wait_s=0.05)


@contextmanager
def lossy_server(
    answer: Callable[[int, bytes], list[bytes]], *, result: Any = None
) -> Iterator[tuple[QueueAccess, list[str]]]:
    """A stand-in that sends `answer(number of the message, its request id)`; yields access and requests seen."""
    context, seen, ended = zmq.Context(), [], threading.Event()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port(BIND)

    def serve() -> None:
        while not ended.is_set():
            if socket.poll(20):
                peer, request_id, payload = socket.recv_multipart()
                seen.append(decode(payload)["op"])
                for answered_id in answer(len(seen), request_id):
                    socket.send_multipart([peer, answered_id, encode({"result": result or [str(len(seen))]})])
        socket.close(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield QueueAccess(f"{BIND}:{port}"), seen
    finally:
        ended.set()
        thread.join()
        context.term()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [QueueClient, AsyncQueueClient])
def test_what_may_be_repeated_is_sent_a_second_time(kind: Client) -> None:
    """Answers to other requests are dropped.

    Seen failing with one attempt for every request, with two for leases, and with the first answer taken for the right
    one.
    """

    def answer(number: int, request_id: bytes) -> list[bytes]:
        return [b"an earlier one"] if number == 1 else [b"an earlier one", request_id, request_id]

    with lossy_server(answer) as (access, seen):
        assert call(kind, access, "forget", timeout_s=2.0, worker="w") == ["2"]
        assert seen == ["forget", "forget"]
    with lossy_server(lambda number, request_id: []) as (access, seen):
        with pytest.raises(QueueTimeout, match=r"lease_verify .* 1 attempt"):
            call(kind, access, "lease_verify", timeout_s=2.0, worker="w", limit=1, wait_s=0.0)
        assert seen == ["lease_verify"]


def test_a_save_begins_again_when_another_queue_takes_over() -> None:
    """Seen failing with the second part asked of the new queue."""
    with (
        lossy_server(lambda number, request_id: [request_id] * (number == 1), result=b"of the first") as (first, seen),
        serving() as second,
    ):
        client = QueueClient(first, timeout_s=SOON_S, check=lambda: client.move_to(second))
        assert decode(client.save())["ledger"]["version"] == 0
        client.close()
    assert seen == ["save_part", "save_part"]


# Closing


def test_closing_the_server_ends_promptly_and_wakes_who_waits() -> None:
    """Seen failing with parked requests forgotten at closing: their clients wait for their own time-out."""
    server = make_queue()
    access = server.start()
    with connected(access) as client, connected(access) as waiting, ThreadPoolExecutor(1) as pool:
        client.open_admission()
        client.lease_rollout(worker="rollout/0", limit=1, wait_s=0.0)
        with parked(client, waiting.lease_verify, worker="verifier/0", limit=1) as answer, closing(waiting):
            pool.submit(server.close).result(timeout=SOON_S)
            with pytest.raises(QueueClosed):
                answer.result(timeout=SOON_S)
    server.close()


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    """Seen failing with the socket left open: closing never ended."""
    server = make_queue(bind="192.0.2.1")
    with pytest.raises(ConfigError, match=r"the queue must listen at .* got '192\.0\.2\.1'"):
        server.start()
    server.close()


def test_a_port_is_taken_from_the_range_or_the_range_is_named() -> None:
    """Seen failing with any free port, which a firewall between nodes may not let through."""
    with listen("127.0.0.1", range(20000, 22000)) as other:
        taken = other.getsockname()[1]
        server = make_queue(ports=range(taken, taken + 1))
        with pytest.raises(ConfigError, match=r"a port of run\.ports must be free on 127\.0\.0\.1"):
            server.start()
        server.close()
    server = make_queue(ports=range(20000, 22000))
    assert int(server.start().endpoint.rpartition(":")[2]) in range(20000, 22000)
    server.close()


def test_closing_a_client_wakes_its_waiting_call() -> None:
    """Seen failing with the whole of `wait_s` slept in one go."""
    with serving() as access, connected(access) as other:
        client = QueueClient(access, timeout_s=SOON_S)
        with parked(other, client.lease_verify, worker="verifier/0", limit=1) as answer:
            client.close()
            client.close()
            with pytest.raises(LedgerError, match="lease_verify needs an open client"):
                answer.result(timeout=SOON_S)
        with pytest.raises(LedgerError, match="status needs an open client"):
            client.status()


def test_a_waiting_call_checks_whether_an_answer_can_come() -> None:
    """Seen failing with a check before the first wait alone."""
    has_died = threading.Event()

    def check() -> None:
        if has_died.is_set():
            raise QueueError("its process ended")

    with serving() as access, connected(access) as other:
        client = QueueClient(access, timeout_s=SOON_S, check=check)
        with parked(other, client.lease_verify, worker="verifier/0", limit=1) as answer:
            has_died.set()
            with pytest.raises(QueueError, match="its process ended"):
                answer.result(timeout=SOON_S)
        client.close()


@in_loop
async def test_closing_an_async_client_wakes_its_waiting_calls() -> None:
    """Seen failing with the waiting calls left to their time-outs."""
    with serving() as access:
        client = AsyncQueueClient(access, timeout_s=SOON_S)
        waiting = [client.lease_verify(worker="verifier/0", limit=1, wait_s=LONG_WAIT_S) for _ in range(3)]
        tasks = [asyncio.ensure_future(call) for call in waiting]
        async with asyncio.timeout(SOON_S):
            while (await client.status())["parked"] < 3:
                pass
        client.close()
        client.close()
        answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), SOON_S)
        assert [type(answer) for answer in answers] == [LedgerError] * 3
        with pytest.raises(LedgerError, match="open client"):
            await client.status()
        AsyncQueueClient(access, timeout_s=SOON_S).close()  # one that was never in a loop
