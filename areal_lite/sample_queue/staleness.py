"""The staleness bound as arithmetic over integers.

The ledger uses it to decide how many groups may be admitted, which batch may be taken and which group still holds a
trainable token; the trainer, which tokens of a batch may carry a gradient. It keeps no state.

Shape letter: `T` output tokens of one sample.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from areal_lite.types import GIVEN, VersionSpan


def admission_capacity(
    num_outstanding: int, *, version: int, total_steps: int, max_ahead: int, groups_per_step: int
) -> int:
    """Return how many more groups may be admitted now, never negative.

    At most `min(max_ahead + 1, total_steps - version) * groups_per_step` groups are outstanding at once: the batch that
    is being trained and `max_ahead` more, but never more than the remaining steps can train.

    Args:
        num_outstanding: Admitted groups that have not ended.
        version: Completed trainer steps.
        total_steps: Trainer steps of the whole run.
        max_ahead: Batches beside the one being trained, >= 0; eta unless the recipe asks for fewer.
        groups_per_step: Groups that one trainer step trains.

    Source:
        arXiv 2505.24298 eq. 3, counting what is outstanding instead of everything ever submitted, so that
        filtered groups, skipped steps and resumes cannot move the bound.

    >>> [admission_capacity(9, version=v, total_steps=5, max_ahead=2, groups_per_step=4) for v in range(6)]
    [3, 3, 3, 0, 0, 0]
    """
    return max(0, min(max_ahead + 1, total_steps - version) * groups_per_step - num_outstanding)


def age_limit(max_staleness: int, *, on_stale: str) -> float:
    """Return the largest age at which a token trains: eta, or any age under `on_stale: keep`."""
    return math.inf if on_stale == "keep" else max_staleness


def is_over_age(token_version: int, *, version: int, max_staleness: float) -> bool:
    """Return whether a token of `token_version` is too old to train at `version`: `version - token_version > eta`."""
    return version - token_version > max_staleness


def token_ages(spans: Sequence[VersionSpan], *, version: int) -> npt.NDArray[np.int32]:
    """Return each token's age, trainer version minus token version.

    Args:
        spans: Version spans that cover the tokens 0..T without gaps.
        version: Trainer version when the batch was taken.

    Returns:
        [T] ages in trainer steps; -1 for given tokens, which no model produced.

    >>> token_ages([VersionSpan(version=3, start=0, end=2), VersionSpan(version=5, start=2, end=3)], version=5)
    array([2, 2, 0], dtype=int32)
    """
    ages = np.array([-1 if span.version == GIVEN else version - span.version for span in spans], dtype=np.int32)
    return np.repeat(ages, [span.end - span.start for span in spans])


def own_mask(spans: Sequence[VersionSpan]) -> npt.NDArray[np.bool_]:
    """Return which tokens the model produced, [T]: all but the given ones.

    >>> own_mask([VersionSpan(version=3, start=0, end=2), VersionSpan(version=-1, start=2, end=3)])
    array([ True,  True, False])
    """
    return np.repeat([span.version != GIVEN for span in spans], [span.end - span.start for span in spans])


def trainable_mask(spans: Sequence[VersionSpan], *, version: int, max_staleness: float) -> npt.NDArray[np.bool_]:
    """Return which tokens may carry a gradient: those that the model produced, of age <= eta.

    Args:
        spans: Version spans that cover the tokens 0..T without gaps, which `Sample` checks.
        version: Trainer version when the batch was taken.
        max_staleness: eta >= 0, or any other `age_limit`.

    Returns:
        [T] booleans.
    """
    ages = token_ages(spans, version=version)
    return (ages >= 0) & (ages <= max_staleness)


def num_trainable(spans: Sequence[VersionSpan], *, version: int, max_staleness: float) -> int:
    """Count the model's tokens of age <= eta, without building the mask.

    >>> spans = [VersionSpan(version=3, start=0, end=2), VersionSpan(version=5, start=2, end=3)]
    >>> num_trainable(spans, version=5, max_staleness=1)
    1
    """
    return sum(
        span.end - span.start
        for span in spans
        if span.version != GIVEN and not is_over_age(span.version, version=version, max_staleness=max_staleness)
    )


def may_leave_behind(
    admitted_versions: Iterable[int] | Mapping[int, int], *, version: int, max_staleness: int, groups_per_step: int
) -> bool:
    """Return whether a batch may be taken at `version` if these groups stay behind (`on_stale: wait`).

    A group admitted at `a` must be in a batch taken at `a + eta` or earlier. The batches of the versions
    `version + 1 .. version + k` have room for `k * groups_per_step` groups, so for every k = 0..eta at most that many
    of those left behind may be due by `version + k`. Otherwise a later step would be forced over the bound.

    Args:
        admitted_versions: One per group left behind, in any order, or how many of each; no token of the group is older.
        version: Trainer version at which the batch would be taken.
        max_staleness: eta >= 0.
        groups_per_step: Groups that one trainer step trains.

    >>> may_leave_behind([3], version=4, max_staleness=1, groups_per_step=2)      # due now
    False
    >>> may_leave_behind([4, 4], version=4, max_staleness=1, groups_per_step=2)   # both fit into the next batch
    True
    >>> may_leave_behind([4, 4, 4], version=4, max_staleness=1, groups_per_step=2)
    False
    """
    numbers, num_due = Counter(admitted_versions), 0
    for admitted in sorted(numbers):
        # All that are due by version + k; until the next version in the list the number stays and the room grows.
        num_due += numbers[admitted]
        k = max(0, admitted + max_staleness - version)
        if k <= max_staleness and num_due > k * groups_per_step:
            return False
    return True
