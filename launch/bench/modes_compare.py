"""From measured runs to what they say: the best threads, a line per mode, and findings in words. Pure functions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal_lite.launch.bench.measures import Spread, ratios, spread
from areal_lite.launch.bench.modes import MODES

__all__ = ["best_setting", "best_synchronous", "compare", "findings"]

Entry = Mapping[str, Any]
"""One run: `mode`, `repeat`, `threads`, and the figures of `measures.measure` where it is done."""

FIGURES = (
    "samples_per_s", "generated_tokens_per_s", "trained_tokens_per_s", "seconds_per_step", "occupancy",
    "generator_idle", "generator_draining", "generator_paused", "trainer_idle", "trainer_publishing", "seconds",
    "reward_equal_steps", "reward_equal_time", "accuracy_end",
)  # fmt: skip
_BUSY = 0.05
"""Whoever idles for less than this share is what the others wait for."""
_REPEATS = 3
"""Fewer say little about the spread, and nothing about rewards."""
_GAIN = 1.02
"""A median ratio up to this one is no gain worth a word."""


def best_setting(entries: Iterable[Entry]) -> str | None:
    """Return the threads of the fastest of one mode's search runs; None where none is done."""
    done = [entry for entry in entries if "samples_per_s" in entry]
    return str(max(done, key=lambda entry: entry["samples_per_s"])["threads"]) if done else None


def best_synchronous(entries: Sequence[Entry]) -> str | None:
    """Return the synchronous mode with the highest median of samples per second; None where none was measured."""
    medians = {
        mode: spread(list(values.values()))["median"]
        for mode, settings in MODES.items()
        if settings.is_synchronous and (values := _by_repeat(entries, mode))
    }
    return max(medians, key=lambda mode: medians[mode]) if medians else None


def compare(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return one line per measured mode, in the order of `MODES`.

    Args:
        entries: The measured runs, unfinished ones included.

    Returns:
        Per mode `figures`: the spread of each over the repeats, `ratio`: that of its samples per second to the best
        synchronous mode's of the same repeat, and the histograms of all repeats together.
    """
    best = best_synchronous(entries)
    base = {} if best is None else _by_repeat(entries, best)
    lines = []
    for mode in MODES:
        done = [entry for entry in entries if entry["mode"] == mode and "samples_per_s" in entry]
        if not done:
            continue
        known = {name: [e[name] for e in done if e.get(name) is not None] for name in FIGURES}
        over_best = ratios(_by_repeat(entries, mode), base)
        lines.append(
            {
                "mode": mode,
                "threads": done[0]["threads"],
                "repeats": len(done),
                "figures": {name: spread(values) for name, values in known.items() if values},
                "ratio": spread(over_best) if over_best else None,
                "ages": _sum(entry["age_histogram"] for entry in done),
                "lengths": done[0]["lengths"],
            }
        )
    return lines


def findings(lines: Sequence[Mapping[str, Any]], *, best: str | None) -> list[str]:
    """Say in words what the table shows, above all where asynchrony does not help.

    Args:
        lines: Of `compare`.
        best: The best synchronous mode.
    """
    by_mode = {line["mode"]: line for line in lines}
    if best is None or best not in by_mode:
        return ["No synchronous mode was measured, so nothing can be said about what asynchrony gains."]
    base = by_mode[best]
    texts = [f"The best synchronous mode is {best} ({_of(base['figures']['samples_per_s'], '.1f')} samples/s)."]
    others = [line for line in lines if not MODES[line["mode"]].is_synchronous and line["ratio"] is not None]
    if (fewest := min(line["repeats"] for line in lines)) < _REPEATS:
        texts.append(f"{fewest} of at least {_REPEATS} repeats: the spread is hardly known: take figures with care.")
    texts += [_gain(line) for line in others]
    texts += [text for line in others if (text := _bottleneck(line))]
    texts += [text for line in others if (text := _reward(line, base))]
    return texts


def _gain(line: Mapping[str, Any]) -> str:
    ratio, mode = line["ratio"], line["mode"]
    if ratio["median"] <= _GAIN:
        return f"{mode} does not help: {_of(ratio, '.2f')} times the best synchronous mode."
    if ratio["low"] <= 1:
        return f"{mode} may not help: {_of(ratio, '.2f')} times the best synchronous mode, within the spread."
    return f"{mode} is faster: {_of(ratio, '.2f')} times the best synchronous mode."


def _bottleneck(line: Mapping[str, Any]) -> str | None:
    figures, mode = line["figures"], line["mode"]
    if figures["trainer_idle"]["median"] < _BUSY:
        return f"In {mode} the trainer hardly waits: more asynchrony cannot make it faster."
    if figures["generator_idle"]["median"] < _BUSY and figures["occupancy"]["median"] > 1 - 2 * _BUSY:
        return f"In {mode} the engines are full: more asynchrony cannot make it faster."
    return None


def _reward(line: Mapping[str, Any], base: Mapping[str, Any]) -> str | None:
    if min(line["repeats"], base["repeats"]) < _REPEATS:
        return None
    for name, what in (("reward_equal_steps", "after as many steps"), ("reward_equal_time", "after as much time")):
        own, other = line["figures"].get(name), base["figures"].get(name)
        if own and other and other["median"] - own["median"] > 2 * max(_width(own), _width(other)):
            return f"{line['mode']} learns less {what}: reward {_of(own, '.3f')}, against {_of(other, '.3f')}."
    return None


def _width(value: Spread) -> float:
    return value["high"] - value["low"]


def _of(value: Spread, spec: str) -> str:
    """Write a spread as `1.50 (1.40 to 1.60)`."""
    low, high = format(value["low"], spec), format(value["high"], spec)
    return format(value["median"], spec) + (f" ({low} to {high})" if low != high else "")


def _by_repeat(entries: Sequence[Entry], mode: str) -> dict[int, float]:
    return {e["repeat"]: e["samples_per_s"] for e in entries if e["mode"] == mode and "samples_per_s" in e}


def _sum(histograms: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for histogram in histograms:
        for key, count in histogram.items():
            total[key] = total.get(key, 0) + count
    return {key: total[key] for key in sorted(total, key=int)}
