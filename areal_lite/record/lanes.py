"""The event log by lane: what each did from when to when. Pure functions; the trace and the report draw it."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from areal_lite.events import Event

__all__ = ["Slice", "first_moment", "lane_events", "sample_lengths", "slices"]

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
    """Return the events of each lane in order of time; a worker's loss is told in the worker's own."""
    lanes: dict[str, list[Event]] = {}
    for event in events:
        lane = event.get("worker") if event["kind"] == "lost" else event["lane"]
        lanes.setdefault(str(lane), []).append(event)
    return {lane: sorted(found, key=lambda event: event["time"]) for lane, found in sorted(lanes.items())}


def first_moment(events: Iterable[Event]) -> float:
    """Return when the first thing began that the log tells of: an event may be about what it ended; 0 for no events."""
    return min((min(event["time"], event.get("start", event["time"])) for event in events), default=0.0)


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
