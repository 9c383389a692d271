"""The event log as a Perfetto trace (Chrome trace-event JSON).

One track per lane: pauses and training become slices of the lane, samples and verified groups become
asynchronous slices (they overlap), `running` becomes a counter.
"""

import gzip
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from areal_lite.events import Event
from areal_lite.record.lanes import Slicer, event_begins, lane_of, lane_order
from areal_lite.types import GIVEN

Row = dict[str, Any]


def write_trace(path: Path, read_events: Callable[[], Iterable[Event]]) -> None:
    """Write the trace, packed by gzip, which Perfetto unpacks; events are read twice, and never held all at once."""
    with gzip.GzipFile(path, "wb", compresslevel=5, mtime=0) as packed, io.BufferedWriter(packed, 2**20) as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
        for place, row in enumerate(trace_rows(read_events)):
            file.write((",\n" if place else "").encode() + json.dumps(row).encode())
        file.write(b"]}")


def trace_rows(read_events: Callable[[], Iterable[Event]]) -> Iterator[Row]:
    """Yield the trace events of an event log, in which each lane's events are in order of time."""
    lanes, first = set[str](), 0.0
    for event in read_events():
        first = min(first, event_begins(event)) if lanes else event_begins(event)
        lanes.add(lane_of(event))

    def ticks(moment: float) -> int:
        # Whole microseconds: with fractions a slice may seem to overlap the one before, and Perfetto drops it.
        return round((moment - first) * 1e6)

    pids = {lane: pid for pid, lane in enumerate(sorted(lanes, key=lane_order), start=1)}
    for lane, pid in pids.items():
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": lane}}
    slicers = defaultdict[str, Slicer](Slicer)
    for event in read_events():
        lane = lane_of(event)
        if found := slicers[lane].feed(event):
            name, start = "pause" if found.kind == "drain" else found.kind, ticks(found.start)
            yield {"ph": "X", "pid": pids[lane], "tid": 1, "name": name, "ts": start, "dur": ticks(found.end) - start}
        yield from _rows_of(event, pids[lane], ticks)


def _rows_of(event: Event, pid: int, ticks: Callable[[float], int]) -> Iterator[Row]:
    if event["kind"] == "running":
        yield {"ph": "C", "pid": pid, "name": "running", "ts": ticks(event["time"]), "args": {"samples": event["n"]}}
    elif event["kind"] == "verify":
        times, group = (ticks(event["start"]), ticks(event["end"])), event["group_id"]
        yield from _overlapping("verify", group, pid=pid, times=times, detail={"group": group})
    elif event["kind"] == "group":
        for index, sample in enumerate(event["samples"]):
            times = ticks(event["start"]), ticks(sample["end"])
            versions = dict.fromkeys(version for version, _, _ in sample["spans"] if version != GIVEN)
            given = sum(end - begin for version, begin, end in sample["spans"] if version == GIVEN)
            detail = {"group": event["group"], "tokens": sample["tokens"], "versions": list(versions)}
            detail |= {"given": given} if given else {}  # by an environment
            yield from _overlapping("sample", f"{event['group']}/{index}", pid=pid, times=times, detail=detail)


def _overlapping(category: str, identity: str, *, pid: int, times: tuple[int, int], detail: Row) -> Iterator[Row]:
    """Yield an asynchronous slice: overlapping ones each get a line."""
    # `id2.local` belongs to the lane; a plain `id` would move the slice to a track of all lanes. Perfetto gives each
    # name a track of its own, so all slices of a kind share one.
    row = {"cat": category, "id2": {"local": identity}, "pid": pid, "tid": 1, "name": category}
    begin, end = times
    yield {"ph": "b", "ts": begin, "args": detail, **row}
    yield {"ph": "e", "ts": end, **row}
