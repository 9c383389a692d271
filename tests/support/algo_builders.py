"""Cases and compositions for the tests of `areal_lite/algo`: rows of a batch in the flat order, in numpy."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from areal_lite.algo.advantages import (
    gae,
    kept_samples,
    masked_sums,
    returns_to_go,
    sample_advantages,
    std_from_sums,
)
from areal_lite.algo.aggregation import aggregate
from areal_lite.algo.behaviour import behaviour_weights, divergence_keep, m2po_keep
from areal_lite.algo.kl import kl_estimate
from areal_lite.algo.losses import kl_penalty, policy_loss
from areal_lite.algo.rewards import overlong_penalties, shape_rewards, token_rewards
from areal_lite.config.presets import LossConfig, ObjectiveConfig

MAX_NEW_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """N groups of G samples, row i = sample i % G of group i // G; per-token arrays are flat over the rows."""

    rewards: np.ndarray
    """[N, G]."""
    lengths: np.ndarray
    """[B]."""
    truncated: np.ndarray
    """[B] booleans."""
    mask: np.ndarray
    """[T] booleans: young tokens of scored samples."""
    current: np.ndarray
    proximal: np.ndarray
    behaviour: np.ndarray
    reference: np.ndarray
    values: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """[T] the row of each token."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def change(self, **changes: np.ndarray) -> "Case":
        return replace(self, **changes)


def make_case(seed: int = 0, *, groups: int = 3, samples: int = 4, failed: bool = True, stale: bool = True) -> Case:
    """Draw rows of 1..8 tokens; the policies differ enough for every clip and cap to bite somewhere."""
    rng = np.random.default_rng(seed)
    num_rows = groups * samples
    lengths = rng.integers(1, MAX_NEW_TOKENS + 1, num_rows)
    lengths[0] = MAX_NEW_TOKENS
    rewards = rng.normal(0, 1, (groups, samples)).round(2)
    if failed:
        rewards[0, 1] = np.nan
    num_tokens = int(lengths.sum())
    proximal = rng.uniform(-3, -0.5, num_tokens)
    young = rng.random(num_tokens) < 0.85 if stale else np.ones(num_tokens, bool)
    return Case(
        rewards=rewards,
        lengths=lengths,
        truncated=lengths == MAX_NEW_TOKENS,
        mask=young & ~np.isnan(np.repeat(rewards.reshape(-1), lengths)),
        # Whole rows moved too, so that ratios of sequences leave their clips.
        current=proximal + rng.normal(0, 0.4, num_tokens) + np.repeat(rng.normal(0, 0.3, num_rows), lengths),
        proximal=proximal,
        behaviour=proximal + rng.normal(0, 0.9, num_tokens),
        reference=proximal + rng.normal(0, 0.5, num_tokens),
        values=rng.normal(0, 1, num_tokens),
    )


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def compose(case: Case, knobs: ObjectiveConfig) -> tuple[float, np.ndarray]:
    """Put the functions together as the knobs say, and return the loss and its gradient by the current logprobs."""
    mask_T = _loss_mask(case, knobs)
    advantages_T = _advantages(case, knobs, mask_T)
    everything: dict[str, Any] = {"rows_T": tensor(case.rows), "num_rows": len(case.lengths)}
    weights_T, denominator = aggregate(mask_T, kind=knobs.aggregation, max_new_tokens=MAX_NEW_TOKENS, **everything)
    shared = {"loss_mask_T": mask_T, "token_weights_T": weights_T / denominator}
    current_T = tensor(case.current).requires_grad_()
    behaviour_T, _ = behaviour_weights(
        tensor(case.proximal),
        behaviour_logprobs_T=tensor(case.behaviour),
        loss_mask_T=mask_T,
        level=knobs.behaviour_weight,
        cap=knobs.behaviour_weight_cap,
        above=knobs.behaviour_weight_above,
        floor=knobs.behaviour_weight_floor,
        **everything,
    )
    if knobs.behaviour_filter == "m2po":
        kept_T = m2po_keep(
            current_T.detach() - tensor(case.behaviour),
            advantages_T=advantages_T,
            loss_mask_T=mask_T,
            threshold=knobs.m2po_threshold,
        )
        behaviour_T = torch.where(kept_T, behaviour_T, 0.0)
    if knobs.behaviour_filter == "binary_kl":
        kept_T = divergence_keep(
            tensor(case.proximal),
            behaviour_logprobs_T=tensor(case.behaviour),
            loss_mask_T=mask_T,
            limit=knobs.binary_kl_limit,
            **everything,
        )
        behaviour_T = torch.where(kept_T, behaviour_T, 0.0)
    loss, _ = policy_loss(
        current_T,
        proximal_logprobs_T=tensor(case.proximal),
        behaviour_weights_T=behaviour_T,
        advantages_T=advantages_T,
        **{key: getattr(knobs, key) for key in LossConfig.model_fields},
        **shared,
        **everything,
    )
    if knobs.kl == "loss":
        loss = loss + knobs.kl_coef * kl_penalty(
            current_T,
            other_logprobs_T=tensor(case.reference),
            behaviour_weights_T=behaviour_T,
            estimator=knobs.kl_estimator,
            direction="to_other",
            **shared,
        )
    loss.backward()
    assert current_T.grad is not None
    return float(loss.detach()), current_T.grad.numpy()


def _loss_mask(case: Case, knobs: ObjectiveConfig) -> torch.Tensor:
    kept = kept_samples(tensor(case.rewards), sample_filter=knobs.sample_filter).numpy().reshape(-1)
    kept = kept & ~(case.truncated & knobs.mask_truncated)
    return tensor(case.mask & np.repeat(kept, case.lengths))


def _advantages(case: Case, knobs: ObjectiveConfig, mask_T: torch.Tensor) -> torch.Tensor:
    shaped_NG = shape_rewards(
        tensor(case.rewards), scale=knobs.reward_scale, bias=knobs.reward_bias, clip=knobs.reward_clip
    )
    lengths_B = tensor(case.lengths)
    shaped_NG = shaped_NG + overlong_penalties(
        lengths_B.reshape(shaped_NG.shape), max_new_tokens=MAX_NEW_TOKENS, buffer=knobs.overlong_buffer
    )
    costs_T = torch.zeros(len(mask_T), dtype=torch.float64)
    if knobs.kl == "reward":
        costs_T = knobs.kl_coef * kl_estimate(
            tensor(case.proximal), reference_logprobs_T=tensor(case.reference), estimator=knobs.kl_estimator
        )
    rewards_T = token_rewards(shaped_NG.reshape(-1).nan_to_num(), lengths_B=lengths_B, costs_T=costs_T)
    if knobs.baseline == "critic":
        advantages_T, _ = gae(
            rewards_T,
            values_T=tensor(case.values),
            lengths_B=lengths_B,
            gamma=knobs.gamma,
            gae_lambda=knobs.gae_lambda,
        )
    else:
        # Whole samples are compared; a token answers for what is paid from it on.
        costs_NG = torch.zeros(len(lengths_B), dtype=torch.float64).index_add(0, tensor(case.rows), costs_T)
        advantages_NG = sample_advantages(
            shaped_NG - costs_NG.reshape(shaped_NG.shape), baseline=knobs.baseline, scale=knobs.scale
        )
        to_go_T = returns_to_go(rewards_T, lengths_B=lengths_B, gamma=1.0)
        advantages_T = advantages_NG.reshape(-1)[tensor(case.rows)]
        if knobs.kl == "reward":
            starts_B = to_go_T[lengths_B.cumsum(dim=0) - lengths_B]
            advantages_T = advantages_T + to_go_T - starts_B[tensor(case.rows)]
    if knobs.scale == "batch_std":
        advantages_T = advantages_T / (std_from_sums(masked_sums(advantages_T, mask_T)) + 1e-6)
    return advantages_T
