"""What one client can cost the queue: memory, other clients' time, lost work."""

import time

import psutil
import pytest
from ledger_builders import FakeClock
from queue_builders import LONG_WAIT_S, SCORES, SOON_S, await_parked, connected, dealer, generate, open_queue, serving

from areal_lite.errors import WireError
from areal_lite.sample_queue import groups, server
from areal_lite.types import Score, StepReward
from areal_lite.wire import encode

WAITING = {"worker": "gone", "limit": 1, "wait_s": LONG_WAIT_S}


def test_a_client_that_reads_no_answers_costs_only_a_bounded_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are served, and what it reads later are answers to its first requests.

    Seen hanging with a server that waits for room.
    """
    monkeypatch.setattr(server, "_SEND_HWM", 8)
    number, large = 400, b"x" * 50_000  # more than the system's buffers hold
    with serving() as access, connected(access) as client, dealer(access, lambda socket: socket.set_hwm(1)) as deaf:
        client.open_admission()
        client.lease_rollout(worker=large.decode(), limit=1, wait_s=0.0)  # makes every status long
        for place in range(number):
            deaf.send_multipart([b"%d" % place, encode({"op": "status", "fields": {}})])
            assert client.status()["version"] == 0
        received = []
        assert deaf.poll(1000 * SOON_S)
        while deaf.poll(500):
            received.append(int(deaf.recv_multipart()[0]))
        assert received[0] == 0
        assert len(received) < number


def test_work_is_not_lost_with_a_client_that_is_gone() -> None:
    """Its parked request comes first. Seen failing with the group lent until its lease expired."""
    with serving() as access, connected(access) as client:
        client.open_admission()
        with dealer(access) as gone:
            gone.send_multipart([b"id", encode({"op": "lease_verify", "fields": WAITING})])
            await_parked(client, 1)
        port, begun = int(access.endpoint.rpartition(":")[2]), time.monotonic()
        while sum(link.laddr.port == port and bool(link.raddr) for link in psutil.Process().net_connections()) > 1:
            assert time.monotonic() - begun < SOON_S
            time.sleep(0.01)  # the server's side has not noticed yet
        generate(client, 1)
        assert client.status()["parked"] == 0
        (lease,) = client.lease_verify(worker="verifier/0", limit=1, wait_s=0.0)
        assert lease.group.group_id == "fake/0/0#0"


def test_reasons_are_cut_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a worker that fails a group and from a verifier alike. Seen failing with the reason as it came."""
    monkeypatch.setattr(groups, "_MAX_REASONS", 2)
    with open_queue(max_staleness=9) as client:
        for reason in ("x" * 10_000, "y", "y", "z"):
            (lease,) = client.lease_rollout(worker="w", limit=1, wait_s=0.0)
            assert client.fail(lease_id=lease.lease_id, reason=reason)
        generate(client, 1)
        (lease,) = client.lease_verify(worker="v", limit=1, wait_s=0.0)
        assert client.complete_verify(lease_id=lease.lease_id, scores=[Score(failure="v" * 10_000)] * 3)
        counts = client.status()["counts"]
        reasons = {state: number for state, number in counts.items() if "(" in state}
        assert reasons == {f"failed({'x' * 200})": 1, "failed(y)": 2, "failed(other)": 2}
        assert counts["failed"] == 5


def test_a_score_that_does_not_fit_its_sample_loses_no_group() -> None:
    """A step reward after the last token. Seen failing with the lease ended first: the group stayed lent forever."""
    clock = FakeClock()
    with open_queue(clock=clock) as client:
        generate(client, 1)
        (lease,) = client.lease_verify(worker="v", limit=1, wait_s=0.0)
        wrong = [Score(reward=1.0, step_rewards=(StepReward(token=99, value=1.0),)), *SCORES[1:]]
        with pytest.raises(WireError, match="step rewards"):
            client.complete_verify(lease_id=lease.lease_id, scores=wrong)
        assert client.heartbeat(worker="v", lease_ids=[lease.lease_id], progress=0) == []
        assert client.complete_verify(lease_id=lease.lease_id, scores=SCORES)
