"""What a sample or a token is worth: baselines, returns, generalised advantage estimation. Called by `train/batch.py`.

Sample-level functions see whole groups and no tokens; token-level ones see the flat order of completion tokens.

Shape letters: `N` groups of a batch, `G` samples of a group, `B` rows, `T` completion tokens of the rows one after
another.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["none", "batch_mean", "group_mean", "leave_one_out"]
Scale = Literal["none", "group_std", "batch_std"]
SampleFilter = Literal["all", "best_of_group", "varied_groups"]


def sample_baselines(returns_NG: Tensor, *, kind: Baseline) -> Tensor:
    """Return what each sample's return is compared with.

    ::

        none            b = 0
        batch_mean      b = mean of all scored samples of the batch
        group_mean      b = mean of the scored samples of the group
        leave_one_out   b = mean of the *other* scored samples of the group

    Only `none` and `leave_one_out` leave the policy gradient unbiased: a mean that holds the sample itself shrinks the
    gradient in expectation by the factor 1 - 1/n.

    Args:
        returns_NG: [N, G] returns in units of reward, taken as float32; NaN = unscored, left out of every mean.
        kind: Which baseline.

    Returns:
        [N, G] float64. Under `leave_one_out` a lone scored sample is its own baseline.

    Raises:
        ValueError: `returns_NG` is not a matrix, a return is infinite, or the kind is unknown.

    Source:
        group_mean: arXiv 2402.03300 §4.1.2; leave_one_out: the RLOO estimator of arXiv 2402.14740. There, every sample
        has a score.
    """
    scored_NG, returns_NG = _scored(returns_NG)
    num_N1, sum_N1 = scored_NG.sum(dim=1, keepdim=True), returns_NG.sum(dim=1, keepdim=True)
    if kind == "none":
        return torch.zeros_like(returns_NG)
    if kind == "batch_mean":
        return (sum_N1.sum() / num_N1.sum().clamp(min=1)).expand_as(returns_NG)
    if kind == "group_mean":
        return (sum_N1 / num_N1.clamp(min=1)).expand_as(returns_NG)
    if kind == "leave_one_out":
        return torch.where(num_N1 > 1, (sum_N1 - returns_NG) / (num_N1 - 1).clamp(min=1), returns_NG)
    raise ValueError(f"expected the baseline none, batch_mean, group_mean or leave_one_out, got {kind!r}")


def group_stds(returns_NG: Tensor) -> Tensor:
    """Return the standard deviation of each group's scored samples, with `n - 1` in the denominator.

    Args:
        returns_NG: [N, G] returns, taken as float32; NaN = unscored.

    Returns:
        [N, 1] float64 in units of reward; 0 where all are equal or fewer than two are scored.

    Raises:
        ValueError: `returns_NG` is not a matrix, or a return is infinite.

    Source:
        The std of arXiv 2402.03300 §4.1.2, which leaves open whether it divides by n or n - 1.
    """
    mean_NG = sample_baselines(returns_NG, kind="group_mean")
    scored_NG, returns_NG = _scored(returns_NG)
    squares_N1 = torch.where(scored_NG, returns_NG - mean_NG, 0.0).square().sum(dim=1, keepdim=True)
    return (squares_N1 / (scored_NG.sum(dim=1, keepdim=True) - 1).clamp(min=1)).sqrt()


def sample_advantages(returns_NG: Tensor, *, baseline: Baseline, scale: Scale, eps: float = 1e-6) -> Tensor:
    """Compare each sample's return with its baseline.

    `A = r - b`, divided by `std + eps` of its group under `scale: group_std`.

    Args:
        returns_NG: [N, G] returns, taken as float32; NaN = the verifier failed: the sample stays out of mean and std,
            and its advantage is 0.
        baseline: See `sample_baselines`.
        scale: `none` and `batch_std` leave the difference undivided: the latter is a matter of tokens, see
            `masked_sums`.
        eps: Added to the standard deviation, in units of reward.

    Returns:
        [N, G] float32 advantages, all finite. A group whose returns are all equal, or with fewer than two scored
        samples, says nothing: exactly 0 under `group_mean`, `leave_one_out` and `group_std`.

    Raises:
        ValueError: `returns_NG` is not a matrix, a return is infinite, or baseline or scale are unknown.

    Source:
        group_mean with group_std: arXiv 2402.03300 §4.1.2, which has no eps. Without the std: arXiv 2503.20783 §3.2.

    >>> sample_advantages(
    ...     torch.tensor([[1.0, 0.0, float("nan")], [0.5, 0.5, 0.5]]), baseline="group_mean", scale="group_std", eps=0.0
    ... )
    tensor([[ 0.7071, -0.7071,  0.0000],
            [ 0.0000,  0.0000,  0.0000]])
    """
    if scale not in ("none", "group_std", "batch_std"):
        raise ValueError(f"expected the scale none, group_std or batch_std, got {scale!r}")
    baselines_NG = sample_baselines(returns_NG, kind=baseline)
    stds_N1 = group_stds(returns_NG)
    scored_NG, returns_NG = _scored(returns_NG)
    advantages_NG = torch.where(scored_NG, returns_NG - baselines_NG, 0.0)
    if scale == "group_std":
        advantages_NG = torch.where(stds_N1 > 0, advantages_NG / (stds_N1 + eps), 0.0)
    return advantages_NG.float()


def kept_samples(rewards_NG: Tensor, *, sample_filter: SampleFilter) -> Tensor:
    """Return which samples train.

    Args:
        rewards_NG: [N, G] rewards; NaN = unscored, never kept.
        sample_filter: `all` scored samples; `best_of_group`: the one with the highest reward, the first of equals;
            `varied_groups`: those of groups whose scored rewards are not all equal.

    Returns:
        [N, G] booleans.

    Raises:
        ValueError: `rewards_NG` is not a matrix, a reward is infinite, or the filter is unknown.

    Source:
        best_of_group: RAFT, arXiv 2304.06767 algorithm 1; varied_groups: arXiv 2503.14476 eq. 11 (there, groups are
        drawn again until the batch is full; here the queue does that, under `queue.reject`).

    >>> kept_samples(torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, float("nan")]]), sample_filter="best_of_group")
    tensor([[False,  True, False],
            [ True, False, False]])
    """
    scored_NG, filled_NG = _scored(rewards_NG)
    if sample_filter == "all":
        return scored_NG
    if sample_filter == "varied_groups":
        return scored_NG & (group_stds(rewards_NG) > 0)
    if sample_filter != "best_of_group":
        raise ValueError(f"expected the filter all, best_of_group or varied_groups, got {sample_filter!r}")
    filled_NG = torch.where(scored_NG, filled_NG, -torch.inf)
    is_best_NG = scored_NG & (filled_NG == filled_NG.amax(dim=1, keepdim=True))
    return is_best_NG & (is_best_NG.cumsum(dim=1) == 1)


def returns_to_go(rewards_T: Tensor, *, lengths_B: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of rewards from each token to the end of its row.

    `R_t = r_t + gamma * R_(t+1)`: generalised advantage estimation with lambda 1 and no critic.

    Args:
        rewards_T: [T] reward of each token.
        lengths_B: [B] int64 tokens of each row.
        gamma: Discount per token, in 0..1.

    Returns:
        [T] returns, without gradient.

    Raises:
        ValueError: The lengths do not add up to the number of tokens, or gamma is out of range.

    Source:
        The return of Sutton and Barto, Reinforcement Learning (2nd ed.), eq. 3.8.

    >>> returns_to_go(torch.tensor([0.0, 0.0, 1.0, 2.0]), lengths_B=torch.tensor([3, 1]), gamma=0.5)
    tensor([0.2500, 0.5000, 1.0000, 2.0000])
    """
    zeros_T = torch.zeros_like(rewards_T)
    return gae(rewards_T, values_T=zeros_T, lengths_B=lengths_B, gamma=gamma, gae_lambda=1.0)[0]


@torch.no_grad()
def gae(
    rewards_T: Tensor,
    *,
    values_T: Tensor,
    lengths_B: Tensor,
    gamma: float,
    gae_lambda: float,
    last_values_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return generalised advantages and the returns a critic learns.

    With `delta_t = r_t + gamma * V_(t+1) - V_t`, from the last token of a row backwards::

        A_t = delta_t + gamma * gae_lambda * A_(t+1)        R_t = A_t + V_t

    Lambda 1 gives Monte-Carlo returns, lambda 0 one-step temporal differences.

    Args:
        rewards_T: [T] reward of each token, for the step from the state before it to the state after it.
        values_T: [T] value of the state before each token.
        lengths_B: [B] int64 tokens of each row; a row may be empty.
        gamma: Discount per token, in 0..1.
        gae_lambda: Lambda, in 0..1.
        last_values_B: [B] value of the state after each row's last token; None = 0, every episode ended there.

    Returns:
        [T] advantages and [T] returns, without gradient. A NaN stays within its row.

    Raises:
        ValueError: The lengths do not add up to the number of tokens, the shapes differ, or gamma or lambda is out of
            range.

    Source:
        arXiv 1506.02438 eq. 16, on finite episodes; the critic's target as in arXiv 1707.06347 eq. 11, plus V.
    """
    if not (0 <= gamma <= 1 and 0 <= gae_lambda <= 1):
        raise ValueError(f"expected gamma and gae_lambda in 0..1, got {gamma} and {gae_lambda}")
    last_values_B = torch.zeros_like(lengths_B) if last_values_B is None else last_values_B
    present_BL = _present(rewards_T, values_T, lengths_B=lengths_B, last_values_B=last_values_B)
    num_rows, num_columns = present_BL.shape
    advantages_BL = torch.zeros((num_rows, num_columns), dtype=values_T.dtype, device=values_T.device)
    rewards_BL = torch.zeros_like(advantages_BL).masked_scatter(present_BL, rewards_T.to(values_T.dtype))
    values_BL = torch.zeros_like(advantages_BL).masked_scatter(present_BL, values_T)
    next_values_B = last_values_B.to(values_T.dtype)
    carried_B = torch.zeros_like(next_values_B)
    for column in reversed(range(num_columns)):
        here_B = present_BL[:, column]
        deltas_B = rewards_BL[:, column] + gamma * next_values_B - values_BL[:, column]
        carried_B = torch.where(here_B, deltas_B + gamma * gae_lambda * carried_B, carried_B)
        next_values_B = torch.where(here_B, values_BL[:, column], next_values_B)
        advantages_BL[:, column] = carried_B
    advantages_T = advantages_BL[present_BL]
    return advantages_T, advantages_T + values_T


def masked_sums(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return count, sum and sum of squares of the values inside the mask.

    Args:
        values_T: [T] values.
        mask_T: [T] booleans.

    Returns:
        [3] float64, to be added up over micro-batches and ranks before `std_from_sums`.

    Raises:
        ValueError: The shapes differ, or the mask is not boolean.

    Source:
        Advantage normalisation over a batch is usual practice in PPO, not in arXiv 1707.06347; most also centre.
    """
    if mask_T.dtype != torch.bool or mask_T.shape != values_T.shape:
        raise ValueError(
            f"expected a boolean mask of the values' shape {tuple(values_T.shape)}, got {mask_T.dtype} of "
            f"{tuple(mask_T.shape)}"
        )
    values_T = torch.where(mask_T, values_T.detach(), 0.0).double()
    return torch.stack([mask_T.sum().double(), values_T.sum(), values_T.square().sum()])


def std_from_sums(sums_3: Tensor) -> float:
    """Return the standard deviation of what `masked_sums` counted, with `n - 1` in the denominator.

    Args:
        sums_3: [3] count, sum, sum of squares.

    Returns:
        The deviation in the values' unit; 0 for fewer than two values.

    Raises:
        ValueError: `sums_3` has not three elements.

    Source:
        As `masked_sums`.

    >>> std_from_sums(masked_sums(torch.tensor([1.0, 3.0, 5.0, 9.0]), torch.tensor([True, True, True, False])))
    2.0
    """
    count, total, squares = sums_3.tolist()
    # Rounding may leave equal values a sum slightly below 0.
    spread = max(0.0, squares - total * total / max(count, 1.0))
    return math.sqrt(spread / max(count - 1.0, 1.0))


def _scored(values_NG: Tensor) -> tuple[Tensor, Tensor]:
    """Return which samples are scored, and the values with 0 elsewhere."""
    if values_NG.ndim != 2 or torch.isinf(values_NG).any():
        raise ValueError(f"rewards must be a matrix [groups, samples] of finite numbers or NaN, got {values_NG}")
    scored_NG = ~torch.isnan(values_NG)
    # In float64 the mean of equal float32 rewards is exactly that reward; a rounded mean would leave a tiny distance,
    # which a tiny std would blow up to order 1.
    return scored_NG, torch.where(scored_NG, values_NG, 0.0).float().double()


def _present(*values_T: Tensor, lengths_B: Tensor, last_values_B: Tensor) -> Tensor:
    """Return which places of a [B, longest] table hold a token, checking that the rows fill the flat tensors."""
    shapes = [tuple(values.shape) for values in (*values_T, lengths_B, last_values_B)]
    if set(shapes[:-2]) != {(int(lengths_B.sum()),)} or set(shapes[-2:]) != {(lengths_B.numel(),)}:
        raise ValueError(
            f"expected rewards and values [T], one per token of rows of {lengths_B.tolist()} tokens, and lengths and "
            f"last values [B], got the shapes {shapes}"
        )
    longest = int(lengths_B.max()) if len(lengths_B) else 0
    return torch.arange(longest, device=lengths_B.device) < lengths_B[:, None]
