"""Estimates of a KL divergence from the log-probabilities of sampled tokens, and its adaptive coefficient.

Called by the trainer (KL in the reward) and by `losses.py` (KL in the loss).

Shape letter: `T` completion tokens.
"""

import math
from typing import Literal

from torch import Tensor

from areal_lite.algo.masked import MAX_EXPONENT, bounded

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs_T: Tensor, *, reference_logprobs_T: Tensor, estimator: Estimator) -> Tensor:
    """Estimate `KL(pi || reference)` at each token, for tokens sampled from `pi`.

    With `d = log pi - log reference`::

        estimator   value             expected value   expected gradient, as a loss on samples of pi
        k1          d                 KL(pi || ref)    0: the mean of grad log pi is 0
        k2          d^2 / 2           >= 0, biased     grad KL(pi || ref)
        k3          exp(-d) - 1 + d   KL(pi || ref)    grad KL(ref || pi)

    The values of k1 and k3 are unbiased, and k3 is never negative; as a *loss* only k2 has the gradient of the
    divergence that it estimates. In the reward all three act through their values, where k1 is the exact choice.

    Args:
        logprobs_T: [T] under `pi`, in nats.
        reference_logprobs_T: [T] under the reference.
        estimator: Which.

    Returns:
        [T] nats, differentiable in both. Below `d = -20` k3 is a straight line, whose slope `1 - exp(20)` still pulls
        `pi` back to the reference, and is finite.

    Raises:
        ValueError: The estimator is unknown, or the shapes differ.

    Source:
        Schulman, Approximating KL Divergence (2020); k3 in a loss is arXiv 2402.03300 eq. 4. The bound on the exponent
        is ours.
    """
    if logprobs_T.shape != reference_logprobs_T.shape:
        raise ValueError(
            f"expected as many reference logprobs as logprobs, got {tuple(reference_logprobs_T.shape)} and "
            f"{tuple(logprobs_T.shape)}"
        )
    gap_T = logprobs_T - reference_logprobs_T
    if estimator == "k1":
        return gap_T
    if estimator == "k2":
        return gap_T.square() / 2
    if estimator == "k3":
        # expm1: near 0, exp(-d) - 1 would be all rounding.
        held_T = bounded(-gap_T)
        return held_T.expm1() - held_T + math.expm1(MAX_EXPONENT) * (-gap_T - MAX_EXPONENT).relu()
    raise ValueError(f"expected the estimator k1, k2 or k3, got {estimator!r}")


def adapt_coefficient(coef: float, *, measured: float, target: float) -> float:
    """Move the coefficient of a KL penalty towards the wanted divergence.

    `2 * coef` where `measured > 1.5 * target`, `coef / 2` where `measured < target / 1.5`, else `coef`.

    Args:
        coef: The coefficient of the step that was measured.
        measured: Mean divergence of that step, in nats per token.
        target: The wanted one, > 0.

    Returns:
        The coefficient of the next step. Unchanged where `measured` is NaN.

    Raises:
        ValueError: The target is not positive.

    Source:
        arXiv 1707.06347 §4.

    >>> [adapt_coefficient(0.1, measured=measured, target=0.01) for measured in (0.02, 0.01, 0.005)]
    [0.2, 0.1, 0.05]
    """
    if target <= 0:
        raise ValueError(f"expected a target above 0, got {target}")
    if measured > 1.5 * target:
        return coef * 2
    return coef / 2 if measured < target / 1.5 else coef
