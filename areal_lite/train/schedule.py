"""The learning rate as a function of the step. Called by the trainer and the supervised loop; keeps no state."""

import math

from areal_lite.config.sections import TrainerConfig

__all__ = ["learning_rate"]


def learning_rate(step: int, *, total_steps: int, settings: TrainerConfig) -> float:
    """Return the learning rate of a step: linear warm-up, then constant or cosine.

    Args:
        step: 0 .. total_steps - 1.
        total_steps: Steps of the whole run; the cosine reaches its end in the last one.
        settings: `lr` (the peak), `warmup_steps`, `schedule` and `min_lr_fraction`.

    >>> settings = TrainerConfig(lr=1.0, warmup_steps=2, schedule="cosine", min_lr_fraction=0.0)
    >>> [round(learning_rate(step, total_steps=5, settings=settings), 2) for step in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    done = min(1.0, (step - settings.warmup_steps) / max(1, total_steps - 1 - settings.warmup_steps))
    lowest = settings.lr * settings.min_lr_fraction
    return lowest + (settings.lr - lowest) * 0.5 * (1.0 + math.cos(math.pi * done))
