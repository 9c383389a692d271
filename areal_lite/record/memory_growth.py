"""A warning on a process whose memory keeps growing: a leak ends a long run, at the worst moment."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from areal_lite.record.run_files import numbers

_STEPS = 60
"""Rows that are looked at: the last ones."""
_PARTS = 6
"""Consecutive parts of these rows; memory that keeps growing is higher in each than in the one before."""
_LEAST_MIB, _LEAST_SHARE = 100, 0.1
"""Growth over these rows that is worth a warning: at least both."""


def growth_warning(rows: Sequence[Mapping[str, Any]]) -> str:
    """Name the process whose memory grew steadily over the last 60 steps; empty where none did.

    Example: 1,000 MiB that become 1,120 MiB, each tenth row larger than the one ten rows before, give a warning; 1,000
    that become 1,500 in the first ten rows and stay there do not.
    """
    last = rows[-_STEPS:]
    if len(last) < _STEPS:
        return ""
    memory = [numbers(row.get("memory_mb")) for row in last]
    for name in memory[-1]:
        values = [row[name] for row in memory if name in row]
        size = len(values) // _PARTS
        means = [fmean(values[part * size : (part + 1) * size]) for part in range(_PARTS if size else 0)]
        is_steady = all(before < after for before, after in pairwise(means))
        if is_steady and means and means[-1] - means[0] > max(_LEAST_MIB, _LEAST_SHARE * means[0]):
            return (
                f"the memory of {name} grew from {means[0]:,.0f} to {means[-1]:,.0f} MiB in the last {_STEPS} steps, "
                "and keeps growing: see memory_mb in the report. Fix: look for what the verifier, workflow or loss "
                "function keeps; run.checkpoint_every limits what is lost if memory runs out"
            )
    return ""
