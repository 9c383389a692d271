"""Clients of the sample queue: one for coroutines, one for plain calls.

Rollout workers, verifier workers, trainer ranks and the controller use them. Both have a method for each request of
`service.QueueService`, with its fields as keyword arguments. They raise `QueueTimeout` when no answer came in time,
`WireError` when the message was refused, and `LedgerError` when the request was. A request that may be repeated is sent
a second time before they give up.
"""

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import zmq

from areal_lite.errors import ArealLiteError, DataError, LedgerError, QueueClosed, QueueTimeout, WireError
from areal_lite.sample_queue.access import QueueAccess, too_large
from areal_lite.sample_queue.requests import NOT_REPEATABLE, REQUESTS, answer_type
from areal_lite.wire import Raw, as_type, decode, encode

if TYPE_CHECKING:
    from areal_lite.sample_queue.service import QueueService
else:
    QueueService = object

_SLICE_S = 0.1
"""How often a waiting call checks whether the client was closed."""
_ERRORS: dict[str, type[ArealLiteError]] = {
    cls.__name__: cls for cls in (DataError, LedgerError, QueueClosed, QueueTimeout, WireError)
}


class _Client:
    """A connection to the queue, with the methods of `QueueService`."""

    def __init__(self, access: QueueAccess, *, timeout_s: float) -> None:
        """Connect, without waiting for the queue.

        Args:
            access: As `QueueServer.access` returned it.
            timeout_s: Seconds to wait for each answer, beyond the request's own `wait_s`.
        """
        self._access, self._timeout_s = access, timeout_s
        self._request_ids = itertools.count()
        self._context = zmq.Context()
        self._socket = _connect(self._context, access)

    def __getattr__(self, op: str) -> Any:
        """Return a request as a method, whose fields are keyword arguments."""
        if op not in REQUESTS:
            raise AttributeError(f"a request is one of {', '.join(sorted(REQUESTS))}, got {op!r}")
        return functools.partial(self._call, op)

    def _next(self, op: str, fields: dict[str, Any]) -> tuple[bytes, bytes, float]:
        """Return the id of a new request, its message, and how long its answer may take."""
        request_id, payload = next(self._request_ids).to_bytes(8, "big"), encode({"op": op, "fields": fields})
        limit = self._access.max_message_bytes
        if limit is not None and len(request_id) + len(payload) > limit:
            raise WireError(too_large(len(payload), limit))
        return request_id, payload, self._timeout_s + fields.get("wait_s", 0.0)

    def _timeout_error(self, op: str, *, wait_s: float, num_bytes: int) -> QueueTimeout:
        return QueueTimeout(
            f"the sample queue at {self._access} must answer {op} ({num_bytes} bytes) within {wait_s:g} s, got no "
            f"answer after {_attempts(op)} attempt(s): check whether the queue's process is alive, and its log"
        )

    def _closed_error(self, op: str) -> LedgerError:
        return LedgerError(f"{op} needs an open client, got one of {self._access} that was closed: make a new client")


class QueueClient(_Client, QueueService):
    """Plain calls, one at a time: safe from several threads, but a waiting call blocks the others."""

    def __init__(self, access: QueueAccess, *, timeout_s: float, check: Callable[[], object] = lambda: None) -> None:
        """Connect; `check` is called during every wait, and raises if no answer can come."""
        super().__init__(access, timeout_s=timeout_s)
        self._check, self._connected_to = check, access
        self._lock = threading.RLock()  # `check` may make calls
        self._closing = threading.Event()

    def move_to(self, access: QueueAccess) -> None:
        """Send calls to another queue from now on, those that wait once more; from any thread."""
        self._access = access

    def save(self) -> bytes:
        """Return ledger and data cursor as bytes, for `service.restore`; the queue serves others meanwhile."""
        parts, queue = list[bytes](), self._connected_to
        try:
            while part := self.save_part(part=len(parts)):
                parts.append(part)
        except LedgerError:
            if self._connected_to is queue:
                raise
            return self.save()  # another queue has replaced it meanwhile
        return b"".join(parts)

    def close(self) -> None:
        """Disconnect; a call that waits in another thread raises `LedgerError`. Idempotent."""
        self._closing.set()
        with self._lock:
            self._socket.close(linger=0)
            self._context.term()

    def _call(self, op: str, **fields: Any) -> Any:
        request_id, payload, wait_s = self._next(op, fields)
        with self._lock:
            for _ in range(_attempts(op)):
                self._raise_if_closing(op)
                if self._connected_to is not (access := self._access):
                    self._socket.close(linger=0)
                    self._socket, self._connected_to = _connect(self._context, access), access
                self._socket.send_multipart([request_id, payload])
                answer = self._receive(op, request_id, deadline=time.monotonic() + wait_s)
                if answer is not None:
                    return _result(op, answer)
        raise self._timeout_error(op, wait_s=wait_s, num_bytes=len(payload))

    def _receive(self, op: str, request_id: bytes, *, deadline: float) -> bytes | None:
        """Wait for the answer to one request, or for `move_to`; late answers to earlier requests are dropped."""
        asked = self._connected_to
        while self._access is asked and (remaining_s := deadline - time.monotonic()) > 0:
            self._raise_if_closing(op)
            if self._socket.poll(1 + int(1000 * min(remaining_s, _SLICE_S))):
                answered_id, answer = self._socket.recv_multipart()
                if answered_id == request_id:
                    return cast(bytes, answer)
            else:
                self._check()
        return None

    def _raise_if_closing(self, op: str) -> None:
        if self._closing.is_set():
            raise self._closed_error(op)


class AsyncQueueClient(_Client):
    """Coroutines, many requests in flight at once; for one event loop.

    It does not use zmq.asyncio, whose futures and polling take most of the time of a short request.
    """

    def __init__(self, access: QueueAccess, *, timeout_s: float) -> None:
        super().__init__(access, timeout_s=timeout_s)
        self._answers: dict[bytes, asyncio.Future[bytes]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def close(self) -> None:
        """Disconnect; calls that wait raise `LedgerError`. Idempotent; from the loop's thread."""
        self._closed = True
        self._disconnect(self._closed_error("a request"))
        self._context.term()

    def move_to(self, access: QueueAccess) -> None:
        """Send calls to another queue from now on; calls that wait raise `QueueTimeout`. From the loop's thread."""
        self._disconnect(QueueTimeout(f"the sample queue at {self._access} was replaced by another: send it again"))
        self._access, self._socket = access, _connect(self._context, access)

    def _disconnect(self, error: Exception) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fd)
        self._loop = None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        self._socket.close(linger=0)

    async def _call(self, op: str, **fields: Any) -> Any:
        request_id, payload, wait_s = self._next(op, fields)
        try:
            for _ in range(_attempts(op)):
                if self._closed:
                    raise self._closed_error(op)
                if self._loop is None:  # a client may be made before its event loop runs
                    self._loop = asyncio.get_running_loop()
                    self._loop.add_reader(self._socket.fd, self._read)
                answer = self._answers[request_id] = self._loop.create_future()
                self._socket.send_multipart([request_id, payload])
                # ZeroMQ signals its descriptor once for several events: sending may have used up an answer's signal.
                self._read()
                await asyncio.wait([answer], timeout=wait_s)
                if answer.done():
                    return _result(op, answer.result())
        finally:
            self._answers.pop(request_id, None)
        raise self._timeout_error(op, wait_s=wait_s, num_bytes=len(payload))

    def _read(self) -> None:
        """Pass every answer that has arrived to the call that waits for it; the event loop calls this."""
        while not self._closed and self._socket.get(zmq.EVENTS) & zmq.POLLIN:
            request_id, payload = self._socket.recv_multipart()
            answer = self._answers.get(request_id)
            if answer is not None and not answer.done():
                answer.set_result(payload)


def _connect(context: Any, access: QueueAccess) -> Any:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.set_hwm(0)
    if access.keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, access.server_key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, access.keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, access.keys.secret)
    socket.connect(access.endpoint)
    return socket


def _attempts(op: str) -> int:
    return 1 if op in NOT_REPEATABLE else 2


def _result(op: str, answer: bytes) -> Any:
    """Return the result in an answer, or raise the error it names."""
    content = decode(answer, dict[str, Raw])
    if "error" in content:
        kind, message = (as_type(content[name], str) for name in ("error", "message"))
        raise _ERRORS.get(kind, LedgerError)(message)
    return as_type(content["result"], answer_type(op))
