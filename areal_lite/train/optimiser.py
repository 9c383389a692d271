"""One optimiser update over micro-batches: AdamW, clipping, skipping, and the learning rate of a step.

Losses come in as functions: the policy, the critic and the offline objectives share this.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from areal_lite.config.sections import TrainerConfig

Share = Callable[[], tuple[Tensor, Mapping[str, Tensor]]]
"""Runs the model on a micro-batch; returns its share of the loss, and detached scalars to log, by name."""

logger = logging.getLogger(__name__)

_BETA2 = 0.95
"""AdamW's decay of the second moment."""
_LOWEST_SHARE = 0.1
"""Where the cosine ends, as a share of the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The outcome of an optimiser update."""

    applied: bool
    """False when the gradient norm was not finite: weights and optimiser state are as before."""
    grad_norm: float
    """Global L2 norm before clipping; may be NaN or infinite when not applied."""
    figures: Sequence[Mapping[str, Tensor]]
    """What each share returned to log."""


class Learner:
    """A model with its AdamW optimiser."""

    def __init__(self, model: nn.Module, *, settings: TrainerConfig, total_steps: int) -> None:
        """Make the optimiser for a run of so many steps.

        Matrices decay; norms and biases do not, the stacked ones of experts included.
        """
        self.model, self.settings, self._total_steps = model, settings, total_steps
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        # Operations on lists of tensors need tensors of one mesh.
        groups: dict[tuple[Any, float], list[nn.Parameter]] = {}
        for name, parameter in trained.items():
            decay = settings.weight_decay if parameter.ndim > 1 and not name.endswith("bias") else 0.0
            groups.setdefault((getattr(parameter, "device_mesh", None), decay), []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters, "weight_decay": decay} for (_, decay), parameters in groups.items()],
            lr=settings.lr,
            betas=(0.9, _BETA2),
            fused=True,
        )
        # AdamW would make this state on its first step; a checkpoint before that step needs it too.
        for parameter in trained.values():
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 0 on."""
        return learning_rate(step, total_steps=self._total_steps, settings=self.settings)

    def update(self, shares: Iterable[Share], *, step: int) -> Update:
        """Sum the gradients of all micro-batches, clip them, and step unless their norm is not finite; collective.

        Args:
            shares: Functions whose losses, over all micro-batches and ranks, sum to the loss of the update; equally
                many on every rank.
        """
        figures, waiting, num_shares = [], list(shares), self.settings.ranks // self.settings.mesh.tensor
        while waiting:
            loss, logged = waiting.pop(0)()
            figures.append(logged)
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(not waiting or self.settings.reduce_every == "micro_batch")
            # FSDP averages gradients over the ranks, but the shares must be summed.
            (loss * num_shares).backward()  # type: ignore[no-untyped-call]
        grad_norm = self._clip_gradients()
        applied = math.isfinite(grad_norm)
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(step)
            self.optimizer.step()
        else:
            logger.warning("optimiser update skipped: the gradient norm is %s", grad_norm)
        self.optimizer.zero_grad()
        return Update(applied=applied, grad_norm=grad_norm, figures=figures)

    def _clip_gradients(self) -> float:
        groups = [group["params"] for group in self.optimizer.param_groups]
        norms = [
            get_total_norm([each.grad for each in group if each.grad is not None], foreach=True) for group in groups
        ]
        norm = math.hypot(*(float(each.full_tensor() if isinstance(each, DTensor) else each) for each in norms))
        for group in groups:
            clip_grads_with_norm_(group, self.settings.max_grad_norm, torch.tensor(norm), foreach=True)
        return norm


def learning_rate(step: int, *, total_steps: int, settings: TrainerConfig) -> float:
    """Return the learning rate of a step: linear warm-up, then constant or cosine.

    Args:
        step: 0 .. total_steps - 1.
        total_steps: Steps of the whole run; the cosine reaches its end in the last one.
        settings: `lr` (the peak), `warmup_steps` and `schedule`.

    >>> settings = TrainerConfig(lr=1.0, warmup_steps=2, schedule="cosine")
    >>> [round(learning_rate(step, total_steps=5, settings=settings), 2) for step in range(5)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    done = min(1.0, (step - settings.warmup_steps) / max(1, total_steps - 1 - settings.warmup_steps))
    lowest = settings.lr * _LOWEST_SHARE
    return lowest + (settings.lr - lowest) * 0.5 * (1.0 + math.cos(math.pi * done))
