"""What the ledger costs does not depend on how many groups are outstanding: counted in executed lines, not in time."""

import dataclasses
from collections.abc import Callable

from executed_lines import executed_lines
from ledger_builders import FakeClock, make_samples, make_settings
from queue_builders import FakeCursor

from areal_lite.sample_queue.ledger import Ledger
from areal_lite.sample_queue.service import QueueService
from areal_lite.types import Prompt, Score

FEW, MANY = 64, 4096
NUM_WORKERS = 32
SAMPLES = make_samples((0,))
BOUND = 3
"""Times the lines at `FEW` that a call may execute at `MANY`; a loop over all groups executes 64 times as many."""


class ShortCursor(FakeCursor):
    """Prompts of one token."""

    def get(self, prompt_id: str) -> Prompt:
        return Prompt(prompt_id=prompt_id, text="1+1=?", token_ids=(1,), answer="2")


def service_with(num_outstanding: int) -> QueueService:
    """A third lent, a third waiting for the verifier, a third ready; no batch, as a straggler would miss the bound."""
    max_staleness = num_outstanding // 4 + 50
    settings = make_settings(max_staleness=max_staleness, on_stale="wait", groups_per_step=4, samples_per_group=1,
                             total_steps=10**6)  # fmt: skip
    ledger, cursor, clock = Ledger(settings), ShortCursor(), FakeClock()
    ledger.admit(cursor.next().prompt_id)
    ledger.complete_rollout(ledger.lease_rollout("", limit=1)[0].lease_id, SAMPLES)
    ledger = Ledger.restore(settings, ledger.state() | {"version": max_staleness}, clock=clock)
    service = QueueService(ledger, cursor, num_minibatches=1, num_ranks=1, seed=0)
    service.open_admission()
    service.lease_verify(worker="straggler", limit=1, wait_s=0.0)
    for place in range(num_outstanding):
        (lease,) = service.lease_rollout(worker=f"rollout/{place % NUM_WORKERS}", limit=1, wait_s=0.0)
        if place % 3:
            service.complete_rollout(lease_id=lease.lease_id, samples=SAMPLES)
        if place % 3 == 2:
            (lease,) = service.lease_verify(worker="verifier/0", limit=1, wait_s=0.0)
            service.complete_verify(lease_id=lease.lease_id, scores=[Score(reward=1.0)])
    return service


def round_trip(service: QueueService) -> None:
    """One group generated and one scored."""
    (lease,) = service.lease_rollout(worker="rollout/0", limit=1, wait_s=0.0)
    service.heartbeat(worker="rollout/0", lease_ids=[lease.lease_id], progress=1)
    service.complete_rollout(lease_id=lease.lease_id, samples=SAMPLES)
    (lease,) = service.lease_verify(worker="verifier/0", limit=1, wait_s=0.0)
    service.complete_verify(lease_id=lease.lease_id, scores=[Score(reward=1.0)])


def keep(service: QueueService) -> None:
    """A group is verified out of turn: a worker presents it to a queue that took over."""
    service.close_admission()
    (lease,) = service.lease_verify(worker="old", limit=1, wait_s=0.0)
    service.ledger.take_back([lease.lease_id])
    assert service.present(worker="verifier/0", lease=dataclasses.replace(lease, lease_id=f"{lease.lease_id}/kept"))
    service.forget(worker="verifier/0")
    service.open_admission()


def lines_of(call: Callable[[QueueService], object], service: QueueService) -> int:
    with executed_lines("sample_queue") as lines:
        call(service)
    return lines.total()


CALLS: dict[str, Callable[[QueueService], object]] = {
    "status": lambda service: service.status(),
    "a group's way": round_trip,
    "a lease that is kept": keep,
    "expire": lambda service: service.ledger.expire(),
    "refused take": lambda service: service.take(batch_id="b", wait_s=0.0),
    "forget": lambda service: service.forget(worker="nobody"),
}


def test_a_call_costs_the_same_with_many_groups_outstanding() -> None:
    """Seen failing with the leases of a worker looked for among all, and with all groups looked at before a batch is
    refused.
    """
    few, many = (service_with(number) for number in (FEW, MANY))
    ratios = {name: lines_of(call, many) / lines_of(call, few) for name, call in CALLS.items()}
    assert max(ratios.values()) < BOUND, ratios
