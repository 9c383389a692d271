"""One optimiser update over micro-batches. Called by the RL trainer and by the supervised loop, which share it.

It knows AdamW, clipping and skipping, but not what is learned: the loss comes in as a function.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from areal_lite.config.sections import TrainerConfig

__all__ = ["Learner", "Update"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What an optimiser update did."""

    applied: bool
    """False when the gradient norm was not finite: weights and optimiser state are as before."""
    grad_norm: float
    """Global L2 norm before clipping; may be NaN or infinite when not applied."""


class Learner:
    """A model with its AdamW optimiser."""

    def __init__(self, model: nn.Module, *, settings: TrainerConfig, world_size: int) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._max_grad_norm = settings.max_grad_norm
        self._world_size = world_size
        self._create_optimizer_state()

    def update(self, shares: Sequence[Callable[[], Tensor]], *, lr: float) -> Update:
        """Add up the gradients of all micro-batches, clip them, and step unless their norm is not finite; collective.

        Args:
            shares: Each runs the model on a micro-batch and returns its share of the loss; the shares of all
                micro-batches and all ranks add up to the loss of the update. Equally many on every rank.
            lr: Learning rate of this update.
        """
        for share in shares:
            # FSDP averages gradients over the ranks; the shares are to be added.
            (share() * self._world_size).backward()  # type: ignore[no-untyped-call]
        grad_norm = self._clip_gradients()
        applied = math.isfinite(grad_norm)
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        else:
            logger.warning("optimiser update skipped: the gradient norm is %s", grad_norm)
        self.optimizer.zero_grad()
        return Update(applied=applied, grad_norm=grad_norm)

    def _clip_gradients(self) -> float:
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None], foreach=True)
        clip_grads_with_norm_(parameters, self._max_grad_norm, norm, foreach=True)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _create_optimizer_state(self) -> None:
        """Create what AdamW would on its first step, so that a checkpoint before it is like any other."""
        for parameter in self.model.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
