"""The timeline of a run, after Figure 3 of AReaL (arXiv 2505.24298): what each process did, under which version.

A rollout lane has a row per slot; each sample is drawn where it was generated, split where the weights changed.
`timeline.js` draws what `timeline` returns, binned to the screen's columns, so that a long run stays fast.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from areal_lite.events import Event
from areal_lite.record.lanes import GAP, lane_events, lived, slices
from areal_lite.types import GIVEN

KINDS = ("pause", "drain", "verify", "train", "publish", "wait", "other", "checkpoint", "eval")
"""Kinds of segments beside samples. In the JSON a segment's kind is its version, or `-1 -` its index in this list."""

_MAX_ROWS = 48
"""Rows of a lane; more would be too thin on a screen."""

_MAX_SEGMENTS = {"rollout": 45_000, "verifier": 15_000}
"""Segments of a kind of lanes in the page: together about 2 MB."""

_MAX_LANES = {"rollout": 12, "verifier": 6, "trainer": 1, "controller": 1}
"""Workers of a kind; more would not fit on a screen."""

_UNIT_S = 1e-4
"""Times are whole numbers of this."""

_MARKS = ("eval", "checkpoint", "parity", "lost", "rejoined", "restarted", GAP)


class Segment(NamedTuple):
    """A period in one row of a lane.

    Example: `Segment(row=0, start=1.0, end=2.5, kind=3, label="arith/0/17#0")`: tokens of version 3.
    """

    row: int
    """-1 is the whole lane."""
    start: float
    """Seconds since the epoch."""
    end: float
    kind: int
    """Version of the weights, or `-1 -` a place in `KINDS`."""
    label: str


Lives = Mapping[int, tuple[float, float]]
"""When an engine began and ended generating with each version."""


def timeline(events: Sequence[Event]) -> dict[str, Any]:
    """Return the lanes as JSON: times in units of 0.1 ms since the first event, without the gaps between two starts.

    Args:
        events: Rows of `events.jsonl`. Of too many slots only some are shown, as the lane's note says.

    Returns:
        `lanes` (name, note, number of rows, and one list each of rows, starts, ends, kinds and labels per segment),
        `labels`, `marks`, `focus` (what to show first), `end`, `unit`, and `left_out`, the number of workers without a
        lane. Empty without events.
    """
    if not events:
        return {}
    by_name, clock = lane_events(events), lived(events)

    def ticks(moment: float) -> int:
        return round(clock(moment) / _UNIT_S)

    end = ticks(max(event["time"] for event in events))
    trained = [ticks(row["time"]) for row in by_name.get("trainer", []) if row["kind"] == "trained"]
    middle = len(trained) // 2
    packed, left_out, labels = [], 0, dict[str, int]()
    for kind, most in _MAX_LANES.items():
        names = [name for name in by_name if name.partition("/")[0] == kind]
        left_out += len(names[most:])
        lanes = {name: list(_segments(kind, by_name[name])) for name in names[:most]}
        lanes = {name: segments for name, segments in lanes.items() if segments or kind != "controller"}
        stride = -(-sum(map(len, lanes.values())) // _MAX_SEGMENTS.get(kind, 1_000_000))
        packed += [_packed(name, segments, ticks, labels, stride) for name, segments in lanes.items()]
    return {
        "unit": _UNIT_S,
        "end": end,
        "kinds": list(KINDS),
        "lanes": packed,
        "left_out": left_out,
        "labels": list(labels),
        "marks": [
            {"time": ticks(event["time"]), "kind": event["kind"], "text": f"{event['kind']} {event.get('step', name)}"}
            for name, found in by_name.items()
            for event in found
            if event["kind"] in _MARKS and "start" not in event
        ],
        # About six steps in the middle: pauses and versions can be told apart in it.
        "focus": [trained[middle - 3], trained[middle + 3]] if len(trained) > 8 else [0, end],
    }


def slots(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return for each period the lowest row that is free for all of it.

    Example: `[(0, 4), (1, 2), (3, 5), (4, 6)]` → `[0, 1, 1, 0]`
    """
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    rows = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda index: spans[index]):
        start, end = spans[index]
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        rows[index] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, rows[index]))
    return rows


def versions_alive(events: Iterable[Event]) -> dict[int, tuple[float, float]]:
    """Return when each version of a rollout lane was in use, from a resume to the next pause; events in order."""
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
    spans: Sequence[Sequence[int]], *, start: float, end: float, alive: Lives, row: int, label: str
) -> list[Segment]:
    """Split a sample at the changes of weights; before its first version it waited in the engine.

    The log has a sample's start and end; the lane's pauses tell where a version ended.

    Args:
        spans: `[version, start token, end token]`; an environment's tokens take no time.
        start: Of generation, in seconds, as is `end`.
        alive: From `versions_alive`; if it has none of the sample's versions, the first one is drawn.
    """
    versions = list(dict.fromkeys(version for version, _, _ in spans if version != GIVEN))
    lives = [(version, *alive[version]) for version in versions if version in alive]
    pieces = [(version, max(start, began), min(end, ended)) for version, began, ended in lives]
    pieces = [piece for piece in pieces if piece[1] < piece[2]] or [(version, start, end) for version in versions[:1]]
    if pieces and pieces[0][1] > start:
        pieces.insert(0, (_kind("wait"), start, pieces[0][1]))
    return [Segment(row, begin, stop, version, label) for version, begin, stop in pieces]


def _segments(kind: str, events: Sequence[Event]) -> Iterator[Segment]:
    """Yield the segments of a lane; a pause of a rollout lane covers all of its rows."""
    if kind == "controller":
        for row, name in enumerate(("checkpoint", "eval")):
            spans = ((event, event.get("start")) for event in events if event["kind"] == name)
            for event, begin in spans:
                if begin is not None:
                    yield Segment(row, begin, event["time"], _kind(name), f"step {event.get('step')}")
        return
    for event, after in itertools.pairwise(events if kind == "trainer" else ()):
        if (event["kind"], after["kind"]) == ("published", "wait") and event["time"] < after["time"]:
            yield Segment(0, event["time"], after["time"], _kind("other"), "")
    for name, begin, stop, label in slices(events):
        yield Segment(-1 if kind == "rollout" else 0, begin, stop, _kind(name), label)
    verified = [(event["start"], event["end"], event["group_id"]) for event in events if event["kind"] == "verify"]
    for row, (start, end, label) in zip(slots([times[:2] for times in verified]), verified, strict=True):
        yield Segment(row, start, end, _kind("verify"), label)
    alive = versions_alive(events)
    samples = [
        (event["start"], max(event["start"], sample["end"]), sample["spans"], event["group"])
        for event in events
        if event["kind"] == "group"
        for sample in event["samples"]
    ]
    for row, (start, end, spans, label) in zip(slots([sample[:2] for sample in samples]), samples, strict=True):
        yield from sample_segments(spans, start=start, end=end, alive=alive, row=row, label=label)


def _kind(name: str) -> int:
    return -1 - KINDS.index(name)


def _packed(
    name: str, segments: Sequence[Segment], ticks: Callable[[float], int], labels: dict[str, int], step: int
) -> dict[str, Any]:
    rows = 1 + max((segment.row for segment in segments), default=0)
    stride = max(1, step, -(-rows // _MAX_ROWS))
    shown = [segment for segment in segments if segment.row < 0 or segment.row % stride == 0]
    what = "slots" if name.startswith("rollout/") else "at a time"
    return {
        "name": name,
        "note": f"{rows} {what}, one in {stride} shown" if stride > 1 else "",
        "rows": max(-(-rows // stride), 1),
        "row": [segment.row if segment.row < 0 else segment.row // stride for segment in shown],
        "start": [ticks(segment.start) for segment in shown],
        "end": [ticks(segment.end) for segment in shown],
        "kind": [segment.kind for segment in shown],
        "label": [labels.setdefault(segment.label, len(labels)) for segment in shown],
    }
