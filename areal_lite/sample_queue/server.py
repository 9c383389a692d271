"""The sample queue's one endpoint: a ZeroMQ ROUTER socket around `QueueService`, in a thread of its own.

The queue actor starts it; workers, trainer ranks and the controller connect out to it with `client.py`. It
knows messages, waiting and refusals; what a request does stands in `service.py`. A request and its answer
are two frames each, after the ROUTER's own:

    request  [request id, {"op": name, "fields": {...}}]
    answer   [request id, {"result": value}]   or   [request id, {"error": class, "message": text}]

With keys it speaks CURVE, and a client may do what its role may. ZeroMQ cuts the connection of a client whose message
is longer than the limit. No other message stops the server: what is not a request is refused with an error, and
counted by reason in `status()["refused"]`:

    unauthenticated   a connection without a key of the run: it gets nothing
    forbidden         a request that its client's role does not have
    unread            answers that were dropped, as their client leaves `_SEND_HWM` others unread
    version, malformed, unknown_op, bad_fields, and internal for our own mistakes
"""

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import zmq

from areal_lite.data.cursor import Cursor
from areal_lite.errors import ArealLiteError, ConfigError, LedgerError, WireError
from areal_lite.sample_queue.access import ALLOWED, QueueAccess, QueueKeys, Role
from areal_lite.sample_queue.connections import Connection, Connections, Gatekeeper
from areal_lite.sample_queue.ledger import Ledger
from areal_lite.sample_queue.requests import REQUESTS, read_fields
from areal_lite.sample_queue.service import QueueService, Traffic
from areal_lite.wire import SCHEMA_VERSION, Raw, as_type, decode, encode, schema_version

logger = logging.getLogger(__name__)

_TICK_S = 0.1
"""Longest sleep: leases are looked at, and `close` is noticed, this often."""
_BURST = 1024
"""Messages that are read before leases are looked at, so that a heartbeat that has arrived counts first."""
_MAX_WAIT_S = 60.0
"""Longest time a request is held back; a larger `wait_s` is cut to this."""
_SEND_HWM = 1024
"""Answers of one client that it has not read; more are dropped."""
_COPIED_BYTES = 2**16
"""Longer answers are sent without a copy."""
_FAREWELL_MS = 200
"""Longest time that closing waits for last answers to leave."""


class _Refusal(WireError):
    """A message that is not a request of ours."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


_Kind = tuple[str, bool]
"""What is asked for, and whether any of it."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Sender:
    peer: bytes
    request_id: bytes
    connection: Connection


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    sender: _Sender
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
        ports: range | None = None,
        max_message_bytes: int = 32 * 2**20,
        keys: QueueKeys | None = None,
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
            ports: One of them is taken; None = any free one.
            max_message_bytes: Longer requests are refused; answers may be longer.
            keys: Of the run; None = anybody may do anything, in measurements and tests.
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
        self._bind, self._ports, self._max_message_bytes, self._keys = bind, ports, max_message_bytes, keys
        self._parked: dict[_Kind, OrderedDict[_Request, None]] = {}
        self._next_deadline = math.inf  # of the parked requests; too early once that one was answered
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._thread: threading.Thread | None = None
        self._gatekeeper: Gatekeeper | None = None

    def start(self) -> QueueAccess:
        """Open the socket on a free port and serve it from a new thread.

        Returns:
            The controller's access; `access` returns the others'.

        Raises:
            ConfigError: The address is none of this machine's.
        """
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an answer that cannot leave is an error here, not silence
        if self._keys is not None:
            self._gatekeeper = Gatekeeper(self._context, self._keys)
            self._gatekeeper.start()
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.server.secret)
        self._connections = Connections(self._socket)
        try:
            ends = {"min_port": self._ports.start, "max_port": self._ports.stop} if self._ports else {}
            port = self._socket.bind_to_random_port(f"tcp://{self._bind}", **ends)
        except zmq.ZMQBindError as error:
            raise ConfigError(f"a port of run.ports must be free on {self._bind}: {error}; choose others") from error
        except zmq.ZMQError as error:
            raise ConfigError(
                f"queue.bind must be a numeric address of this machine, got {self._bind!r} ({error}): use auto, or the "
                "address that the other nodes reach"
            ) from error
        self._thread = threading.Thread(target=self._serve, name="sample-queue", daemon=True)
        self._thread.start()
        self._endpoint = f"tcp://{self._bind}:{port}"
        return self.access(Role.CONTROLLER)

    def access(self, role: Role) -> QueueAccess:
        """Return what clients of a role connect with, once the server has started."""
        access = QueueAccess(self._endpoint) if self._keys is None else self._keys.access(role, self._endpoint)
        return replace(access, max_message_bytes=self._max_message_bytes)

    def close(self) -> None:
        """Stop serving; parked requests are answered with an error. Idempotent, ends within a second."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._gatekeeper is not None:
            self._gatekeeper.stop()
        self._context.destroy(linger=_FAREWELL_MS)

    def _serve(self) -> None:
        """Serve until `close`.

        Consumes requests, produces answers. Waits on the socket, at most until the next deadline of a parked request
        and never longer than a tick; unblocked by a message.
        """
        while not self._closing.is_set():
            self._socket.poll(self._patience_ms())
            self._note_connections()
            self._receive_burst()
            self._service.expire()
            self._answer_parked()
            self._answer_overdue()
        for request in self._all_parked():
            farewell = self._failure(LedgerError("the sample queue has closed: the run has ended"))
            self._send(request.sender, farewell)

    def _note_connections(self) -> None:
        """Drop the parked requests of clients that have disconnected; count connections without a key."""
        if self._connections.note_events():
            for request in self._all_parked():
                if request.sender.connection.is_gone:
                    self._unpark(request)
        if self._connections.num_strangers:
            self._traffic.refused["unauthenticated"] += self._connections.num_strangers
            self._connections.num_strangers = 0

    def _receive_burst(self) -> None:
        """Answer the messages that have arrived, up to a number."""
        for _ in range(_BURST):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._receive(frames)
            self._answer_parked()

    def _answer_parked(self) -> None:
        """Answer the parked requests for which there is something now."""
        for waiting in list(self._parked.values()):
            # What there is not for one, there is not for the next that asks for the same.
            while waiting and self._answer(request := next(iter(waiting))):
                self._unpark(request)

    def _answer_overdue(self) -> None:
        """Answer the parked requests whose time is over."""
        now = time.monotonic()
        if now >= self._next_deadline:
            for request in self._all_parked():
                if request.deadline <= now:
                    self._answer(request)
                    self._unpark(request)
            self._next_deadline = min((request.deadline for request in self._all_parked()), default=math.inf)

    def _park(self, request: _Request) -> None:
        """Hold a request back, unless its client is gone: it would be lent the next work."""
        if request.sender.connection.is_gone:
            return
        self._parked.setdefault(request.kind, OrderedDict())[request] = None
        self._traffic.parked += 1
        self._next_deadline = min(self._next_deadline, request.deadline)

    def _unpark(self, request: _Request) -> None:
        waiting = self._parked[request.kind]
        del waiting[request]
        if not waiting:
            del self._parked[request.kind]
        self._traffic.parked -= 1

    def _all_parked(self) -> list[_Request]:
        return [request for waiting in self._parked.values() for request in waiting]

    def _patience_ms(self) -> int:
        return int(1000 * min(max(self._next_deadline - time.monotonic(), 0.0), _TICK_S)) + 1

    def _receive(self, frames: list[Any]) -> None:
        """Answer a message, or park it.

        Args:
            frames: As they arrived; the first names the peer.
        """
        first, *rest = frames
        self._traffic.messages += 1
        self._traffic.bytes_in += sum(len(frame) for frame in frames)
        sender = _Sender(
            peer=first.bytes,
            request_id=rest[0].bytes if rest else b"",
            connection=self._connections.find(first.get(zmq.SRCFD)),
        )
        try:
            if len(rest) != 2:
                raise _Refusal("malformed", f"a request has 2 frames, got {len(rest)}: use the clients of areal_lite")
            op, fields = _read_payload(rest[1].bytes)
            if self._keys is not None:
                self._authorise(first.get("User-Id"), op, fields)
        except Exception as error:
            self._send(sender, self._failure(error))
            return
        request = _Request(
            sender=sender,
            kind=(op, fields.get("limit", 1) > 0),
            worker=fields.get("worker"),
            run=partial(getattr(self._service, op), **fields),
            deadline=time.monotonic() + min(fields.get("wait_s", 0.0), _MAX_WAIT_S),
        )
        if op == "forget":
            self._dismiss(request.worker)
        if not self._answer(request):
            self._park(request)

    def _authorise(self, role: str, op: str, fields: dict[str, Any]) -> None:
        """Raise when a request is not its client's, by its kind or by whom the work is lent to."""
        lent_to = self._service.lent_to(fields["lease_id"]) if "lease_id" in fields else None
        if op not in ALLOWED[role] or (role != Role.CONTROLLER and lent_to not in (None, role)):
            raise _Refusal("forbidden", f"a {role} may ask for its own work, got {op}: use the clients of its actors")

    def _dismiss(self, worker: str | None) -> None:
        """Answer what a worker waits for with nothing: it is dead, and would be lent the next work."""
        for request in [request for request in self._all_parked() if request.worker == worker]:
            self._send(request.sender, encode({"result": []}))
            self._unpark(request)

    def _answer(self, request: _Request) -> bool:
        """Carry out a request and send its answer; False when there is nothing to answer yet."""
        try:
            result = request.run()
            if not result and time.monotonic() < request.deadline:
                return False
            answer = encode({"result": result})
        except Exception as error:
            answer = self._failure(error)
        self._send(request.sender, answer)
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

    def _send(self, to: _Sender, answer: bytes) -> None:
        """Send an answer; drop it when its receiver is gone, or leaves too many unread."""
        try:
            self._socket.send_multipart([to.peer, to.request_id, answer], zmq.NOBLOCK, copy=len(answer) < _COPIED_BYTES)
        except zmq.Again:
            self._traffic.refused["unread"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        else:
            self._traffic.bytes_out += len(answer)


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
