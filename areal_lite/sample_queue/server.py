"""The sample queue's one endpoint: a ZeroMQ ROUTER socket around `QueueService`, in a thread of its own.

The queue actor starts it; workers, trainer ranks and the controller connect to it with `client.py`. This file knows
messages and waiting; `service.py` knows what a request does. A request and its answer are two frames each, after the
ROUTER's own:

    request  [request id, {"op": name, "fields": {...}}]
    answer   [request id, {"result": value}]   or   [request id, {"error": class, "message": text}]

One loop serves everything. It consumes requests and produces answers; it waits on the socket, no longer than a tick or
the next deadline of a parked request; a message unblocks it:

    read messages → answer each, or park it while there is nothing to answer → expire leases
        → answer parked requests for which something came up, or whose time is over

It speaks CURVE (`access.py`): a connection without a key of the run gets nothing, a client may do what its role may.
ZeroMQ disconnects a client whose message is longer than the limit, and drops answers beyond `_SEND_HWM` that
a client leaves unread. No message stops the server: what is no request is answered with an error.
"""

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from areal_lite.errors import ArealLiteError, ConfigError, LedgerError, QueueClosed, WireError
from areal_lite.sample_queue.access import ALLOWED, LENT_TO, Gatekeeper, QueueAccess, QueueKeys, Role
from areal_lite.sample_queue.requests import NOT_REPEATABLE, REQUESTS, read_fields
from areal_lite.sample_queue.service import QueueService
from areal_lite.wire import Raw, as_type, decode, encode

logger = logging.getLogger(__name__)

_TICK_S = 0.1
"""Longest sleep: leases are checked, and `close` is noticed, this often."""
_BURST = 1024
"""Messages read before leases are checked: a heartbeat that has arrived counts first, and leases expire under load."""
_MAX_WAIT_S = 60.0
"""Longest time a request is parked; a larger `wait_s` is cut to this."""
_SEND_HWM = 1024
"""Unread answers kept for one client."""
_COPIED_BYTES = 2**16
"""Longer answers are sent without a copy."""
_FAREWELL_MS = 200
"""Longest time that closing waits for the last answers to leave."""

_Kind = tuple[str, bool]
"""Name of a request, and whether it wants any work: if one of a kind must wait, all of that kind must."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    peer: bytes
    request_id: bytes
    op: str
    worker: str | None
    """Name of the worker, in requests that hold it."""
    kind: _Kind
    run: Callable[[], Any]
    deadline: float
    """Monotonic time until which an empty answer is held back."""


class QueueServer:
    """Serves what a `QueueService` does to the clients of a run."""

    def __init__(
        self,
        service: QueueService,
        *,
        bind: str = "127.0.0.1",
        ports: range | None = None,
        max_message_bytes: int = 32 * 2**20,
    ) -> None:
        """Open nothing before `start`.

        Args:
            service: From `start` on it belongs to the server's thread, with its ledger and cursor.
            bind: Address to listen on.
            ports: One of them is used; None = any free one.
            max_message_bytes: Longest request; answers may be longer.
        """
        self._service = service
        self._bind, self._ports, self._max_message_bytes = bind, ports, max_message_bytes
        self._parked: dict[_Kind, OrderedDict[_Request, None]] = {}
        self._next_deadline = math.inf  # of the parked requests; too early once that one was answered
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._thread: threading.Thread | None = None
        self._keys = QueueKeys()
        self._gatekeeper = Gatekeeper(self._context, self._keys)

    def start(self) -> QueueAccess:
        """Open the socket on a free port and serve it from a new thread.

        Returns:
            The controller's access; `access` returns the others'.

        Raises:
            ConfigError: The address is not this machine's, or no port is free.
        """
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a client that is gone is an error, not silence
        self._gatekeeper.start()
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.server.secret)
        try:
            ends = {"min_port": self._ports.start, "max_port": self._ports.stop} if self._ports else {}
            port = self._socket.bind_to_random_port(f"tcp://{self._bind}", **ends)
        except zmq.ZMQBindError as error:
            raise ConfigError(f"a port of run.ports must be free on {self._bind}: {error}; choose others") from error
        except zmq.ZMQError as error:
            raise ConfigError(
                f"the queue must listen at an address of this machine, got {self._bind!r} ({error}). Fix: set "
                "run.network to a subnet or an interface that all nodes share"
            ) from error
        self._thread = threading.Thread(target=self._serve, name="sample-queue", daemon=True)
        self._thread.start()
        self._endpoint = f"tcp://{self._bind}:{port}"
        return self.access(Role.CONTROLLER)

    def access(self, role: Role) -> QueueAccess:
        """Return what clients of a role connect with, once the server has started."""
        return self._keys.access(role, self._endpoint, max_message_bytes=self._max_message_bytes)

    def close(self) -> None:
        """Stop serving; parked requests are answered with an error. Idempotent, ends within a second."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._gatekeeper.stop()
        self._context.destroy(linger=_FAREWELL_MS)

    def _serve(self) -> None:
        """Serve until `close`: the loop above."""
        while not self._closing.is_set():
            wait_s = min(max(self._next_deadline - time.monotonic(), 0.0), _TICK_S)
            self._socket.poll(int(1000 * wait_s) + 1)
            self._receive_burst()
            self._service.ledger.expire()
            self._answer_parked()
            self._answer_overdue()
        for request in self._all_parked():
            farewell = _error_answer(QueueClosed("the sample queue has closed: the run has ended"))
            self._send(request.peer, request.request_id, farewell)

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
        self._parked.setdefault(request.kind, OrderedDict())[request] = None
        self._next_deadline = min(self._next_deadline, request.deadline)
        self._service.num_parked += 1

    def _unpark(self, request: _Request) -> None:
        waiting = self._parked[request.kind]
        del waiting[request]
        if not waiting:
            del self._parked[request.kind]
        self._service.num_parked -= 1

    def _all_parked(self) -> list[_Request]:
        return [request for waiting in self._parked.values() for request in waiting]

    def _receive(self, frames: list[Any]) -> None:
        """Answer a message, or park it.

        Args:
            frames: As they arrived; the first names the peer.
        """
        peer, *rest = (frame.bytes for frame in frames)
        try:
            if len(rest) != 2:
                raise WireError(f"a request has 2 frames, got {len(rest)}: use the clients of areal_lite")
            op, fields = _read_payload(rest[1])
            self._authorise(frames[0].get("User-Id"), op, fields)
        except Exception as error:
            self._send(peer, rest[0] if rest else b"", _error_answer(error))
            return
        request = _Request(
            peer=peer,
            request_id=rest[0],
            op=op,
            worker=fields.get("worker"),
            kind=(op, fields.get("limit", 1) > 0),
            run=partial(getattr(self._service, op), **fields),
            deadline=time.monotonic() + min(fields.get("wait_s", 0.0), _MAX_WAIT_S),
        )
        if op == "forget":
            self._dismiss(request.worker)
        if not self._answer(request):
            self._park(request)

    def _authorise(self, role: str, op: str, fields: dict[str, Any]) -> None:
        """Raise when a role does not have a request, or the work is lent to the other kind of worker."""
        held = self._service.ledger.find_lease(fields["lease_id"]) if "lease_id" in fields else None
        is_others = held is not None and role not in (Role.CONTROLLER, LENT_TO[held.group.state])
        if op not in ALLOWED[role] or is_others:
            raise WireError(f"a {role} may request only its own work, got {op}: use the clients of its actors")

    def _dismiss(self, worker: str | None) -> None:
        """Answer a dead worker's parked requests with nothing, so that it is not lent the next work."""
        for request in [request for request in self._all_parked() if request.worker == worker]:
            self._send(request.peer, request.request_id, encode({"result": []}))
            self._unpark(request)

    def _answer(self, request: _Request) -> bool:
        """Execute a request and send its answer; False when there is nothing to answer yet."""
        try:
            result = request.run()
            if not result and time.monotonic() < request.deadline:
                return False
            answer = encode({"result": result})
        except Exception as error:
            result, answer = None, _error_answer(error)
        if not self._send(request.peer, request.request_id, answer) and request.op in NOT_REPEATABLE:
            self._service.ledger.take_back([lease.lease_id for lease in result or ()])
        return True

    def _send(self, peer: bytes, request_id: bytes, answer: bytes) -> bool:
        """Send an answer; False, and it is dropped, when its client is gone or has left too many unread."""
        try:
            self._socket.send_multipart([peer, request_id, answer], zmq.NOBLOCK, copy=len(answer) < _COPIED_BYTES)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True


def _error_answer(error: Exception) -> bytes:
    kind, message = type(error).__name__, str(error)
    if isinstance(error, ValueError) and not isinstance(error, ArealLiteError):
        kind = WireError.__name__  # values that a request may not have
    elif not isinstance(error, ArealLiteError):
        logger.error("a request failed: this is a bug in areal-lite", exc_info=error)
        kind, message = LedgerError.__name__, f"the sample queue has a bug ({kind}: {error}): see its log"
    return encode({"error": kind, "message": message})


def _read_payload(payload: bytes) -> tuple[str, dict[str, Any]]:
    """Return the name of a request and its checked fields from the bytes of a message; a `WireError` if it is none."""
    message = decode(payload, dict[str, Raw])
    if message.keys() != {"op", "fields"}:
        raise WireError(f"a request is {{op, fields}}, got {list(message)!r:.80}: use the clients of areal_lite")
    op = as_type(message["op"], str)
    if op not in REQUESTS:
        raise WireError(f"a request is one of {', '.join(sorted(REQUESTS))}, got {op!r:.80}")
    return op, read_fields(op, message["fields"])
