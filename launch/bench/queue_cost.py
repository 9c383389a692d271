"""What the sample queue's calls cost while few groups are outstanding and while many are: a part of `bench queue`."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from areal_lite.data.cursor import PromptCursor
from areal_lite.launch.bench.harness import in_turns, ratios, target
from areal_lite.sample_queue.ledger import Ledger, LedgerSettings
from areal_lite.sample_queue.service import QueueService, Traffic
from areal_lite.types import Prompt, Sample, Score

NUM_WORKERS = 512
FEW, MANY = 64, NUM_WORKERS * 64
_CALLS_A_TURN = 50
_SPARE = 10_000
"""Steps' worth of groups that measuring may add."""


def cost_targets(samples: list[Sample], *, repeats: int, few: int = FEW, many: int = MANY) -> list[dict[str, Any]]:
    """Return how many times the cost at `few` groups outstanding each call has at `many`, with 512 workers in both."""
    services = {number: service_with(number, samples) for number in (few, many)}
    cases = [(name, number) for name in CALLS for number in services]

    def measure(case: tuple[str, int]) -> float:
        times, call = [], partial(CALLS[case[0]], services[case[1]], samples)
        for _ in range(_CALLS_A_TURN):
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
        return median(times)

    measured = in_turns(cases, repeats=repeats, measure=measure)
    over = f"queue: {{}} with {many} groups outstanding over {few}, {NUM_WORKERS} workers"
    return [target(over.format(name), ratios(measured[name, many], measured[name, few]), at_most=3.0) for name in CALLS]


def service_with(num_outstanding: int, samples: list[Sample]) -> QueueService:
    """Return a queue with so many groups lent, waiting for a verifier and ready, a third each, and one straggler.

    No batch may be taken without the straggler, which is due: `take` has to look at those that would be left behind.
    """
    max_staleness = num_outstanding // 4 + _SPARE
    settings = LedgerSettings(max_staleness=max_staleness, on_stale="wait", total_steps=10**9, groups_per_step=4,
                              samples_per_group=len(samples), lease_timeout_s=1e9)  # fmt: skip
    ledger = Ledger(settings)
    ledger.admit("straggler")
    (lent,) = ledger.lease_rollout("straggler", limit=1)
    ledger.complete_rollout(lent.lease_id, samples)
    ledger = Ledger.restore(settings, ledger.state() | {"version": max_staleness})
    ledger.lease_verify("straggler", limit=1)
    prompt = Prompt(prompt_id="bench", text="1+1=?", token_ids=(1,), answer="2")
    cursor = PromptCursor([prompt] * 1000, source="bench", seed=0)
    service = QueueService(ledger, cursor, num_minibatches=1, num_ranks=1, seed=0, traffic=Traffic())
    service.open_admission()
    for place in range(NUM_WORKERS):
        service.heartbeat(worker=_worker(place), lease_ids=[], progress=0)
    for place in range(num_outstanding):
        (lease,) = service.lease_rollout(worker=_worker(place), limit=1, wait_s=0.0)
        if place % 3:
            service.complete_rollout(lease_id=lease.lease_id, samples=samples)
        if place % 3 == 2:
            _verify(service)
    return service


def _worker(place: int) -> str:
    return f"rollout/{place % NUM_WORKERS}"


def _verify(service: QueueService) -> None:
    (lease,) = service.lease_verify(worker=_worker(0), limit=1, wait_s=0.0)
    service.complete_verify(lease_id=lease.lease_id, scores=[Score(reward=1.0)] * len(lease.group.samples))


def _round_trip(service: QueueService, samples: list[Sample]) -> None:
    (lease,) = service.lease_rollout(worker=_worker(0), limit=1, wait_s=0.0)
    service.heartbeat(worker=_worker(0), lease_ids=[lease.lease_id], progress=1)
    service.complete_rollout(lease_id=lease.lease_id, samples=samples)
    _verify(service)


CALLS: dict[str, Callable[[QueueService, list[Sample]], object]] = {
    "a group's five calls": _round_trip,
    "a refused take": lambda service, _: service.take(batch_id="step", wait_s=0.0),
    "status": lambda service, _: service.status(),
    "a look at the leases": lambda service, _: service.expire(),
}
"""What is measured, by name."""
