"""The connections of the queue's socket: who may connect, and who has disconnected.

Only the server uses it, from its thread.
"""

from dataclasses import dataclass
from typing import Any

import zmq
import zmq.auth.thread
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from areal_lite.sample_queue.access import QueueKeys, Role

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

    is_gone: bool = False


class Connections:
    """All peers of a ROUTER, by the file descriptor that ZeroMQ names in their messages."""

    def __init__(self, router: Any) -> None:
        """Watch a socket that is not bound yet."""
        self._monitor = router.get_monitor_socket(zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | _FAILED)
        self._connections: dict[int, Connection] = {}
        self.num_strangers = 0
        """Connections that could not show a key of the run."""

    def find(self, descriptor: int) -> Connection:
        """Return the connection that a message came over; one that is gone if it has ended since."""
        if descriptor not in self._connections:
            self.note_events()
        return self._connections.get(descriptor) or Connection(is_gone=True)

    def note_events(self) -> bool:
        """Process connection events; True if a client disconnected."""
        has_gone = False
        while self._monitor.get(zmq.EVENTS) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)
            kind, descriptor = event["event"], int(event["value"])
            if kind == zmq.Event.ACCEPTED:
                self._connections[descriptor] = Connection()
            elif kind == zmq.Event.DISCONNECTED:
                if gone := self._connections.pop(descriptor, None):
                    gone.is_gone = has_gone = True
            elif kind & _FAILED:
                self.num_strangers += 1
        return has_gone
