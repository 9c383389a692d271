"""The sample queue's one endpoint: a ZeroMQ ROUTER socket around `QueueService`, in a thread of its own.

The queue actor starts it; workers, trainer ranks and the controller connect out to it with `client.py`. It
knows messages, waiting and refusals; what a request does stands in `service.py`. A request and its answer
are two frames each, after the ROUTER's own:

    request  [request id, {"op": name, "fields": {...}}]
    answer   [request id, {"result": value}]   or   [request id, {"error": class, "message": text}]

No message can take the server down: what is not a request is refused with an error, and counted by reason in
`status()["refused"]`: oversized, version, malformed, unknown_op, bad_fields, and internal for our own mistakes.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from areal_lite.errors import ArealLiteError, ConfigError, LedgerError, WireError
from areal_lite.sample_queue.ledger import Ledger
from areal_lite.sample_queue.requests import REQUESTS, read_fields
from areal_lite.sample_queue.service import Cursor, QueueService, Traffic
from areal_lite.wire import SCHEMA_VERSION, Raw, as_type, decode, encode, schema_version

__all__ = ["QueueServer"]

logger = logging.getLogger(__name__)

_TICK_S = 0.1
"""Longest sleep: leases are looked at, and `close` is noticed, this often."""
_BURST = 64
"""Messages that are read in a row before the clock is looked at."""
_SLACK_BYTES = 2**20
"""ZeroMQ cuts the connection of a peer whose message is longer than our limit and this; below, we answer it."""
_FAREWELL_MS = 200
"""Longest time that closing waits for last answers to leave."""


class _Refusal(WireError):
    """A message that is not a request of ours."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


_Kind = tuple[str, Any]
"""What is asked for, and how much of it where that is said."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    peer: bytes
    request_id: bytes
    kind: _Kind
    worker: str | None
    """Who asks, in the requests that say so."""
    run: Callable[[], Any]
    deadline: float
    """Monotonic time until which an empty answer is held back."""


class QueueServer:
    """Serves a ledger and a data cursor to whoever connects."""

    def __init__(
        self,
        ledger: Ledger,
        cursor: Cursor,
        *,
        num_minibatches: int,
        num_ranks: int,
        seed: int,
        bind: str = "127.0.0.1",
        max_message_bytes: int = 64 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing is open before `start`.

        Args:
            ledger: New, or restored; from `start` on it belongs to the server's thread.
            cursor: Likewise.
            num_minibatches: Optimiser updates per trainer step.
            num_ranks: Trainer ranks that will fetch.
            seed: Of the run; orders the rows of a batch.
            bind: Address to listen on.
            max_message_bytes: Longer requests are refused; answers may be longer.
            clock: The ledger's clock.
        """
        self._traffic = Traffic()
        self._service = QueueService(
            ledger,
            cursor,
            num_minibatches=num_minibatches,
            num_ranks=num_ranks,
            seed=seed,
            traffic=self._traffic,
            clock=clock,
        )
        self._bind, self._max_message_bytes = bind, max_message_bytes
        self._parked: dict[_Kind, deque[_Request]] = {}
        self._next_deadline = math.inf  # of the parked requests; too early once that one was answered
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Open the socket on a free port and serve it from a new thread.

        Returns:
            The endpoint, `tcp://address:port`.

        Raises:
            ConfigError: The address is none of this machine's.
        """
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes + _SLACK_BYTES)
        # No limit on queued messages, since ZeroMQ drops what exceeds it; peers have few requests in flight.
        self._socket.set_hwm(0)
        try:
            port = self._socket.bind_to_random_port(f"tcp://{self._bind}")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"queue.bind must be a numeric address of this machine, got {self._bind!r} ({error}): use "
                "127.0.0.1, or the address that the other nodes reach"
            ) from error
        self._thread = threading.Thread(target=self._serve, name="sample-queue", daemon=True)
        self._thread.start()
        return f"tcp://{self._bind}:{port}"

    def close(self) -> None:
        """Stop serving; parked requests are answered with an error. Idempotent, ends within a second."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(linger=_FAREWELL_MS)

    def _serve(self) -> None:
        """Serve until `close`.

        Consumes requests, produces answers. Waits on the socket, at most until the next deadline of a parked request
        and never longer than a tick; unblocked by a message.
        """
        while not self._closing.is_set():
            self._socket.poll(self._patience_ms())
            # Heartbeats that have arrived count first: a busy server must not take leases for dead.
            if self._receive_burst():
                self._service.expire()
                self._answer_parked()
                self._answer_overdue()
        for request in self._all_parked():
            farewell = self._failure(LedgerError("the sample queue has closed: the run has ended"))
            self._send(request.peer, request.request_id, farewell)

    def _receive_burst(self) -> bool:
        """Answer the messages that have arrived, up to a number; True when none is left."""
        for _ in range(_BURST):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._receive(frames)
            self._answer_parked()
        return False

    def _answer_parked(self) -> None:
        """Answer the parked requests for which there is something now."""
        for kind, waiting in list(self._parked.items()):
            # What there is not for one, there is not for the next that asks for the same.
            while waiting and self._answer(waiting[0]):
                waiting.popleft()
            if not waiting:
                del self._parked[kind]
        self._traffic.parked = sum(map(len, self._parked.values()))

    def _answer_overdue(self) -> None:
        """Answer the parked requests whose time is over."""
        now = time.monotonic()
        if now >= self._next_deadline:
            for request in self._all_parked():
                if request.deadline <= now:
                    self._answer(request)
                    self._parked[request.kind].remove(request)
            self._next_deadline = min((request.deadline for request in self._all_parked()), default=math.inf)

    def _all_parked(self) -> list[_Request]:
        return [request for waiting in self._parked.values() for request in waiting]

    def _patience_ms(self) -> int:
        return int(1000 * min(max(self._next_deadline - time.monotonic(), 0.0), _TICK_S)) + 1

    def _receive(self, frames: list[bytes]) -> None:
        """Answer one message, or park it."""
        self._traffic.messages += 1
        self._traffic.bytes_in += sum(map(len, frames))
        peer, request_id = frames[0], frames[1] if len(frames) > 1 else b""
        try:
            op, fields = self._read(frames)
        except Exception as error:
            self._send(peer, request_id, self._failure(error))
            return
        request = _Request(
            peer=peer,
            request_id=request_id,
            kind=(op, fields.get("limit")),
            worker=fields.get("worker"),
            run=partial(getattr(self._service, op), **fields),
            deadline=time.monotonic() + fields.get("wait_s", 0.0),
        )
        if op == "forget":
            self._dismiss(request.worker)
        if not self._answer(request):
            self._parked.setdefault(request.kind, deque()).append(request)
            self._next_deadline = min(self._next_deadline, request.deadline)

    def _dismiss(self, worker: str | None) -> None:
        """Answer what a worker waits for with nothing: it is dead, and would be lent the next work."""
        for request in [request for request in self._all_parked() if request.worker == worker]:
            self._send(request.peer, request.request_id, encode({"result": []}))
            self._parked[request.kind].remove(request)

    def _read(self, frames: list[bytes]) -> tuple[str, dict[str, Any]]:
        """Return the request and the checked fields of a message, or raise the refusal."""
        size = sum(map(len, frames))
        if size > self._max_message_bytes:
            raise _Refusal(
                "oversized",
                f"a request may have {self._max_message_bytes} bytes, got {size}: send less, or raise "
                "queue.max_message_mb",
            )
        if len(frames) != 3:
            raise _Refusal("malformed", f"a request has 2 frames, got {len(frames) - 1}: use the clients of areal_lite")
        return _read_payload(frames[2])

    def _answer(self, request: _Request) -> bool:
        """Carry out a request and send its answer; False when there is nothing to answer yet."""
        try:
            result = request.run()
            if not result and time.monotonic() < request.deadline:
                return False
            answer = encode({"result": result})
        except Exception as error:
            answer = self._failure(error)
        self._send(request.peer, request.request_id, answer)
        return True

    def _failure(self, error: Exception) -> bytes:
        """Make an error an answer; what is refused is counted."""
        kind, reason, message = type(error).__name__, None, str(error)
        if isinstance(error, _Refusal):
            kind, reason = WireError.__name__, error.reason
        elif isinstance(error, ValueError) and not isinstance(error, ArealLiteError):
            kind, reason = WireError.__name__, "bad_fields"
        elif not isinstance(error, ArealLiteError):
            logger.error("a request failed by our own mistake", exc_info=error)
            message = f"the sample queue made a mistake ({kind}: {error}): see its log"
            kind, reason = LedgerError.__name__, "internal"
        if reason is not None:
            self._traffic.refused[reason] += 1
        return encode({"error": kind, "message": message})

    def _send(self, peer: bytes, request_id: bytes, answer: bytes) -> None:
        self._traffic.bytes_out += len(answer)
        self._socket.send_multipart([peer, request_id, answer])


def _read_payload(payload: bytes) -> tuple[str, dict[str, Any]]:
    """Return the request and its checked fields from the bytes of a message, or raise the refusal."""
    try:
        message = decode(payload, dict[str, Raw])
        op = as_type(message["op"], str) if message.keys() == {"op", "fields"} else None
    except WireError as error:
        raise _Refusal("version" if _is_of_another_version(payload) else "malformed", str(error)) from error
    if op is None:
        raise _Refusal(
            "malformed", f"a request is {{op, fields}}, got {list(message)!r:.80}: use the clients of areal_lite"
        )
    if op not in REQUESTS:
        raise _Refusal("unknown_op", f"a request is one of {', '.join(sorted(REQUESTS))}, got {op!r:.80}")
    try:
        return op, read_fields(op, message["fields"])
    except WireError as error:
        raise _Refusal("bad_fields", str(error)) from error


def _is_of_another_version(payload: bytes) -> bool:
    try:
        return bool(schema_version(payload) != SCHEMA_VERSION)
    except WireError:
        return False
