"""The event log by lane: what each did from when to when, and how much of its time it spent in which state.

A reading of a clock changes nothing, so that events that arrive late still count from their own time; a share is of the
difference of two readings.
"""

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from areal_lite.events import Event

GAP = "gap"
"""The run did not live from this event on, until each lane's next one: such time is part of no share."""

PAUSE_PARTS = ("pausing", "transferring", "reloading", "stamping")
"""States of a rollout lane that make up a pause, from the pause call to the resume."""

_STATES = {
    "pause": "pausing", "drain": "draining", "paused": "transferring", "update_received": "reloading",
    "update_loaded": "stamping", "resumed": "generating", "lost": "lost",
    "wait": "waiting", "train": "training", "trained": "publishing", "published": "other", GAP: GAP,
}  # fmt: skip
"""The state after an event, of a worker or of the trainer; a worker that was lost neither idles nor is busy."""

_SLICES = {
    "pause": ("pause", "resumed"),
    "drain": ("drain", "resumed"),
    "wait": ("wait", "train"),
    "train": ("train", "trained"),
    "trained": ("publish", "published"),
}
"""Begin event -> (kind of the slice, end event)."""


class Slice(NamedTuple):
    """What a whole lane did for a while."""

    kind: str
    """pause, drain, wait, train or publish."""
    start: float
    """Seconds since the epoch."""
    end: float
    label: str
    """Its batch or version."""


def lane_events(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Return the events of each lane in order of time, `rollout/2` before `rollout/10`."""
    lanes: dict[str, list[Event]] = {}
    for event in events:
        lanes.setdefault(_lane(event), []).append(event)
    return {lane: sorted(lanes[lane], key=lambda event: event["time"]) for lane in sorted(lanes, key=_place)}


def first_moment(events: Iterable[Event]) -> float:
    """Return when the first thing began that the log tells of: an event may be about what it ended; 0 for no events."""
    return min((min(event["time"], event.get("start", event["time"])) for event in events), default=0.0)


def lived(events: Sequence[Event]) -> Callable[[float], float]:
    """Return what gives the seconds from the first moment to another, without the time between two lives."""
    begin, times = first_moment(events), sorted(event["time"] for event in events)
    ends = [event["time"] for event in events if event["kind"] == GAP]
    gaps = [(end, times[min(bisect.bisect(times, end), len(times) - 1)]) for end in ends]
    return lambda moment: moment - begin - sum(min(max(moment, end), again) - end for end, again in gaps)


def slices(events: Iterable[Event]) -> Iterator[Slice]:
    """Yield a slice per begin event of a lane that is followed by its end; one left open by a kill is left out.

    Args:
        events: Of one lane, in order of time.
    """
    begun: Event | None = None
    for event in events:
        kind, end = _SLICES[begun["kind"]] if begun else ("", "")
        if begun and event["kind"] == end:
            label = event.get("batch") or event.get("version") or begun.get("batch") or ""
            yield Slice(kind, begun["time"], event["time"], str(label))
            begun = None
        if event["kind"] in _SLICES:
            begun = event


def sample_lengths(events: Iterable[Event]) -> Iterator[int]:
    """Yield the tokens of each completion."""
    for event in events:
        for sample in event["samples"] if event["kind"] == "group" else ():
            yield sample["tokens"]


class _LaneClock:
    """Adds up the seconds one lane spends in each state, and its running samples over time.

    Example: `running n=2` at 0 s, `pause` at 3 s, `resumed` at 4 s; read at 5 s gives
    `{"generating": 4.0, "pausing": 1.0, "slot_seconds": 10.0}`.
    """

    def __init__(self, state: str) -> None:
        self._state, self._running = state, 0
        self._time: float | None = None
        self._totals: dict[str, float] = {}

    def feed(self, event: Event) -> None:
        """Take the next event of the lane, in order of time; kinds it does not know change nothing."""
        time, kind = event["time"], event["kind"]
        if kind != "running" and kind not in _STATES:
            return
        self._totals = self.read(time)
        self._time = time if self._time is None else max(time, self._time)
        self._state = _STATES.get(kind, "generating" if self._state == GAP else self._state)
        if kind in ("running", "lost", GAP):
            self._running = event.get("n", 0)

    def read(self, time: float) -> dict[str, float]:
        """Return seconds per state up to a time, plus `slot_seconds`, the integral of running samples."""
        totals = defaultdict(float, self._totals)
        if self._time is not None and time > self._time:
            idle = self._state == "generating" and self._running == 0
            totals["idle" if idle else self._state] += time - self._time
            totals["slot_seconds"] += (time - self._time) * self._running
        return dict(totals)


class LaneClocks:
    """A clock for the trainer and one for each rollout lane that is heard of."""

    def __init__(self) -> None:
        self._clocks = {"trainer": _LaneClock("other")}

    def feed(self, events: Iterable[Event]) -> None:
        """Take events of any lanes, each lane's in order of time."""
        for event in events:
            lane = _lane(event)
            if lane.startswith("rollout/") and event["kind"] != "lost":
                self._clocks.setdefault(lane, _LaneClock("generating"))
            for one in self._clocks if event["kind"] == GAP else self._clocks.keys() & {lane}:
                self._clocks[one].feed(event)

    def read(self, time: float) -> dict[str, dict[str, float]]:
        """Return a reading of every clock, by lane."""
        return {lane: clock.read(time) for lane, clock in self._clocks.items()}


@dataclass(frozen=True, slots=True)
class Stretch:
    """What the lanes did between two readings of all clocks."""

    before: Mapping[str, Mapping[str, float]]
    after: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, events: Sequence[Event], *, start: float, end: float) -> Self:
        """Return what an event log says of the time between two moments."""
        clocks, in_order = LaneClocks(), sorted(events, key=lambda event: event["time"])
        clocks.feed(event for event in in_order if event["time"] <= start)
        before = clocks.read(start)
        clocks.feed(event for event in in_order if start < event["time"] <= end)
        return cls(before, clocks.read(end))

    @property
    def workers(self) -> list[str]:
        """The rollout lanes, in order."""
        return sorted(self.after.keys() - {"trainer"}, key=_place)

    def spent(self, *states: str) -> float:
        """Seconds in some states, added up over the workers; `slot_seconds` is the integral of running samples."""
        return sum(self._gained(lane).get(state, 0.0) for lane in self.workers for state in states)

    def shares(self, lane: str) -> dict[str, float]:
        """Share of a lane's time by state; empty for no time."""
        spent = {state: seconds for state, seconds in self._gained(lane).items() if state not in ("slot_seconds", GAP)}
        elapsed = sum(spent.values())
        return {state: seconds / elapsed for state, seconds in spent.items() if seconds > 0}

    def share(self, *states: str, lane: str | None = None) -> float:
        """Share of the time in some states: of one lane, or the workers' mean."""
        shares = [self.shares(one) for one in ([lane] if lane else self.workers)]
        return sum(one.get(state, 0.0) for one in shares for state in states) / max(len(shares), 1)

    def _gained(self, lane: str) -> dict[str, float]:
        before = self.before.get(lane, {})
        return {name: total - before.get(name, 0.0) for name, total in self.after.get(lane, {}).items()}


def _lane(event: Event) -> str:
    """The lane that an event is about: a worker's loss and return are told by the controller."""
    return str(event.get("worker") if event["kind"] in ("lost", "rejoined") else event["lane"])


def _place(lane: str) -> tuple[str, int]:
    kind, _, number = lane.partition("/")
    return kind, int(number) if number.isdigit() else 0
