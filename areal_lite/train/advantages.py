"""From a batch's rewards to one advantage per completion token, over all ranks.

A group's rows may be on different ranks. Whatever depends on a whole group becomes an [N, G] matrix: each rank fills
in its own rows, and a sum over the ranks completes it. The arithmetic itself is in `algo/`.

Shape letters: `N` groups of the batch, `G` samples of a group, `B` rows and `T` completion tokens of the shard.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from areal_lite.algo.advantages import gae, group_stds, masked_sums, returns_to_go, sample_advantages, std_from_sums
from areal_lite.algo.kl import kl_estimate
from areal_lite.algo.rewards import overlong_penalties, shape_rewards, token_rewards
from areal_lite.config.plugins import find_function, takes
from areal_lite.config.presets import ObjectiveConfig
from areal_lite.config.recipe import Config
from areal_lite.errors import PluginError
from areal_lite.train.batch import PolicyBatch, described
from areal_lite.train.distributed import max_over_ranks, sum_over_ranks

Compare = Callable[..., Tensor]
"""`sample_advantages`, or a function like it."""

_EPS = 1e-6
"""Added to a group's standard deviation. A smaller deviation of the batch is rounding: nothing is divided by it."""


def batch_advantages(
    batch: PolicyBatch, *, config: Config, kl_coef: float, compare: Compare = sample_advantages
) -> dict[str, float]:
    """Shape rewards, compare returns, and set advantages and targets of the batch's tokens; collective.

    Args:
        kl_coef: The weight of the KL to the reference, where that is charged in the reward.
        compare: From `find_advantage_function`.

    Returns:
        Figures to log: `advantage_std`, over the loss-mask tokens of all ranks, before any division by it; and
        `reward_shaped_mean` of all scored samples, overlong penalties included, 0 when none is scored.
    """
    objective, tokens = config.objective, batch.tokens
    rewards_NG = shape_rewards(
        batch.rewards_NG, scale=objective.reward_scale, bias=objective.reward_bias, clip=objective.reward_clip
    )
    if objective.overlong_buffer > 0:
        penalties_B = overlong_penalties(batch.lengths_B, limits=batch.limits_B, buffer=objective.overlong_buffer)
        rewards_NG = rewards_NG + _over_ranks(penalties_B, batch)
    costs_T = None
    if objective.kl == "reward" and tokens.reference_logprobs_T is not None:
        known_T, kind = tokens.reference_logprobs_T, objective.kl_estimator
        costs_T = kl_coef * kl_estimate(tokens.proximal_logprobs_T, reference_logprobs_T=known_T, estimator=kind)
        # A stale token's cost counts too, but a NaN in a slot that does not train must not reach the sample's return.
        costs_T = torch.where(tokens.loss_mask_T | costs_T.isfinite(), costs_T, 0.0)
    rewards_T = token_rewards(_of_rows(rewards_NG, batch).nan_to_num(), lengths_B=batch.lengths_B, costs_T=costs_T)
    if tokens.step_rewards_T is not None:  # from the sample's last token, where the whole reward is
        steps_T = objective.reward_scale * tokens.step_rewards_T
        totals_B = torch.zeros_like(batch.lengths_B, dtype=steps_T.dtype).index_add(0, tokens.rows_T, steps_T)
        rewards_T = rewards_T + steps_T - token_rewards(totals_B, lengths_B=batch.lengths_B)
    if tokens.values_T is None:
        advantages_T = _sample_comparison(batch, rewards_NG, rewards_T, objective, compare)
    else:
        advantages_T, tokens.targets_T = _critic_advantages(batch, rewards_T, tokens.values_T, config)
    std = std_from_sums(sum_over_ranks(masked_sums(advantages_T, tokens.loss_mask_T)))
    # Not centred: the baseline did that, and a shift would reward or punish all tokens equally.
    tokens.advantages_T = advantages_T / std if objective.scale == "batch_std" and std > _EPS else advantages_T
    shaped = rewards_NG[~rewards_NG.isnan()]
    return {"advantage_std": std, "reward_shaped_mean": float(shaped.mean()) if len(shaped) else 0.0}


def find_advantage_function(objective: ObjectiveConfig) -> Compare:
    """Return the recipe's advantage function, `sample_advantages` unless it names another; results are checked.

    It is given the settings that its signature names.

    Raises:
        PluginError: The function cannot be found.
    """
    name = objective.advantage_function or "of_samples"
    function = find_function(name, kind="advantage function")

    def compare(returns_NG: Tensor, **knobs: Any) -> Tensor:
        named = {key: value for key, value in knobs.items() if takes(function, key)}
        advantages_NG = function(returns_NG.clone(), **named)
        if (
            not isinstance(advantages_NG, Tensor)
            or advantages_NG.shape != returns_NG.shape
            or advantages_NG.dtype != torch.float32
            or not advantages_NG.isfinite().all()
        ):
            raise PluginError(
                f"objective.advantage_function={name} must return finite float32 advantages of the shape of its "
                f"returns, {tuple(returns_NG.shape)}, got {described(advantages_NG)}. Fix: give failed samples (NaN) "
                "an advantage of 0, and end with .float()"
            )
        return advantages_NG.detach()

    return compare


def _sample_comparison(
    batch: PolicyBatch, rewards_NG: Tensor, rewards_T: Tensor, objective: ObjectiveConfig, compare: Compare
) -> Tensor:
    """Return the return from each token on, minus a baseline, [T].

    The baseline compares whole samples, within group or batch: the return from the first token on. With gamma 1, no KL
    in the reward and no rewards for steps it is the same number on all tokens of a sample.

    After rewarded steps, samples are compared with those that have completed as many steps. Example: two samples of a
    group earn 1 at their first step and nothing later. Their return is 1 before that step and 0 after it; against the
    first baseline of 1, all later tokens would be punished by -1. (DeepSeekMath, arXiv 2402.03300 section 4.1.3,
    centres each step's reward instead, which charges for the number of steps.)
    """
    tokens, knobs = batch.tokens, {"baseline": objective.baseline, "scale": objective.scale, "eps": _EPS}
    if objective.gamma == 1.0 and objective.kl != "reward" and tokens.step_rewards_T is None:
        return _of_rows(compare(rewards_NG, **knobs), batch)[tokens.rows_T]
    to_go_T = _to_go(rewards_T, batch, gamma=objective.gamma)
    starts_BK = _at_starts(to_go_T, batch)
    returns_NGK = torch.where(rewards_NG.isnan()[:, :, None], torch.nan, _over_ranks(starts_BK, batch))
    if objective.advantage_function is not None:
        return _of_rows(compare(returns_NGK[:, :, 0], **knobs), batch)[tokens.rows_T]
    factors_NG = _factors(returns_NGK[:, :, 0], objective)
    centred = [compare(part_NG, **knobs | {"scale": "none"}) for part_NG in returns_NGK.unbind(dim=2)]
    rows_T, places_T = tokens.rows_T, tokens.steps_before_T
    starts_T = starts_BK.nan_to_num()[rows_T, places_T]
    centred_T = _of_rows(torch.stack(centred, dim=2), batch)[rows_T, places_T] + to_go_T - starts_T
    return (centred_T * _of_rows(factors_NG, batch)[rows_T]).float()


def _at_starts(values_T: Tensor, batch: PolicyBatch) -> Tensor:
    """Return the value at the first token after each number of rewarded steps, [B, K]; NaN where there is none."""
    rows_T, own_T, places_T = batch.tokens.rows_T, batch.tokens.own_T, batch.tokens.steps_before_T
    num_places = int(max_over_ranks(places_T.max().double().reshape(1))[0]) + 1
    keys_T = (rows_T * num_places + places_T)[own_T]
    is_first_T = torch.ones_like(keys_T, dtype=torch.bool)
    is_first_T[1:] = keys_T[1:] != keys_T[:-1]
    starts_BK = values_T.new_full((len(batch.lengths_B), num_places), torch.nan)
    starts_BK.view(-1)[keys_T[is_first_T]] = values_T[own_T][is_first_T]
    return starts_BK


def _factors(returns_NG: Tensor, objective: ObjectiveConfig) -> Tensor:
    """Return the factors of differences of returns, [N, G]; 0 where a group has nothing to compare."""
    scored_NG = ~returns_NG.isnan()
    factors_N1 = torch.ones_like(returns_NG[:, :1])
    if objective.scale == "group_std":
        stds_N1 = group_stds(returns_NG)
        factors_N1 = torch.where(stds_N1 > 0, 1.0 / (stds_N1 + _EPS), 0.0)
    if objective.baseline in ("group_mean", "leave_one_out"):
        factors_N1 = torch.where(scored_NG.sum(dim=1, keepdim=True) > 1, factors_N1, 0.0)
    return torch.where(scored_NG, factors_N1, 0.0)


def _critic_advantages(
    batch: PolicyBatch, rewards_T: Tensor, values_T: Tensor, config: Config
) -> tuple[Tensor, Tensor]:
    """Return generalised advantages and the critic's targets, [T] each; 0 at given tokens, which are no time steps.

    A sample that was cut off at the token limit ended there: the verifier scored what it wrote.
    """
    objective, own_T = config.objective, batch.tokens.own_T
    advantages_T, targets_T = torch.zeros_like(values_T), torch.zeros_like(values_T)
    advantages_T[own_T], targets_T[own_T] = gae(
        rewards_T[own_T].float(),
        values_T=values_T[own_T],
        lengths_B=_own_lengths(batch),
        gamma=objective.gamma,
        gae_lambda=objective.gae_lambda,
    )
    if config.critic.target == "monte_carlo":
        targets_T = _to_go(rewards_T.float(), batch, gamma=objective.gamma)
    return advantages_T, targets_T


def _to_go(rewards_T: Tensor, batch: PolicyBatch, *, gamma: float) -> Tensor:
    """Return the return from each token of the model on, [T]; 0 at given tokens, which are no time steps."""
    to_go_T, own_T = torch.zeros_like(rewards_T), batch.tokens.own_T
    to_go_T[own_T] = returns_to_go(rewards_T[own_T], lengths_B=_own_lengths(batch), gamma=gamma)
    return to_go_T


def _own_lengths(batch: PolicyBatch) -> Tensor:
    return torch.zeros_like(batch.lengths_B).index_add(0, batch.tokens.rows_T, batch.tokens.own_T.long())


def _of_rows(values_NG: Tensor, batch: PolicyBatch) -> Tensor:
    return values_NG[batch.groups_B, batch.samples_B]


def _over_ranks(values_B: Tensor, batch: PolicyBatch) -> Tensor:
    """Combine every rank's rows except branches, [B] or [B, K], to [N, G] or [N, G, K] float64; collective."""
    values_NG = values_B.new_zeros(batch.rewards_NG.shape + values_B.shape[1:], dtype=torch.float64)
    firsts_B = batch.firsts_B
    values_NG[batch.groups_B[firsts_B], batch.samples_B[firsts_B]] = values_B[firsts_B].double()
    return sum_over_ranks(values_NG)
