"""The arithmetic of `bench modes`: from a run's rows and events to its figures, and from runs to comparisons.

Pure functions; `modes_results.py` reads the files. A run is measured from the publication of one step to that of
another, the same steps in every mode: before them queues fill, behind them nothing new is admitted.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.events import Event
from areal_lite.record.lane_clock import PAUSE_PARTS, LaneClock, fraction, rollout_clock, trainer_clock

__all__ = ["Spread", "measure", "measured_steps", "percentile", "ratios", "reward_at", "spread"]

Spread = dict[str, float]
"""`median`, `low` and `high` of the repeats."""

_Reading = dict[str, float]
"""Seconds per state of a lane."""

_REWARD_STEPS = 5
"""Steps averaged into one reward: those up to the one asked for."""
_PERCENTILES = (10, 50, 90, 99, 100)


def measured_steps(steps: int, *, max_staleness: int) -> tuple[int, int]:
    """Return the steps at whose publication measuring begins and ends.

    At first `max_staleness + 1` batches are generated at once, under the first weights; over the last `max_staleness`
    steps admission runs dry. Both are left out where half the run remains, else all but the first step counts.

    Args:
        steps: Of the run.
        max_staleness: The largest of the modes that are compared.

    >>> measured_steps(20, max_staleness=4), measured_steps(8, max_staleness=4)
    ((5, 16), (1, 8))
    """
    first, last = max_staleness + 1, steps - max_staleness
    return (first, last) if 2 * (last - first) >= steps else (1, steps)


def measure(
    rows: Sequence[Mapping[str, Any]],
    events: Sequence[Event],
    *,
    first: int,
    last: int,
    samples_per_step: int,
    slots: int,
) -> dict[str, Any]:
    """Return the figures of one run between the publications of two steps.

    Args:
        rows: Of `metrics.jsonl`, one per step from 1 on.
        events: Of `events.jsonl`, each lane's in order of time.
        first: Step at whose publication measuring begins.
        last: Step at whose publication it ends.
        samples_per_step: B.
        slots: Of one engine.

    Returns:
        Rates per second, shares of the time (of one engine, on average), and histograms.
    """
    published = _published(events)
    begin, end = published[first], published[last]
    seconds, steps = end - begin, rows[first:last]
    before_step = {row["step"]: before["time_s"] for before, row in itertools.pairwise(rows)}
    generated = sum(row["gen_tokens_per_s"] * (row["time_s"] - before_step[row["step"]]) for row in steps)
    return {
        "seconds_per_step": seconds / len(steps),
        "samples_per_s": len(steps) * samples_per_step / seconds,
        "generated_tokens_per_s": generated / seconds,
        "trained_tokens_per_s": sum(row["tokens_trained"] for row in steps) / seconds,
        **_shares(events, begin=begin, end=end, slots=slots),
        "age_histogram": _age_histogram(steps),
        "lengths": _lengths(events),
        "seconds": published[len(rows)] - _work_begins(events),
    }


def reward_at(rows: Sequence[Mapping[str, Any]], events: Sequence[Event], *, seconds: float = math.inf) -> float | None:
    """Return the mean training reward of the last steps that were published by a time.

    Args:
        rows: Of `metrics.jsonl`.
        events: Of `events.jsonl`.
        seconds: Since the trainer began to wait for its first batch; without it the end of the run counts.

    Returns:
        None where no step was published by then.
    """
    deadline, published = _work_begins(events) + seconds, _published(events)
    rewards = [row["reward_mean"] for row in rows if published[row["step"]] <= deadline]
    return statistics.fmean(rewards[-_REWARD_STEPS:]) if rewards else None


def spread(values: Sequence[float]) -> Spread:
    """Return median, lowest and highest of at least one value."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratios(values: Mapping[int, float], over: Mapping[int, float]) -> list[float]:
    """Return the ratios within each repeat that both have: the machine was the same then, or nearly.

    >>> ratios({0: 3.0, 1: 5.0}, {0: 2.0, 1: 2.0, 2: 9.0})
    [1.5, 2.5]
    """
    return [value / over[repeat] for repeat, value in values.items() if repeat in over]


def percentile(counts: Mapping[int, int], percent: float) -> int | None:
    """Return the smallest value that at least `percent` % of the values do not exceed; None of nothing.

    >>> percentile({1: 8, 7: 1, 9: 1}, 50), percentile({1: 8, 7: 1, 9: 1}, 90), percentile({1: 8, 7: 1, 9: 1}, 91)
    (1, 7, 9)
    """
    wanted, seen = math.ceil(sum(counts.values()) * percent / 100), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= wanted:
            return value
    return None


def _shares(events: Sequence[Event], *, begin: float, end: float, slots: int) -> dict[str, float]:
    lanes = sorted({event["lane"] for event in events if event["lane"].startswith("rollout/")})
    engines = [_readings(events, lane, rollout_clock, begin=begin, end=end) for lane in lanes]
    trainer = _readings(events, "trainer", trainer_clock, begin=begin, end=end)

    def share(*states: str) -> float:
        return statistics.fmean(fraction(*readings, *states) for readings in engines)

    # A publication begins when the last engine has drained: until then the trainer waits, whatever its lane says.
    held_up = max(fraction(*readings, "draining") for readings in engines)
    busy = sum(after.get("slot_seconds", 0.0) - before.get("slot_seconds", 0.0) for before, after in engines)
    return {
        "occupancy": busy / ((end - begin) * slots * len(lanes)),
        "generator_idle": share("idle"),
        "generator_draining": share("draining"),
        "generator_paused": share(*PAUSE_PARTS),
        "trainer_idle": fraction(*trainer, "waiting") + held_up,
        "trainer_publishing": fraction(*trainer, "publishing") - held_up,
    }


def _readings(events: Sequence[Event], lane: str, clock: Any, *, begin: float, end: float) -> tuple[_Reading, _Reading]:
    """Read a lane's clock at two times; a clock cannot be read at a time before the event it was last fed."""

    def read(time: float) -> _Reading:
        lane_clock: LaneClock = clock()
        for event in events:
            if event["lane"] == lane and event["time"] <= time:
                lane_clock.feed(event)
        return lane_clock.read(time)

    return read(begin), read(end)


def _published(events: Sequence[Event]) -> dict[int, float]:
    return {event["version"]: event["time"] for event in events if event["kind"] == "published"}


def _work_begins(events: Sequence[Event]) -> float:
    return min(float(event["time"]) for event in events if event["lane"] == "trainer")


def _age_histogram(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    ages = Counter[int]()
    for row in rows:
        ages.update({int(age): count for age, count in row["age_histogram"].items()})
    return {str(age): ages[age] for age in sorted(ages)}


def _lengths(events: Sequence[Event]) -> dict[str, float | None]:
    """Tokens of all samples of the run: their mean, and percentiles."""
    counts = Counter(int(s["tokens"]) for event in events if event["kind"] == "group" for s in event["samples"])
    total = sum(tokens * count for tokens, count in counts.items())
    return {
        "mean": total / counts.total() if counts else None,
        **{f"p{percent}": percentile(counts, percent) for percent in _PERCENTILES},
    }
