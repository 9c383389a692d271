"""The event log: what happened, when, in which lane.

Each actor owns an `EventBuffer`; the controller drains them and appends the rows to `events.jsonl`, the
one log that every picture and share of time is computed from (`metrics.py`). A row is a plain mapping
`{"time": seconds since the epoch, "lane": "rollout/0", "kind": "pause", ...ids}`, whose time is that of `now`.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_CLOCK = "AREAL_LITE_CLOCK"
"""Variable with the boot of a machine, and the offset of a run's clock there."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def _here() -> str:
    return _BOOT.read_text().strip() if _BOOT.is_file() else ""


def _offset() -> float:
    boot, _, offset = os.environ.get(_CLOCK, "").partition(" ")
    return float(offset) if boot and boot == _here() else time.time() - time.monotonic()


_OFFSET = _offset()


def now() -> float:
    """Return the seconds since the epoch by a clock that nobody sets: idle shares must survive one that is set."""
    return _OFFSET + time.monotonic()


def clock_variables() -> dict[str, str]:
    """Return the variable that gives this process's clock to others on this machine, restarted workers included."""
    return {_CLOCK: f"{_here()} {_OFFSET}"}


class EventBuffer:
    """Collects the events of one lane until they are drained; several threads may emit."""

    def __init__(self, lane: str, clock: Callable[[], float] = now) -> None:
        self.lane, self._clock = lane, clock
        self._events: deque[Event] = deque()  # to append to one, or to pop from it, is safe

    def emit(self, kind: str, **ids: Any) -> None:
        """Append one event stamped with the present time."""
        self._events.append({"time": self._clock(), "lane": self.lane, "kind": kind, **ids})

    def drain(self) -> list[Event]:
        """Return the collected events, oldest first, and forget them; one thread at a time."""
        return [self._events.popleft() for _ in range(len(self._events))]
