"""How the terms of single tokens add up to one loss. Called by the trainer; knows no ranks.

A loss is `sum over tokens of weight * term / denominator`. Denominators add up over micro-batches and ranks, so that
the way an update is split changes nothing: add all of them first, then divide.

Shape letters: `T` completion tokens, `B` rows.
"""

from typing import Literal

import torch
from torch import Tensor

from areal_lite.algo.masked import check_tokens, inside, row_sums

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


@torch.no_grad()
def aggregate(
    loss_mask_T: Tensor, *, rows_T: Tensor, num_rows: int, kind: Aggregation, max_new_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the weight of each token and this part's share of the denominator.

    With `n_i` the loss-mask tokens of row i::

        kind            weight               denominator
        token_mean      1                    loss-mask tokens
        sequence_mean   1 / n_i              rows with a loss-mask token
        sequence_sum    1                    rows with a loss-mask token
        constant        1 / max_new_tokens   rows with a loss-mask token

    Args:
        loss_mask_T: [T] booleans.
        rows_T: [T] int64, the row of each token; all tokens of a row are in the same call.
        num_rows: B, rows without a token included.
        kind: See above.
        max_new_tokens: The limit of a completion in tokens, > 0.

    Returns:
        [T] float64 weights, 0 outside the loss mask, and the denominator as a 0-dim float64 tensor, 0 where nothing
        trains.

    Raises:
        ValueError: The shapes differ, the mask is not boolean, `max_new_tokens` is below 1, or the kind is unknown.

    Source:
        token_mean: arXiv 2503.14476 eq. 8; sequence_mean: arXiv 2402.03300 eq. 3; sequence_sum: the sequence
        log-likelihood in the RLOO estimator of arXiv 2402.14740; constant: arXiv 2503.20783 §3.2 and
        its listing 1. There, every token trains; here masked ones leave the denominators too.

    >>> mask_T, rows_T = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 0, 1])
    >>> weights_T, denominator = aggregate(mask_T, rows_T=rows_T, num_rows=2, kind="sequence_mean", max_new_tokens=8)
    >>> weights_T.tolist(), float(denominator)
    ([0.5, 0.5, 0.0, 1.0], 2.0)
    """
    check_tokens(loss_mask_T, rows=rows_T)
    if max_new_tokens < 1:
        raise ValueError(f"expected max_new_tokens > 0, got {max_new_tokens}")
    counts_B = row_sums(loss_mask_T, rows_T=rows_T, num_rows=num_rows)
    weights_T, num_filled = loss_mask_T.double(), (counts_B > 0).sum().double()
    if kind == "token_mean":
        return weights_T, counts_B.sum()
    if kind == "sequence_mean":
        return inside(loss_mask_T, 1 / counts_B[rows_T]), num_filled
    if kind == "sequence_sum":
        return weights_T, num_filled
    if kind == "constant":
        return weights_T / max_new_tokens, num_filled
    raise ValueError(f"expected token_mean, sequence_mean, sequence_sum or constant, got {kind!r}")
