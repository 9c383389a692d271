"""The objective: decoupled PPO. Called by the trainer once per micro-batch; knows no model and no ranks.

Three policies, three names: tokens were sampled from the *behaviour* policy, the *proximal* policy is the
trainer's own when the batch was taken, the *current* policy is being optimised.

Shape letter: `T` completion tokens of a micro-batch.
"""

import torch
from torch import Tensor

__all__ = ["decoupled_ppo_loss"]


def decoupled_ppo_loss(
    current_logprobs_T: Tensor,
    *,
    proximal_logprobs_T: Tensor,
    behaviour_logprobs_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    clip_low: float,
    clip_high: float,
    behaviour_weight_cap: float,
    denominator: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a micro-batch's share of the policy loss.

    `loss = - sum over loss-mask tokens of w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) / denominator`
    with `r = pi_current / pi_proximal` and `w = pi_proximal / pi_behaviour` without gradient, 0 where above the cap.
    With proximal = behaviour, `w` is 1 and this is PPO (arXiv 1707.06347 eq. 7).

    Args:
        current_logprobs_T: [T] log-probabilities under the weights being optimised; the gradient flows through them.
        proximal_logprobs_T: [T] under the weights of the moment the batch was taken.
        behaviour_logprobs_T: [T] under the weights that sampled each token.
        advantages_T: [T] each token's advantage.
        loss_mask_T: [T] booleans; whatever stands in the other slots, NaN included, has no effect.
        clip_low: Lower clip distance of `r`, in 0..1.
        clip_high: Upper clip distance of `r`, >= 0.
        behaviour_weight_cap: Largest `w` that counts; tokens above it (or with a `w` that is no number) add nothing.
        denominator: Number of loss-mask tokens of the whole optimiser update: all micro-batches, all ranks, tokens
            above the cap included.

    Returns:
        The scalar loss share, and sums over the loss mask for logging: `behav_weight` (0 above the cap),
        `behav_weight_masked` (tokens above the cap), `clipped` (tokens whose ratio the clip holds back),
        `kl_behav_prox` (`behaviour - proximal` logprob, the estimator k1 of KL(behaviour || proximal)).

    Raises:
        ValueError: The shapes differ, or the mask is not boolean.

    Source:
        arXiv 2505.24298 eq. 5; the cap and the denominator before it are ours.
    """
    _check(loss_mask_T, current_logprobs_T, proximal_logprobs_T, behaviour_logprobs_T, advantages_T)

    def inside(values_T: Tensor) -> Tensor:
        # Chosen, not multiplied: 0 * NaN is NaN.
        return torch.where(loss_mask_T, values_T, 0.0)

    behaviour_gap_T = inside(behaviour_logprobs_T - proximal_logprobs_T)
    weight_T = (-behaviour_gap_T).exp()
    counts_T = weight_T <= behaviour_weight_cap
    weight_T = torch.where(counts_T, weight_T, 0.0).detach()
    advantages_T = inside(advantages_T)
    ratio_T = inside(current_logprobs_T - proximal_logprobs_T.detach()).exp()
    free_T = ratio_T * advantages_T
    held_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    loss = -inside(weight_T * torch.minimum(free_T, held_T)).sum() / denominator
    sums = {
        "behav_weight": inside(weight_T).sum(),
        "behav_weight_masked": (loss_mask_T & ~counts_T).sum(),
        "clipped": (loss_mask_T & (held_T < free_T)).sum(),
        "kl_behav_prox": behaviour_gap_T.sum(),
    }
    return loss, {name: value.detach() for name, value in sums.items()}


def _check(loss_mask_T: Tensor, *values_T: Tensor) -> None:
    shapes = [tuple(values.shape) for values in (loss_mask_T, *values_T)]
    if len(set(shapes)) > 1 or loss_mask_T.dtype != torch.bool:
        raise ValueError(
            f"expected a boolean loss mask and logprobs and advantages of its shape, got a mask of {loss_mask_T.dtype} "
            f"and the shapes {shapes} (mask, current, proximal, behaviour, advantages)"
        )
