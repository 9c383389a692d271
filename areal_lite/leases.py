"""A worker's loop at the sample queue: it leases work while it has room, and keeps its leases alive by heartbeats.

Three kinds of tasks run on one event loop. One leases: it waits for room, then for the queue's answer. One sends
heartbeats. The others serve one lease each, and hand in its result. While the queue is being replaced, all three wait
for `reconnect`; `stop` cancels them.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from areal_lite.errors import QueueClosed, QueueTimeout, WireError
from areal_lite.types import Lease

if TYPE_CHECKING:
    from areal_lite.sample_queue.access import QueueAccess
    from areal_lite.sample_queue.client import AsyncQueueClient

logger = logging.getLogger(__name__)


class LeaseWorker(ABC):
    """Serves every lease in a task of its own, as many at a time as it has room for."""

    def __init__(self, client: "AsyncQueueClient", *, name: str, heartbeat_s: float) -> None:
        """Lease nothing before `run`.

        Args:
            client: Connected to the sample queue; the caller closes it.
            name: Name at the queue, unique among workers.
            heartbeat_s: Seconds between heartbeats; well below the queue's lease time-out.
        """
        self._client, self._name, self._heartbeat_s = client, name, heartbeat_s
        self._held: dict[str, tuple[Lease, asyncio.Task[None]]] = {}
        self._room_changed, self._connected = asyncio.Event(), asyncio.Event()
        self._connected.set()
        self._stopping, self._ended = asyncio.Event(), asyncio.Event()
        self._ended.set()

    @abstractmethod
    def _room(self) -> int:
        """Return how many more leases may be held now; sets `_room_changed` if that changes without a lease's end."""

    @abstractmethod
    async def _ask(self, limit: int) -> list[Lease]:
        """Ask the queue for at most `limit` leases."""

    @abstractmethod
    async def _serve(self, lease: Lease) -> None:
        """Do the work of a lease; an exception ends the worker."""

    @abstractmethod
    def _progress(self) -> int:
        """Return a number that grows while the worker is not stuck."""

    async def run(self) -> None:
        """Work until `stop`, or until the queue has closed; an exception ends it, and its leases expire."""
        self._ended.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [tasks.create_task(self._lease(tasks)), tasks.create_task(self._beat())]
                await self._stopping.wait()
                for task in [*loops, *(task for _, task in self._held.values())]:
                    task.cancel()
        except BaseExceptionGroup as group:
            if not isinstance(group.exceptions[0], QueueClosed):
                raise group.exceptions[0] from None
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Drop all leases and end `run`; idempotent. The queue lends the groups again once the leases expire."""
        self._stopping.set()
        await self._ended.wait()

    async def reconnect(self, access: "QueueAccess") -> tuple[int, int]:
        """Move to the queue that replaced a dead one; returns how many leases it keeps, and how many not.

        Results of the time between are handed in there.
        """
        self._connected.clear()
        self._client.move_to(access)
        held = list(self._held.values())
        kept = [await self._client.present(worker=self._name, lease=lease) for lease, _ in held]
        for (_, task), is_kept in zip(held, kept, strict=True):
            if not is_kept:
                task.cancel()
        self._connected.set()
        return sum(kept), len(kept) - sum(kept)

    async def _deliver(self, lease: Lease, send: Callable[[], Awaitable[bool]]) -> bool:
        """Hand in a result, repeatedly until the queue, or the one that replaced it, has acknowledged it.

        A result that the queue refuses fails its lease alone.

        Raises:
            WireError: The queue refuses the failure, too.
        """
        is_refused = False
        while True:
            await self._connected.wait()
            try:
                return await send()
            except QueueTimeout as error:
                logger.warning("handing in a result again: %s", error)
            except WireError as error:
                if is_refused:
                    raise
                is_refused = True
                logger.error("the queue refused lease %s: %s", lease.lease_id, error)
                send = partial(self._client.fail, lease_id=lease.lease_id, reason=f"refused:{type(error).__name__}")

    async def _lease(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._connected.wait()
            self._room_changed.clear()
            if (limit := self._room()) <= 0:
                await self._room_changed.wait()
                continue
            try:
                leases = await self._ask(limit)
            except QueueTimeout:
                logger.warning("the queue did not answer a lease request; asking again")
                continue
            for lease in leases:
                task = tasks.create_task(self._serve(lease))
                self._held[lease.lease_id] = lease, task
                task.add_done_callback(lambda _, lease_id=lease.lease_id: self._release(lease_id))  # type: ignore[misc]

    def _release(self, lease_id: str) -> None:
        self._held.pop(lease_id)
        self._room_changed.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self._connected.wait()
            try:
                dead = await self._client.heartbeat(
                    worker=self._name, lease_ids=list(self._held), progress=self._progress()
                )
            except QueueTimeout:
                logger.warning("the queue did not answer a heartbeat")
                dead = []
            for lease_id in dead:
                if held := self._held.get(lease_id):
                    held[1].cancel()
