"""The event log: what happened, when, in which lane.

Each actor owns an `EventBuffer`; the controller drains them and appends the rows to `events.jsonl`, the
one log that every picture and share of time is computed from (`metrics.py`). A row is a plain mapping
`{"time": seconds since the epoch, "lane": "rollout/0", "kind": "pause", ...ids}`.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

Event = dict[str, Any]


class EventBuffer:
    """Collects the events of one lane until they are drained; safe to use from several threads."""

    def __init__(self, lane: str, clock: Callable[[], float] = time.time) -> None:
        self.lane = lane
        self._clock = clock
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def emit(self, kind: str, **ids: Any) -> None:
        """Append one event stamped with the present time."""
        event = {"time": self._clock(), "lane": self.lane, "kind": kind, **ids}
        with self._lock:
            self._events.append(event)

    def drain(self) -> list[Event]:
        """Return the collected events, oldest first, and forget them."""
        with self._lock:
            events, self._events = self._events, []
        return events
