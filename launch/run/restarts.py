"""Workers that come back: who is started again when, how often, and until when it must be ready.

Nobody waits for a start: `poll` is called beside the other waits, and who is ready is taken when there is use for it.
"""

import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

from areal_lite.actors.calls import Calls, describe, kill

_CLEARED_AFTER_S = 3600.0
"""A worker that has worked so long since its last start has died of something else."""


class State(StrEnum):
    """What is known of a worker."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """It has not answered when it was asked last."""
    RESTARTING = "restarting"
    JOINING = "joining"
    """It is started, and waits for the next publication."""
    DEAD = "dead"


class Change(NamedTuple):
    """A worker's new state, and why it was lost, where it was."""

    worker: str
    state: State
    reason: str = ""


class Restarts:
    """The workers that are lost or on their way back, by lane name; of the others nothing is kept but a count."""

    def __init__(
        self,
        spawn: Callable[[str], Any],
        *,
        most: int,
        start_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take note of the limits.

        Args:
            spawn: Starts a worker's process and returns its handle, at once; None where it has no place any more.
            most: Times that one worker is started again: after 1 s, then after 2, 4, 8 ...; an hour of work clears it.
            start_timeout_s: Seconds that a start may take.
        """
        self._spawn, self._most, self._start_timeout_s, self._clock = spawn, most, start_timeout_s, clock
        self._num_starts = Counter[str]()
        self._back_at: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._deadlines: dict[str, float] = {}
        self._starting = Calls({})
        self.handles: dict[str, Any] = {}
        """Of those that start, or are ready."""
        self.states: dict[str, State] = {}
        self.changes: list[Change] = []
        """For whoever tells of them, who empties it."""
        self.dead: dict[str, str] = {}
        """Those that stay lost, with the reason."""

    def lost(self, name: str, reason: str) -> None:
        """Have a worker started again after a while, if it was not too often."""
        kill(self.handles.pop(name, None))
        if self._clock() - self._back_at.pop(name, self._clock()) > _CLEARED_AFTER_S:
            del self._num_starts[name]
        if self._num_starts[name] >= self._most:
            return self.give_up(name, reason)
        self._due[name] = self._clock() + 2 ** self._num_starts[name]
        self._num_starts[name] += 1
        self._change(name, State.RESTARTING, reason)

    def restart_pending(self) -> None:
        """Start those that are on their way once more, for what is not their fault, and is not counted."""
        kill(*self.handles.values())
        self._due |= dict.fromkeys(self.handles, self._clock())
        self.states |= dict.fromkeys(self.handles, State.RESTARTING)
        self.handles.clear()
        self._starting.pending.clear()

    def add(self, name: str) -> None:
        """Start a worker that is new, or was dead or dismissed, at once."""
        self.dead.pop(name, None)
        del self._num_starts[name]
        self._due[name] = self._clock()
        self.states[name] = State.JOINING

    def dismiss(self, name: str) -> None:
        """Forget a worker for good."""
        kill(self.handles.pop(name, None))
        for known in (self._due, self._starting.pending, self.dead, self.states, self._back_at):
            known.pop(name, None)

    def has_restarted(self, name: str) -> bool:
        """Whether a worker is there for the second time."""
        return self._num_starts[name] > 0

    def give_up(self, name: str, reason: str) -> None:
        """Leave a worker dead."""
        self.dead[name] = reason
        self._change(name, State.DEAD, reason)

    def poll(self) -> None:
        """Start who is due; see who is ready, has failed, or is late."""
        now = self._clock()
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            if (handle := self._spawn(name)) is None:
                self.give_up(name, "no node has a place for it")
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
            self.lost(name, f"it must start within run.start_timeout_s={self._start_timeout_s:g} s, it did not")

    def awaits(self, kind: str) -> bool:
        """Whether a worker of a kind is on its way back."""
        return any(name.startswith(kind) for name in (*self._due, *self.handles))

    def ready(self, kind: str) -> list[str]:
        """The workers of a kind that could join."""
        return [name for name in self.handles if name.startswith(kind) and name not in self._starting.pending]

    def take(self, kind: str) -> dict[str, Any]:
        """Return the handles of those workers, for good."""
        return {name: self.handles.pop(name) for name in self.ready(kind)}

    def back(self, name: str) -> None:
        """Note that a worker that was taken works again."""
        self._back_at[name] = self._clock()
        self._change(name, State.HEALTHY)
        del self.states[name]

    def _change(self, name: str, state: State, reason: str = "") -> None:
        self.states[name] = state
        self.changes.append(Change(name, state, reason))
