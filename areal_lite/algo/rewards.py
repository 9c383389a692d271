"""From a verifier's reward to the reward that is learned from. Called by `train/batch.py`.

The logged reward stays as it is: every function returns a new tensor.

Shape letters: `N` groups of a batch, `G` samples of a group, `B` rows, `T` completion tokens of the rows one after
another.
"""

import torch
from torch import Tensor


def shape_rewards(rewards_NG: Tensor, *, scale: float, bias: float, clip: float | None) -> Tensor:
    """Return `clip(scale * reward + bias, -clip, clip)`.

    Args:
        rewards_NG: [N, G] rewards; NaN = unscored.
        scale: Factor.
        bias: Added after scaling.
        clip: Largest absolute value of the result, > 0; None = no limit.

    Returns:
        A new [N, G] tensor; NaN stays NaN.

    Raises:
        ValueError: The limit is not positive.

    Source:
        Usual practice in RLHF (arXiv 2203.02155 adds a bias so that the mean reward of demonstrations is 0).

    >>> shape_rewards(torch.tensor([[1.0, 9.0, float("nan")]]), scale=2.0, bias=-1.0, clip=5.0)
    tensor([[1., 5., nan]])
    """
    if clip is not None and clip <= 0:
        raise ValueError(f"expected a clip above 0, got {clip}")
    shaped_NG = rewards_NG * scale + bias
    return shaped_NG if clip is None else shaped_NG.clamp(-clip, clip)


def overlong_penalties(lengths: Tensor, *, limits: Tensor, buffer: float) -> Tensor:
    """Return the soft punishment of long samples, to be added to the shaped reward.

    With a buffer of `c = buffer * limit` tokens and `s = limit - c`::

        0                 length <= s
        (s - length) / c  s < length <= limit
        -1                beyond

    Args:
        lengths: Completion tokens of samples, any shape.
        limits: The most that each may have, the same shape or [].
        buffer: Share of the limit in which length costs, above 0 and up to 1.

    Returns:
        The same shape, float32, in -1..0.

    Raises:
        ValueError: The buffer is out of range, or a limit is not positive.

    Source:
        arXiv 2503.14476 eq. 13, where the buffer is a number of tokens.

    >>> overlong_penalties(torch.tensor([5, 8, 9, 10, 99]), limits=torch.tensor(10), buffer=0.2)
    tensor([ 0.0000,  0.0000, -0.5000, -1.0000, -1.0000])
    """
    if not 0 < buffer <= 1 or bool((limits <= 0).any()):
        raise ValueError(f"expected a buffer above 0, up to 1, and positive limits, got {buffer} and {limits.tolist()}")
    buffers = buffer * limits.double()
    return ((limits - buffers - lengths) / buffers).clamp(-1.0, 0.0).float()


def token_rewards(sample_rewards_B: Tensor, *, lengths_B: Tensor, costs_T: Tensor | None = None) -> Tensor:
    """Return the reward of each token: the sample's reward at its last token, minus what each token costs.

    The last token is found by the row's own length; a padded width would take the longest row's reward away.

    Args:
        sample_rewards_B: [B] reward of each row; NaN stays at its row's last token.
        lengths_B: [B] int64 tokens of each row; an empty row's reward goes nowhere.
        costs_T: [T] cost of each token in units of reward, as a KL coefficient times `kl_estimate`; None = 0.

    Returns:
        [T] in the dtype of the rewards, without gradient.

    Raises:
        ValueError: The shapes do not belong together.

    Source:
        arXiv 2203.02155 eq. 2 with the KL term spread over the tokens.

    >>> token_rewards(torch.tensor([1.0, 2.0]), lengths_B=torch.tensor([2, 1]), costs_T=torch.tensor([0.5, 0.25, 0.0]))
    tensor([-0.5000,  0.7500,  2.0000])
    """
    num_tokens = int(lengths_B.sum())
    if sample_rewards_B.shape != lengths_B.shape or (costs_T is not None and costs_T.shape != (num_tokens,)):
        raise ValueError(
            f"expected one reward per row and one cost per token, got rewards of shape "
            f"{tuple(sample_rewards_B.shape)}, {len(lengths_B)} rows of {num_tokens} tokens, and costs of shape "
            f"{None if costs_T is None else tuple(costs_T.shape)}"
        )
    rewards_T = torch.zeros(num_tokens, dtype=sample_rewards_B.dtype, device=sample_rewards_B.device)
    filled_B = lengths_B > 0
    rewards_T[lengths_B.cumsum(dim=0)[filled_B] - 1] = sample_rewards_B.detach()[filled_B]
    return rewards_T if costs_T is None else rewards_T - costs_T.detach().to(rewards_T.dtype)
