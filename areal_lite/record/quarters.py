"""Which tokens the staleness bound lets train: by the length of their sample, and by the quarter of it they are in.

And the warnings on rows: of too much that is stale, and of rewards that do not differ.

The longer a sample and the nearer to its beginning, the older a token is when its batch is taken: what is too old is no
fair part of what was generated (docs/objective.md).

Shape letter: `Q` quarters.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

EDGES = tuple(4**power for power in range(2, 9))
"""The longest samples of each class of lengths but the last, in tokens."""
LENGTHS = (*(f"{shorter + 1}-{edge}" for shorter, edge in pairwise((0, *EDGES))), f"{EDGES[-1] + 1}-")
"""The names of the classes."""
_STEPS = 10
"""Steps that a warning looks back on."""
_LEAST = 0.5
"""Share of a quarter's tokens below which a warning is due."""
_RARE = 0.01
"""Share of all tokens up to which a quarter says nothing yet."""
_MAX_LOST = 0.05
"""Share of whole groups that may be too old before a warning is due."""


def by_quarter(rows: Sequence[Mapping[str, Any]]) -> dict[str, npt.NDArray[np.int64]]:
    """Add up `tokens_by_quarter` over rows of metrics: tokens, and those that train, [2, Q], shortest samples first."""
    found = [row.get("tokens_by_quarter") or {} for row in rows]
    of_length = {name: [row[name] for row in found if name in row] for name in LENGTHS}
    return {name: np.sum(counts, axis=0) for name, counts in of_length.items() if counts}


def stale_warning(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say what hardly trains as it is too old, by the rows of the last ten steps; empty as long as most does."""
    last, found = rows[-_STEPS:], by_quarter(rows[-_STEPS:])
    if len(last) < _STEPS or not found:
        return ""
    ledger = last[-1]["ledger"]
    lost = ledger.get("stale", 0) + ledger.get("failed(too_slow)", 0)
    advice = "raise queue.max_staleness, with queue.max_ahead at what it is now (docs/objective.md)"
    if lost > _MAX_LOST * (lost + ledger["trained"]):
        return f"{lost} groups were too old to train, {ledger['trained']} trained: long samples train less; {advice}"
    tokens_LQ, trained_LQ = np.array(list(found.values())).swapaxes(0, 1)
    known_LQ = tokens_LQ > _RARE * tokens_LQ.sum()
    shares_LQ = np.where(known_LQ, trained_LQ / tokens_LQ.clip(1), 1.0)
    length, quarter = np.unravel_index(shares_LQ.argmin(), shares_LQ.shape)
    if shares_LQ[length, quarter] >= _LEAST:
        return ""
    return (
        f"of quarter {quarter + 1} of the samples of {list(found)[length]} tokens only {shares_LQ.min():.0%} was young "
        f"enough to train in the last {_STEPS} steps, of all tokens {trained_LQ.sum() / tokens_LQ.sum():.0%}: the "
        f"beginnings of long samples train less; {advice}"
    )


def spread_warning(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say that no group of the last ten steps had rewards that differ, and what may help; empty where one had."""
    last, page = rows[-_STEPS:], "docs/first.md#when-nothing-is-learned"
    if len(last) < _STEPS or any(row.get("varied_groups_fraction", 1) for row in last):
        return ""
    rewards, lowest = [row["reward_mean"] for row in last], min(row["reward_mean"] for row in rows)
    seen = f"nothing to learn from in the last {_STEPS} steps, as in no group did the rewards differ: "
    if not math.isclose(min(rewards), max(rewards), rel_tol=1e-5, abs_tol=1e-9):
        return (
            f"{seen}the samples of a prompt all earned the same, {fmean(rewards):.3g} in the mean: raise "
            f"rollout.temperature, or go back to where they still differed, with a lower trainer.lr ({page})"
        )
    if rewards[-1] >= 1 or (rewards[-1] > lowest and not math.isclose(rewards[-1], lowest, rel_tol=1e-5)):
        return (
            f"{seen}every sample earned {rewards[-1]:.3g}; where that is the most that the verifier gives, the task is "
            f"solved, and harder prompts are needed (else {page})"
        )
    return (
        f"{seen}no sample earned more than {rewards[-1]:.3g}; show the model right answers first (areal-lite sft), or "
        f"give it easier prompts, more samples of each (queue.samples_per_group), or a reward for part of the way "
        f"({page})"
    )
