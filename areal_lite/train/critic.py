"""The critic: a value model with an optimiser of its own, trained beside the policy."""

from functools import partial

import torch
from torch import Tensor

from areal_lite.algo.advantages import masked_sums, std_from_sums
from areal_lite.algo.losses import value_loss
from areal_lite.config.recipe import Config
from areal_lite.train.batch import PolicyBatch, Tokens
from areal_lite.train.distributed import sum_over_ranks
from areal_lite.train.micro_batch import MicroBatch
from areal_lite.train.model import completion_values, load_value_model
from areal_lite.train.optimiser import Learner, Update, learning_rate


def load_critic(config: Config, *, model_folder: str) -> Learner:
    """Load a body, put a head on it that says 0, and spread both over the ranks; collective.

    It learns the return from each state on, the state being a prompt with part of a completion.

    Args:
        config: The recipe: `critic`, and `trainer` for all that the critic shares with the policy.
        model_folder: The initial policy, whose body the critic starts from unless the recipe names another.
    """
    settings = config.trainer.model_copy(update={"lr": config.critic.lr})
    return Learner(load_value_model(config.critic.path or model_folder, config), settings=settings)


def update_critic(critic: Learner, batch: PolicyBatch, number: int, *, config: Config, version: int) -> Update:
    """Take one optimiser step towards the targets; collective.

    Args:
        batch: The shard, scored, with targets and weights.
        number: Of the update.
        version: Completed trainer steps, for the learning rate.
    """

    def share(micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = batch.tokens.at(micro_batch.tokens_T)
        assert tokens.values_T is not None
        assert tokens.targets_T is not None
        loss, _ = value_loss(
            completion_values(critic.model, micro_batch),
            old_values_T=tokens.values_T,
            targets_T=tokens.targets_T,
            loss_mask_T=tokens.loss_mask_T,
            token_weights_T=tokens.weights_T,
            clip=config.critic.value_clip,
        )
        return loss, {"value_loss": loss.detach()}

    lr = learning_rate(version, total_steps=config.run.steps, settings=critic.settings)
    return critic.update([partial(share, part) for part in batch.updates[number]], lr=lr)


def explained_variance(tokens: Tokens) -> float | None:
    """Return `1 - var(target - value) / var(target)` over the loss mask of all ranks; collective.

    1 = the values are the targets, 0 = no better than a constant; None where the targets do not vary, and without a
    critic.
    """
    values_T, targets_T, mask_T = tokens.values_T, tokens.targets_T, tokens.loss_mask_T
    if values_T is None or targets_T is None:
        return None
    targets_3, errors_3 = sum_over_ranks(
        torch.stack([masked_sums(targets_T, mask_T), masked_sums(targets_T - values_T, mask_T)])
    )
    target_std = std_from_sums(targets_3)
    return 1.0 - (std_from_sums(errors_3) / target_std) ** 2 if target_std > 0 else None
