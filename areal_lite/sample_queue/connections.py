"""The connections of the queue's socket: who is there, who sends without end, who does not read.

Only the server uses it, from its thread. ZeroMQ's own limits count whole messages and hold for one frame, so the bytes
are watched here: those that arrive and never become a message, and the long answers that nobody reads.
"""

import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.auth.thread
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from areal_lite.sample_queue.access import QueueKeys, Role

COPIED_BYTES = 2**16
"""Answers of fewer bytes are not watched: `SNDHWM` bounds their number."""
_LOOK_S = 0.05
"""How often the connections are looked at."""
_RECEIVED = slice(128, 136)
"""Where `tcpi_bytes_received` stands in Linux's `struct tcp_info`."""
_FAILED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH


class Gatekeeper(zmq.auth.thread.ThreadAuthenticator):
    """Lets in whoever has a key of the run; the user id of its messages is its role."""

    def __init__(self, context: Any, keys: QueueKeys) -> None:
        super().__init__(context)
        self._roles = keys.roles()
        self.configure_curve_callback("*", self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell whether a public key is one of the run's."""
        return key in self._roles

    def curve_user_id(self, client_public_key: bytes) -> Role:
        """Return the role of a key."""
        return self._roles[z85.encode(client_public_key)]


@dataclass(slots=True, eq=False)
class Connection:
    """One peer."""

    tcp: socket.socket | None = None
    is_gone: bool = False
    is_deaf: bool = False
    """The last answer could not be sent, as it leaves too much unread."""
    num_refused: int = 0
    """Its requests since then."""
    num_parked: int = 0
    """Its requests that wait for an answer."""
    had_message: bool = False
    """Since it was looked at last."""
    bytes_before: int = 0
    """Received when its last message had come, at the latest."""
    unread: list[tuple[Any, int]] = field(default_factory=list)
    """Its long answers on the way: tracker and bytes."""

    def num_unread_bytes(self, more: int) -> int:
        """Return the bytes of its unread long answers with so many more, 0 when it has read all."""
        self.unread = [(tracker, size) for tracker, size in self.unread if not tracker.done]
        return sum(size for _, size in self.unread) + more if self.unread else 0

    def num_received_bytes(self) -> int:
        """Return what came over the connection so far."""
        if self.tcp is None:
            return 0
        return int.from_bytes(self.tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[_RECEIVED], "little")

    def cut(self) -> None:
        """End it, whatever is on the way."""
        if self.tcp is not None:
            with suppress(OSError):  # its peer may have ended it
                self.tcp.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of it."""
        self.is_gone = True
        if self.tcp is not None:
            self.tcp.close()


class Connections:
    """All peers of a ROUTER, by the file descriptor that ZeroMQ names in their messages."""

    def __init__(self, router: Any, *, max_unfinished_bytes: int) -> None:
        """Watch a socket that is not bound yet.

        Args:
            router: The socket.
            max_unfinished_bytes: Received of a message that has not ended: with more the connection is cut.
        """
        self._monitor = router.get_monitor_socket(zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | _FAILED)
        self._max_unfinished_bytes = max_unfinished_bytes
        self._connections: dict[int, Connection] = {}
        self._next_look = 0.0
        self.num_strangers = 0
        """Connections that could not show a key of the run."""
        self.num_cut = 0
        """Connections that sent a message without end."""

    def find(self, descriptor: int) -> Connection:
        """Return the connection that a message came over; one that is gone if it has ended since."""
        if descriptor not in self._connections:
            self.note_events()
        return self._connections.get(descriptor) or Connection(is_gone=True)

    def note_events(self) -> bool:
        """Take up who came and went; True when somebody went."""
        has_gone = False
        while self._monitor.get(zmq.EVENTS) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)
            kind, descriptor = event["event"], int(event["value"])
            if kind == zmq.Event.ACCEPTED:
                self._connections[descriptor] = connection = Connection()
                with suppress(OSError):  # it may have ended already
                    # A descriptor of our own: ZeroMQ's number may be another connection's when it is looked at.
                    connection.tcp = socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM)
            elif kind == zmq.Event.DISCONNECTED:
                if gone := self._connections.pop(descriptor, None):
                    gone.close()
                    has_gone = True
            elif kind & _FAILED:
                self.num_strangers += 1
        return has_gone

    def cut_endless(self) -> None:
        """Cut the connections whose message has not ended within the limit; to be called when no message waits."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + _LOOK_S
        for connection in self._connections.values():
            received = connection.num_received_bytes()
            if connection.had_message:
                connection.had_message, connection.bytes_before = False, received
            elif connection.tcp and received - connection.bytes_before > self._max_unfinished_bytes:
                connection.bytes_before = received
                self.num_cut += 1
                connection.cut()

    def close(self) -> None:
        """Let go of all."""
        for connection in self._connections.values():
            connection.close()
