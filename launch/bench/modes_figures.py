"""The modes of `bench modes`, and its arithmetic: from a run's log to figures, from figures to findings.

A run is measured between the publications of two steps, the same in every mode: before the first, queues fill; after
the second, nothing new is admitted. An *entry* is one run: `mode`, `repeat`, `threads`, and the figures of `measure`
if it is done.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from areal_lite.events import Event
from areal_lite.launch.bench.harness import ratios
from areal_lite.record.columns import Row, spread
from areal_lite.record.lanes import PAUSE_PARTS, Stretch, reading, sample_lengths

_REWARD_STEPS = 5
"""Steps averaged into one reward: those up to the one asked for."""
_BUSY = 0.05
"""A process that is idle for a smaller share of its time is the bottleneck."""
_REPEATS = 3
"""With fewer repeats the spread is uncertain, and rewards are not compared."""
_GAIN = 1.02
"""A median ratio up to this one does not count as a gain."""
MAX_STALENESS = 4
"""The largest eta of the modes."""


class Mode(NamedTuple):
    """One way to run a recipe."""

    eta: int
    """0 = generation and training take turns: asynchrony is compared with the best of these."""
    interrupt: str | None = None
    """None = the recipe's."""
    has_split: bool = True
    """Cores are split between generation and training; else each phase may have all of them."""


MODES: dict[str, Mode] = {
    "sync-colocated": Mode(0, has_split=False),
    "sync-split": Mode(0),
    # At eta 1 a trained batch makes room for exactly one batch, and `drain` has finished the one before it: so whole
    # batches are admitted at once without a further rule.
    "one-step-off": Mode(1, "drain"),
    "async-eta1": Mode(1, "recompute"),
    "async-eta4": Mode(MAX_STALENESS, "recompute"),
    "keep_kv-eta4": Mode(MAX_STALENESS, "keep_kv"),
    "drain-eta4": Mode(MAX_STALENESS, "drain"),
}
"""In the order in which tables show them."""


def measured_steps(steps: int, *, max_staleness: int) -> tuple[int, int]:
    """Return the steps at whose publications the measurement begins and ends.

    The first `max_staleness + 1` batches are generated at once, under the first weights; in the last `max_staleness`
    steps nothing is admitted. Both are left out if half of the run remains; otherwise all steps but the first count.

    >>> measured_steps(20, max_staleness=4), measured_steps(8, max_staleness=4)
    ((5, 16), (1, 8))
    """
    first, last = max_staleness + 1, steps - max_staleness
    return (first, last) if 2 * (last - first) >= steps else (1, steps)


def measure(
    rows: Sequence[Row], events: Sequence[Event], *, first: int, last: int, samples_per_step: int, slots: int
) -> dict[str, Any]:
    """Return the figures of one run between the publications of two steps.

    Args:
        rows: Of `metrics.jsonl`, one per step from 1 on.
        events: Of `events.jsonl`, each lane's in order of time.
        first: Step at whose publication measuring begins.
        last: Step at whose publication it ends.
        slots: Of one engine; shares are those of one engine, on average.
    """
    times, steps = published(events), rows[first:last]
    begin, end = times[first], times[last]
    seconds = end - begin
    generated = sum(
        row["gen_tokens_per_s"] * (row["time_s"] - before["time_s"])
        for before, row in itertools.pairwise(rows[first - 1 : last])
    )
    ages = Counter[int]()
    for row in steps:
        ages.update({int(age): count for age, count in row["age_histogram"].items()})
    lengths = list(sample_lengths(events))
    return {
        "seconds_per_step": seconds / len(steps),
        "samples_per_s": len(steps) * samples_per_step / seconds,
        "generated_tokens_per_s": generated / seconds,
        "trained_tokens_per_s": sum(row["tokens_trained"] for row in steps) / seconds,
        **_shares(events, begin=begin, end=end, slots=slots),
        "age_histogram": {str(age): ages[age] for age in sorted(ages)},
        "lengths": {"mean": statistics.fmean(lengths) if lengths else None, **percentiles(lengths)},
        "seconds": times[len(rows)] - work_begins(events),
    }


def reward_at(rows: Sequence[Row], events: Sequence[Event], *, seconds: float = math.inf) -> float | None:
    """Return the mean training reward of the last steps published within so many seconds; None if there are none.

    The clock starts when the trainer begins to wait for its first batch.
    """
    deadline, times = work_begins(events) + seconds, published(events)
    rewards = [row["reward_mean"] for row in rows if times[row["step"]] <= deadline]
    return statistics.fmean(rewards[-_REWARD_STEPS:]) if rewards else None


def percentiles(values: Sequence[int], percents: Sequence[float] = (10, 50, 90, 99, 100)) -> dict[str, int | None]:
    """Return percentiles that are values of the list; None for an empty list.

    >>> percentiles([1] * 8 + [7, 9], (50, 90, 91))
    {'p50': 1, 'p90': 7, 'p91': 9}
    """
    found = np.percentile(values, percents, method="inverted_cdf").tolist() if values else itertools.repeat(None)
    return {f"p{percent}": value for percent, value in zip(percents, found, strict=False)}


def _shares(events: Sequence[Event], *, begin: float, end: float, slots: int) -> dict[str, float]:
    run = Stretch(reading(events, begin), reading(events, end))
    # While engines drain, before a publication, the trainer waits, although its lane shows publishing.
    held_up = max(run.share("draining", lane=lane) for lane in run.workers)
    return {
        "occupancy": run.spent("slot_seconds") / ((end - begin) * slots * len(run.workers)),
        "generator_idle": run.share("idle"),
        "generator_draining": run.share("draining"),
        "generator_paused": run.share(*PAUSE_PARTS),
        "trainer_idle": run.share("waiting", lane="trainer") + held_up,
        "trainer_publishing": run.share("publishing", lane="trainer") - held_up,
    }


def published(events: Sequence[Event]) -> dict[int, float]:
    """Return when each version was published."""
    return {event["version"]: event["time"] for event in events if event["kind"] == "published"}


def work_begins(events: Sequence[Event]) -> float:
    """Return when the trainer began to wait for its first batch."""
    return min(float(event["time"]) for event in events if event["lane"] == "trainer")


def best_synchronous(entries: Sequence[Row]) -> str | None:
    """Return the synchronous mode with the highest median of samples per second; None if none was measured."""
    rates = {mode: _rates(entries, mode).values() for mode in MODES if not MODES[mode].eta}
    return max(filter(rates.get, rates), key=lambda mode: statistics.median(rates[mode]), default=None)


def compare(entries: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row per measured mode, in the order of `MODES`.

    A row has the spread of each figure over the repeats, that of the ratio of its samples per second to those of the
    best synchronous mode in the same repeat, and the histograms of all repeats together.
    """
    base = _rates(entries, best_synchronous(entries))
    lines = []
    for mode in MODES:
        done = [entry for entry in entries if entry["mode"] == mode and "samples_per_s" in entry]
        figures = dict.fromkeys(name for entry in done for name, value in entry.items() if isinstance(value, float))
        own = {repeat: rate for repeat, rate in _rates(entries, mode).items() if repeat in base}
        ages = sum((Counter(entry["age_histogram"]) for entry in done), Counter[str]())
        if done:
            lines.append({
                "mode": mode,
                "threads": done[0]["threads"],
                "repeats": len(done),
                "figures": {name: spread(e[name] for e in done if e.get(name) is not None) for name in figures},
                "ratio": spread(ratios(own.values(), (base[repeat] for repeat in own))) if own else None,
                "ages": {age: ages[age] for age in sorted(ages, key=int)},
                "lengths": done[0]["lengths"],
            })  # fmt: skip
    return lines


def findings(lines: Sequence[Row], *, best: str | None) -> list[str]:
    """Return sentences on what the table shows, above all where asynchrony does not help."""
    base = next((line for line in lines if line["mode"] == best), None)
    if base is None:
        return ["No synchronous mode was measured, so the gain of asynchrony is unknown."]
    texts = [f"The best synchronous mode is {best} ({_of(base['figures']['samples_per_s'], '.1f')} samples/s)."]
    if (fewest := min(line["repeats"] for line in lines)) < _REPEATS:
        texts.append(f"{fewest} of at least {_REPEATS} repeats: the spread is uncertain.")
    others = [line for line in lines if MODES[line["mode"]].eta and line["ratio"] is not None]
    return texts + [text for line in others for text in _finding(line, base)]


def _finding(line: Row, base: Row) -> Iterator[str]:
    """Yield whether a mode is faster than the best synchronous one, what limits it, and whether it learns less."""
    mode, ratio, figures = line["mode"], line["ratio"], line["figures"]
    times = f"{_of(ratio, '.2f')} times the best synchronous mode"
    if ratio["median"] <= _GAIN:
        yield f"{mode} does not help: {times}."
    elif ratio["low"] <= 1:
        yield f"{mode} may not help: {times}, within the spread."
    else:
        yield f"{mode} is faster: {times}."
    if figures["trainer_idle"]["median"] < _BUSY:
        yield f"In {mode} the trainer hardly waits: more asynchrony cannot make it faster."
    elif figures["generator_idle"]["median"] < _BUSY and figures["occupancy"]["median"] > 1 - 2 * _BUSY:
        yield f"In {mode} the engines are full: more asynchrony cannot make it faster."
    rewards = {"reward_equal_steps": "after as many steps", "reward_equal_time": "after as much time"}
    for name in rewards if min(line["repeats"], base["repeats"]) >= _REPEATS else ():
        own, other = figures.get(name), base["figures"].get(name)
        if own and other:
            width = max(value["high"] - value["low"] for value in (own, other))
            if other["median"] - own["median"] > 2 * width:
                against = f"reward {_of(own, '.3f')}, against {_of(other, '.3f')}"
                yield f"{mode} learns less {rewards[name]}: {against}."
                break


def _of(value: Mapping[str, float], spec: str) -> str:
    """Format a spread as `1.50 (1.40 to 1.60)`."""
    median, low, high = (format(value[name], spec) for name in ("median", "low", "high"))
    return median + (f" ({low} to {high})" if low != high else "")


def _rates(entries: Sequence[Row], mode: str | None) -> dict[int, float]:
    return {e["repeat"]: e["samples_per_s"] for e in entries if e["mode"] == mode and "samples_per_s" in e}
