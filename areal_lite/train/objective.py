"""The policy's loss of one optimiser update, micro-batch by micro-batch, and the sums it leaves for the log.

Called by the trainer, which hands it to the optimiser update as the loss function. The arithmetic itself is in `algo/`.

Shape letters: `T` completion tokens of the shard or of a micro-batch, `V` vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from areal_lite.algo.behaviour import behaviour_weights
from areal_lite.algo.kl import kl_estimate
from areal_lite.algo.logprobs import token_entropies, token_logprobs
from areal_lite.algo.losses import entropy_bonus, kl_penalty, policy_loss
from areal_lite.config.recipe import Config
from areal_lite.train.batch import PolicyBatch
from areal_lite.train.micro_batch import MicroBatch
from areal_lite.train.model import completion_logits
from areal_lite.train.passes import Scores
from areal_lite.train.plan import StepPlan

__all__ = ["PolicyUpdateLoss"]


class PolicyUpdateLoss:
    """A function from a micro-batch to its share of the loss: policy term, KL terms, entropy bonus."""

    def __init__(
        self,
        batch: PolicyBatch,
        *,
        model: nn.Module,
        scores: Scores,
        plan: StepPlan,
        is_first: bool,
        config: Config,
    ) -> None:
        """Prepare the loss of one update.

        Args:
            batch: The shard.
            model: The policy.
            scores: Logprobs before the updates; in the first update the proximal ones may be filled in here.
            plan: What all updates of the step share.
            is_first: The weights are still those of the moment the batch was taken: the current logprobs, detached,
                are the proximal ones.
            config: The recipe.
        """
        self._batch, self._model, self._config = batch, model, config
        self._scores, self._plan, self._is_first = scores, plan, is_first
        self._sums: list[dict[str, Tensor]] = []
        self._age0_diffs: list[Tensor] = []

    def __call__(self, micro_batch: MicroBatch) -> Tensor:
        """Run the model and return the micro-batch's share of the loss."""
        tokens_T, temperature = micro_batch.tokens_T, self._config.rollout.temperature
        objective = self._config.objective
        logits_TV = completion_logits(self._model, micro_batch)
        token_ids_T = self._batch.token_ids_T[tokens_T]
        current_logprobs_T = token_logprobs(logits_TV, token_ids_T=token_ids_T, temperature=temperature)
        if self._is_first and not self._scores.proximal_complete:
            self._scores.proximal_logprobs_T[tokens_T] = current_logprobs_T.detach()
        entropies_T = token_entropies(logits_TV, temperature=temperature, differentiable=objective.entropy_coef > 0)
        tokens = self._look_up(tokens_T)
        loss, sums = self._policy_term(current_logprobs_T, tokens)
        loss = loss + self._kl_terms(current_logprobs_T, tokens)
        if objective.entropy_coef > 0:
            bonus = entropy_bonus(entropies_T, loss_mask_T=tokens.loss_mask_T, token_weights_T=tokens.token_weights_T)
            loss = loss - objective.entropy_coef * bonus
        means = tokens.sums(current_logprobs_T.detach(), entropies_T.detach())
        self._sums.append({"clip_fraction": sums["clipped"], **means, "loss": loss.detach()})
        self._age0_diffs.append(self._age0_diff(tokens_T, tokens, current_logprobs_T.detach()))
        return loss

    def sums(self) -> dict[str, float]:
        """Return the sums over all micro-batches so far, by the names of their metrics."""
        values = torch.stack([torch.stack([sums[name].double() for name in sums]) for sums in self._sums]).sum(dim=0)
        return dict(zip(self._sums[0], values.tolist(), strict=True))

    def max_age0_diff(self) -> float:
        """Return the largest behaviour-trainer logprob difference at age-0 tokens; infinite if one is not finite."""
        return float(torch.stack(self._age0_diffs).max())

    def _look_up(self, tokens_T: Tensor) -> "_Tokens":
        batch, plan, objective = self._batch, self._plan, self._config.objective
        proximal_logprobs_T = self._scores.proximal_logprobs_T[tokens_T]
        behaviour_logprobs_T = batch.behaviour_logprobs_T[tokens_T]
        loss_mask_T, rows_T = batch.loss_mask_T[tokens_T], batch.rows_T[tokens_T]
        weights_T, above_cap_T = behaviour_weights(
            proximal_logprobs_T,
            behaviour_logprobs_T=behaviour_logprobs_T,
            loss_mask_T=loss_mask_T,
            rows_T=rows_T,
            num_rows=len(batch.lengths_B),
            level=objective.behaviour_weight,
            cap=objective.behaviour_weight_cap,
            above=objective.behaviour_weight_above,
        )
        reference_T = self._scores.reference_logprobs_T
        return _Tokens(
            rows_T=rows_T,
            loss_mask_T=loss_mask_T,
            behaviour_logprobs_T=behaviour_logprobs_T,
            proximal_logprobs_T=proximal_logprobs_T,
            reference_logprobs_T=None if reference_T is None else reference_T[tokens_T],
            behaviour_weights_T=torch.where(plan.kept_T[tokens_T], weights_T, 0.0),
            above_cap_T=above_cap_T,
            token_weights_T=plan.token_weights_T[tokens_T],
            advantages_T=plan.advantages.advantages_T[tokens_T],
        )

    def _policy_term(self, current_logprobs_T: Tensor, tokens: "_Tokens") -> tuple[Tensor, dict[str, Tensor]]:
        objective = self._config.objective
        return policy_loss(
            current_logprobs_T,
            proximal_logprobs_T=tokens.proximal_logprobs_T,
            behaviour_weights_T=tokens.behaviour_weights_T,
            advantages_T=tokens.advantages_T,
            loss_mask_T=tokens.loss_mask_T,
            token_weights_T=tokens.token_weights_T,
            rows_T=tokens.rows_T,
            num_rows=len(self._batch.lengths_B),
            surrogate=objective.surrogate,
            ratio_level=objective.ratio_level,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
        )

    def _kl_terms(self, current_logprobs_T: Tensor, tokens: "_Tokens") -> Tensor:
        """Return the weighted distances to the reference and to the proximal policy, as far as they are asked for."""
        objective, coefficients = self._config.objective, self._plan.coefficients
        terms = current_logprobs_T.new_zeros(())
        if objective.kl == "loss" and tokens.reference_logprobs_T is not None:
            terms = terms + coefficients.kl * kl_penalty(
                current_logprobs_T,
                other_logprobs_T=tokens.reference_logprobs_T,
                behaviour_weights_T=tokens.behaviour_weights_T,
                loss_mask_T=tokens.loss_mask_T,
                token_weights_T=tokens.token_weights_T,
                estimator=objective.kl_estimator,
                direction="to_other",
            )
        if objective.proximal_kl_coef > 0:
            terms = terms + coefficients.proximal_kl * kl_penalty(
                current_logprobs_T,
                other_logprobs_T=tokens.proximal_logprobs_T,
                behaviour_weights_T=tokens.behaviour_weights_T,
                loss_mask_T=tokens.loss_mask_T,
                token_weights_T=tokens.token_weights_T,
                estimator="k3",
                direction="from_other",
            )
        return terms

    def _age0_diff(self, tokens_T: Tensor, tokens: "_Tokens", current_logprobs_T: Tensor) -> Tensor:
        trainer_logprobs_T = current_logprobs_T if self._is_first else tokens.proximal_logprobs_T
        diffs_T = (tokens.behaviour_logprobs_T - trainer_logprobs_T).abs()
        # A NaN would vanish in a maximum.
        diffs_T = torch.where(diffs_T.isfinite(), diffs_T, torch.inf)
        diffs_T = torch.where(tokens.loss_mask_T & (self._batch.ages_T[tokens_T] == 0), diffs_T, 0.0)
        return torch.cat([diffs_T, diffs_T.new_zeros(1)]).max()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """What the terms of the loss need to know of a micro-batch, [T] each."""

    rows_T: Tensor
    loss_mask_T: Tensor
    behaviour_logprobs_T: Tensor
    proximal_logprobs_T: Tensor
    reference_logprobs_T: Tensor | None
    behaviour_weights_T: Tensor
    above_cap_T: Tensor
    token_weights_T: Tensor
    advantages_T: Tensor

    def sums(self, current_logprobs_T: Tensor, entropies_T: Tensor) -> dict[str, Tensor]:
        """Add up over the loss mask what the log shows as means."""

        def total(values_T: Tensor) -> Tensor:
            return torch.where(self.loss_mask_T, values_T, 0.0).sum()

        sums = {
            "entropy": total(entropies_T),
            "kl_behav_prox": total(self.behaviour_logprobs_T - self.proximal_logprobs_T),
            "behav_weight_mean": total(self.behaviour_weights_T),
            "behav_weight_masked_fraction": self.above_cap_T.sum(),
        }
        if self.reference_logprobs_T is None:
            return sums
        # k3 is never negative, unlike k1 off-policy.
        distances_T = kl_estimate(current_logprobs_T, reference_logprobs_T=self.reference_logprobs_T, estimator="k3")
        return sums | {"kl_ref": total(self.behaviour_weights_T * distances_T)}
