"""The calls of a verifier that wait for a process. Used by `pool.py`, inside one event loop."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from areal_lite.verify.protocol import Reply

__all__ = ["Line", "Waiting"]


@dataclass(slots=True, eq=False)
class Waiting:
    """A call that somebody waits for."""

    packed: bytes
    reply: "asyncio.Future[Reply]"
    retries: int = field(default=0)
    """Further tries so far after its process was lost."""
    is_alone: bool = field(default=False)
    """It must be the only call in its process: one of several is suspected of having ended another."""
    had_fresh: bool = field(default=False)
    """It got a process that had served nobody else: lack of memory there is its own."""
    away_since: float | None = field(default=None)
    """`time.monotonic` when its service first did not answer."""
    num_unanswered: int = field(default=0)
    """Times when it did not."""


class Line:
    """First come, first served; who must be alone comes first of all."""

    def __init__(self) -> None:
        self._calls: deque[Waiting] = deque()
        self._num_paused = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._calls) + self._num_paused

    def put(self, call: Waiting, *, pause_s: float = 0.0) -> None:
        """Let a call wait its turn, which does not come before `pause_s` seconds have passed."""
        if pause_s:
            self._num_paused += 1
            asyncio.get_running_loop().call_later(pause_s, self._resume, call)
            return
        if call.is_alone:
            self._calls.appendleft(call)
        else:
            self._calls.append(call)
        self.notify()

    def _resume(self, call: Waiting) -> None:
        self._num_paused -= 1
        self.put(call)

    def take(self, size: int, *, is_idle: bool) -> list[Waiting]:
        """Return up to `size` calls that wait; none where the first must be alone and the process is not idle."""
        taken: list[Waiting] = []
        while self._calls and len(taken) < size:
            if self._calls[0].reply.done():  # whoever waited was cancelled meanwhile
                self._calls.popleft()
            elif self._calls[0].is_alone:
                return [self._calls.popleft()] if is_idle and not taken else taken
            else:
                taken.append(self._calls.popleft())
        return taken

    def notify(self) -> None:
        """Wake everybody who waits for a change."""
        self._changed.set()

    async def change(self) -> None:
        """Wait until something has changed since now."""
        self._changed.clear()
        await self._changed.wait()
