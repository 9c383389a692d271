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
    """First come, first served; but whoever runs alone goes before all others, and first who needs a fresh process."""

    def __init__(self) -> None:
        self._waiting: deque[Call] = deque()
        self._changed = asyncio.Event()

    async def reply_to(self, call: Call) -> Reply:
        """Have a call wait its turn; returns what came of this try."""
        call.reply = asyncio.get_running_loop().create_future()
        if call.is_alone:
            self._waiting.appendleft(call)
        else:
            self._waiting.append(call)
        self.notify()
        return await call.reply

    def take(self, process: VerifierProcess) -> list[Call]:
        """Return what a process may do next: a call or a batch; nothing where that waits."""
        num_most = (process.batch_size or 1) if process.num_jobs < process.max_jobs else 0
        taken: list[Call] = []
        for call in sorted(self._waiting, key=lambda call: not call.needs_fresh):
            if call.reply.done():  # whoever waited was cancelled meanwhile
                self._waiting.remove(call)
            elif not (call.needs_fresh and process.num_served):
                if len(taken) == num_most or (call.is_alone and (taken or process.num_jobs)):
                    break
                self._waiting.remove(call)
                taken.append(call)
                call.needs_fresh = False
                if call.is_alone:
                    break
        return taken

    def num_needing_fresh(self) -> int:
        """Return how many wait for a process that has served nobody."""
        return sum(call.needs_fresh and not call.reply.done() for call in self._waiting)

    def notify(self) -> None:
        """Wake everybody who waits for a change."""
        self._changed.set()

    async def change(self) -> None:
        """Wait until something has changed since now."""
        self._changed.clear()
        await self._changed.wait()
