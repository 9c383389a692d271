"""What verifiers do in all its variety, seen from the run's books: every group ends in a counted state."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from ledger_builders import make_sample, make_settings
from places import FIXTURES

from areal_lite.config.verifier import VerifierConfig
from areal_lite.events import EventBuffer
from areal_lite.sample_queue.ledger import Ledger
from areal_lite.types import Group, Lease, Prompt, Score
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


class LedgerQueue:
    """A real ledger behind the interface of the queue's client."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def lease_verify(self, *, worker: str, limit: int, wait_s: float) -> list[Lease]:
        held = self.ledger.lease_verify(worker, limit=limit)
        await asyncio.sleep(0 if held else 0.01)
        return [
            Lease(
                lease_id=lease.lease_id,
                group=Group(
                    group_id=lease.group.group_id,
                    prompt=Prompt(prompt_id=lease.group.prompt_id, text="p", token_ids=(1,), answer="a"),
                    samples=lease.group.samples,
                ),
                version=self.ledger.version,
            )
            for lease in held
        ]

    async def complete_verify(self, *, lease_id: str, scores: Sequence[Score]) -> bool:
        return self.ledger.complete_verify(lease_id, scores)

    async def heartbeat(self, *, worker: str, lease_ids: Sequence[str], progress: int) -> list[str]:
        return self.ledger.renew(worker, lease_ids)


def generated(texts: Sequence[Sequence[str]]) -> Ledger:
    """A ledger with one generated group for each, with a sample for each text."""
    ledger = Ledger(make_settings(groups_per_step=4))
    for number, group in enumerate(texts):
        ledger.admit(f"p/0/{number}")
        (rollout,) = ledger.lease_rollout("rollout/0", limit=1)
        ledger.complete_rollout(rollout.lease_id, [replace(make_sample(versions=[0]), text=text) for text in group])
    return ledger


def test_groups_that_meet_misbehaving_verifiers_end_in_counted_states() -> None:
    """One of two samples is not enough for a group, so each harm fails one; the group of two good ones is ready.

    Seen failing (by the time-out) with `_run` not setting a failed call's reply.
    """
    ledger = generated([*([harm, "right"] for harm in HARMS), ["right", "right"]])

    async def work() -> Any:
        config = VerifierConfig(function=f"{HOGS}:hog", timeout_s=5.0, memory_mb=160, max_failure_share=1.0)
        verifiers = VerifierSet(config)
        events = EventBuffer("verifier/0")
        worker = VerifierWorker(LedgerQueue(ledger), verifiers, events=events, decode=str, heartbeat_s=2.0)
        async with asyncio.timeout(PATIENCE_S):
            try:
                await verifiers.start()
                running = asyncio.create_task(worker.run())
                while worker.gauges()["groups"] < len(HARMS) + 1 and not running.done():
                    await asyncio.sleep(0.01)
                await worker.stop()
                await running
                return worker.gauges()["verifiers"]["hog_verifiers.py:hog"]["failures"]
            finally:
                await verifiers.close()

    failures = asyncio.run(work())
    assert failures == {"timeout": 1, "memory": 1, "crashed": 1, "reply_too_large": 1, "exception:KeyError": 1}
    counts = ledger.counts()
    assert (counts["admitted"], counts["failed"], counts["ready"], counts["outstanding"]) == (6, 5, 1, 1)
    assert ledger.counts()["leased_verify"] == 0
