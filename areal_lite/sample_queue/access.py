"""Who may talk to the sample queue: the keys of a run, what each role may request, and what a client connects with.

The queue's process makes the keys, Ray carries each role's own to its actors, and `server.py` and `client.py` give them
to ZeroMQ, whose CURVE encrypts everything and admits only clients that hold a key of the run.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import zmq
import zmq.auth.thread
from zmq.utils import z85

from areal_lite.sample_queue.groups import GroupState
from areal_lite.sample_queue.requests import REQUESTS

logger = logging.getLogger(__name__)


class Role(StrEnum):
    """What a client does in the run."""

    CONTROLLER = "controller"
    ROLLOUT = "rollout"
    VERIFIER = "verifier"
    TRAINER = "trainer"


ALLOWED: Mapping[str, frozenset[str]] = {
    Role.CONTROLLER: REQUESTS,
    Role.ROLLOUT: frozenset({"lease_rollout", "present", "heartbeat", "complete_rollout", "fail"}),
    Role.VERIFIER: frozenset({"lease_verify", "present", "heartbeat", "complete_verify", "fail"}),
    Role.TRAINER: frozenset({"fetch"}),
}
"""The requests of each role; a worker may complete or `fail` only what is lent to workers of its own kind."""

LENT_TO: Mapping[GroupState, Role] = {
    GroupState.LEASED_ROLLOUT: Role.ROLLOUT,
    GroupState.LEASED_VERIFY: Role.VERIFIER,
}
"""The kind of worker that holds a group's lease."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, in ZeroMQ's text form."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> "KeyPair":
        """Return a random one."""
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True, slots=True)
class QueueAccess:
    """What a client connects with. It belongs in no recipe, log or run folder."""

    endpoint: str
    """`tcp://address:port`."""
    server_key: bytes | None = None
    """The queue's public key; None = no encryption, for a stand-in of the queue in tests."""
    keys: KeyPair | None = None
    """The client's own."""
    max_message_bytes: int | None = None
    """Of a request: ZeroMQ silently disconnects a client that exceeds it. None = not known."""

    def __str__(self) -> str:
        return self.endpoint


class QueueKeys:
    """The keys of one run: the queue's own pair, and one for each role."""

    def __init__(self) -> None:
        self.server = KeyPair.new()
        self._roles = {role: KeyPair.new() for role in Role}

    def access(self, role: Role, endpoint: str, *, max_message_bytes: int | None = None) -> QueueAccess:
        """Return what the clients of a role connect with."""
        return QueueAccess(endpoint, self.server.public, self._roles[role], max_message_bytes)

    def role_of(self, public_key: bytes) -> Role | None:
        """Return the role whose key this is; None for a stranger's."""
        return next((role for role, pair in self._roles.items() if pair.public == public_key), None)


class Gatekeeper(zmq.auth.thread.ThreadAuthenticator):
    """Admits clients that hold a key of the run; the user id of their messages is their role."""

    def __init__(self, context: Any, keys: QueueKeys) -> None:
        super().__init__(context)
        self._keys, self._has_warned = keys, False
        self.configure_curve_callback("*", self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a public key is one of the run's."""
        is_stranger = self._keys.role_of(key) is None
        if is_stranger and not self._has_warned:  # once, as ZeroMQ lets a client try again and again
            logger.warning("a client without a key of this run tried to connect, and got nothing")
            self._has_warned = True
        return not is_stranger

    def curve_user_id(self, client_public_key: bytes) -> str:
        """Return the role of an admitted client."""
        return str(self._keys.role_of(z85.encode(client_public_key)))


def too_large(num_bytes: int, limit: int) -> str:
    """Return the message for a request that is too long."""
    return f"a request may have {limit} bytes, got {num_bytes}: send less, or raise queue.max_message_mb"
