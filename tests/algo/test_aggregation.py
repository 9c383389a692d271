"""Aggregation: weights and denominators by hand, and their additivity."""

from typing import Any

import numpy as np
import pytest
import torch
from algo_builders import tensor

from areal_lite.algo.aggregation import aggregate

KINDS = ["token_mean", "sequence_mean", "sequence_sum", "constant"]
# Rows of 3, 2, 1 and 0 tokens: the first has two in the mask, the second none, the third one.
MASK = np.array([1, 0, 1, 0, 0, 1], bool)
ROWS = np.array([0, 0, 0, 1, 1, 2])


@pytest.mark.parametrize(
    ("kind", "weights", "denominator"),
    [
        ("token_mean", [1, 0, 1, 0, 0, 1], 3.0),
        ("sequence_mean", [0.5, 0, 0.5, 0, 0, 1], 2.0),
        ("sequence_sum", [1, 0, 1, 0, 0, 1], 2.0),
        ("constant", [0.125, 0, 0.125, 0, 0, 0.125], 2.0),
    ],
)
def test_by_hand(kind: Any, weights: list[float], denominator: float) -> None:
    """Seen failing with masked tokens in a row's length, and with rows that train nothing in the denominator."""
    got, total = aggregate(tensor(MASK), rows_T=tensor(ROWS), num_rows=4, kind=kind, max_new_tokens=8)
    np.testing.assert_array_equal(got, weights)
    assert total.dtype == torch.float64
    assert total.shape == ()
    assert total == denominator


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_train_has_a_denominator_of_zero(kind: Any) -> None:
    for size in (0, 2):
        mask_T = torch.zeros(size, dtype=torch.bool)
        weights, denominator = aggregate(mask_T, rows_T=mask_T.long(), num_rows=1, kind=kind, max_new_tokens=8)
        assert weights.tolist() == [0.0] * size
        assert denominator == 0.0
