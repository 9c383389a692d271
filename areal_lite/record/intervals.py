"""How sure a figure is: 95 % intervals of means, of paired differences, and pass@k from groups."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Z = 1.96
"""Standard errors on either side of a mean that hold 95 % of a normal distribution."""


class Paired(NamedTuple):
    """What became of the rows that two measurements share."""

    rows: int
    difference: float
    """Mean of the later values, minus that of the earlier ones."""
    low: float
    """Its 95 % interval."""
    high: float
    better: int
    worse: int


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean: Wilson's where each value is 0 or 1, else normal; None for one other value.

    Wilson's (1927) has a width even where all values are equal:

    >>> [round(end, 3) for end in mean_interval([1.0] * 8)]
    [0.676, 1.0]
    """
    count, mean = len(values), statistics.fmean(values)
    if set(values) <= {0.0, 1.0}:
        centre, half = mean + Z**2 / (2 * count), Z * math.sqrt(mean * (1 - mean) / count + (Z / (2 * count)) ** 2)
        low, high = ((centre + sign * half) / (1 + Z**2 / count) for sign in (-1, 1))
        return max(0.0, low), min(1.0, high)
    if count == 1:
        return None
    half = Z * _standard_error(values)
    return mean - half, mean + half


def paired(before: Mapping[str, float], after: Mapping[str, float]) -> Paired | None:
    """Compare values of the rows that both have, by row; None for fewer than two.

    Pairs take out how hard each row is: the interval is that of the mean of the rows' own differences.

    >>> paired({"a": 0.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "b": 1.0, "d": 0.0})[:2]
    (2, 0.5)
    """
    changes = [after[row] - before[row] for row in before if row in after]
    if len(changes) < 2:
        return None
    mean, half = statistics.fmean(changes), Z * _standard_error(changes)
    better, worse = (sum(sign * change > 0 for change in changes) for sign in (1, -1))
    return Paired(len(changes), mean, mean - half, mean + half, better, worse)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the chance that one of k samples is right, unbiased from `right` of at least k samples.

    1 - C(samples - right, k) / C(samples, k): arXiv 2107.03374, equation 1.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))
