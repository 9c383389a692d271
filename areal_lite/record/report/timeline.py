"""The picture of AReaL's Figure 3 (arXiv 2505.24298) from a run's own events: who did what when, under which version.

A pure function of the event log. A rollout lane holds a line per slot; each sample is drawn where it was generated and
split where the weights changed. `timeline.js` draws what `timeline` returns, binned to the screen's columns, so that a
long run stays quick.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_lite.events import Event
from areal_lite.record.report.times import lane_events
from areal_lite.types import GIVEN

__all__ = [
    "KINDS",
    "MAX_LANES",
    "MAX_ROWS",
    "MAX_SEGMENTS",
    "Segment",
    "sample_segments",
    "slots",
    "timeline",
    "versions_alive",
]

KINDS = ("pause", "drain", "verify", "train", "publish", "wait")
"""Kinds of segments beside samples. On the wire a segment's kind is its version, or `-1 -` the place in this list."""

MAX_ROWS = 48
"""Lines of a lane; more could not be told apart on a screen."""

MAX_SEGMENTS = 120_000
"""Segments of all rollout lanes, and of all verifier lanes, in the page: about 4 MB."""

MAX_LANES = {"rollout": 12, "verifier": 6}
"""Workers of a kind; more would not fit on a screen."""

_UNIT_S = 1e-4
"""Times are whole numbers of this."""

_SLICES = {
    "rollout": {"pause": ("pause", "resumed"), "drain": ("drain", "resumed")},
    "trainer": {"wait": ("wait", "train"), "train": ("train", "trained"), "trained": ("publish", "published")},
}
"""By lane: begin event → (kind, end event)."""

_MARKS = ("eval", "checkpoint", "parity", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one line of a lane did for a while.

    Example: `Segment(start=1.0, end=2.5, kind=3, label="arith/0/17#0")`: tokens of version 3.
    """

    start: float
    """Seconds since the epoch."""
    end: float
    kind: int
    """Version of the weights, or `-1 -` a place in `KINDS`."""
    label: str


@dataclass(slots=True, kw_only=True)
class _Lane:
    name: str
    lines: list[list[Segment]]
    """Segments by line; they do not overlap within one."""
    over_all: list[Segment] = field(default_factory=list)
    """Drawn over all lines."""


def timeline(events: Sequence[Event], *, max_rows: int = MAX_ROWS, max_segments: int = MAX_SEGMENTS) -> dict[str, Any]:
    """Return the lanes as JSON: times in units of 0.1 ms since the first event.

    Args:
        events: Rows of `events.jsonl`.
        max_rows: A lane with more lines shows every second, third, ... one, and says so.
        max_segments: The same for all lanes of a kind together.

    Returns:
        `lanes` (name, note, number of rows, and one list each of rows, starts, ends, kinds and labels per segment; row
        -1 is the whole lane), `labels`, `marks`, `focus` (what to show first), `end`, `unit`, and
        `left_out`, the number of workers without a lane. Empty without events.
    """
    if not events:
        return {}
    by_name = lane_events(events)
    names = {kind: [name for name in by_name if name.startswith(f"{kind}/")] for kind in MAX_LANES}
    rollouts = [_rollout(name, by_name[name]) for name in names["rollout"][: MAX_LANES["rollout"]]]
    verifiers = [_verifier(name, by_name[name]) for name in names["verifier"][: MAX_LANES["verifier"]]]
    trainers = [_trainer(name, by_name[name]) for name in by_name if name.startswith("trainer")]
    shown = [*_all(rollouts), *_all(verifiers), *_all(trainers)]
    start = min([event["time"] for event in events] + [segment.start for segment in shown])
    end = max([event["time"] for event in events] + [segment.end for segment in shown])
    labels: dict[str, int] = {}
    packed = []
    for lanes in (rollouts, verifiers, trainers):
        stride = -(-sum(len(line) for lane in lanes for line in lane.lines) // max_segments)
        packed += [_packed(lane, start=start, labels=labels, max_rows=max_rows, stride=stride) for lane in lanes]
    return {
        "unit": _UNIT_S,
        "end": _ticks(end - start),
        "kinds": list(KINDS),
        "lanes": packed,
        "left_out": sum(len(names[kind]) for kind in names) - len(rollouts) - len(verifiers),
        "labels": list(labels),
        "marks": list(_marks(by_name, start)),
        "focus": _focus(by_name.get("trainer", []), start=start, end=end),
    }


def slots(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Give each stretch of time the lowest line that is free for all of it.

    Example: `[(0, 4), (1, 2), (3, 5), (4, 6)]` → `[0, 1, 1, 0]`
    """
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    lines = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda index: spans[index]):
        start, end = spans[index]
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lines[index] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lines[index]))
    return lines


def versions_alive(events: Iterable[Event]) -> dict[int, tuple[float, float]]:
    """Return from when to when an engine generated with each version: from a resume to the next pause.

    Args:
        events: Of one rollout lane, in order of time.
    """
    alive: dict[int, tuple[float, float]] = {}
    version: int | None = None
    for event in events:
        if event["kind"] in ("pause", "drain") and version in alive:
            alive[version] = (alive[version][0], event["time"])
        elif event["kind"] == "stamped":
            version = event["version"]
        elif event["kind"] == "resumed" and version is not None:
            alive[version] = (event["time"], float("inf"))
    return alive


def sample_segments(
    spans: Sequence[Sequence[int]], *, start: float, end: float, alive: dict[int, tuple[float, float]], label: str
) -> list[Segment]:
    """Split a sample at the changes of weights; before its first version it waited in the engine.

    The log has a sample's beginning and end; where a version ended is known from the lane's pauses. Where the two do
    not fit (a lane without hand-over events), time is split by tokens.

    Args:
        spans: `[version, start token, end token]`; tokens that were given have no time of their own.
        start: Of generation, seconds.
        end: Of generation, seconds.
        alive: From `versions_alive`.
        label: Of the segments.
    """
    tokens: dict[int, int] = {}
    for version, first, last in spans:
        if version != GIVEN:
            tokens[version] = tokens.get(version, 0) + last - first
    known = [(version, *alive.get(version, (0.0, -1.0))) for version in tokens]
    pieces = [(version, max(start, began), min(end, ended)) for version, began, ended in known]
    if any(begin >= stop for _, begin, stop in pieces):
        pieces, begin, total = [], start, sum(tokens.values())
        for version, share in tokens.items():
            pieces.append((version, begin, begin + (end - start) * share / total))
            begin = pieces[-1][2]
    if pieces and pieces[0][1] > start:
        pieces.insert(0, (-1 - KINDS.index("wait"), start, pieces[0][1]))
    return [Segment(start=begin, end=stop, kind=version, label=label) for version, begin, stop in pieces]


def _rollout(name: str, events: Sequence[Event]) -> _Lane:
    alive = versions_alive(events)
    samples = [
        (event["start"], max(event["start"], sample["end"]), sample["spans"], event["group"])
        for event in events
        if event["kind"] == "group"
        for sample in event["samples"]
    ]
    lines: list[list[Segment]] = []
    for line, (start, end, spans, label) in zip(slots([sample[:2] for sample in samples]), samples, strict=True):
        lines += ([] for _ in range(line + 1 - len(lines)))
        lines[line] += sample_segments(spans, start=start, end=end, alive=alive, label=label)
    return _Lane(name=name, lines=lines, over_all=list(_slices(events, _SLICES["rollout"])))


def _verifier(name: str, events: Sequence[Event]) -> _Lane:
    found = [event for event in events if event["kind"] == "verify"]
    lines: list[list[Segment]] = []
    for line, event in zip(slots([(event["start"], event["end"]) for event in found]), found, strict=True):
        lines += ([] for _ in range(line + 1 - len(lines)))
        kind = -1 - KINDS.index("verify")
        lines[line].append(Segment(start=event["start"], end=event["end"], kind=kind, label=event["group_id"]))
    return _Lane(name=name, lines=lines)


def _trainer(name: str, events: Sequence[Event]) -> _Lane:
    return _Lane(name=name, lines=[list(_slices(events, _SLICES["trainer"]))])


def _slices(events: Iterable[Event], meaning: dict[str, tuple[str, str]]) -> Iterator[Segment]:
    """Yield a segment per begin event that is followed by its end; one left open by a kill is left out."""
    begun: tuple[str, str, Event] | None = None
    for event in events:
        kind = event["kind"]
        if begun is not None and kind == begun[1]:
            label = str(event.get("batch") or event.get("version") or begun[2].get("batch") or "")
            yield Segment(
                start=begun[2]["time"], end=event["time"], kind=-1 - KINDS.index(begun[0]), label=label
            )  # fmt: skip
            begun = None
        if kind in meaning:
            begun = (*meaning[kind], event)


def _marks(lanes: dict[str, list[Event]], start: float) -> Iterator[dict[str, Any]]:
    for name, events in lanes.items():
        for event in events:
            if event["kind"] in _MARKS:
                where = event.get("step", name)
                yield {"time": _ticks(event["time"] - start), "text": f"{event['kind']} {where}"}


def _focus(trainer: Sequence[Event], *, start: float, end: float) -> list[int]:
    """Return a stretch of about six steps in the middle: pauses and versions can be told apart in it."""
    times = [event["time"] for event in trainer if event["kind"] == "trained"]
    if len(times) <= 8:
        return [0, _ticks(end - start)]
    middle = len(times) // 2
    return [_ticks(times[middle - 3] - start), _ticks(times[middle + 3] - start)]


def _packed(lane: _Lane, *, start: float, labels: dict[str, int], max_rows: int, stride: int) -> dict[str, Any]:
    stride = max(1, stride, -(-len(lane.lines) // max_rows))
    shown = lane.lines[::stride]
    rows = [(-1, segment) for segment in lane.over_all]
    rows += [(row, segment) for row, line in enumerate(shown) for segment in line]
    return {
        "name": lane.name,
        "note": f"1 of {stride} of {len(lane.lines)} lines" if stride > 1 else "",
        "rows": max(len(shown), 1),
        "row": [row for row, _ in rows],
        "start": [_ticks(segment.start - start) for _, segment in rows],
        "end": [_ticks(segment.end - start) for _, segment in rows],
        "kind": [segment.kind for _, segment in rows],
        "label": [labels.setdefault(segment.label, len(labels)) for _, segment in rows],
    }


def _all(lanes: Iterable[_Lane]) -> Iterator[Segment]:
    for lane in lanes:
        yield from lane.over_all
        for line in lane.lines:
            yield from line


def _ticks(seconds: float) -> int:
    return round(seconds / _UNIT_S)
