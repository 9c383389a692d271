"""The terms of the online objective. Called by the trainer once per micro-batch; knows no model and no ranks.

Three policies, three names: tokens were sampled from the *behaviour* policy, the *proximal* policy is the
trainer's own when the batch was taken, the *current* policy is being optimised.

Every term is a sum over loss-mask tokens of `token_weights_T` times the token's part. Those weights come from
`aggregation.py`, already divided by the denominator of the whole update, so that the terms of micro-batches and ranks
simply add up.

Shape letters: `T` completion tokens of a micro-batch, `B` its rows.
"""

from typing import Literal

import torch
from torch import Tensor

from areal_lite.algo.kl import Estimator, kl_estimate
from areal_lite.algo.masked import bounded, check_tokens, inside, row_means


def policy_loss(
    current_logprobs_T: Tensor,
    *,
    proximal_logprobs_T: Tensor,
    behaviour_weights_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    token_weights_T: Tensor,
    rows_T: Tensor,
    num_rows: int,
    surrogate: Literal["ratio", "soft_ratio", "weighted_likelihood", "likelihood"],
    ratio_level: Literal["token", "sequence"],
    clip_low: float | None,
    clip_high: float | None,
    clip_unit: Literal["ratio", "probability"] = "ratio",
    clip_dual: float | None = None,
    soft_positive: float = 1.0,
    soft_negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a micro-batch's share of the policy loss.

    `loss = - sum over loss-mask tokens of token_weight * w * s`, with the behaviour weight `w` and ::

        surrogate             s
        ratio                 min(r * A, clip(r) * A); where A < 0 at least clip_dual * A
        soft_ratio            4 / tau * sigmoid(tau * (r - 1)) * A, tau = soft_positive where A > 0, else soft_negative
        weighted_likelihood   sg(clip(r)) * A * log pi_current
        likelihood            log pi_current

    where `clip(r) = min(max(r, 1 - clip_low / p), 1 + clip_high / p)`, `p` is 1 or, with the `clip_unit` probability,
    pi_proximal of the token, `sg` stops the gradient, and the ratio is ::

        token      r = pi_current / pi_proximal of the token
        sequence   r = exp(mean of log (pi_current / pi_proximal) over the row's tokens with w > 0), on each of them

    With proximal = behaviour, `ratio` is PPO. At `pi_current = pi_proximal` the gradient of all but `likelihood` is
    REINFORCE's, `w * A` times that of `log pi_current`; that of `soft_ratio` fades as `r` leaves 1, and never ends.

    Args:
        current_logprobs_T: [T] log-probabilities in nats under the weights being optimised; the gradient flows
            through them alone.
        proximal_logprobs_T: [T] under the weights of the moment the batch was taken.
        behaviour_weights_T: [T] from `behaviour_weights`; a token of weight 0 adds nothing, whatever it holds.
        advantages_T: [T] each token's advantage.
        loss_mask_T: [T] booleans; whatever stands in the other slots, NaN included, has no effect.
        token_weights_T: [T] from `aggregate`, divided by the denominator of the whole optimiser update.
        rows_T: [T] int64, the row of each token; all tokens of a row are in the same call.
        num_rows: B.
        surrogate: See above.
        ratio_level: See above.
        clip_low: Lower clip distance of `r`, in 0..1; None = that side is open.
        clip_high: Upper clip distance of `r`, >= 0; None = that side is open.
        clip_unit: Of the clip distances: shares of pi_proximal, or probability: how far pi_current may move from it.
        clip_dual: Largest `r` where A < 0, above 1; None = any.
        soft_positive: How fast `soft_ratio` fades where A > 0, above 0.
        soft_negative: The same where A <= 0.

    Returns:
        The scalar loss, and sums for the log, unweighted and without gradient: `clipped`, the tokens with w > 0 whose
        ratio (`weighted_likelihood`) or `s` (`ratio`) the clip changes.

    Raises:
        ValueError: The shapes differ, the mask is not boolean, a clip distance is out of range, or `surrogate`,
            `ratio_level` or `clip_unit` is unknown.

    Source:
        ratio: arXiv 1707.06347 eq. 7, with `w` arXiv 2505.24298 eq. 5, with two clip distances arXiv 2503.14476 eq. 8;
        sequence level: arXiv 2507.18071 eqs. 5 and 7; weighted_likelihood: arXiv 2506.13585 eqs. 4 and 5; likelihood:
        RAFT, arXiv 2304.06767; clip_dual: arXiv 1912.09729; soft_ratio: SAPO, arXiv 2511.20347; clip_unit: the
        gradient of DPPO, arXiv 2602.04879, with binary total variation to the proximal policy.
        Where we differ: GSPO, CISPO and SAPO have no `w`, and a log ratio above 20 counts as 20.
    """
    check_tokens(
        loss_mask_T,
        current=current_logprobs_T,
        proximal=proximal_logprobs_T,
        behaviour_weights=behaviour_weights_T,
        advantages=advantages_T,
        token_weights=token_weights_T,
        rows=rows_T,
    )
    if clip_unit not in ("ratio", "probability"):
        raise ValueError(f"expected the clip unit ratio or probability, got {clip_unit!r}")
    if not 0 <= (clip_low or 0) <= 1 or not (clip_high or 0) >= 0:
        raise ValueError(f"expected clip_low in 0..1 and clip_high >= 0, or None, got {clip_low} and {clip_high}")
    if not ((clip_dual is None or clip_dual > 1) and soft_positive > 0 and soft_negative > 0):
        raise ValueError(
            "expected clip_dual above 1, or None, and soft_positive and soft_negative above 0, got "
            f"{clip_dual}, {soft_positive} and {soft_negative}"
        )
    counts_T = loss_mask_T & (behaviour_weights_T != 0)
    scale_T = inside(counts_T, behaviour_weights_T.detach() * token_weights_T)
    advantages_T = inside(counts_T, advantages_T)
    current_T, proximal_T = inside(counts_T, current_logprobs_T), inside(counts_T, proximal_logprobs_T.detach())
    ratios_T = _ratios(current_T - proximal_T, counts_T, rows_T=rows_T, num_rows=num_rows, level=ratio_level)
    unit = bounded(-proximal_T).exp() if clip_unit == "probability" else 1.0
    held_T = ratios_T if clip_low is None else ratios_T.clamp(min=1 - clip_low * unit)
    held_T = held_T if clip_high is None else held_T.clamp(max=1 + clip_high * unit)
    is_clipped_T = torch.zeros_like(loss_mask_T)
    if surrogate == "ratio":
        parts_T = torch.minimum(ratios_T * advantages_T, held_T * advantages_T)
        if clip_dual is not None:
            parts_T = torch.where(advantages_T < 0, parts_T.maximum(clip_dual * advantages_T), parts_T)
        is_clipped_T = parts_T != ratios_T * advantages_T
    elif surrogate == "soft_ratio":
        taus_T = torch.full_like(ratios_T, soft_negative).masked_fill(advantages_T > 0, soft_positive)
        parts_T = 4 / taus_T * (taus_T * (ratios_T - 1)).sigmoid() * advantages_T
    elif surrogate == "weighted_likelihood":
        is_clipped_T = held_T != ratios_T
        parts_T = held_T.detach() * advantages_T * current_T
    elif surrogate == "likelihood":
        parts_T = current_T
    else:
        raise ValueError(
            f"expected the surrogate ratio, soft_ratio, weighted_likelihood or likelihood, got {surrogate!r}"
        )
    return -(scale_T * parts_T).sum(), {"clipped": (counts_T & is_clipped_T).sum()}


def kl_penalty(
    current_logprobs_T: Tensor,
    *,
    other_logprobs_T: Tensor,
    behaviour_weights_T: Tensor,
    loss_mask_T: Tensor,
    token_weights_T: Tensor,
    estimator: Estimator,
    direction: Literal["to_other", "from_other"],
) -> Tensor:
    """Return a micro-batch's share of a mean KL divergence, to be multiplied by its coefficient and added to the loss.

    `sum over loss-mask tokens of token_weight * w * k`, with `k` of `kl_estimate` and ::

        to_other     KL(current || other), for samples of the current policy: distance to a reference model
        from_other   KL(other || current), for samples of the other policy: PPO's penalty, other = proximal

    Under `from_other`, k3 is `r - 1 - log r` with `r = pi_current / pi_other`: never negative, and both its value and
    its gradient are unbiased. Under `to_other` see `kl_estimate` for what each gradient is; the samples are the
    proximal policy's (through `w`), so that after the first update of a step the estimate is off by `r`, as in GRPO.

    Args:
        current_logprobs_T: [T] under the weights being optimised, in nats; the gradient flows through them alone.
        other_logprobs_T: [T] under the other policy.
        behaviour_weights_T: [T] from `behaviour_weights`; a token of weight 0 adds nothing.
        loss_mask_T: [T] booleans; the other slots have no effect.
        token_weights_T: [T] from `aggregate`, divided by the denominator of the update.
        estimator: k1, k2 or k3.
        direction: See above.

    Returns:
        The scalar penalty in nats.

    Raises:
        ValueError: The shapes differ, the mask is not boolean, or estimator or direction is unknown.

    Source:
        to_other with k3: arXiv 2402.03300 eqs. 3 and 4; from_other: arXiv 1707.06347 eq. 8, where the divergence is
        exact instead of estimated. The weight `w` is ours.
    """
    check_tokens(
        loss_mask_T,
        current=current_logprobs_T,
        other=other_logprobs_T,
        behaviour_weights=behaviour_weights_T,
        token_weights=token_weights_T,
    )
    counts_T = loss_mask_T & (behaviour_weights_T != 0)
    current_T, other_T = inside(counts_T, current_logprobs_T), inside(counts_T, other_logprobs_T.detach())
    if direction == "to_other":
        estimates_T = kl_estimate(current_T, reference_logprobs_T=other_T, estimator=estimator)
    elif direction == "from_other":
        estimates_T = kl_estimate(other_T, reference_logprobs_T=current_T, estimator=estimator)
    else:
        raise ValueError(f"expected the direction to_other or from_other, got {direction!r}")
    return (inside(counts_T, behaviour_weights_T.detach() * token_weights_T) * estimates_T).sum()


def entropy_bonus(entropies_T: Tensor, *, loss_mask_T: Tensor, token_weights_T: Tensor) -> Tensor:
    """Return a micro-batch's share of the mean entropy; the caller *subtracts* it, times a coefficient, from the loss.

    `sum over loss-mask tokens of token_weight * entropy`

    Args:
        entropies_T: [T] entropy of the current policy at each token, in nats, differentiable.
        loss_mask_T: [T] booleans; the other slots have no effect.
        token_weights_T: [T] from `aggregate`, divided by the denominator of the update.

    Returns:
        The scalar bonus in nats.

    Raises:
        ValueError: The shapes differ, or the mask is not boolean.

    Source:
        arXiv 1707.06347 eq. 9, the term `c_2 S`. It is not weighted by `w`: the states are taken as they come.
    """
    check_tokens(loss_mask_T, entropies=entropies_T, token_weights=token_weights_T)
    return (inside(loss_mask_T, token_weights_T) * inside(loss_mask_T, entropies_T)).sum()


def value_loss(
    values_T: Tensor,
    *,
    old_values_T: Tensor,
    targets_T: Tensor,
    loss_mask_T: Tensor,
    token_weights_T: Tensor,
    clip: float | None,
) -> Tensor:
    """Return a micro-batch's share of the critic's loss.

    `sum over loss-mask tokens of token_weight * 0.5 * max((v - t)^2, (clip(v, old - clip, old + clip) - t)^2)`, without
    the second part where `clip` is None.

    Args:
        values_T: [T] the critic's values; the gradient flows through them alone.
        old_values_T: [T] its values of the moment the batch was taken.
        targets_T: [T] returns to learn.
        loss_mask_T: [T] booleans; the other slots have no effect.
        token_weights_T: [T] from `aggregate`, divided by the denominator of the update.
        clip: How far a value may move per step, in units of return, > 0; None = freely.

    Raises:
        ValueError: The shapes differ, the mask is not boolean, or `clip` is not above 0.

    Source:
        arXiv 1707.06347 eq. 9, the term `c_1 L^VF`, with the factor 0.5; the clipping is not in the paper but in
        its authors' code.
    """
    check_tokens(loss_mask_T, values=values_T, old=old_values_T, targets=targets_T, token_weights=token_weights_T)
    if clip is not None and not clip > 0:
        raise ValueError(f"expected clip > 0 or None, got {clip}")
    values_T, targets_T = inside(loss_mask_T, values_T), inside(loss_mask_T, targets_T.detach())
    errors_T = (values_T - targets_T).square()
    if clip is not None:
        old_T = inside(loss_mask_T, old_values_T.detach())
        errors_T = torch.maximum(errors_T, (values_T.clamp(old_T - clip, old_T + clip) - targets_T).square())
    return 0.5 * (inside(loss_mask_T, token_weights_T) * errors_T).sum()


def _ratios(log_ratios_T: Tensor, counts_T: Tensor, *, rows_T: Tensor, num_rows: int, level: str) -> Tensor:
    if level == "token":
        return bounded(log_ratios_T).exp()
    if level != "sequence":
        raise ValueError(f"expected the ratio level token or sequence, got {level!r}")
    return bounded(row_means(counts_T, log_ratios_T, rows_T=rows_T, num_rows=num_rows)).exp()[rows_T]
