"""The reference model: a frozen policy that KL terms measure the distance to. Loaded only where a recipe has one."""

import torch
from torch import nn

from areal_lite.config.recipe import Config
from areal_lite.train.model import load_model, shard_model

__all__ = ["load_reference"]


def load_reference(config: Config, *, model_folder: str, world_size: int, device: torch.device) -> nn.Module | None:
    """Load the reference model without gradients, sharded as the policy is; None where no term needs one; collective.

    Args:
        config: The recipe: `objective.kl` and `objective.reference_path`.
        model_folder: The initial policy, which is the reference unless the recipe names another.
        world_size: Trainer ranks.
        device: The rank's device.
    """
    if config.objective.kl == "none":
        return None
    folder = config.objective.reference_path or model_folder
    whole = load_model(folder, device=device, activation_checkpointing=False).requires_grad_(False)
    # In the policy's compute dtype: equal weights must give equal logprobs.
    return shard_model(whole, world_size=world_size, device=device, compute_dtype=getattr(torch, config.compute_dtype))
