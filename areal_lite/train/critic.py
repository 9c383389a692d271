"""The critic: a value model with an optimiser of its own, trained beside the policy. Called by the trainer.

Shape letter: `T` completion tokens of the shard.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from areal_lite.algo.advantages import masked_sums, std_from_sums
from areal_lite.algo.losses import value_loss
from areal_lite.config.recipe import Config
from areal_lite.train.distributed import sum_over_ranks
from areal_lite.train.micro_batch import MicroBatch
from areal_lite.train.model import completion_values, load_value_model, shard_model
from areal_lite.train.passes import fill_in
from areal_lite.train.schedule import learning_rate
from areal_lite.train.step import Learner

__all__ = ["Critic", "explained_variance"]


class Critic:
    """A model of the return from each state on, the state being a prompt with part of a completion."""

    def __init__(self, config: Config, *, model_folder: str, world_size: int, device: torch.device) -> None:
        """Load the body, put a head on it that says 0, and spread both over the ranks; collective.

        Args:
            config: The recipe: `critic`, and `trainer` for all that the critic shares with the policy.
            model_folder: The initial policy, whose body the critic starts from unless the recipe names another.
            world_size: Trainer ranks.
            device: The rank's device.
        """
        self._config, self._device = config, device
        self._settings = config.trainer.model_copy(update={"lr": config.critic.lr})
        whole = load_value_model(
            config.critic.path or model_folder,
            device=device,
            activation_checkpointing=config.trainer.activation_checkpointing,
        )
        dtype = getattr(torch, config.compute_dtype)
        self.model = shard_model(whole, world_size=world_size, device=device, compute_dtype=dtype)
        self.learner = Learner(self.model, settings=self._settings, world_size=world_size)

    def values(self, batches: Sequence[MicroBatch], *, num_tokens: int) -> Tensor:
        """Return the value of the state before each completion token, [T] float32; collective."""
        values_T = torch.zeros(num_tokens, device=self._device)
        return fill_in(values_T, batches, model=self.model, of_batch=partial(completion_values, self.model))

    def update(
        self,
        batches: Sequence[MicroBatch],
        *,
        old_values_T: Tensor,
        targets_T: Tensor,
        loss_mask_T: Tensor,
        token_weights_T: Tensor,
        version: int,
    ) -> float | None:
        """Take one optimiser step towards the targets; collective.

        Args:
            batches: The micro-batches of the policy's update.
            old_values_T: [T] values before the step's updates.
            targets_T: [T] returns.
            loss_mask_T: [T] booleans.
            token_weights_T: [T], divided by the denominator of the update.
            version: Completed trainer steps, for the learning rate.

        Returns:
            This rank's share of the value loss; None when the update was not applied.
        """
        shares: list[Tensor] = []

        def share(batch: MicroBatch) -> Tensor:
            tokens_T = batch.tokens_T
            loss, _ = value_loss(
                completion_values(self.model, batch),
                old_values_T=old_values_T[tokens_T],
                targets_T=targets_T[tokens_T],
                loss_mask_T=loss_mask_T[tokens_T],
                token_weights_T=token_weights_T[tokens_T],
                clip=self._config.critic.value_clip,
            )
            shares.append(loss.detach())
            return loss

        lr = learning_rate(version, total_steps=self._config.run.steps, settings=self._settings)
        outcome = self.learner.update([partial(share, batch) for batch in batches], lr=lr)
        return float(torch.stack(shares).sum()) if outcome.applied else None


def explained_variance(values_T: Tensor, *, targets_T: Tensor, loss_mask_T: Tensor) -> float | None:
    """Return `1 - var(target - value) / var(target)` over the loss mask of all ranks; collective.

    1 = the values are the targets, 0 = no better than a constant; None where the targets do not vary.

    Args:
        values_T: [T] values before the updates.
        targets_T: [T] returns.
        loss_mask_T: [T] booleans.
    """
    sums = torch.stack([masked_sums(targets_T, loss_mask_T), masked_sums(targets_T - values_T, loss_mask_T)])
    targets_3, errors_3 = sum_over_ranks(sums)
    target_std = std_from_sums(targets_3)
    return 1.0 - (std_from_sums(errors_3) / target_std) ** 2 if target_std > 0 else None
