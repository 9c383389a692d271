"""Who has no key of the run gets nothing from the sample queue, and who has one gets what its role may."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from queue_builders import SCORES, FakeCursor, connected, dealer, make_queue, make_ready, make_samples

from areal_lite.errors import WireError
from areal_lite.sample_queue.access import KeyPair, QueueAccess, QueueKeys, Role
from areal_lite.sample_queue.client import QueueClient
from areal_lite.sample_queue.requests import REQUESTS
from areal_lite.sample_queue.server import QueueServer
from areal_lite.types import Group, Lease
from areal_lite.wire import encode

SHORT_WAIT_MS = 300


@pytest.fixture
def server() -> Iterator[QueueServer]:
    """A queue with keys and open admission."""
    with closing(make_queue()) as server:
        with connected(server.start()) as controller:
            controller.open_admission()
        yield server


@contextmanager
def clients(server: QueueServer, *roles: Role) -> Iterator[list[QueueClient]]:
    with ExitStack() as opened:
        yield [opened.enter_context(connected(server.access(role))) for role in roles]


def in_the_clear(socket: Any, access: QueueAccess) -> None:
    """A stranger that knows the port."""


def with_own_server_key(socket: Any, access: QueueAccess) -> None:
    """One that speaks CURVE, to a queue of its own making."""
    own = KeyPair.new()
    socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = own.public, own.public, own.secret


def with_the_queues_public_key(socket: Any, access: QueueAccess) -> None:
    """One that has seen the public key of the queue and of a worker, but no secret one."""
    own = KeyPair.new()
    socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = access.server_key, own.public, own.secret


@pytest.mark.parametrize("prepare", [in_the_clear, with_own_server_key, with_the_queues_public_key])
def test_a_stranger_reads_nothing_and_injects_nothing(
    server: QueueServer, prepare: Callable[[Any, QueueAccess], None]
) -> None:
    """Seen failing with a server that does not use CURVE, and with a gatekeeper that lets every key in."""
    with clients(server, Role.CONTROLLER, Role.ROLLOUT, Role.VERIFIER) as (controller, rollout, verifier):
        (lease,) = rollout.lease_rollout(worker="rollout/0", limit=1, wait_s=0.0)
        assert rollout.complete_rollout(lease_id=lease.lease_id, samples=make_samples())
        (lease,) = verifier.lease_verify(worker="verifier/0", limit=1, wait_s=0.0)
        access = server.access(Role.ROLLOUT)
        forged = {"op": "complete_verify", "fields": {"lease_id": lease.lease_id, "scores": SCORES}}
        without_keys = replace(access, keys=None)
        with dealer(without_keys, lambda socket: prepare(socket, access)) as stranger:
            for message in (forged, {"op": "status", "fields": {}}, {"op": "abandon", "fields": {}}):
                stranger.send_multipart([b"id", encode(message)])
            assert not stranger.poll(SHORT_WAIT_MS)
            status = controller.status()
            assert (status["counts"]["leased_verify"], status["counts"]["abandoned"]) == (1, 0)
        assert verifier.complete_verify(lease_id=lease.lease_id, scores=SCORES)  # the run continues
        assert controller.status()["counts"]["ready"] == 1


LEASE = Lease(lease_id="x", group=Group(group_id="x#0", prompt=FakeCursor().get("fake/0/1")), version=0)
FIELDS: dict[str, dict[str, Any]] = {
    "lease_rollout": {"worker": "w", "limit": 1, "wait_s": 0.0},
    "lease_verify": {"worker": "w", "limit": 1, "wait_s": 0.0},
    "present": {"worker": "w", "lease": LEASE},
    "heartbeat": {"worker": "w", "lease_ids": [], "progress": 0},
    "complete_rollout": {"lease_id": "x", "samples": []},
    "complete_verify": {"lease_id": "x", "scores": []},
    "fail": {"lease_id": "x", "reason": "r"},
    "take": {"batch_id": "b", "wait_s": 0.0},
    "fetch": {"batch_id": "step", "rank": 0},
    "batch_groups": {"batch_id": "step", "limit": 1},
    "complete_step": {"batch_id": "step"},
    "forget": {"worker": "w"},
    "save_part": {"part": 0},
}
OWN = {
    Role.ROLLOUT: {"lease_rollout", "present", "heartbeat", "complete_rollout", "fail"},
    Role.VERIFIER: {"lease_verify", "present", "heartbeat", "complete_verify", "fail"},
    Role.TRAINER: {"fetch"},
}


@pytest.mark.parametrize("role", OWN)
def test_a_role_may_ask_for_its_own_work_alone(server: QueueServer, role: Role) -> None:
    """Every request by every role. Seen failing with roles not looked at, and with `take` allowed to workers."""
    others = sorted(REQUESTS - OWN[role])
    with clients(server, Role.CONTROLLER, role) as (controller, client):
        make_ready(controller, 2)
        assert controller.take(batch_id="step", wait_s=0.0) is not None
        before = controller.status()["counts"]
        for op in others:
            with pytest.raises(WireError, match=f"a {role} may request only its own work, got {op}"):
                getattr(client, op)(**FIELDS.get(op, {}))
        status = controller.status()
        assert status["counts"] == before
        for op in OWN[role]:
            getattr(client, op)(**FIELDS[op])


def test_a_worker_cannot_end_work_that_is_lent_to_the_other_kind(server: QueueServer) -> None:
    """Seen failing with the request's name looked at and not whom the work is lent to."""
    with clients(server, Role.ROLLOUT, Role.VERIFIER) as (rollout, verifier):
        (lease,) = rollout.lease_rollout(worker="rollout/0", limit=1, wait_s=0.0)
        with pytest.raises(WireError, match="own work"):
            verifier.fail(lease_id=lease.lease_id, reason="forged")
        assert rollout.fail(lease_id=lease.lease_id, reason="own")


def test_a_key_is_in_no_text() -> None:
    """Seen failing with a plain dataclass's `repr`."""
    access = QueueKeys().access(Role.ROLLOUT, "tcp://127.0.0.1:1")
    assert access.keys is not None
    secret = access.keys.secret.decode()
    assert secret not in repr(access)
    assert secret not in str(access)
