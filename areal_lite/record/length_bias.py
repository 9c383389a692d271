"""Counts how many tokens the staleness bound lets train, by sample length and by quarter; warns where few are left.

The longer a sample, and the nearer to its beginning, the older a token is when its batch is taken. So a tight bound
trains less of long samples, and least of their beginnings (docs/objective.md).

Shape letter: `Q` quarters.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_lite.record.run_files import has_shape, number, numbers, table

EDGES = tuple(4**power for power in range(2, 9))
"""The longest sample of each class of lengths but the last, in tokens."""
LENGTHS = (*(f"{shorter + 1}-{edge}" for shorter, edge in pairwise((0, *EDGES))), f"{EDGES[-1] + 1}-")
"""The names of the classes."""
STEPS = 10
"""Latest steps that a warning looks at."""
_MIN_TRAINED = 0.5
"""A quarter of whose tokens a smaller share trains is worth a warning."""
_RARE = 0.01
"""A quarter that holds at most this share of all tokens is too small to judge."""
_MAX_LOST = 0.05
"""Share of groups that may be too old to train before a warning is due."""
_COUNTS = tuple[tuple[int, int, int, int], tuple[int, int, int, int]]


def by_quarter(rows: Sequence[Mapping[str, Any]]) -> dict[str, npt.NDArray[np.int64]]:
    """Add up `tokens_by_quarter` of rows of metrics, by class of lengths, shortest first.

    Returns:
        [2, Q] each: tokens, and those of them that train.
    """
    found = [table(row.get("tokens_by_quarter")) for row in rows]
    counts = {name: [row[name] for row in found if has_shape(row.get(name), _COUNTS)] for name in LENGTHS}
    return {name: np.sum(of_name, axis=0) for name, of_name in counts.items() if of_name}


def stale_warning(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a warning of samples too old to train, by the rows of the last ten steps; empty while most train."""
    last, found = rows[-STEPS:], by_quarter(rows[-STEPS:])
    if len(last) < STEPS or not found:
        return ""
    ledger = numbers(last[-1].get("ledger"))
    trained, lost = ledger.get("trained", 0), ledger.get("stale", 0) + ledger.get("failed(too_slow)", 0)
    advice = "Fix: in a new run, raise queue.max_staleness and set queue.max_ahead to its old value (docs/objective.md)"
    if lost > _MAX_LOST * (lost + trained):
        return (
            f"{lost:.0f} groups were too old to train, {trained:.0f} trained: long samples train less than short ones. "
            f"{advice}"
        )
    tokens_LQ, trained_LQ = np.array(list(found.values())).swapaxes(0, 1)
    is_known_LQ = tokens_LQ > _RARE * tokens_LQ.sum()
    shares_LQ = np.where(is_known_LQ, trained_LQ / tokens_LQ.clip(1), 1.0)
    length, quarter = np.unravel_index(shares_LQ.argmin(), shares_LQ.shape)
    if shares_LQ[length, quarter] >= _MIN_TRAINED:
        return ""
    share = trained_LQ.sum() / tokens_LQ.sum()
    return (
        f"in the last {STEPS} steps only {shares_LQ.min():.0%} of quarter {quarter + 1} of the samples of "
        f"{list(found)[length]} tokens was recent enough to train (all tokens: {share:.0%}): the beginnings of long "
        f"samples train less. {advice}"
    )


def spread_warning(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a warning if in the last ten steps no group had rewards that differ, with what may help; else empty."""
    last, page = rows[-STEPS:], "docs/first.md#when-nothing-is-learned"
    rewards = [reward for row in last if (reward := number(row.get("reward_mean"))) is not None]
    if len(rewards) < STEPS or any(row.get("varied_groups_fraction", 1) for row in last):
        return ""
    earlier = [reward for row in rows if (reward := number(row.get("reward_mean"))) is not None]
    fact = f"nothing to learn from in the last {STEPS} steps, as in no group did the rewards differ: "
    if not math.isclose(min(rewards), max(rewards), rel_tol=1e-5, abs_tol=1e-9):
        return (
            f"{fact}the samples of a prompt all earned the same, {fmean(rewards):.3g} on average. Fix: raise "
            f"rollout.temperature in a new run, or resume from where they differed, with a lower trainer.lr ({page})"
        )
    is_above_lowest = rewards[-1] > min(earlier) and not math.isclose(rewards[-1], min(earlier), rel_tol=1e-5)
    if rewards[-1] >= 1 or is_above_lowest:
        return (
            f"{fact}every sample earned {rewards[-1]:.3g}. If that is the verifier's maximum, the task is solved: take "
            f"harder prompts (otherwise see {page})"
        )
    return (
        f"{fact}no sample earned more than {rewards[-1]:.3g}. Fix: train on correct answers first (areal-lite sft), or "
        f"give easier prompts, more samples of each (queue.samples_per_group), or a reward for partial answers ({page})"
    )
