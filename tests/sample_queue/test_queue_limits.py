"""What one client can cost the queue: memory, other clients' time, dead workers' leases."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from ledger_builders import FakeClock
from queue_attacks import ATTACKS, attacking, floods, rss_mb, serving_apart
from queue_builders import LONG_WAIT_S, SCORES, SOON_S, await_parked, connected, generate, serving

from areal_lite.errors import LedgerError, WireError
from areal_lite.sample_queue import groups, server, service
from areal_lite.sample_queue.access import Role
from areal_lite.sample_queue.client import QueueClient
from areal_lite.types import Score, StepReward
from areal_lite.wire import decode, encode

MAX_MB = 300
NUM_CALLS = 200
ATTACK_WAIT_S = 300.0


def median_s(client: QueueClient) -> float:
    """How long a worker's heartbeat takes."""
    times = []
    for place in range(NUM_CALLS):
        begun = time.perf_counter()
        client.heartbeat(worker="worker", lease_ids=[], progress=place)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


@pytest.mark.deadline
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_costs_neither_memory_nor_the_others_time(attack: Callable[[Any], None]) -> None:
    """By a client with a key, against a queue with its own limits. Memory in MB and the ratio of medians:

    seen failing with an unlimited `SNDHWM`.
    """
    with serving_apart() as (pid, accesses), connected(accesses[Role.CONTROLLER]) as client:
        before_s = min(median_s(client) for _ in range(3))
        with attacking(attack, accesses[Role.CONTROLLER]):
            ends, peak, medians = time.monotonic() + ATTACK_WAIT_S, 0.0, []
            while len(medians) < 5 or not ATTACKS[attack](client.status()):
                medians.append(median_s(client))
                peak = max(peak, rss_mb(pid))
                time.sleep(0.1)  # the attacker's turn, where processors are few
                assert time.monotonic() < ends, client.status()
        assert peak < MAX_MB
        # Twice is the aim; a machine shared with the attacker and other tests is given more.
        assert min(medians) < 6 * before_s


def test_leases_expire_while_messages_pour_in() -> None:
    """By a client that never lets the socket run empty. Seen failing with a burst that ends with the last message."""
    clock = FakeClock()
    with serving(clock=clock) as access, connected(access) as client:
        client.open_admission()
        assert client.lease_rollout(worker="dead", limit=1, wait_s=0.0)
        clock.now = 1000.0
        with attacking(floods, access):
            ends = time.monotonic() + LONG_WAIT_S
            while client.status()["counts"]["leased_rollout"]:
                assert time.monotonic() < ends


def test_a_wait_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with the request's own `wait_s`."""
    monkeypatch.setattr(server, "_MAX_WAIT_S", 0.2)
    with serving() as access, dealer(access.endpoint) as socket:
        socket.send_multipart([b"id", encode({"op": "lease_verify", "fields": WAITING | {"wait_s": 1e9}})])
        assert socket.poll(1000 * SOON_S)
        assert decode(socket.recv_multipart()[1]) == {"result": []}


def test_what_a_gone_client_waits_for_is_dropped() -> None:
    """It would be lent the next work. Seen failing with connections that end not noticed."""
    with serving() as access, connected(access) as client:
        client.open_admission()
        with dealer(access.endpoint) as gone:
            gone.send_multipart([b"id", encode({"op": "lease_verify", "fields": WAITING})])
            await_parked(client, 1)
        await_parked(client, 0)
        generate(client, 1)
        assert client.status()["counts"]["generated"] == 1


WAITING = {"worker": "gone", "limit": 1, "wait_s": LONG_WAIT_S}


@contextmanager
def dealer(endpoint: str) -> Iterator["zmq.Socket[bytes]"]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


def test_numbers_and_names_have_bounds() -> None:
    """`progress=2**64-1` made `status` fail, and with it the run. Seen failing with plain `int` and `str`."""
    with serving() as access, connected(access) as client:
        for progress in (2**64 - 1, 2**60, -1):
            with pytest.raises(WireError, match="progress"):
                client.heartbeat(worker="w", lease_ids=[], progress=progress)
        with pytest.raises(WireError, match="limit"):
            client.lease_verify(worker="w", limit=-1, wait_s=0.0)
        with pytest.raises(WireError, match="worker"):
            client.forget(worker="w" * 201)
        with pytest.raises(WireError, match="batch_id"):
            client.take(batch_id="b" * 201, wait_s=0.0)
        assert client.status()["workers"] == {}


def test_progress_that_goes_up_and_down_never_leaves_its_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that restarts counts from 0 again, and its reports add up. Seen failing with the plain sum."""
    monkeypatch.setattr(service, "_MAX_PROGRESS", 2**54)
    with serving() as access, connected(access) as client:
        for progress in (2**53, 0) * 3:
            client.heartbeat(worker="w", lease_ids=[], progress=progress)
        assert client.status()["progress"] < 2**54 + 1000


def test_workers_by_name_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with every name taken."""
    monkeypatch.setattr(service, "_MAX_WORKERS", 2)
    with serving() as access, connected(access) as client:
        for worker in ("a", "b", "a"):
            client.heartbeat(worker=worker, lease_ids=[], progress=0)
        with pytest.raises(LedgerError, match="knows 2 workers"):
            client.heartbeat(worker="c", lease_ids=[], progress=0)


def test_reasons_are_cut_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a worker that fails a group and from a verifier alike. Seen failing with the reason as it came."""
    monkeypatch.setattr(groups, "_MAX_REASONS", 2)
    with serving(max_staleness=9) as access, connected(access) as client:
        client.open_admission()
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
    """A step reward behind the last token. Seen failing with the lease ended first: the group stayed lent for ever."""
    clock = FakeClock()
    with serving(clock=clock) as access, connected(access) as client:
        client.open_admission()
        generate(client, 1)
        (lease,) = client.lease_verify(worker="v", limit=1, wait_s=0.0)
        wrong = [Score(reward=1.0, step_rewards=(StepReward(token=99, value=1.0),)), *SCORES[1:]]
        with pytest.raises(WireError, match="step rewards"):
            client.complete_verify(lease_id=lease.lease_id, scores=wrong)
        assert client.heartbeat(worker="v", lease_ids=[lease.lease_id], progress=0) == []
        assert client.complete_verify(lease_id=lease.lease_id, scores=SCORES)
