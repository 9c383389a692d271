"""Shares of time from the event log: how long each lane spent in which state.

A `LaneClock` is fed the events of one lane in order. A reading changes nothing, so that events that arrive late still
count from their own time; a share is of the difference of two readings.
"""

from collections import defaultdict
from collections.abc import Mapping

from areal_lite.events import Event

__all__ = ["PAUSE_PARTS", "LaneClock", "fraction", "rollout_clock", "trainer_clock"]

PAUSE_PARTS = ("pausing", "transferring", "reloading", "stamping")
"""States of a rollout lane that make up a pause, from the pause call to the resume."""

_ROLLOUT_STATES = {
    "pause": "pausing",
    "drain": "draining",
    "paused": "transferring",
    "update_received": "reloading",
    "update_loaded": "stamping",
    "resumed": "generating",
    "lost": "lost",
}
"""The state after an event; a worker that was lost neither idles nor is busy."""

_TRAINER_STATES = {"wait": "waiting", "train": "training", "trained": "publishing", "published": "other"}


class LaneClock:
    """Adds up the seconds one lane spends in each state, and its running samples over time.

    Example: `running n=2` at 0 s, `pause` at 3 s, `resumed` at 4 s; read at 5 s gives
    `{"generating": 4.0, "pausing": 1.0, "slot_seconds": 10.0}`.
    """

    def __init__(self, states: Mapping[str, str], initial: str) -> None:
        self._states, self._state = states, initial
        self._running = 0
        self._time: float | None = None
        self._totals: dict[str, float] = {}

    def feed(self, event: Event) -> None:
        """Take the next event of the lane, in order of time; kinds it does not know change nothing."""
        time, kind = event["time"], event["kind"]
        if kind != "running" and kind not in self._states:
            return
        self._totals = self.read(time)
        self._time = time if self._time is None else max(time, self._time)
        self._state = self._states.get(kind, self._state)
        if kind in ("running", "lost"):
            self._running = event.get("n", 0)

    def read(self, time: float) -> dict[str, float]:
        """Return seconds per state up to a time, plus `slot_seconds`, the integral of running samples."""
        totals = defaultdict(float, self._totals)
        if self._time is not None and time > self._time:
            idle = self._state == "generating" and self._running == 0
            totals["idle" if idle else self._state] += time - self._time
            totals["slot_seconds"] += (time - self._time) * self._running
        return dict(totals)


def rollout_clock() -> LaneClock:
    """Clock of a rollout lane: generating, idle, draining, and the four parts of a pause."""
    return LaneClock(_ROLLOUT_STATES, "generating")


def trainer_clock() -> LaneClock:
    """Clock of the trainer lane: waiting, training, publishing, other."""
    return LaneClock(_TRAINER_STATES, "other")


def fraction(before: Mapping[str, float], after: Mapping[str, float], *states: str) -> float:
    """Share of the time between two readings of a clock that was spent in some states."""
    spent = {state: total - before.get(state, 0.0) for state, total in after.items() if state != "slot_seconds"}
    elapsed = sum(spent.values())
    return sum(spent.get(state, 0.0) for state in states) / elapsed if elapsed > 0 else 0.0
