"""What all updates of a step share: advantages, the tokens a filter leaves, and token weights. Called by the trainer.

Shape letters: `B` rows and `T` completion tokens of the shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo.aggregation import aggregate
from areal_lite.algo.behaviour import geometric_keep, m2po_keep
from areal_lite.config.presets import ObjectiveConfig
from areal_lite.config.recipe import Config
from areal_lite.train.advantages import Advantages, batch_advantages
from areal_lite.train.batch import PolicyBatch
from areal_lite.train.coefficients import Coefficients
from areal_lite.train.distributed import gather_over_ranks, sum_over_ranks
from areal_lite.train.micro_batch import MicroBatch
from areal_lite.train.passes import Scores

__all__ = ["StepPlan", "make_plan", "needs_proximal_first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Fixed before the first update, and the same function of the batch on any number of ranks."""

    advantages: Advantages
    coefficients: Coefficients
    kept_T: Tensor
    """[T] booleans: loss-mask tokens that the behaviour filter leaves."""
    token_weights_T: Tensor
    """[T] float32 weight of each token in the loss of its update, divided by that update's denominator."""
    is_empty: tuple[bool, ...]
    """Updates in which no token trains, on any rank."""


def needs_proximal_first(objective: ObjectiveConfig) -> bool:
    """Tell whether the plan itself reads the proximal logprobs, so that the first update cannot provide its own."""
    return objective.kl == "reward" or objective.behaviour_filter != "none"


def make_plan(
    batch: PolicyBatch,
    updates: Sequence[Sequence[MicroBatch]],
    scores: Scores,
    *,
    config: Config,
    coefficients: Coefficients,
) -> StepPlan:
    """Compute what the updates have in common; collective.

    Args:
        batch: The shard.
        updates: The micro-batches of each update.
        scores: Logprobs and values before the updates.
        config: The recipe.
        coefficients: The weights of the KL terms in this step.
    """
    token_weights_T, is_empty = _token_weights(batch, updates, config)
    return StepPlan(
        advantages=batch_advantages(batch, scores, config=config, kl_coef=coefficients.kl),
        coefficients=coefficients,
        kept_T=_kept_tokens(batch, scores, config.objective),
        token_weights_T=token_weights_T,
        is_empty=is_empty,
    )


def _token_weights(
    batch: PolicyBatch, updates: Sequence[Sequence[MicroBatch]], config: Config
) -> tuple[Tensor, tuple[bool, ...]]:
    """Divide by the denominators of whole updates: the loss mask before any behaviour weight, over all ranks."""
    places = [torch.cat([part.tokens_T for part in update]) for update in updates]
    shares = [
        aggregate(
            batch.loss_mask_T[tokens_T],
            rows_T=batch.rows_T[tokens_T],
            num_rows=len(batch.lengths_B),
            kind=config.objective.aggregation,
            max_new_tokens=config.rollout.max_new_tokens,
        )
        for tokens_T in places
    ]
    denominators = sum_over_ranks(torch.stack([denominator for _, denominator in shares]))
    token_weights_T = torch.zeros_like(batch.behaviour_logprobs_T)
    for tokens_T, (weights_T, _), denominator in zip(places, shares, denominators, strict=True):
        token_weights_T[tokens_T] = (weights_T / denominator.clamp(min=1)).float()
    return token_weights_T, tuple((denominators == 0).tolist())


def _kept_tokens(batch: PolicyBatch, scores: Scores, objective: ObjectiveConfig) -> Tensor:
    """Return the loss-mask tokens that are not too far off-policy, [T]."""
    loss_mask_T = batch.loss_mask_T
    if objective.behaviour_filter == "none":
        return loss_mask_T
    log_weights_T = scores.proximal_logprobs_T - batch.behaviour_logprobs_T
    if objective.behaviour_filter == "geometric":
        return geometric_keep(
            log_weights_T,
            loss_mask_T=loss_mask_T,
            rows_T=batch.rows_T,
            num_rows=len(batch.lengths_B),
            low=objective.geometric_low,
            high=objective.geometric_high,
        )
    everyones, mine = gather_over_ranks(log_weights_T[loss_mask_T])
    kept = m2po_keep(
        everyones, loss_mask_T=torch.ones_like(everyones, dtype=torch.bool), threshold=objective.m2po_threshold
    )
    kept_T = loss_mask_T.clone()
    kept_T[loss_mask_T] = kept[mine]
    return kept_T
