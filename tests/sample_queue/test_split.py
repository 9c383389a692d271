"""Dealing the rows of a batch to minibatches and ranks."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.sample_queue.shards import assign_rows


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
