"""Restarts of workers: when, how often, and how long a start may take.

Nothing waits for a start: `poll` is called beside the run's other waits, and `take` returns workers that are ready.

    lost ─► restarting ─(1 to 60 s)─► starting ─► joining ─► take, back ─► healthy
       └─► dead, after `most` restarts          └─► lost again, if it fails or takes too long
"""

import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

from areal_lite.actors.calls import Calls, describe, kill

_CLEARED_AFTER_S = 3600.0
"""After so much work since its last start, a worker's restarts are counted from 0 again."""
_LONGEST_PAUSE_S = 60.0
"""Before a restart."""


class State(StrEnum):
    """State of a worker."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """It owes a report."""
    RESTARTING = "restarting"
    JOINING = "joining"
    """It has started, and waits for the next publication."""
    DEAD = "dead"


class Change(NamedTuple):
    """A worker's new state, and why it was lost if it was."""

    worker: str
    state: State
    reason: str = ""


class Restarts:
    """The workers that are lost or restarting, by lane name, and the number of restarts of the others."""

    def __init__(
        self,
        spawn: Callable[[str], Any],
        *,
        most: int,
        start_timeout_s: float,
    ) -> None:
        """Set the limits.

        Args:
            spawn: Starts a worker's process and returns its handle without waiting; None if no node has a place.
            most: Restarts of one worker: after 1, 2, 4 ... 60 s; an hour of work resets the count.
            start_timeout_s: Longest duration of a start.
        """
        self._spawn, self._most, self._start_timeout_s = spawn, most, start_timeout_s
        self._num_starts = Counter[str]()
        self._back_at: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._deadlines: dict[str, float] = {}
        self._starting = Calls({})
        self.handles: dict[str, Any] = {}
        """Handles of workers that are starting or ready."""
        self.states: dict[str, State] = {}
        self.changes: list[Change] = []
        """Changes that were not reported yet; the collector empties it."""
        self.dead: dict[str, str] = {}
        """Workers that are not restarted any more, with the reason."""

    def lost(self, name: str, reason: str) -> None:
        """Schedule a restart, or give the worker up after too many."""
        kill(self.handles.pop(name, None))
        if time.monotonic() - self._back_at.pop(name, time.monotonic()) > _CLEARED_AFTER_S:
            del self._num_starts[name]
        if self._num_starts[name] >= self._most:
            return self.give_up(name, reason)
        self._due[name] = time.monotonic() + min(2 ** self._num_starts[name], _LONGEST_PAUSE_S)
        self._num_starts[name] += 1
        self._change(name, State.RESTARTING, reason)

    def restart_pending(self) -> None:
        """Restart workers that are starting or ready, as the queue that they know is gone; this is not counted."""
        kill(*self.handles.values())
        self._due |= dict.fromkeys(self.handles, time.monotonic())
        self.states |= dict.fromkeys(self.handles, State.RESTARTING)
        self.handles.clear()
        self._starting.pending.clear()

    def add(self, name: str) -> None:
        """Start a new, dead or dismissed worker at the next `poll`."""
        self.dead.pop(name, None)
        del self._num_starts[name]
        self._due[name] = time.monotonic()
        self.states[name] = State.JOINING

    def dismiss(self, name: str) -> None:
        """Kill and forget a worker."""
        kill(self.handles.pop(name, None))
        for known in (self._due, self._starting.pending, self.dead, self.states, self._back_at):
            known.pop(name, None)

    def has_restarted(self, name: str) -> bool:
        """Whether a worker was restarted."""
        return self._num_starts[name] > 0

    def give_up(self, name: str, reason: str) -> None:
        """Mark a worker as dead for good."""
        self.dead[name] = reason
        self._change(name, State.DEAD, reason)

    def poll(self) -> None:
        """Start workers that are due; check which have started, failed, or take too long."""
        now = time.monotonic()
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            if (handle := self._spawn(name)) is None:
                self.give_up(name, "no node has room for it")
                continue
            self.handles[name], self._deadlines[name] = handle, now + self._start_timeout_s
            self._starting.pending[name] = handle.start.remote()
        for name, error in self._starting.answers(0.0):
            if error is None:
                self._change(name, State.JOINING)
            else:
                self.lost(name, f"it did not start: {describe(error)}")
        for name in [name for name in self._starting.pending if self._deadlines[name] < now]:
            del self._starting.pending[name]
            self.lost(name, f"it did not start within run.start_timeout_s={self._start_timeout_s:g} s")

    def awaits(self, kind: str) -> bool:
        """Whether a worker of a kind is restarting."""
        return any(name.startswith(kind) for name in (*self._due, *self.handles))

    def ready(self, kind: str) -> list[str]:
        """Return the workers of a kind that have started."""
        return [name for name in self.handles if name.startswith(kind) and name not in self._starting.pending]

    def take(self, kind: str) -> dict[str, Any]:
        """Remove and return the handles of workers that have started."""
        return {name: self.handles.pop(name) for name in self.ready(kind)}

    def back(self, name: str) -> None:
        """Record that a worker works again."""
        self._back_at[name] = time.monotonic()
        self._change(name, State.HEALTHY)
        del self.states[name]

    def _change(self, name: str, state: State, reason: str = "") -> None:
        self.states[name] = state
        self.changes.append(Change(name, state, reason))
