"""What `areal-lite bench train` runs, in which order, and what its figures show: our trainer against a padded loop.

The two sides are processes of `launch/train_bench.py`, the loop that people write is in `padded_loop.py`, the command
in `train_command.py`.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from areal_lite.config.presets import ObjectiveConfig
from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError, TrainerError
from areal_lite.launch.bench.output import middle, target, with_spread

__all__ = [
    "COLUMNS",
    "LONGTAIL",
    "WORK",
    "Measured",
    "Step",
    "TrainBench",
    "cells",
    "check_gradients",
    "check_recipe",
    "run_steps",
    "summarise",
    "targets",
    "work_settings",
]

Side = Literal["areal-lite", "padded", "fastest"]
"""The trainer; the padded loop with `TrainBench.rows`; and with the number of rows with which it is fastest here."""
Work = Literal["one pass", "recipe"]
WORK: tuple[Work, ...] = ("one pass", "recipe")
LONGTAIL = "areal_lite.launch.bench.longtail:drawn_length"
"""The workflow whose lengths are drawn."""
COLUMNS = (
    "side and pass", "lengths, work", "tokens/s", "places", "MB", "gradient", "over padded", "over fastest"
)  # fmt: skip
TOLERANCE = 1e-3
"""Largest relative difference of gradient norms with which a figure counts."""
_FREE = {"preset", "clip_low", "clip_high", "behaviour_weight_cap", "proximal"}
"""Knobs of the objective that the padded loop knows; the others must be the default's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one trainer step of one side was."""

    seconds: float
    tokens: int
    """Completion tokens that trained."""
    positions: int
    """Places of all forward passes, prompts and padding included."""
    grad_norm: float
    """Mean over the step's updates, before clipping."""


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    """Settings of the bench."""

    repeats: int = 5
    steps: int = 2
    """Trainer steps of one measurement, each with a batch of its own."""
    rows: int = 8
    """Rows of a micro-batch of the padded loop; 8 is what `TrainingArguments` of transformers has."""
    work: tuple[Work, ...] = WORK
    searches: bool = True
    """Whether the padded loop also runs with the number of rows with which it is fastest on this machine."""

    def rows_tried(self, rows_per_minibatch: int) -> list[int]:
        """Return the sizes among which the fastest is chosen: powers of two up to a whole minibatch."""
        return [2**power for power in range(int(math.log2(rows_per_minibatch)) + 1)]


@dataclass(kw_only=True)
class Measured:
    """One recipe's lengths with one kind of work, on all sides."""

    recipe: str
    work: Work
    is_longtail: bool
    micro_batch: dict[Side, str]
    """What each side puts into one pass, in words; the sides take turns in this order."""
    steps: dict[Side, list[list[Step]]] = field(default_factory=dict)
    """By repeat."""
    peak_mb: dict[Side, float] = field(default_factory=dict)


def work_settings(work: Work) -> list[str]:
    """Return what the kind of work changes in a recipe.

    In one pass there is one update and no proximal pass: both sides do the same forward and backward passes, and only
    padding and code differ. In the recipe's own work the trainer takes the proximal log-probabilities of the first
    minibatch from its update, while the padded loop has a pass over the whole batch before the updates, as verl has.
    """
    return ["trainer.minibatches=1", "objective.proximal=reuse"] if work == "one pass" else []


def check_recipe(config: Config) -> None:
    """Refuse recipes that the padded loop cannot train, or that do not say how long completions are.

    Raises:
        ConfigError: The objective has other terms, the recipe is not for one rank on a CPU in float32, or has neither
            drawn lengths nor worked sums alone.
    """
    default = ObjectiveConfig()
    others = sorted(
        name
        for name in ObjectiveConfig.model_fields
        if name not in _FREE and getattr(config.objective, name) != getattr(default, name)
    )
    if others:
        raise ConfigError(
            f"bench train compares decoupled PPO (objective.preset: areal), got a recipe that changes "
            f"{', '.join(f'objective.{name}' for name in others)}: leave them out"
        )
    if (config.run.device, config.compute_dtype, config.trainer.ranks) != ("cpu", "float32", 1):
        raise ConfigError(
            "bench train needs run.device=cpu, model.compute_dtype=float32 and trainer.ranks=1, got "
            f"{config.run.device}, {config.compute_dtype} and {config.trainer.ranks}: set them behind the recipe"
        )
    if config.rollout.workflow != LONGTAIL and (config.data.source != "arith" or config.data.mix):
        raise ConfigError(
            f"bench train must know how long completions are: expected rollout.workflow={LONGTAIL} (with "
            "rollout.workflow_arguments, see the recipe longtail_cpu) or data.source=arith alone, got "
            f"{config.rollout.workflow} and {', '.join(config.data.mix) or config.data.source}"
        )


def run_steps(bench: TrainBench, measured: Measured, step: Callable[[Side, int], Step]) -> None:
    """Let the sides take turns, every other repeat in the opposite order, and check each repeat's gradients.

    Args:
        bench: Settings.
        measured: Takes what is measured.
        step: Trains a side one step on the batch of that number; 0 was the step that warmed up.

    Raises:
        TrainerError: See `check_gradients`.
    """
    numbers = itertools.count(1)
    for repeat in range(bench.repeats):
        chosen = list(itertools.islice(numbers, bench.steps))
        for side in list(measured.micro_batch)[:: -1 if repeat % 2 else 1]:
            measured.steps.setdefault(side, []).append([step(side, number) for number in chosen])
        ours, *others = (measured.steps[side][-1] for side in measured.micro_batch)
        for theirs in others:
            check_gradients(ours, theirs)


def check_gradients(ours: Sequence[Step], theirs: Sequence[Step]) -> None:
    """Refuse figures of sides that did not compute the same thing.

    Raises:
        TrainerError: The norms of their gradients, or their trained tokens, differ.
    """
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine.tokens != other.tokens or not _difference(mine, other) <= TOLERANCE:
            raise TrainerError(
                f"in step {number} of a repeat our gradient has the norm {mine.grad_norm:.7g} over {mine.tokens} "
                f"tokens, the padded loop's {other.grad_norm:.7g} over {other.tokens}: they do not compute the same, "
                "so that no figure counts; report it"
            )


def summarise(measured: Iterable[Measured]) -> list[dict[str, Any]]:
    """Return a row per case and side: tokens/s of all repeats, and the ratios inside each repeat."""
    return [_row(one, side) for one in measured for side in one.micro_batch]


def targets(rows: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return what is aimed at: 1.5 times the padded loop on long-tailed lengths, and the same gradients everywhere."""
    rows = [row for row in rows if row["side"] == "areal-lite"]
    speed = [
        target(
            f"trained tokens/s over a padded transformers loop, lengths of {row['recipe']}, {row['work']}",
            at_least=1.5,
            values=row["over"]["padded"],
        )
        for row in rows
        if row["is_longtail"]
    ]
    differences = [row["gradient_difference"] for row in rows]
    return [*speed, target("relative difference of the gradient norms", at_most=TOLERANCE, values=differences)]


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return one row's cells."""
    return [
        f"{row['side']}\n{row['micro_batch']}",
        f"{row['recipe'].removesuffix('_cpu')}\n{row['work']}",
        with_spread(row["tokens_per_s"], ".0f"),
        f"{row['positions_per_token']:.2f}",
        f"{row['peak_mb']:.0f}",
        f"{row['grad_norm']:.5g}",
        *(middle(row["over"].get(other, []), ".2f") for other in ("padded", "fastest")),
    ]


def _row(one: Measured, side: Side) -> dict[str, Any]:
    repeats = one.steps[side]
    rates = {other: [_rate(repeat) for repeat in one.steps[other]] for other in one.steps}
    steps, theirs = (list(itertools.chain.from_iterable(one.steps[other])) for other in (side, "padded"))
    return {
        "side": side,
        "recipe": one.recipe,
        "work": one.work,
        "is_longtail": one.is_longtail,
        "micro_batch": one.micro_batch[side],
        "seconds": [sum(step.seconds for step in repeat) for repeat in repeats],
        "tokens_per_s": rates[side],
        "median": statistics.median(rates[side]),
        "over": {
            other: [mine / theirs for mine, theirs in zip(rates[side], rates[other], strict=True)]
            for other in rates
            if other not in (side, "areal-lite")
        },
        "tokens": sum(step.tokens for step in repeats[0]),
        "positions_per_token": sum(step.positions for step in steps) / sum(step.tokens for step in steps),
        "peak_mb": one.peak_mb[side],
        "grad_norm": steps[0].grad_norm,
        "gradient_difference": max(_difference(mine, other) for mine, other in zip(steps, theirs, strict=True)),
    }


def _rate(steps: Sequence[Step]) -> float:
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def _difference(mine: Step, other: Step) -> float:
    return abs(mine.grad_norm - other.grad_norm) / other.grad_norm
