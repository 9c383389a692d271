"""The policy loss of one optimiser update, micro-batch by micro-batch, and the sums it leaves for the log.

Called by the trainer, which hands it to the optimiser update as the loss function. The arithmetic itself is in `algo/`.

Shape letters: `T` completion tokens of the shard or of a micro-batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from areal_lite.algo.logprobs import token_entropies, token_logprobs
from areal_lite.algo.losses import decoupled_ppo_loss
from areal_lite.config import Config
from areal_lite.train.batch import PolicyBatch
from areal_lite.train.micro_batch import MicroBatch

__all__ = ["PolicyUpdateLoss"]


class PolicyUpdateLoss:
    """A function from a micro-batch to its share of the loss."""

    def __init__(
        self,
        batch: PolicyBatch,
        *,
        forward: Callable[[MicroBatch], Tensor],
        proximal_logprobs_T: Tensor,
        is_first: bool,
        denominator: int,
        config: Config,
    ) -> None:
        """Prepare the loss of one update.

        Args:
            batch: The shard.
            forward: From a micro-batch to its [T, V] logits under the current weights.
            proximal_logprobs_T: [T] over the shard; in the first update filled in here.
            is_first: The weights are still those of the moment the batch was taken: the current logprobs, detached,
                are the proximal ones.
            denominator: Loss-mask tokens of the update over all ranks, > 0.
            config: The recipe.
        """
        self._batch, self._forward, self._config = batch, forward, config
        self._proximal_logprobs_T = proximal_logprobs_T
        self._is_first, self._denominator = is_first, denominator
        self._sums: list[dict[str, Tensor]] = []
        self._age0_diffs: list[Tensor] = []

    def __call__(self, micro_batch: MicroBatch) -> Tensor:
        """Run the model and return the micro-batch's share of the loss."""
        batch, objective, tokens_T = self._batch, self._config.objective, micro_batch.tokens_T
        temperature = self._config.rollout.temperature
        logits_TV = self._forward(micro_batch)
        current_logprobs_T = token_logprobs(logits_TV, token_ids_T=batch.token_ids_T[tokens_T], temperature=temperature)
        if self._is_first and objective.proximal != "behaviour":
            self._proximal_logprobs_T[tokens_T] = current_logprobs_T.detach()
        loss_mask_T = batch.loss_mask_T[tokens_T]
        loss, sums = decoupled_ppo_loss(
            current_logprobs_T,
            proximal_logprobs_T=self._proximal_logprobs_T[tokens_T],
            behaviour_logprobs_T=batch.behaviour_logprobs_T[tokens_T],
            advantages_T=batch.advantages_T[tokens_T],
            loss_mask_T=loss_mask_T,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            behaviour_weight_cap=objective.behaviour_weight_cap,
            denominator=self._denominator,
        )
        entropies_T = token_entropies(logits_TV, temperature=temperature)
        sums["entropy"] = torch.where(loss_mask_T, entropies_T, 0.0).sum()
        sums["loss"] = loss.detach()
        self._sums.append(sums)
        self._age0_diffs.append(self._age0_diff(tokens_T, loss_mask_T, current_logprobs_T.detach()))
        return loss

    def sums(self) -> dict[str, float]:
        """Return the sums over all micro-batches so far, by name."""
        values = torch.stack([torch.stack([sums[name].double() for name in sums]) for sums in self._sums]).sum(dim=0)
        return dict(zip(self._sums[0], values.tolist(), strict=True))

    def max_age0_diff(self) -> float:
        """Return the largest behaviour-trainer logprob difference at age-0 tokens; infinite if one is not finite."""
        return float(torch.stack(self._age0_diffs).max())

    def _age0_diff(self, tokens_T: Tensor, loss_mask_T: Tensor, current_logprobs_T: Tensor) -> Tensor:
        trainer_logprobs_T = current_logprobs_T if self._is_first else self._proximal_logprobs_T[tokens_T]
        diffs_T = (self._batch.behaviour_logprobs_T[tokens_T] - trainer_logprobs_T).abs()
        # A NaN would vanish in a maximum.
        diffs_T = torch.where(diffs_T.isfinite(), diffs_T, torch.inf)
        diffs_T = torch.where(loss_mask_T & (self._batch.ages_T[tokens_T] == 0), diffs_T, 0.0)
        return torch.cat([diffs_T, diffs_T.new_zeros(1)]).max()
