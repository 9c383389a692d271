"""The calls of a verifier that wait for a process, inside one event loop."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from areal_lite.verify.process import VerifierProcess
from areal_lite.verify.protocol import Reply


@dataclass(slots=True, eq=False)
class Call:
    """A call that somebody waits for."""

    packed: bytes
    is_alone: bool = False
    """It must be the only call in its process: one of several is suspected of having ended another."""
    needs_fresh: bool = False
    """Next, it must be the first of its process: lack of memory there is its own."""
    reply: "asyncio.Future[Reply]" = field(init=False)
    """Of the try it waits for; cancelled where nobody waits any more."""


class Calls:
    """First come, first served; but those with wishes go before all others."""

    def __init__(self) -> None:
        self._waiting: deque[Call] = deque()
        self._needing_fresh: deque[Call] = deque()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._needing_fresh)

    async def reply_to(self, call: Call) -> Reply:
        """Have a call wait its turn; returns what came of this try."""
        call.reply = asyncio.get_running_loop().create_future()
        if call.needs_fresh:
            self._needing_fresh.append(call)
        elif call.is_alone:
            self._waiting.appendleft(call)
        else:
            self._waiting.append(call)
        self.notify()
        return await call.reply

    def take(self, process: VerifierProcess, *, limit: int) -> list[Call]:
        """Return what a process, of at most `limit` jobs, may do next: a call or a batch; nothing where that waits."""
        for calls in (self._needing_fresh, self._waiting):
            for call in [call for call in calls if call.reply.done()]:  # whoever waited was cancelled meanwhile
                calls.remove(call)
        if self._needing_fresh and not process.num_served:
            self._needing_fresh[0].needs_fresh = False
            return [self._needing_fresh.popleft()]
        taken: list[Call] = []
        while self._waiting and process.num_jobs < limit and len(taken) < (process.batch_size or 1):
            if self._waiting[0].is_alone:
                return [self._waiting.popleft()] if not (process.num_jobs or taken) else taken
            taken.append(self._waiting.popleft())
        return taken

    def notify(self) -> None:
        """Wake everybody who waits for a change."""
        self._changed.set()

    async def change(self) -> None:
        """Wait until something has changed since now."""
        self._changed.clear()
        await self._changed.wait()
