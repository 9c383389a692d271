"""Which tokens the staleness bound lets train: by the length of their sample, and by the quarter of it they are in.

The longer a sample and the nearer to its beginning, the older a token is when its batch is taken: what is too old is no
fair part of what was generated (docs/staleness.md).

Shape letter: `Q` quarters.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
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


def warning(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say what hardly trains as it is too old, by the rows of the last ten steps; empty as long as most does."""
    last, found = rows[-_STEPS:], by_quarter(rows[-_STEPS:])
    if len(last) < _STEPS or not found:
        return ""
    ledger = last[-1]["ledger"]
    lost = ledger.get("stale", 0) + ledger.get("failed(too_slow)", 0)
    advice = "raise queue.max_staleness, with queue.max_ahead at what it is now (docs/staleness.md)"
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
