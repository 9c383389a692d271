"""The loss of one optimiser update: which tokens count, how much, and the terms of a micro-batch.

The arithmetic itself is in `algo/`. Shape letters: `T` completion tokens of the shard or of a micro-batch, `V`
vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from areal_lite.algo.aggregation import aggregate
from areal_lite.algo.behaviour import behaviour_weights
from areal_lite.algo.kl import adapt_coefficient, kl_estimate
from areal_lite.algo.logprobs import token_entropies, token_logprobs
from areal_lite.algo.losses import entropy_bonus, kl_penalty, policy_loss, value_loss
from areal_lite.config.plugins import find_function, takes
from areal_lite.config.presets import LossConfig, ObjectiveConfig
from areal_lite.config.recipe import Config
from areal_lite.errors import PluginError
from areal_lite.train.batch import PolicyBatch, Tokens, described
from areal_lite.train.distributed import sum_over_ranks
from areal_lite.train.micro_batch import MicroBatch
from areal_lite.train.model import completion_outputs, completion_values
from areal_lite.train.score import needs_proximal_first
from areal_lite.train.stats import own_metric

PolicyTerm = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""From the current log-probabilities and named tensors, as of `algo.losses.policy_loss`, to a loss and sums to log."""

_FURTHEST = 100.0
"""An adaptive coefficient stays within this factor of the recipe's. The distance to a reference starts at 0: a
coefficient that was halved at every step until then would need as many steps to recover."""


class KLCoefficient:
    """The weight of a KL term, which may adapt to the measured KL; a checkpoint holds it."""

    def __init__(self, first: float, *, target: float | None) -> None:
        self.value = self._first = first
        self._target = target

    def adapt(self, measured: float | None) -> None:
        """Adapt the weight to a step's mean KL in nats per token, if it has a target."""
        if measured is not None and self._target is not None:
            moved = adapt_coefficient(self.value, measured=measured, target=self._target)
            self.value = min(max(moved, self._first / _FURTHEST), self._first * _FURTHEST)

    def restore(self, saved: float | None) -> None:
        """Continue with a saved weight if it has a target; else the recipe's stays."""
        self.value = self._first if saved is None or self._target is None else saved


def weigh_tokens(batch: PolicyBatch, config: Config) -> list[bool]:
    """Set the weights of the batch's tokens; collective.

    Denominators are those of whole updates: the loss mask before any behaviour weight, over all ranks.

    Returns:
        For each update, whether no token of any rank trains in it.
    """
    tokens = batch.tokens
    places = [torch.cat([part.tokens_T for part in update]) for update in batch.updates]
    shares = [
        aggregate(
            tokens.loss_mask_T[places_T],
            rows_T=tokens.rows_T[places_T],
            num_rows=len(batch.lengths_B),
            kind=config.objective.aggregation,
            max_new_tokens=config.rollout.max_new_tokens,
        )
        for places_T in places
    ]
    denominators = sum_over_ranks(torch.stack([denominator for _, denominator in shares]))
    for places_T, (weights_T, _), denominator in zip(places, shares, denominators, strict=True):
        tokens.weights_T[places_T] = (weights_T / denominator.clamp(min=1)).float()
    is_empty: list[bool] = (denominators == 0).tolist()
    return is_empty


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateLoss:
    """A function from a micro-batch to its share of an update's loss: policy term, KL terms, entropy bonus."""

    batch: PolicyBatch
    """Scored, with advantages and weights."""
    model: nn.Module
    config: Config
    is_first: bool
    """The weights are still those of the moment the batch was taken: the current logprobs, detached, are the proximal
    ones, and are set here unless they were needed before."""
    kl_coef: float
    """Of the KL to the reference."""
    policy_term: PolicyTerm

    def __call__(self, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the model; return the share of the loss, and sums to log, by the names of the metrics."""
        everything, places_T = self.batch.tokens, micro_batch.tokens_T
        objective, temperature = self.config.objective, self.config.rollout.temperature

        def read(logits_TV: Tensor, token_ids_T: Tensor) -> Tensor:
            logprobs_T = token_logprobs(logits_TV, token_ids_T, temperature=temperature)
            differentiable = objective.entropy_coef > 0
            entropies_T = token_entropies(logits_TV, temperature=temperature, differentiable=differentiable)
            return torch.stack([logprobs_T, entropies_T], dim=1)

        outputs_T2 = completion_outputs(self.model, micro_batch, read, micro_batch.token_ids_T)
        current_T, entropies_T = outputs_T2.unbind(dim=1)
        if self.is_first and objective.proximal != "behaviour" and not needs_proximal_first(objective):
            everything.proximal_logprobs_T[places_T] = current_T.detach()
        tokens = everything.at(places_T)
        rows: dict[str, Any] = {"rows_T": tokens.rows_T, "num_rows": len(self.batch.lengths_B)}
        weights_T, above_cap_T = behaviour_weights(
            tokens.proximal_logprobs_T,
            behaviour_logprobs_T=tokens.behaviour_logprobs_T,
            loss_mask_T=tokens.loss_mask_T,
            level=objective.behaviour_weight,
            cap=objective.behaviour_weight_cap,
            above=objective.behaviour_weight_above,
            floor=objective.behaviour_weight_floor,
            **rows,
        )
        weights_T = torch.where(tokens.kept_T, weights_T, 0.0)
        weighting = {
            "behaviour_weights_T": weights_T,
            "loss_mask_T": tokens.loss_mask_T,
            "token_weights_T": tokens.weights_T,
        }
        loss, logged = self.policy_term(
            current_T,
            proximal_logprobs_T=tokens.proximal_logprobs_T,
            advantages_T=tokens.advantages_T,
            **rows,
            **weighting,
        )
        loss = loss + sum(self._kl_terms(current_T, tokens, weighting))
        if objective.entropy_coef > 0:
            bonus = entropy_bonus(entropies_T, loss_mask_T=tokens.loss_mask_T, token_weights_T=tokens.weights_T)
            loss = loss - objective.entropy_coef * bonus
        sums = {
            "clip_fraction": logged.pop("clipped", loss.new_zeros(())),
            "entropy": _total(entropies_T, tokens),
            "kl_behav_prox": _total(tokens.behaviour_logprobs_T - tokens.proximal_logprobs_T, tokens),
            "behav_weight_mean": _total(weights_T, tokens),
            "behav_weight_masked_fraction": above_cap_T.sum(),
            "loss": loss,
            "behav_prox_max_abs_diff_age0": self._age0_diff(current_T, tokens),
        }
        if tokens.reference_logprobs_T is not None:
            # k3 is never negative, unlike k1 off-policy.
            distances_T = kl_estimate(current_T, reference_logprobs_T=tokens.reference_logprobs_T, estimator="k3")
            sums["kl_ref"] = _total(weights_T * distances_T, tokens)
            # Tokens that cap or filter removes would count as tokens without any distance.
            sums["weighted_tokens"] = (tokens.loss_mask_T & (weights_T > 0)).sum()
        sums |= {own_metric(name): value for name, value in logged.items()}
        return loss, {name: value.detach().double() for name, value in sums.items()}

    def _age0_diff(self, current_T: Tensor, tokens: Tokens) -> Tensor:
        """Return the largest behaviour-trainer logprob difference at age-0 tokens; infinite if one is not finite."""
        diffs_T = (tokens.behaviour_logprobs_T - (current_T if self.is_first else tokens.proximal_logprobs_T)).abs()
        # A NaN would vanish in a maximum.
        diffs_T = torch.where(diffs_T.isfinite(), diffs_T, torch.inf)
        diffs_T = torch.where(tokens.loss_mask_T & (tokens.ages_T == 0), diffs_T, 0.0)
        return torch.cat([diffs_T, diffs_T.new_zeros(1)]).max()

    def _kl_terms(self, current_T: Tensor, tokens: Tokens, weighting: Mapping[str, Any]) -> Iterator[Tensor]:
        """Yield the weighted distances to the reference and to the proximal policy that the recipe has."""
        objective = self.config.objective
        penalty = partial(kl_penalty, current_T, **weighting)
        if objective.kl == "loss" and (reference_T := tokens.reference_logprobs_T) is not None:
            kind = objective.kl_estimator
            yield self.kl_coef * penalty(other_logprobs_T=reference_T, estimator=kind, direction="to_other")
        if objective.proximal_kl_coef > 0:
            proximal_T = tokens.proximal_logprobs_T
            yield objective.proximal_kl_coef * penalty(
                other_logprobs_T=proximal_T, estimator="k3", direction="from_other"
            )


def critic_loss(
    micro_batch: MicroBatch, *, model: nn.Module, batch: PolicyBatch, config: Config
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the critic; return a micro-batch's share of its update's loss, and sums to log.

    It learns the return from each state on: a prompt with part of a completion.

    Args:
        batch: Scored, with targets and weights.
    """
    tokens = batch.tokens.at(micro_batch.tokens_T)
    assert tokens.values_T is not None
    assert tokens.targets_T is not None
    loss = value_loss(
        completion_values(model, micro_batch),
        old_values_T=tokens.values_T,
        targets_T=tokens.targets_T,
        loss_mask_T=tokens.loss_mask_T,
        token_weights_T=tokens.weights_T,
        clip=config.critic.value_clip,
    )
    return loss, {"value_loss": loss.detach()}


def find_loss_function(objective: ObjectiveConfig) -> PolicyTerm:
    """Return the recipe's loss function, bound to its settings in `LossConfig`; its results are checked.

    It is given the tensors and settings that its signature names.

    Raises:
        PluginError: The function cannot be found, needs an argument that there is not, or does not take a setting that
            the recipe or its preset makes.
    """
    name = objective.loss_function or "policy"
    function = find_function(name, kind="loss function")
    _, *offered = signature(policy_loss).parameters
    names = {key for key in offered if takes(function, key)}
    settings = {key: getattr(objective, key) for key in LossConfig.model_fields if key in names}
    unread = [key for key in LossConfig.model_fields if key not in names]
    to_do = "take it as a keyword of the function, or leave it out"
    because = f"by objective.loss_function={name}"
    is_saved = objective.model_fields_set == ObjectiveConfig.model_fields.keys()  # which names every setting
    made = () if is_saved else objective.model_fields_set
    if problems := list(objective.unread(unread, because, at="objective.", to_do=to_do, made=made)):
        raise PluginError("\n".join(problems))
    try:
        signature(function).bind(None, **dict.fromkeys(names))
    except TypeError as error:
        raise PluginError(
            f"objective.loss_function={name} must take current_logprobs_T first, then keywords that a loss may get: "
            f"{error}. Fix: name any of {', '.join(offered)}"
        ) from None

    def policy_term(current_logprobs_T: Tensor, **known: Any) -> tuple[Tensor, dict[str, Tensor]]:
        chosen = {key: value for key, value in known.items() if key in names}
        result = function(current_logprobs_T, **chosen, **settings)
        loss, sums = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(loss, Tensor) or not isinstance(sums, dict) or loss.shape or not loss.is_floating_point():
            raise PluginError(
                f"objective.loss_function={name} must return a scalar loss and a dict of sums to log, got "
                f"{described(loss)} and {type(sums).__name__}. Fix: return (weights * terms).sum(), {{}}"
            )
        if not loss.requires_grad and not known["loss_mask_T"].any():  # a constant, where nothing trains
            loss = loss + 0.0 * current_logprobs_T.sum()
        return loss, {str(key): _scalar(value, key=key, name=name) for key, value in sums.items()}

    return policy_term


def _scalar(value: Any, *, key: Any, name: str) -> Tensor:
    if (isinstance(value, Tensor) and value.shape) or not isinstance(value, Tensor | int | float):
        raise PluginError(
            f"objective.loss_function={name} must return one number for {key!r}, got {described(value)}. "
            "Fix: return its sum over the loss mask"
        )
    return torch.as_tensor(value)


def _total(values_T: Tensor, tokens: Tokens) -> Tensor:
    """Sum over the loss mask what the log shows as a mean."""
    return torch.where(tokens.loss_mask_T, values_T, 0.0).sum()
