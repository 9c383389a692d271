"""Who may talk to the sample queue: the keys of a run, what goes with each, and what a client is handed.

The queue's process makes the keys, Ray carries each role its own, `server.py` and `client.py` give them to ZeroMQ. It
speaks CURVE: encrypted, and closed to whoever has no key of the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import zmq

from areal_lite.sample_queue.requests import REQUESTS


class Role(StrEnum):
    """What a client is in the run."""

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
"""The requests of each role; a worker may `fail` what is lent to workers of its own kind."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, in the text form that ZeroMQ takes."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> "KeyPair":
        """Draw one."""
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True, slots=True)
class QueueAccess:
    """What a client connects with: never a part of a recipe, a log or a run folder."""

    endpoint: str
    """`tcp://address:port`."""
    server_key: bytes | None = None
    """The queue's public key; None = it speaks in the clear, in measurements and tests."""
    keys: KeyPair | None = None
    """The client's own."""
    max_message_bytes: int | None = None
    """Of a request: ZeroMQ cuts the connection of who sends much more, and nobody is told why. None = not known."""

    def __str__(self) -> str:
        return self.endpoint


class QueueKeys:
    """The keys of one run: the queue's own, and a pair for each role."""

    def __init__(self) -> None:
        self.server = KeyPair.new()
        self._roles = {role: KeyPair.new() for role in Role}

    def access(self, role: Role, endpoint: str) -> QueueAccess:
        """Return what the clients of a role connect with."""
        return QueueAccess(endpoint, self.server.public, self._roles[role])

    def roles(self) -> dict[bytes, Role]:
        """Return each role by its public key."""
        return {pair.public: role for role, pair in self._roles.items()}


def too_large(num_bytes: int, limit: int) -> str:
    """Say that a request is longer than it may be."""
    return f"a request may have {limit} bytes, got {num_bytes}: send less, or raise queue.max_message_mb"
