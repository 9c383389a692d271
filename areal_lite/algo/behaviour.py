"""The correction for tokens that an older policy sampled: weights and filters. Called by the trainer.

Three policies, three names: tokens were sampled from the *behaviour* policy, the *proximal* policy is the trainer's own
when the batch was taken, the *current* policy is being optimised. Here `w = pi_proximal / pi_behaviour`.

Shape letters: `T` completion tokens, `A` the active ones among them, `B` rows.
"""

from typing import Literal

import torch
from torch import Tensor

from areal_lite.algo.masked import check_tokens, inside, row_means, row_sums


@torch.no_grad()
def behaviour_weights(
    proximal_logprobs_T: Tensor,
    *,
    behaviour_logprobs_T: Tensor,
    loss_mask_T: Tensor,
    rows_T: Tensor,
    num_rows: int,
    level: Literal["token", "sequence", "geometric_mean", "none"],
    cap: float,
    above: Literal["mask", "truncate"],
    floor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the weight of each token, which turns samples of the behaviour policy into samples of the proximal one.

    ::

        token            w_t = pi_proximal(t) / pi_behaviour(t)
        sequence         w   = product of w_t over the row's loss-mask tokens, the same on each of them
        geometric_mean   w   = exp(mean of log w_t over the row's loss-mask tokens), the same on each of them
        none             w   = 1: the difference is ignored, whatever the log-probabilities are

    Above the cap, `mask` sets `w = 0` (no gradient) and `truncate` sets `w = cap`. Below the floor `w = 0`. A weight
    that is no number is 0, too: nothing is known about its token.

    Args:
        proximal_logprobs_T: [T] under the weights of the moment the batch was taken, in nats.
        behaviour_logprobs_T: [T] under the weights that sampled each token.
        loss_mask_T: [T] booleans; whatever stands in the other slots, NaN included, has no effect.
        rows_T: [T] int64, the row of each token.
        num_rows: B.
        level: See above.
        cap: Largest weight, > 0.
        above: What happens above it.
        floor: Smallest weight, >= 0.

    Returns:
        [T] weights, 0 outside the loss mask, in the dtype of the logprobs and without gradient; and [T] booleans:
        loss-mask tokens above the cap or below the floor (or no number).

    Raises:
        ValueError: The shapes differ, the mask is not boolean, or `level` or `above` is unknown.

    Source:
        arXiv 2505.24298 eq. 5 (token), which has no cap; geometric_mean: the sequence ratio of arXiv 2507.18071 eq. 7,
        of these two policies; truncate: `rho` of arXiv 1802.01561 eq. 1; mask with a floor: IcePop, arXiv 2510.18855;
        mask without one is ours.
    """
    check_tokens(loss_mask_T, proximal=proximal_logprobs_T, behaviour=behaviour_logprobs_T, rows=rows_T)
    if above not in ("mask", "truncate"):
        raise ValueError(f"expected above: mask or truncate, got {above!r}")
    if level == "none":
        return loss_mask_T.to(proximal_logprobs_T.dtype), torch.zeros_like(loss_mask_T)
    log_weights_T = inside(loss_mask_T, proximal_logprobs_T - behaviour_logprobs_T)
    if level == "sequence":
        log_weights_T = row_sums(log_weights_T, rows_T=rows_T, num_rows=num_rows)[rows_T]
    elif level == "geometric_mean":
        log_weights_T = row_means(loss_mask_T, log_weights_T, rows_T=rows_T, num_rows=num_rows)[rows_T]
    elif level != "token":
        raise ValueError(f"expected the level token, sequence, geometric_mean or none, got {level!r}")
    weights_T = log_weights_T.exp()
    is_within_T = (weights_T >= floor) & (weights_T <= cap)
    keeps_T = weights_T >= floor if above == "truncate" else is_within_T
    masked_T = loss_mask_T & ~is_within_T
    weights_T = inside(loss_mask_T & keeps_T, weights_T.clamp(max=cap))
    return weights_T.to(proximal_logprobs_T.dtype), masked_T


@torch.no_grad()
def m2po_keep(log_ratios_T: Tensor, *, advantages_T: Tensor, loss_mask_T: Tensor, threshold: float) -> Tensor:
    """Return which tokens stay when the farthest active ones are dropped until their second moment is small enough.

    A token is active where its ratio has moved the way its advantage pushes, `r > 1` with `A > 0` or `r < 1` with
    `A < 0`: only there would a clip act. `mean of (log r)^2 over the active tokens that stay <= threshold`, with as
    many of them kept as possible; all others stay. Equal values leave together, so that the order does not matter.

    Args:
        log_ratios_T: [T] `log r`, `r = pi_current / pi_behaviour`, in nats.
        advantages_T: [T] each token's advantage.
        loss_mask_T: [T] booleans; the other slots have no effect.
        threshold: Largest mean square, > 0.

    Returns:
        [T] booleans, a part of the loss mask; a token whose `log r` is not finite is never kept.

    Raises:
        ValueError: The shapes differ, or the mask is not boolean.

    Source:
        M2PO, arXiv 2510.01161; the restriction to active tokens is that of its authors' code, which makes the choice
        in each micro-batch and caps the squares at the threshold that it looks for instead of dropping them.

    >>> log_ratios, ones = torch.tensor([0.1, 1.0, 0.3, 0.2, -2.0]), torch.ones(5)
    >>> m2po_keep(log_ratios, advantages_T=ones, loss_mask_T=ones.bool(), threshold=0.04).tolist()
    [True, False, False, True, True]

    (0.01 + 0.04 + 0.09) / 3 = 0.0467 is too much, (0.01 + 0.04) / 2 is not; the last token went the other way.
    """
    check_tokens(loss_mask_T, log_ratios=log_ratios_T, advantages=advantages_T)
    candidates_T = loss_mask_T & log_ratios_T.isfinite()
    is_active_T = candidates_T & (log_ratios_T * advantages_T > 0)
    squares_T = log_ratios_T.double().square()
    sorted_A = squares_T[is_active_T].sort().values
    means_A = sorted_A.cumsum(dim=0) / torch.arange(1, len(sorted_A) + 1, device=sorted_A.device)
    # The means of ever larger squares never fall, so those within the threshold come first.
    dropped = sorted_A[means_A > threshold]
    return candidates_T & ~(is_active_T & (squares_T >= dropped[0])) if len(dropped) else candidates_T


@torch.no_grad()
def geometric_keep(
    log_ratios_T: Tensor, *, loss_mask_T: Tensor, rows_T: Tensor, num_rows: int, low: float, high: float
) -> Tensor:
    """Return which tokens stay when rows that are far off-policy as a whole leave.

    A row stays where `low <= exp(mean of log w over its loss-mask tokens) <= high`.

    Args:
        log_ratios_T: [T] `log w` in nats.
        loss_mask_T: [T] booleans; the other slots have no effect.
        rows_T: [T] int64, the row of each token.
        num_rows: B.
        low: Smallest geometric mean, > 0.
        high: Largest one.

    Returns:
        [T] booleans, a part of the loss mask; a row whose mean is not finite leaves.

    Raises:
        ValueError: The shapes differ, or the mask is not boolean.

    Source:
        The sequence ratio of arXiv 2507.18071 eq. 7 used as a filter; the bounds are ours.
    """
    check_tokens(loss_mask_T, log_ratios=log_ratios_T, rows=rows_T)
    means_B = row_means(loss_mask_T, log_ratios_T, rows_T=rows_T, num_rows=num_rows).exp()
    return loss_mask_T & ((means_B >= low) & (means_B <= high))[rows_T]


@torch.no_grad()
def divergence_keep(
    proximal_logprobs_T: Tensor,
    *,
    behaviour_logprobs_T: Tensor,
    loss_mask_T: Tensor,
    rows_T: Tensor,
    num_rows: int,
    limit: float,
) -> Tensor:
    """Return which tokens stay when rows leave whose sampled tokens have become too likely or unlikely.

    A row stays where the mean over its loss-mask tokens of `p log(p / q) + (1 - p) log((1 - p) / (1 - q))` is at most
    `limit`: the divergence between sampling that token or another one, with `p = pi_behaviour`, `q = pi_proximal`.

    Args:
        proximal_logprobs_T: [T] under the weights of the moment the batch was taken, in nats.
        behaviour_logprobs_T: [T] under the weights that sampled each token.
        loss_mask_T: [T] booleans; the other slots have no effect.
        rows_T: [T] int64, the row of each token.
        num_rows: B.
        limit: Largest mean divergence in nats, > 0.

    Returns:
        [T] booleans, a part of the loss mask; a row whose mean is no number leaves.

    Raises:
        ValueError: The shapes differ, or the mask is not boolean.

    Source:
        The trust region of FlashREINFORCE, as NVIDIA-NeMo/labs-molt has it: probabilities are kept within 1e-6 of 0
        and 1.
    """
    check_tokens(loss_mask_T, proximal=proximal_logprobs_T, behaviour=behaviour_logprobs_T, rows=rows_T)
    p, q = (
        logprobs_T.double().exp().clamp(1e-6, 1 - 1e-6) for logprobs_T in (behaviour_logprobs_T, proximal_logprobs_T)
    )
    divergences_T = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    means_B = row_means(loss_mask_T, divergences_T, rows_T=rows_T, num_rows=num_rows)
    return loss_mask_T & (means_B <= limit)[rows_T]
