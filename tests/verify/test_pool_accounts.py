"""What verifiers do in all its variety, seen from the run's books: every group ends in a counted state."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from ledger_builders import make_sample
from places import FIXTURES
from queue_builders import connected, serving

from areal_lite.config.verifier import VerifierConfig
from areal_lite.events import EventBuffer
from areal_lite.sample_queue.access import QueueAccess
from areal_lite.sample_queue.client import AsyncQueueClient
from areal_lite.verify.verifier_set import VerifierSet
from areal_lite.verify.worker import VerifierWorker

pytestmark = pytest.mark.deadline

HOGS = FIXTURES / "hog_verifiers.py"
PATIENCE_S = 120.0
HARMS = {
    "spin": "timeout",
    "gigabytes": "memory",
    "exit": "crashed",
    "reply": "reply_too_large",
    "no such harm": "exception:KeyError",
}


async def verify_all(access: QueueAccess) -> dict[str, int]:
    """Serve the queue until every group is verified; return the verifier's failures."""
    config = VerifierConfig(function=f"{HOGS}:hog", timeout_s=5.0, memory_mb=160, max_failure_share=1.0)
    verifiers, client = VerifierSet(config), AsyncQueueClient(access, timeout_s=PATIENCE_S)
    worker = VerifierWorker(client, verifiers, events=EventBuffer("verifier/0"), decode=str, heartbeat_s=2.0)
    async with asyncio.timeout(PATIENCE_S):
        try:
            await verifiers.start()
            running = asyncio.create_task(worker.run())
            while worker.gauges()["groups"] < len(HARMS) + 1 and not running.done():
                await asyncio.sleep(0.01)
            await worker.stop()
            await running
            failures: dict[str, int] = worker.gauges()["verifiers"]["hog_verifiers.py:hog"]["failures"]
            return failures
        finally:
            await verifiers.close()
            client.close()


def test_groups_that_meet_misbehaving_verifiers_end_in_counted_states() -> None:
    """One of two samples is not enough for a group, so each harm fails one; the group of two good ones is ready.

    Seen failing (by the time-out) with `_run` not setting a failed call's reply.
    """
    with serving(samples_per_group=2, groups_per_step=4) as access, connected(access) as queue:
        queue.open_admission()
        leases: list[Any] = queue.lease_rollout(worker="rollout/0", limit=len(HARMS) + 1, wait_s=0.0)
        for harm, lease in zip([*HARMS, "right"], leases, strict=True):
            samples = [replace(make_sample(), text=text) for text in (harm, "right")]
            assert queue.complete_rollout(lease_id=lease.lease_id, samples=samples)
        assert asyncio.run(verify_all(access)) == dict.fromkeys(HARMS.values(), 1)
        counts = queue.status()["counts"]
    assert (counts["admitted"], counts["failed"], counts["ready"], counts["outstanding"]) == (6, 5, 1, 1)
    assert counts["leased_verify"] == 0
