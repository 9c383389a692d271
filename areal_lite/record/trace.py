"""The event log as a Perfetto trace (Chrome trace-event JSON); a pure function.

One track per lane: pauses and training become slices of the lane, samples and verified groups become
asynchronous slices (they overlap), `running` becomes a counter.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from areal_lite.events import Event
from areal_lite.record.lanes import first_moment, lane_events, slices
from areal_lite.types import GIVEN

Row = dict[str, Any]


def to_trace(events: Sequence[Event]) -> dict[str, Any]:
    """Return the trace of the rows of `events.jsonl` as a JSON object."""
    lanes = lane_events(events)
    start, rows = first_moment(events), []
    for pid, (lane, found) in enumerate(lanes.items(), start=1):
        rows.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": lane}})
        for kind, begin, end, _ in slices(found):
            name, (ts, until) = "pause" if kind == "drain" else kind, _microseconds(begin - start, end - start)
            rows.append({"ph": "X", "pid": pid, "tid": 1, "name": name, "ts": ts, "dur": until - ts})
        for event in found:
            rows += _rows_of(event, pid=pid, start=start)
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _rows_of(event: Event, *, pid: int, start: float) -> Iterator[Row]:
    if event["kind"] == "running":
        (ts,) = _microseconds(event["time"] - start)
        yield {"ph": "C", "pid": pid, "name": "running", "ts": ts, "args": {"samples": event["n"]}}
    elif event["kind"] == "verify":
        times = _microseconds(event["start"] - start, event["end"] - start)
        yield from _overlapping("verify", event["group_id"], pid=pid, times=times, detail={"group": event["group_id"]})
    elif event["kind"] == "group":
        for index, sample in enumerate(event["samples"]):
            times = _microseconds(event["start"] - start, sample["end"] - start)
            detail = {"group": event["group"], "tokens": sample["tokens"], **_origins(sample)}
            yield from _overlapping("sample", f"{event['group']}/{index}", pid=pid, times=times, detail=detail)


def _origins(sample: Row) -> Row:
    """Return the versions of a sample's own tokens, in order, and how many were given by an environment, if any."""
    versions = dict.fromkeys(version for version, _, _ in sample["spans"] if version != GIVEN)
    given = sum(end - begin for version, begin, end in sample["spans"] if version == GIVEN)
    return {"versions": list(versions)} | ({"given": given} if given else {})


def _overlapping(category: str, identity: str, *, pid: int, times: tuple[int, ...], detail: Row) -> Iterator[Row]:
    """Yield an asynchronous slice: overlapping ones each get a line."""
    # `id2.local` belongs to the lane; a plain `id` would move the slice to a track of all lanes. Perfetto gives each
    # name a track of its own, so all slices of a kind share one.
    row = {"cat": category, "id2": {"local": identity}, "pid": pid, "tid": 1, "name": category}
    begin, end = times
    yield {"ph": "b", "ts": begin, "args": detail, **row}
    yield {"ph": "e", "ts": end, **row}


def _microseconds(*seconds: float) -> tuple[int, ...]:
    # Whole ones: with fractions a slice may seem to overlap the one before, and Perfetto drops it.
    return tuple(round(value * 1e6) for value in seconds)
