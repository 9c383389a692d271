"""The event log as a Perfetto trace (Chrome trace-event JSON); a pure function.

One track per lane: pauses and training become slices of the lane, samples and verified groups become
asynchronous slices (they overlap), `running` becomes a counter.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from areal_lite.events import Event
from areal_lite.record.lanes import first_moment, lane_events, slices
from areal_lite.types import GIVEN

Row = dict[str, Any]


def to_trace(events: Sequence[Event]) -> dict[str, Any]:
    """Return the trace of the rows of `events.jsonl` as a JSON object."""
    first, rows = first_moment(events), list[Row]()

    def ticks(moment: float) -> int:
        # Whole microseconds: with fractions a slice may seem to overlap the one before, and Perfetto drops it.
        return round((moment - first) * 1e6)

    for pid, (lane, found) in enumerate(lane_events(events).items(), start=1):
        rows.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": lane}})
        for kind, begin, end, _ in slices(found):
            name, ts = "pause" if kind == "drain" else kind, ticks(begin)
            rows.append({"ph": "X", "pid": pid, "tid": 1, "name": name, "ts": ts, "dur": ticks(end) - ts})
        for event in found:
            rows += _rows_of(event, pid, ticks)
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


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
