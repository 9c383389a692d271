"""Advantages from rewards, on whole groups. Called by `train/batch.py`; knows no tokens and no ranks.

Shape letters: `N` groups of a batch, `G` samples of a group.
"""

import torch
from torch import Tensor

__all__ = ["group_normalised_advantages"]


def group_normalised_advantages(rewards_NG: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Compare each sample with the other samples of its group.

    `A = (r - mean) / (std + eps)` over the scored samples of the group, `std` with `n - 1` in the denominator.
    A group whose rewards are all equal, or with fewer than two scored samples, says nothing: its advantages are 0.

    Args:
        rewards_NG: [N, G] rewards, taken as float32; NaN = the verifier failed: the sample stays out of mean and
            std, and its advantage is 0.
        eps: Added to the standard deviation, in units of reward.

    Returns:
        [N, G] float32 advantages, all finite.

    Raises:
        ValueError: `rewards_NG` is not a matrix, or a reward is infinite.

    Source:
        arXiv 2402.03300 §4.1.2.

    >>> group_normalised_advantages(torch.tensor([[1.0, 0.0, float("nan")], [0.5, 0.5, 0.5]]), eps=0.0)
    tensor([[ 0.7071, -0.7071,  0.0000],
            [ 0.0000,  0.0000,  0.0000]])
    """
    if rewards_NG.ndim != 2 or torch.isinf(rewards_NG).any():
        raise ValueError(f"rewards must be a matrix [groups, samples] of finite numbers or NaN, got {rewards_NG}")
    scored_NG = ~torch.isnan(rewards_NG)
    # In float64 the mean of equal float32 rewards is exactly that reward; a rounded mean would leave a tiny distance,
    # which a tiny std would blow up to order 1.
    rewards_NG = torch.where(scored_NG, rewards_NG, 0.0).float().double()
    num_scored_N1 = scored_NG.sum(dim=1, keepdim=True)
    mean_N1 = rewards_NG.sum(dim=1, keepdim=True) / num_scored_N1.clamp(min=1)
    centred_NG = torch.where(scored_NG, rewards_NG - mean_N1, 0.0)
    std_N1 = (centred_NG.square().sum(dim=1, keepdim=True) / (num_scored_N1 - 1).clamp(min=1)).sqrt()
    return torch.where(std_N1 > 0, centred_NG / (std_N1 + eps), 0.0).float()
