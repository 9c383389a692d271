"""Token tensors with a loss mask: checks, masking and sums per row, shared by the functions of this package.

Shape letters: `T` completion tokens of rows one after another, `B` rows.
"""

import torch
from torch import Tensor

MAX_EXPONENT = 20.0
"""exp(20) is 4.9e8: any such ratio is far outside every trust region, and its sums still fit float32."""


def check_tokens(loss_mask_T: Tensor, **values_T: Tensor) -> None:
    """Refuse token tensors that do not belong together.

    Args:
        loss_mask_T: [T] booleans.
        **values_T: Tensors of the same shape, by the name that a message shall give them.

    Raises:
        ValueError: The mask is not a boolean vector, or a shape differs from its shape.
    """
    if loss_mask_T.dtype != torch.bool or loss_mask_T.ndim != 1:
        raise ValueError(
            f"expected a boolean loss mask with one value per token, got {loss_mask_T.dtype} of shape "
            f"{tuple(loss_mask_T.shape)}: flatten the rows and compare with 0"
        )
    wrong = {name: tuple(values.shape) for name, values in values_T.items() if values.shape != loss_mask_T.shape}
    if wrong:
        raise ValueError(
            f"expected one value per token, {tuple(loss_mask_T.shape)} as the loss mask has, got {wrong}: "
            "lay all of them out in the same flat order"
        )


def inside(mask_T: Tensor, values_T: Tensor) -> Tensor:
    """Return the values where the mask is true and 0 elsewhere; what stood there has no effect, NaN included.

    Apply it to the inputs of a computation, not to its result: the gradient of a hidden infinity is NaN. Chosen,
    not multiplied, because 0 * NaN is NaN.

    Args:
        mask_T: [T] booleans.
        values_T: [T] values.

    Returns:
        [T], differentiable; the gradient is 0 outside the mask.
    """
    return torch.where(mask_T, values_T, 0.0)


def bounded(exponents_T: Tensor) -> Tensor:
    """Return `min(x, 20)`, whose exponential is neither infinite nor, in the gradient behind a clip, `0 * inf`.

    Args:
        exponents_T: Log ratios in nats, any shape.

    Returns:
        The same shape; the gradient is 0 where `x > 20`.
    """
    return exponents_T.clamp(max=MAX_EXPONENT)


def row_sums(values_T: Tensor, *, rows_T: Tensor, num_rows: int) -> Tensor:
    """Add up the values of each row.

    Args:
        values_T: [T] numbers or booleans.
        rows_T: [T] int64, the row of each token, in 0..num_rows - 1; rows may stand in any order.
        num_rows: B, rows without a token included.

    Returns:
        [B] float64 sums, differentiable.
    """
    return torch.zeros(num_rows, dtype=torch.float64, device=values_T.device).index_add(0, rows_T, values_T.double())


def row_means(mask_T: Tensor, values_T: Tensor, *, rows_T: Tensor, num_rows: int) -> Tensor:
    """Average the values of each row over the tokens of a mask.

    Args:
        mask_T: [T] booleans; the other slots have no effect.
        values_T: [T] numbers.
        rows_T: [T] int64, the row of each token, in 0..num_rows - 1.
        num_rows: B.

    Returns:
        [B] float64 means, differentiable; 0 for a row without a token of the mask.
    """
    sums_B = row_sums(inside(mask_T, values_T), rows_T=rows_T, num_rows=num_rows)
    return sums_B / row_sums(mask_T, rows_T=rows_T, num_rows=num_rows).clamp(min=1)
