"""Where the time went: shares of every lane, lengths of completions, latencies of verifiers; from the event log."""

from collections import Counter
from collections.abc import Iterator, Sequence

from areal_lite.events import Event
from areal_lite.record.lane_clock import LaneClock, rollout_clock, trainer_clock
from areal_lite.record.report.charts import COLOURS, Chart, Line, bars, lines
from areal_lite.record.report.curves import metric_line
from areal_lite.record.report.read import Row, RunFiles, number, numbers, table

__all__ = [
    "failure_table",
    "lane_events",
    "lane_shares",
    "length_charts",
    "share_chart",
    "verifier_charts",
    "verifier_table",
]

_STATES = {
    "generating": COLOURS[0], "training": COLOURS[2], "publishing": COLOURS[4], "pausing": "#7d3c3c",
    "transferring": "#a34747", "reloading": "#c65f5f", "stamping": "#e08a8a", "draining": COLOURS[3],
    "idle": "#9aa0a6", "waiting": "#b8bdc2", "other": "#d5d9dc", "lost": "#555555",
}  # fmt: skip
"""In the order of the bars: work, the parts of a hand-over, then what is not work."""

_BINS = 40
"""Bars of a histogram of lengths, and stretches of time over which latencies are summed up."""


def lane_events(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Return the events of each lane in order of time; a worker's loss is told in the worker's own."""
    lanes: dict[str, list[Event]] = {}
    for event in events:
        lane = event.get("worker") if event["kind"] == "lost" else event["lane"]
        lanes.setdefault(str(lane), []).append(event)
    return {lane: sorted(found, key=lambda event: event["time"]) for lane, found in sorted(lanes.items())}


def lane_shares(events: Sequence[Event]) -> dict[str, dict[str, float]]:
    """Return each lane's share of time by state, between the first and the last publication.

    Returns:
        By lane: rollout workers, then the trainer; empty before the second publication.
    """
    lanes = lane_events(events)
    times = [event["time"] for event in lanes.get("trainer", []) if event["kind"] == "published"]
    if len(times) < 2:
        return {}
    clocks = {lane: rollout_clock() for lane in lanes if lane.startswith("rollout/")} | {"trainer": trainer_clock()}
    return {lane: _between(clock, lanes[lane], times[0], times[-1]) for lane, clock in clocks.items()}


def _between(clock: LaneClock, events: Sequence[Event], start: float, end: float) -> dict[str, float]:
    before: dict[str, float] | None = None
    for event in events:
        if event["time"] > end:
            break
        if before is None and event["time"] > start:
            before = clock.read(start)
        clock.feed(event)
    first = before or {}
    spent = {
        state: value - first.get(state, 0.0) for state, value in clock.read(end).items() if state != "slot_seconds"
    }
    total = sum(spent.values())
    return {state: value / total for state, value in spent.items()} if total > 0 else {}


def share_chart(shares: dict[str, dict[str, float]]) -> Chart | None:
    """Draw a bar per lane, split by state."""
    lanes = list(reversed(shares))
    data = [
        {
            "type": "bar", "orientation": "h", "name": state, "y": lanes, "marker": {"color": colour},
            "x": [shares[lane].get(state, 0.0) for lane in lanes],
            "hovertemplate": "%{y} " + state + ": %{x:.1%}<extra></extra>",
        }
        for state, colour in _STATES.items()
        if any(shares[lane].get(state) for lane in lanes)
    ]  # fmt: skip
    layout = {
        "barmode": "stack", "xaxis": {"tickformat": ".0%", "range": [0, 1]}, "hovermode": "closest",
        "height": 130 + 42 * len(lanes), "showlegend": True, "legend": {"traceorder": "normal"},
    }  # fmt: skip
    note = "between the first and the last publication; idle: not paused, and nothing running"
    return Chart(title="shares of time", data=data, layout=layout, note=note) if data else None


def length_charts(runs: Sequence[RunFiles]) -> Iterator[Chart | None]:
    """Draw how long completions were, all over and over steps."""
    yield bars("lengths of the completions", _histograms(runs), x="tokens", y="share of samples")
    for key, title, unit in (
        ("length_mean", "mean length", "tokens"),
        ("truncated_fraction", "cut off at the token limit", "share of samples"),
    ):
        curves = [metric_line(run, key, name=run.name) for run in runs]
        if any(any(curve.y) for curve in curves):
            yield lines(title, curves, x="trainer step", y=unit, rangemode="tozero")


def _histograms(runs: Sequence[RunFiles]) -> dict[str, dict[str, float]]:
    lengths = {run.name: list(_lengths(run)) for run in runs}
    longest = max((max(found) for found in lengths.values() if found), default=0)
    width = max(1, -(-longest // _BINS))
    names = {
        start: str(start) if width == 1 else f"{start}-{start + width - 1}" for start in range(0, longest + 1, width)
    }
    histograms = {}
    for run, found in lengths.items():
        counts = Counter(length // width * width for length in found)
        histograms[run] = {names[start]: counts[start] / len(found) for start in names} if found else {}
    return histograms


def _lengths(run: RunFiles) -> Iterator[int]:
    for event in run.events:
        for sample in event.get("samples", ()) if event["kind"] == "group" else ():
            yield sample["tokens"]


def verifier_charts(run: RunFiles) -> Iterator[Chart | None]:
    """Draw how long a group's verification took over the run, and failures by step."""
    found = [event for event in run.events if event["kind"] == "verify"]
    start = min((event["time"] for event in run.events), default=0.0)
    end = max((event["end"] for event in found), default=start)
    width = max(end - start, 1e-9) / _BINS
    bins: dict[int, list[float]] = {}
    for event in found:
        bins.setdefault(min(int((event["end"] - start) / width), _BINS - 1), []).append(event["end"] - event["start"])
    places = [(index + 0.5) * width for index in sorted(bins)]
    curves = [
        Line(name=name, x=places, y=[1e3 * _quantile(bins[index], q) for index in sorted(bins)])
        for name, q in (("median", 0.5), ("95 of 100", 0.95), ("slowest", 1.0))
    ]
    yield lines("verification of a group", curves, x="seconds since the first event", y="milliseconds", type="log")
    reasons = sorted({name for row in run.metrics for name in table(row.get("verifier_failures"))})
    steps = [number(row.get("step")) for row in run.metrics]
    failed = [
        Line(
            name=name, x=steps, y=[number(table(row.get("verifier_failures")).get(name)) or 0.0 for row in run.metrics]
        )
        for name in reasons
    ]
    yield lines("failures of verifiers", failed, x="trainer step", y="samples")


def verifier_table(run: RunFiles) -> list[Row]:
    """Return one row per verifier as of the last step: calls, time-outs, restarts, latencies."""
    last = table(run.metrics[-1].get("verifiers")) if run.metrics else {}
    rows = []
    for name, found in sorted(last.items()):
        figures = table(found)
        row: Row = {"verifier": name} | {key: figures.get(key) for key in ("calls", "timeouts", "restarts")}
        row["failures"] = sum(numbers(table(figures.get("failures"))).values())
        for key in ("p50", "p95"):
            latency = number(figures.get(f"latency_{key}_s"))
            row[f"{key} ms"] = None if latency is None else round(latency * 1e3, 3)
        rows.append(row)
    return rows


def failure_table(run: RunFiles) -> list[Row]:
    """Return what went wrong without ending the run, by kind and reason, over all steps."""
    total: Counter[tuple[str, str]] = Counter()
    for row in run.metrics:
        for key, what in (("verifier_failures", "verifier failed"), ("messages_refused", "message refused")):
            for reason, times in table(row.get(key)).items():
                total[what, str(reason)] += int(number(times) or 0)
    return [{"what": what, "reason": reason, "times": times} for (what, reason), times in total.most_common()]


def _quantile(values: Sequence[float], q: float) -> float:
    """Nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(q * 1000) * len(ordered) // 1000) - 1)]
