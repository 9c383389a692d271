"""The staleness bound as arithmetic, and how the rows of a batch are dealt to minibatches and ranks."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ledger_builders import make_sample, version_spans

from areal_lite.sample_queue import staleness
from areal_lite.sample_queue.shards import assign_rows
from areal_lite.types import GIVEN, VersionSpan


@pytest.mark.parametrize(
    ("num_outstanding", "version", "expected"),
    [
        (0, 0, 12),  # (2 + 1) * 4
        (5, 3, 7),  # 12 - 5
        (12, 3, 0),
        (13, 3, 0),  # never negative
        (0, 98, 8),  # two steps left: 2 * 4
        (3, 99, 1),  # one step left: 4 - 3
        (0, 100, 0),
        (0, 101, 0),
    ],
)
def test_admission_capacity(num_outstanding: int, version: int, expected: int) -> None:
    """Golden values at eta 2, 4 groups a step, 100 steps.

    Seen failing without the taper near the end of the run (`min(eta + 1, total_steps - version)` as `eta + 1`).
    """
    capacity = staleness.admission_capacity(
        num_outstanding, version=version, total_steps=100, max_ahead=2, groups_per_step=4
    )
    assert capacity == expected


@given(
    eta=st.integers(0, 8), groups_per_step=st.integers(1, 5), num_admitted=st.integers(0, 60), version=st.integers(0, 8)
)
def test_admission_equals_the_cumulative_rule(eta: int, groups_per_step: int, num_admitted: int, version: int) -> None:
    """One more group fits exactly when `floor((N - 1) / B) <= i + eta` (arXiv 2505.24298 eq. 3), N counting it.

    That holds while each step trained exactly B groups, so `outstanding = admitted - B * version`.
    """
    num_outstanding = num_admitted - groups_per_step * version
    if num_outstanding < 0:
        return
    capacity = staleness.admission_capacity(
        num_outstanding, version=version, total_steps=1000, max_ahead=eta, groups_per_step=groups_per_step
    )
    assert (capacity > 0) == (num_admitted // groups_per_step <= version + eta)


def test_token_ages_and_mask() -> None:
    """Ages by hand: versions 3 3 4 6 6 at trainer version 7 are 4 4 3 1 1 steps old; eta 3 keeps the last three.

    Seen failing with `<` instead of `<=` in the mask, and with spans repeated once instead of by their length.
    """
    spans = version_spans([3, 3, 4, 6, 6])
    np.testing.assert_array_equal(staleness.token_ages(spans, version=7), [4, 4, 3, 1, 1])
    mask = staleness.trainable_mask(spans, version=7, max_staleness=3)
    assert mask.dtype == np.bool_
    np.testing.assert_array_equal(mask, [False, False, True, True, True])


def test_given_tokens_have_no_age() -> None:
    """They are not trainable, not stale, and do not make a sample old. Seen failing with -1 taken for a version."""
    sample = make_sample(versions=[3, 3, GIVEN, GIVEN, 3])
    assert staleness.token_ages(sample.spans, version=5).tolist() == [2, 2, -1, -1, 2]
    mask = staleness.trainable_mask(sample.spans, version=5, max_staleness=2)
    assert mask.tolist() == [True, True, False, False, True]
    assert staleness.num_trainable(sample.spans, version=5, max_staleness=2) == 3
    assert staleness.num_trainable(sample.spans, version=5, max_staleness=1) == 0
    assert sample.oldest_version == 3


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    steps=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    behind=st.integers(0, 6),
    eta=st.integers(0, 5),
)
def test_counting_agrees_with_the_mask(lengths: list[int], steps: list[int], behind: int, eta: int) -> None:
    versions = list(itertools.accumulate(steps))
    ends = list(itertools.accumulate(lengths))
    spans = [
        VersionSpan(version=v, start=end - length, end=end)
        for v, length, end in zip(versions, lengths, ends, strict=False)
    ]
    version = spans[-1].version + behind
    mask = staleness.trainable_mask(spans, version=version, max_staleness=eta)
    assert staleness.num_trainable(spans, version=version, max_staleness=eta) == mask.sum()


@given(eta=st.integers(0, 3), groups_per_step=st.integers(1, 3), behind=st.lists(st.integers(0, 4), max_size=12))
@example(eta=1, groups_per_step=1, behind=[4, 4])
@example(eta=1, groups_per_step=1, behind=[3])
def test_wait_condition_is_feasibility(eta: int, groups_per_step: int, behind: list[int]) -> None:
    """Leaving groups behind is allowed exactly when the coming steps can train them all in time, oldest first.

    Seen failing with `k` running over 1..eta only, and over 0 only.
    """
    version = 4
    allowed = staleness.may_leave_behind(behind, version=version, max_staleness=eta, groups_per_step=groups_per_step)
    in_time = [
        version + 1 + place // groups_per_step <= admitted + eta for place, admitted in enumerate(sorted(behind))
    ]
    # Groups are admitted up to eta + 1 batches at a time, so more than eta batches cannot be left behind.
    assert allowed == (all(in_time) and len(behind) <= eta * groups_per_step)


# --- dealing rows ---


def test_balances_tokens_inside_a_minibatch() -> None:
    """By hand: 9 to rank 0, 7 to rank 1 (9|7), 6 to rank 1 (9|13), 3 to rank 0 (12|13), 2 to 0 (14|13), 1 to 1 (14|14).

    Seen failing with rows dealt in turn (9 + 6 + 2 = 17 against 11).
    """
    _, ranks = assign_rows([1, 2, 3, 6, 7, 9], num_minibatches=1, num_ranks=2, seed=0)
    assert ranks == [1, 0, 0, 1, 1, 0]


@given(
    num_minibatches=st.integers(1, 4),
    num_ranks=st.integers(1, 4),
    spare=st.integers(0, 4),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_every_minibatch_is_full_and_every_rank_has_a_row(
    num_minibatches: int, num_ranks: int, spare: int, seed: int, data: st.DataObject
) -> None:
    rows_per_minibatch = num_ranks + spare
    num_rows = num_minibatches * rows_per_minibatch
    lengths = data.draw(st.lists(st.integers(0, 100), min_size=num_rows, max_size=num_rows))
    minibatches, ranks = assign_rows(lengths, num_minibatches=num_minibatches, num_ranks=num_ranks, seed=seed)
    assert Counter(minibatches) == dict.fromkeys(range(num_minibatches), rows_per_minibatch)
    assert set(zip(minibatches, ranks, strict=True)) == {
        (minibatch, rank) for minibatch in range(num_minibatches) for rank in range(num_ranks)
    }
    for minibatch in range(num_minibatches):
        loads = Counter[int]()
        longest = 0
        for length, where, rank in zip(lengths, minibatches, ranks, strict=True):
            if where == minibatch:
                loads[rank] += length
                longest = max(longest, length)
        # Longest first, to the lightest rank: no rank is ahead of another by more than one row.
        assert max(loads.values()) - min(loads.values()) <= longest


@pytest.mark.parametrize(("num_rows", "num_ranks"), [(10, 1), (8, 3)])
def test_refuses_uneven_minibatches_and_empty_ranks(num_rows: int, num_ranks: int) -> None:
    with pytest.raises(AssertionError, match="cannot be dealt"):
        assign_rows([1] * num_rows, num_minibatches=4, num_ranks=num_ranks, seed=0)
