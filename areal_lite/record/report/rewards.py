"""Charts of single rewards: their distribution, their spread within groups, and pass@k.

They come from `verify` events, so that groups count that no batch trained; those of older runs hold no rewards.
"""

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean, pstdev

import numpy as np

from areal_lite.record.intervals import pass_at_k
from areal_lite.record.report.charts import Chart, Line, as_shares, lines, stacked
from areal_lite.record.report.curves import STEPS
from areal_lite.record.report.read import RunFiles
from areal_lite.record.run_files import numbers, table

_WINDOW = 10
"""Steps that a point covers: its own and those before it."""
_MOST_VALUES = 6
"""Different rewards that each get a band; more are put into as many bins."""

Rewards = Sequence[float]
"""[G] of a group, failed verifications left out."""


def groups_by_step(run: RunFiles, *, watched: str = "") -> dict[int, list[Rewards]]:
    """Return the scored groups by the trainer steps that were complete when they were scored.

    Args:
        watched: A verifier of `reward_watch`, in place of the trained reward.
    """
    known = (event for event in run.events if event["kind"] == "published" and event.get("version") is not None)
    published = sorted((event["time"], event["version"]) for event in known)
    times, steps = [time for time, _ in published], [version for _, version in published]
    steps.insert(0, steps[0] - 1 if steps else 0)
    found = dict[int, list[Rewards]]()
    for event in run.events:
        if event["kind"] != "verify":
            continue
        rewards = [one for one in event.get("rewards") or () if one is not None]
        if watched:
            rewards = list(numbers(table(event.get("watched")).get(watched)).values())
        if rewards:
            found.setdefault(steps[bisect.bisect(times, event["end"])], []).append(rewards)
    return dict(sorted(found.items()))


def windows(by_step: dict[int, list[Rewards]]) -> dict[int, list[Rewards]]:
    """Return, for each step, the groups of ten steps."""
    return {
        step: [group for at in range(step - _WINDOW + 1, step + 1) for group in by_step.get(at, ())] for step in by_step
    }


def reward_charts(run: RunFiles) -> Iterator[Chart | None]:
    """Draw what the samples of ten steps earned, how far the samples of a group differ, and pass@k."""
    by_step = groups_by_step(run)
    recent = windows(by_step)
    steps, note = list(by_step), f"each point: all groups scored in {_WINDOW} steps, also those that no batch trained"
    edges = _edges(by_step)
    shares = {step: as_shares(_counts(recent[step], edges)) for step in steps}
    names = sorted({name for share in shares.values() for name in share}, key=lambda name: float(name.split()[0]))
    bands = [Line(name=name, x=steps, y=[shares[step].get(name, 0.0) for step in steps]) for name in names]
    yield stacked("distribution of rewards", bands, x=STEPS, y="share of samples", note=note, range=[0, 1])
    differ = [fmean(len(set(group)) > 1 for group in recent[step]) for step in steps]
    spread = [fmean(map(pstdev, recent[step])) for step in steps]
    curves = [Line(name="groups whose rewards differ", x=steps, y=differ)]
    curves.append(Line(name="standard deviation within a group", x=steps, y=spread))
    yield lines("spread within groups", curves, x=STEPS, y="share, reward", rangemode="tozero", note=note)
    yield pass_chart(recent)


def _edges(by_step: dict[int, list[Rewards]]) -> list[float]:
    """Return the different values, or the edges of the bins if they are too many."""
    values = sorted({reward for groups in by_step.values() for group in groups for reward in group})
    return np.linspace(values[0], values[-1], _MOST_VALUES + 1).tolist() if len(values) > _MOST_VALUES else values


def _counts(groups: Sequence[Rewards], edges: list[float]) -> Counter[str]:
    rewards, texts = [reward for group in groups for reward in group], _apart(edges)
    if len(edges) <= _MOST_VALUES:
        return Counter(texts[edges.index(reward)] for reward in rewards)
    counts, _ = np.histogram(rewards, bins=edges)
    return Counter({f"{low} to {high}": int(count) for (low, high), count in zip(pairwise(texts), counts, strict=True)})


def _apart(values: Sequence[float]) -> list[str]:
    """Return values with as few digits as keep them apart, at least three."""
    texts = ([f"{value:.{digits}g}" for value in values] for digits in range(3, 18))
    return next(found for found in texts if len(set(found)) == len(found))


def pass_chart(recent: dict[int, list[Rewards]], *, title: str = "pass@k") -> Chart | None:
    """Draw pass@k of the groups of each step; None where no sample earned 1."""
    right = {step: [(len(group), sum(one >= 1 for one in group)) for group in recent[step]] for step in recent}
    most = max((size for found in right.values() for size, _ in found), default=0)
    if not any(count for found in right.values() for _, count in found):
        return None
    curves = []
    for k in (2**power for power in range(most.bit_length())):
        pairs = {step: [pair for pair in found if pair[0] >= k] for step, found in right.items()}
        known = {step: fmean(pass_at_k(*pair, k) for pair in found) for step, found in pairs.items() if found}
        curves.append(Line(name=f"pass@{k}", x=list(known), y=list(known.values())))
    note = "chance that one of k samples of a prompt earns at least 1, unbiased from its group"
    return lines(title, curves, x=STEPS, y="share of prompts", range=[0, 1], note=note)
