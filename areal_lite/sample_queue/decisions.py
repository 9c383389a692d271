"""The ledger's decisions about groups, as pure functions: is it ready, can it train, may the batch be taken."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from areal_lite.sample_queue import staleness
from areal_lite.sample_queue.groups import GroupRecord, GroupState
from areal_lite.types import Sample


def verdict(samples: Sequence[Sample], *, reject: str) -> tuple[GroupState, str]:
    """Return the state a group enters with its scores, and the reason unless that is `ready`.

    A failed sample leaves its group's baseline, which needs two rewards (one in a group of one sample). With fewer
    the group fails for the most common reason.

    Args:
        samples: [G] samples, each with a score.
        reject: `none`, or `zero_variance`: a group whose rewards are all equal teaches nothing and is rejected.
    """
    scores = [sample.score for sample in samples if sample.score is not None]
    rewards = [score.total for score in scores if score.failure is None]
    if len(rewards) < min(2, len(samples)):
        failures = Counter(score.failure for score in scores if score.failure is not None)
        return GroupState.FAILED, failures.most_common(1)[0][0]
    if reject == "zero_variance" and len(np.unique(np.array(rewards, np.float32))) == 1:  # as the trainer gets them
        return GroupState.REJECTED, "zero_variance"
    return GroupState.READY, ""


def has_trainable_token(group: GroupRecord, *, version: int, max_staleness: float) -> bool:
    """Return whether a scored sample of the group has a token of age <= eta."""
    return any(
        staleness.num_trainable(sequence.spans, version=version, max_staleness=max_staleness) > 0
        for sample in group.samples
        for sequence in sample.sequences
        if sample.total_reward is not None
    )


def may_take(
    chosen: Sequence[GroupRecord],
    outstanding: Mapping[int, Collection[GroupRecord]],
    *,
    version: int,
    max_staleness: int,
) -> bool:
    """Return whether taking `chosen` lets every group left behind be trained within the bound (`on_stale: wait`).

    If no older group is missing from the batch, waiting could not improve it. This matters only after a resume with a
    smaller bound or another policy, when some groups are over age in any case: the trainer masks their tokens.
    The cost grows with the number of versions, not of groups.

    Args:
        chosen: The groups of the batch, oldest admitted first.
        outstanding: All groups that have not ended, the chosen ones included, by the version they were admitted at.
        version: Trainer version.
        max_staleness: eta >= 0.
    """
    left_behind = Counter({admitted: len(groups) for admitted, groups in outstanding.items()})
    left_behind.subtract(group.admitted_version for group in chosen)
    if staleness.may_leave_behind(
        left_behind, version=version, max_staleness=max_staleness, groups_per_step=len(chosen)
    ):
        return True
    newest = chosen[-1]
    if any(number for admitted, number in left_behind.items() if admitted < newest.admitted_version):
        return False
    return all(group.sequence > newest.sequence or group in chosen for group in outstanding[newest.admitted_version])
