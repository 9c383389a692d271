"""The event log by lane: what each lane did from when to when, and its share of time per state.

Clocks add up the seconds of each state. Reading them changes nothing, so that events that arrive late still count from
their own time; a share of time comes from the difference of two readings.
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from areal_lite.events import Event
from areal_lite.record.run_files import number

GAP = "gap"
"""The run was not alive from this event on, until each lane's next one: such time is part of no share.

As a state, also that of a worker that has left the run.
"""

PAUSE_PARTS = ("pausing", "transferring", "reloading", "stamping")
"""States of a rollout lane that make up a pause, from the pause call to the resume."""

_STATES = {
    "pause": "pausing", "drain": "draining", "paused": "transferring", "update_received": "reloading",
    "update_loaded": "stamping", "resumed": "generating", "lost": "lost",
    "wait": "waiting", "train": "training", "trained": "publishing", "published": "other", GAP: GAP,
    "running": "", "scaled": GAP,
}  # fmt: skip
"""The state of a worker or of the trainer after an event; "" keeps the state. A lost worker neither idles nor works."""

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


def lane_of(event: Event) -> str:
    """Return the lane that an event is about: the controller reports that a worker is lost or back."""
    return str(event.get("worker") if event["kind"] in ("lost", "rejoined") else event["lane"])


def lane_order(lane: str) -> tuple[str, int]:
    """Return the sort key of a lane: `rollout/2` before `rollout/10`."""
    kind, _, number = lane.partition("/")
    return kind, int(number) if number.isdecimal() else 0


def lane_events(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Return the events of each lane in order of time, `rollout/2` before `rollout/10`."""
    lanes: dict[str, list[Event]] = {}
    for event in events:
        lanes.setdefault(lane_of(event), []).append(event)
    return {lane: sorted(lanes[lane], key=lambda event: event["time"]) for lane in sorted(lanes, key=lane_order)}


def event_begins(event: Event) -> float:
    """Return when what an event reports began: one of a finished sample or verification comes at its end."""
    start = number(event.get("start"))
    return float(event["time"] if start is None else min(event["time"], start))


def lived(events: Sequence[Event]) -> Callable[[float], float]:
    """Return a function of a moment: the seconds from the first event to it, without the gaps between two starts."""
    begin, times = min(map(event_begins, events), default=0.0), sorted(event["time"] for event in events)
    ends = {event["time"] for event in events if event["kind"] == GAP}
    gaps = [(end, times[min(bisect.bisect(times, end), len(times) - 1)]) for end in ends]
    return lambda moment: moment - begin - sum(min(max(moment, end), again) - end for end, again in gaps)


def steps_before_gaps(events: Iterable[Event]) -> set[int]:
    """Return the steps after which the run was not alive for a while."""
    kinds = [event for event in events if event["kind"] in ("published", GAP)]
    return {event.get("version", 0) for event, after in itertools.pairwise(kinds) if after["kind"] == GAP}


class Slicer:
    """Turns the events of one lane, in order of time, into slices; one left open by a kill or a loss is left out."""

    def __init__(self) -> None:
        self._begun: Event | None = None

    def feed(self, event: Event) -> Slice | None:
        """Take an event; return the slice that it ends, if any."""
        found, begun = None, self._begun
        if begun is not None:
            kind, end = _SLICES[begun["kind"]]
            if event["kind"] == end:
                label = event.get("batch") or event.get("version") or begun.get("batch") or ""
                found, self._begun = Slice(kind, begun["time"], event["time"], str(label)), None
        if event["kind"] in _SLICES:
            self._begun = event
        elif event["kind"] == "lost":
            self._begun = None
        return found


def slices(events: Iterable[Event]) -> Iterator[Slice]:
    """Yield the slices of a lane whose events come in order of time."""
    return filter(None, map(Slicer().feed, events))


def sample_lengths(events: Iterable[Event]) -> Iterator[int]:
    """Yield the tokens of each completion."""
    for event in events:
        for sample in event["samples"] if event["kind"] == "group" else ():
            yield sample["tokens"]


Reading = Mapping[str, Mapping[str, float]]
"""Seconds per state up to a time, plus `slot_seconds`, the integral of running samples, by lane."""


class LaneClocks:
    """Adds up the seconds that trainer and rollout lanes spend in each state, and their running samples over time.

    Example: `running n=2` at 0 s, `pause` at 3 s, `resumed` at 4 s; read at 5 s gives
    `{"generating": 4.0, "pausing": 1.0, "slot_seconds": 10.0}` for their lane.
    """

    def __init__(self) -> None:
        self._now: dict[str, tuple[str, int, float]] = {}
        """State, running samples, and since when, by lane."""
        self._totals: dict[str, dict[str, float]] = {}

    def feed(self, events: Iterable[Event]) -> None:
        """Add events of any lanes, each lane's in order of time; other lanes and unknown kinds are ignored."""
        for event in events:
            kind, time = event["kind"], event["time"]
            if kind not in _STATES:
                continue
            lane = lane_of(event)
            if kind != "lost" and (lane == "trainer" or lane.startswith("rollout/")):
                self._now.setdefault(lane, ("generating", 0, time))
            for one in self._now if kind == GAP else self._now.keys() & {lane, *event.get("dismissed", ())}:
                self._totals[one] = self._reading(one, time)
                state, running, since = self._now[one]
                state = _STATES.get(kind, state) or ("generating" if state == GAP else state)
                if event.get("state") == "dead":
                    state = GAP
                running = event.get("n", 0) if kind in ("running", "lost", "scaled", GAP) else running
                self._now[one] = state, running, max(time, since)

    def read(self, time: float) -> dict[str, dict[str, float]]:
        """Read all clocks at a time."""
        return {lane: self._reading(lane, time) for lane in self._now}

    def _reading(self, lane: str, time: float) -> dict[str, float]:
        totals, (state, running, since) = defaultdict(float, self._totals.get(lane, {})), self._now[lane]
        if time > since:
            totals["idle" if (state, running) == ("generating", 0) else state] += time - since
            totals["slot_seconds"] += (time - since) * running
        return dict(totals)


def reading(events: Iterable[Event], time: float) -> Reading:
    """Read the clocks of an event log at a time."""
    clocks = LaneClocks()
    clocks.feed(sorted((event for event in events if event["time"] <= time), key=lambda event: event["time"]))
    return clocks.read(time)


def between_publications(events: Iterable[Event]) -> "Stretch | None":
    """Return the time between the first and the last publication of a log; None for just one.

    A log of any length is read once and not kept: an event waits here only until a publication later than it.

    Args:
        events: Each lane's in order of time.
    """
    at_first, at_last, waiting, times = LaneClocks(), LaneClocks(), list[Event](), list[float]()

    def feed(event: Event) -> None:
        at_last.feed([event])
        if event["time"] <= times[0]:
            at_first.feed([event])

    for event in (one for one in events if one["kind"] in _STATES):
        if event["kind"] == "published":
            times = [times[0] if times else event["time"], event["time"]]
            for one in waiting:
                if one["time"] <= times[1]:
                    feed(one)
            waiting = [one for one in waiting if one["time"] > times[1]]
        if times and event["time"] <= times[1]:
            feed(event)
        else:
            waiting.append(event)
    return Stretch(at_first.read(times[0]), at_last.read(times[1])) if times and times[0] < times[1] else None


class Stretch:
    """The time between two readings of all clocks."""

    def __init__(self, before: Reading, after: Reading) -> None:
        self.workers = sorted(after.keys() - {"trainer"}, key=lane_order)
        """The rollout lanes, in order."""
        self._gained = {
            lane: {state: total - before.get(lane, {}).get(state, 0.0) for state, total in totals.items()}
            for lane, totals in after.items()
        }

    def spent(self, *states: str) -> float:
        """Return the seconds in some states, added up over the workers; `slot_seconds` integrates running samples."""
        return sum(self._gained[lane].get(state, 0.0) for lane in self.workers for state in states)

    def seconds(self, lane: str) -> dict[str, float]:
        """Return a lane's seconds by state."""
        gained = self._gained.get(lane, {})
        return {state: seconds for state, seconds in gained.items() if state not in ("slot_seconds", GAP)}

    def shares(self, lane: str) -> dict[str, float]:
        """Return the share of a lane's time by state; empty for no time."""
        spent = self.seconds(lane)
        elapsed = sum(spent.values())
        return {state: seconds / elapsed for state, seconds in spent.items() if seconds > 0}

    def share(self, *states: str, lane: str | None = None) -> float:
        """Return the share of time in some states: of one lane, or the workers' mean."""
        shares = [found for one in ([lane] if lane else self.workers) if (found := self.shares(one))]
        return sum(one.get(state, 0.0) for one in shares for state in states) / max(len(shares), 1)
