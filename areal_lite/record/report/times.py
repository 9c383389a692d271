"""Charts of the event log: each lane's shares of time, lengths of completions, latencies of verifiers."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from areal_lite.record.lanes import PAUSE_PARTS, Stretch, sample_lengths
from areal_lite.record.report.charts import COLOURS, Chart, Line, bars, lines
from areal_lite.record.report.curves import STEPS, metric_charts
from areal_lite.record.report.read import RunFiles
from areal_lite.record.run_files import Row, number, numbers, table

_STATES = {
    "generating": COLOURS[0], "training": COLOURS[2], "publishing": COLOURS[4],
    "paused": "#a34747", "pausing": "#7d3c3c", "transferring": "#a34747", "reloading": "#c65f5f",
    "stamping": "#e08a8a", "draining": COLOURS[3],
    "idle": "#9aa0a6", "waiting": "#5f6b7a", "other": "#dfe3e6", "lost": "#222222",
}  # fmt: skip
"""In the order of the bars: work, the parts of a hand-over, then what is not work."""

_BINS = 40
"""Bars of a histogram of lengths."""


def lane_shares(run: Stretch | None) -> dict[str, dict[str, float]]:
    """Return each lane's share of time by state between the first and the last publication; empty for just one."""
    return {lane: run.shares(lane) for lane in [*run.workers, "trainer"]} if run else {}


def mean_shares(shares: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return two lanes: the mean of all generators, with one state for all parts of a pause, and the trainer."""
    workers = [shares[lane] for lane in shares if lane != "trainer"]
    mean = defaultdict[str, float](float)
    for state, share in itertools.chain.from_iterable(one.items() for one in workers):
        mean["paused" if state in PAUSE_PARTS else state] += share / len(workers)
    return {"generators": dict(mean), "trainer": shares["trainer"]} if workers else shares


def share_chart(shares: dict[str, dict[str, float]]) -> Chart | None:
    """Draw a bar per lane, split by state; the parts add up to the whole of its time."""
    lanes = list(reversed(shares))
    data = [
        {
            "type": "bar", "orientation": "h", "name": state, "y": lanes, "marker": {"color": colour},
            "x": [shares[lane].get(state, 0.0) for lane in lanes],
            "text": [f"{share:.0%}" if (share := shares[lane].get(state, 0.0)) >= 0.08 else "" for lane in lanes],
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
            "hovertemplate": "%{y} " + state + ": %{x:.1%}<extra></extra>",
        }
        for state, colour in _STATES.items()
        if any(shares[lane].get(state) for lane in lanes)
    ]  # fmt: skip
    layout = {
        "barmode": "stack", "hovermode": "closest",
        "xaxis": {"tickformat": ".0%", "range": [0, 1.03], "tickvals": [0, 0.25, 0.5, 0.75, 1]},
        "height": max(220, 130 + 42 * len(lanes)), "bargap": 0.3,
        "showlegend": True, "legend": {"traceorder": "normal"},
    }  # fmt: skip
    note = (
        "of the time between the first and the last publication; idle: not paused, and nothing running; other: "
        "saving, parity checks, evaluations"
    )
    return Chart(title="shares of time", data=data, layout=layout, note=note) if data else None


def length_charts(runs: Sequence[RunFiles]) -> Iterator[Chart | None]:
    """Draw the lengths of completions, in total and over steps."""
    lengths = {run.name: list(sample_lengths(run.events)) for run in runs}
    longest = max((length for found in lengths.values() for length in found), default=0)
    width = max(1, -(-longest // _BINS))
    title, histograms = "tokens" if width == 1 else f"tokens, in bins of {width}", {}
    for name, found in lengths.items():
        counts = Counter(length // width * width for length in found)
        starts = range(0, longest + 1, width) if found else ()
        histograms[name] = {str(start): counts[start] / len(found) for start in starts}
    yield bars("lengths of the completions", histograms, x=title, y="share of samples")
    yield from metric_charts(runs, "Lengths")


def failure_chart(run: RunFiles) -> Chart | None:
    """Draw the failures of verifiers by step."""
    failures, steps = _added(run, "verifier_failures"), [row["step"] for row in run.metrics]
    reasons = sorted({reason for row in failures for reason in row})
    failed = [Line(name=reason, x=steps, y=[row.get(reason, 0.0) for row in failures]) for reason in reasons]
    return lines("failures of verifiers", failed, x=STEPS, y="samples")


def verifier_table(run: RunFiles) -> list[Row]:
    """Return one row per verifier as of the last step: calls, time-outs, restarts, latencies."""
    return [
        {"verifier": name}
        | {key: found.get(key) for key in ("calls", "timeouts", "restarts")}
        | {"failures": sum(numbers(found.get("failures")).values())}
        | {f"{key} ms": round((number(found.get(f"latency_{key}_s")) or 0.0) * 1e3, 3) for key in ("p50", "p95")}
        for name, found in ((name, table(found)) for name, found in sorted(table(run.last.get("verifiers")).items()))
    ]


def failure_table(run: RunFiles) -> list[Row]:
    """Return failures that did not end the run, by kind and reason, over all steps."""
    total: Counter[tuple[str, str]] = Counter()
    for key, what in (("verifier_failures", "verifier failed"), ("messages_refused", "message refused")):
        for row in _added(run, key):
            total.update({(what, reason): int(times) for reason, times in row.items()})
    return [{"what": what, "reason": reason, "times": times} for (what, reason), times in total.most_common()]


def _added(run: RunFiles, key: str) -> list[dict[str, float]]:
    """Return the increase of the counts in each step; they restart from 0 at a resume."""
    rows = [numbers(row.get(key)) for row in run.metrics]
    return [
        {name: times - so_far if times >= (so_far := before.get(name, 0.0)) else times for name, times in row.items()}
        for before, row in itertools.pairwise([{}, *rows])
    ]
