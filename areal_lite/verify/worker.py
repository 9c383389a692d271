"""The verifier worker: leases generated groups, has them scored, reports the scores.

Pulls only what it has room for; several groups are scored at the same time, so that the pool's processes stay busy.
"""

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from areal_lite.errors import QueueTimeout
from areal_lite.events import EventBuffer
from areal_lite.types import Group, Lease, Sample, Score, StepReward
from areal_lite.verify.protocol import Reply
from areal_lite.verify.step_tokens import Decode, token_of
from areal_lite.verify.verifier_set import VerifierSet

if TYPE_CHECKING:
    from areal_lite.sample_queue.client import AsyncQueueClient

__all__ = ["VerifierWorker", "score_of"]

logger = logging.getLogger(__name__)

_LEASE_WAIT_S = 5.0


class VerifierWorker:
    """Moves groups from `generated` to `ready`."""

    def __init__(
        self,
        client: "AsyncQueueClient",
        pool: VerifierSet,
        *,
        name: str,
        events: EventBuffer,
        lease_limit: int,
        decode: Decode,
        heartbeat_s: float = 2.0,
    ) -> None:
        """Prepare.

        Args:
            client: Connected to the sample queue; the caller closes it.
            pool: Started; the caller closes it.
            name: Name at the queue, unique among workers.
            events: Gets one `verify` event per scored group.
            lease_limit: Groups held at the same time.
            decode: Gives a sample's text back from its tokens; called where a verifier rewards steps, in a thread.
            heartbeat_s: Seconds between heartbeats; well below the queue's lease time-out.
        """
        self._client, self._pool, self._name, self._events = client, pool, name, events
        self._lease_limit, self._decode, self._heartbeat_s = lease_limit, decode, heartbeat_s
        self._held: dict[str, asyncio.Task[None]] = {}
        self._num_groups = 0
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()

    async def run(self) -> None:
        """Work until `stop`.

        Consumes leases, produces scores. Waits for leases (`wait_s`), for room (the pool's deadlines) and for the
        next heartbeat (`heartbeat_s`); unblocked by `stop`.

        Raises:
            VerifierError: The pool is broken.
        """
        self._ended.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [tasks.create_task(self._beat()), tasks.create_task(self._lease(tasks))]
                await self._stopping.wait()
                for task in [*loops, *self._held.values()]:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Let go of all leases and end `run`; idempotent. The queue lends the groups anew once heartbeats stop."""
        self._stopping.set()
        await self._ended.wait()

    def gauges(self) -> dict[str, Any]:
        """Return the pool's gauges, the groups scored and the groups held."""
        return {**self._pool.gauges(), "groups": self._num_groups, "held": len(self._held)}

    async def _lease(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            if len(self._held) == self._lease_limit:
                await asyncio.wait(self._held.values(), return_when=asyncio.FIRST_COMPLETED)
                continue
            limit = self._lease_limit - len(self._held)
            try:
                leases = await self._client.lease_verify(worker=self._name, limit=limit, wait_s=_LEASE_WAIT_S)
            except QueueTimeout:
                logger.warning("the queue did not answer a lease request; asking again")
                continue
            for lease in leases:
                self._held[lease.lease_id] = task = tasks.create_task(self._score(lease))
                task.add_done_callback(lambda _, lease_id=lease.lease_id: self._held.pop(lease_id))  # type: ignore[misc]

    async def _score(self, lease: Lease) -> None:
        start = time.time()
        group = lease.group
        scores = await self._scores(group)
        try:
            await self._client.complete_verify(lease_id=lease.lease_id, scores=scores)
        except QueueTimeout:
            logger.warning("the queue did not take lease %s; it will be scored again", lease.lease_id)
            return
        self._num_groups += 1
        failures = sum(score.failure is not None for score in scores)
        self._events.emit("verify", group_id=group.group_id, start=start, end=time.time(), failures=failures)

    async def _scores(self, group: Group) -> list[Score]:
        replies = await self._pool.score(
            group.prompt,
            [sample.text for sample in group.samples],
            messages=[sample.messages for sample in group.samples],
        )
        if not any(reply.step_rewards for reply in replies):
            return [score_of(*pair, self._decode) for pair in zip(replies, group.samples, strict=True)]
        # The first one loads a tokenizer: heartbeats and deadlines must not wait for that.
        return await asyncio.to_thread(
            lambda: [score_of(*pair, self._decode) for pair in zip(replies, group.samples, strict=True)]
        )

    async def _beat(self) -> None:
        while True:
            try:
                dead = await self._client.heartbeat(
                    worker=self._name, lease_ids=list(self._held), progress=int(self._pool.gauges()["calls"])
                )
            except QueueTimeout:
                logger.warning("the queue did not answer a heartbeat")
                dead = []
            for lease_id in dead:
                if task := self._held.get(lease_id):
                    task.cancel()
            await asyncio.sleep(self._heartbeat_s)


def score_of(reply: Reply, sample: Sample, decode: Decode) -> Score:
    """Turn a verifier's reply about `sample.text` into a score: step rewards move from characters to tokens.

    `decode` is called only where there are step rewards.
    """
    if reply.failure is not None:
        return Score(failure=reply.failure)
    token_ids = sample.token_ids.tolist() if reply.step_rewards else []
    return Score(
        reward=reply.reward,
        step_rewards=tuple(
            StepReward(token=token_of(end, token_ids, decode), value=value) for end, value in reply.step_rewards
        ),
        parts=dict(reply.parts),
        metrics=dict(reply.metrics),
        feedback=reply.feedback,
    )
