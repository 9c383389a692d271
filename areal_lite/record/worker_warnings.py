"""Warnings on single processes: one whose memory keeps growing, and an engine at the end of a slow link."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from areal_lite.record.run_files import number, numbers

STEPS = 60
"""Rows that are looked at: the last ones."""
_PARTS = 6
"""Consecutive parts of these rows; memory that keeps growing is higher in each than in the one before."""
_LEAST_MIB, _LEAST_SHARE = 100, 0.1
"""Growth over these rows that is worth a warning: at least both."""
_PUBLICATIONS, _SLOWER, _LEAST_S = 5, 3, 1.0
"""An engine is slow if it was so many times slower than the others' median, and publishing took so many seconds, in
each of the last publications."""


def growth_warning(rows: Sequence[Mapping[str, Any]]) -> str:
    """Name the process whose memory grew steadily over the last 60 steps; empty where none did.

    Example: 1,000 MiB that become 1,120 MiB, each tenth row larger than the one ten rows before, give a warning; 1,000
    that become 1,500 in the first ten rows and stay there do not.
    """
    last = rows[-STEPS:]
    if len(last) < STEPS:
        return ""
    memory = [numbers(row.get("memory_mb")) for row in last]
    for name in memory[-1]:
        values = [row[name] for row in memory if name in row]
        size = len(values) // _PARTS
        means = [fmean(values[part * size : (part + 1) * size]) for part in range(_PARTS if size else 0)]
        is_steady = all(before < after for before, after in pairwise(means))
        if is_steady and means and means[-1] - means[0] > max(_LEAST_MIB, _LEAST_SHARE * means[0]):
            return (
                f"the memory of {name} grew from {means[0]:,.0f} to {means[-1]:,.0f} MiB in the last {STEPS} steps, "
                "and keeps growing: see memory_mb in the report. Fix: look for what the verifier, workflow or loss "
                "function keeps; run.checkpoint_every limits what is lost if memory runs out"
            )
    return ""


def link_warning(rows: Sequence[Mapping[str, Any]]) -> str:
    """Name the engine that received the last five publications far more slowly than the others; empty without one."""
    last = [row for row in rows[-_PUBLICATIONS:] if (number(row.get("publish_s")) or 0) > _LEAST_S]
    speeds = [numbers(row.get("publish_mb_s")) for row in last]
    for name in speeds[-1] if len(speeds) == _PUBLICATIONS else ():
        of_name = [row.get(name, float("inf")) for row in speeds]
        others = [median([speed for other, speed in row.items() if other != name] or [0.0]) for row in speeds]
        if all(_SLOWER * own < other for own, other in zip(of_name, others, strict=True)):
            return (
                f"{name} received the last {_PUBLICATIONS} publications at {of_name[-1]:.0f} MB/s, the others at "
                f"{others[-1]:.0f} MB/s: check the network of its node (areal-lite doctor --cluster measures it)"
            )
    return ""
