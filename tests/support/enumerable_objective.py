"""The expected step of an objective's knobs on enumerable languages, from the project's functions in their order."""

from collections.abc import Sequence
from typing import Any

import torch
from enumerable_language import Batch, Language, draw, expected_step, gradient_of
from torch import Tensor

from areal_lite.algo.advantages import gae, kept_samples, sample_advantages
from areal_lite.algo.aggregation import aggregate
from areal_lite.algo.behaviour import behaviour_weights
from areal_lite.algo.kl import kl_estimate
from areal_lite.algo.losses import policy_loss
from areal_lite.algo.rewards import token_rewards
from areal_lite.config.presets import LossConfig, ObjectiveConfig

LANGUAGE = Language(num_symbols=3, max_length=3)
SMALL = Language(num_symbols=3, max_length=2)
TINY = Language(num_symbols=2, max_length=2)
LIMIT = 8
"""max_new_tokens of the constant aggregation."""


def plain(**knobs: Any) -> ObjectiveConfig:
    """Build the simplest objective, sequence REINFORCE without baseline or clip, with some knobs changed."""
    simplest: dict[str, Any] = {
        "baseline": "none",
        "scale": "none",
        "aggregation": "sequence_sum",
        "clip_low": None,
        "clip_high": None,
        "behaviour_weight_cap": 1e9,
    }
    return ObjectiveConfig(**simplest | knobs)


def estimate(
    objective: ObjectiveConfig,
    *,
    language: Language = LANGUAGE,
    rewards_NS: Sequence[Tensor] | None = None,
    samples: int = 1,
    values_X: Tensor | None = None,
    reference_XV: Tensor | None = None,
    behaviour_logits_XV: Tensor | None = None,
) -> Tensor:
    """Return the expected step of an objective, from the project's functions in the order that training calls them.

    Args:
        objective: Its knobs.
        language: What is sampled.
        rewards_NS: The reward of each sequence, for each prompt of a batch.
        samples: G.
        values_X: The critic's value of each prefix (baseline: critic).
        reference_XV: The reference model's log-probabilities (kl: reward).
        behaviour_logits_XV: What is sampled from; None = the current policy.
    """
    rewards_NS = [language.random_rewards(0)] if rewards_NS is None else rewards_NS
    logits_XV = language.random_table(1)
    proximal_XV = logits_XV.log_softmax(dim=1)
    behaviour_XV = proximal_XV if behaviour_logits_XV is None else behaviour_logits_XV.log_softmax(dim=1)
    if objective.proximal == "behaviour":
        proximal_XV = behaviour_XV

    def loss(batch: Batch, logprobs_XV: Tensor) -> Tensor:
        rows: dict[str, Any] = {"rows_T": batch.rows_T, "num_rows": len(batch.lengths_B)}
        rewards_NG = draw(rewards_NS, batch)
        mask_T = kept_samples(rewards_NG, sample_filter=objective.sample_filter).flatten()[batch.rows_T]
        weights_T, denominator = aggregate(mask_T, **rows, kind=objective.aggregation, max_new_tokens=LIMIT)
        behaviour_T, _ = behaviour_weights(
            batch.at_tokens(proximal_XV),
            behaviour_logprobs_T=batch.at_tokens(behaviour_XV),
            loss_mask_T=mask_T,
            level=objective.behaviour_weight,
            cap=objective.behaviour_weight_cap,
            above=objective.behaviour_weight_above,
            floor=objective.behaviour_weight_floor,
            **rows,
        )
        costs_T = None
        if reference_XV is not None:
            costs_T = objective.kl_coef * kl_estimate(
                batch.at_tokens(logprobs_XV),
                reference_logprobs_T=batch.at_tokens(reference_XV),
                estimator=objective.kl_estimator,
            )
        rewards_T = token_rewards(rewards_NG.flatten(), lengths_B=batch.lengths_B, costs_T=costs_T)
        if objective.baseline == "critic":
            assert values_X is not None
            advantages_T, _ = gae(
                rewards_T,
                values_T=values_X[batch.prefixes_T],
                lengths_B=batch.lengths_B,
                gamma=objective.gamma,
                gae_lambda=objective.gae_lambda,
            )
        else:
            returns_B = torch.stack([part.sum() for part in rewards_T.split(batch.lengths_B.tolist())])
            advantages_NG = sample_advantages(
                returns_B.view_as(rewards_NG), baseline=objective.baseline, scale=objective.scale
            )
            advantages_T = advantages_NG.flatten()[batch.rows_T]
        return policy_loss(
            batch.at_tokens(logprobs_XV),
            proximal_logprobs_T=batch.at_tokens(proximal_XV),
            behaviour_weights_T=behaviour_T,
            advantages_T=advantages_T,
            loss_mask_T=mask_T,
            token_weights_T=weights_T / denominator,
            **{key: getattr(objective, key) for key in LossConfig.model_fields},
            **rows,
        )[0]

    return expected_step(
        language, loss, logits_XV=logits_XV, num_rows=len(rewards_NS) * samples, behaviour_logits_XV=behaviour_logits_XV
    )


def weighted_gradient(rewards_S: Tensor, language: Language = LANGUAGE) -> Tensor:
    """Return the exact gradient of `sum over sequences of pi * reward`."""
    return gradient_of(
        lambda logprobs_XV: (language.sequence_logprobs(logprobs_XV).exp() * rewards_S).sum(), language.random_table(1)
    )


def policy(language: Language = LANGUAGE) -> tuple[Tensor, Tensor]:
    """Return the policy's [X, V] and [S] log-probabilities."""
    logprobs_XV = language.random_table(1).log_softmax(dim=1)
    return logprobs_XV, language.sequence_logprobs(logprobs_XV)


def assert_equal(step_XV: Tensor, exact_XV: Tensor) -> None:
    assert float(exact_XV.norm()) > 0.01, "the test would say nothing"
    torch.testing.assert_close(step_XV, exact_XV, rtol=0, atol=1e-6)


def other_logits(language: Language = LANGUAGE) -> Tensor:
    """Return the logits of another policy, not far away."""
    return language.random_table(1) + language.random_table(7, scale=0.7)
