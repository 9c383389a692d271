"""The event log: what happened, when, in which lane.

Each actor owns an `EventBuffer`; the controller drains them and appends the rows to `events.jsonl`, the
one log that every picture and share of time is computed from (`metrics.py`). A row is a plain mapping
`{"time": seconds since the epoch, "lane": "rollout/0", "kind": "pause", ...ids}`.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

Event = dict[str, Any]


class EventBuffer:
    """Collects the events of one lane until they are drained; several threads may emit."""

    def __init__(self, lane: str, clock: Callable[[], float] = time.time) -> None:
        self.lane, self._clock = lane, clock
        self._events: deque[Event] = deque()  # to append to one, or to pop from it, is safe

    def emit(self, kind: str, **ids: Any) -> None:
        """Append one event stamped with the present time."""
        self._events.append({"time": self._clock(), "lane": self.lane, "kind": kind, **ids})

    def drain(self) -> list[Event]:
        """Return the collected events, oldest first, and forget them; one thread at a time."""
        return [self._events.popleft() for _ in range(len(self._events))]
