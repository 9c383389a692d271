"""The event log as a Perfetto trace (Chrome trace-event JSON); a pure function.

One track per lane: pauses and training become slices of the lane, samples and verified groups become
asynchronous slices (they overlap), `running` becomes a counter.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from areal_lite.events import Event
from areal_lite.types import GIVEN

__all__ = ["to_trace"]

_SLICES = {
    "pause": ("pause", "resumed"),
    "drain": ("pause", "resumed"),
    "wait": ("wait", "train"),
    "train": ("train", "trained"),
    "trained": ("publish", "published"),
}
"""Begin event → (name of the slice, end event)."""


def to_trace(events: Iterable[Event]) -> dict[str, Any]:
    """Return the trace as a JSON object.

    Args:
        events: Rows of `events.jsonl`, in any order of lanes, each lane in order of time.
    """
    rows: list[dict[str, Any]] = []
    lanes: dict[str, int] = {}
    open_slices: dict[tuple[str, str], tuple[str, float]] = {}
    events = list(events)
    start = min((event[key] for event in events for key in ("start", "time") if key in event), default=0.0)
    for event in events:
        lane, kind, time_us = event["lane"], event["kind"], _microseconds(event["time"] - start)
        pid = lanes.setdefault(lane, len(lanes) + 1)
        for name, begun in [item for (where, end), item in open_slices.items() if (where, end) == (lane, kind)]:
            rows.append({"ph": "X", "pid": pid, "tid": 1, "name": name, "ts": begun, "dur": time_us - begun})
            del open_slices[lane, kind]
        if kind in _SLICES:
            name, end = _SLICES[kind]
            open_slices[lane, end] = (name, time_us)
        elif kind == "running":
            rows.append({"ph": "C", "pid": pid, "name": "running", "ts": time_us, "args": {"samples": event["n"]}})
        elif kind == "group":
            rows += _group_rows(event, pid, start)
        elif kind == "verify":
            identity = _identity("verify", event["group_id"], pid=pid)
            begun, ended = event["start"] - start, event["end"] - start
            rows += _overlapping(identity, begun=begun, ended=ended, group=event["group_id"])
    names = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": lane}} for lane, pid in lanes.items()]
    return {"traceEvents": names + rows, "displayTimeUnit": "ms"}


def _group_rows(event: Event, pid: int, start: float) -> list[dict[str, Any]]:
    rows = []
    for index, sample in enumerate(event["samples"]):
        identity = _identity("sample", f"{event['group']}/{index}", pid=pid)
        detail = {"group": event["group"], "tokens": sample["tokens"], "versions": _versions(sample["spans"])}
        if given := sum(end - begin for version, begin, end in sample["spans"] if version == GIVEN):
            detail["given"] = given  # of the tokens: from an environment, of no version
        rows += _overlapping(identity, begun=event["start"] - start, ended=sample["end"] - start, **detail)
    return rows


def _versions(spans: Iterable[Sequence[int]]) -> list[int]:
    """Return the versions that a sample's own tokens are of, in order."""
    return list(dict.fromkeys(version for version, _, _ in spans if version != GIVEN))


def _overlapping(identity: dict[str, Any], *, begun: float, ended: float, **detail: Any) -> list[dict[str, Any]]:
    """An asynchronous slice, of seconds since the start: overlapping ones each get a line."""
    return [
        {"ph": "b", "tid": 1, "ts": _microseconds(begun), "args": detail, **identity},
        {"ph": "e", "tid": 1, "ts": _microseconds(ended), **identity},
    ]


def _identity(category: str, identity: str, *, pid: int) -> dict[str, Any]:
    # `id2.local` belongs to the lane; a plain `id` would move the slice to a track of all lanes. Perfetto gives each
    # name a track of its own, so all slices of a kind share one.
    return {"cat": category, "id2": {"local": identity}, "pid": pid, "name": category}


def _microseconds(seconds: float) -> int:
    # Whole ones: with fractions a slice may seem to overlap the one before, and Perfetto drops it.
    return round(seconds * 1e6)
