"""What `bench peers` compares: the same work on both sides, and what their runs show. Pure functions."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.harness import changed_objective, ratios, target
from areal_lite.launch.bench.modes_figures import measured_steps
from areal_lite.launch.bench.modes_runs import MAX_STALENESS, MODES, Threads
from areal_lite.launch.bench.modes_runs import thread_settings as thread_settings_of_mode
from areal_lite.launch.bench.view import PEERS, Row, picture

__all__ = ["Learning", "check_comparable", "draw_peers", "micro_batches", "our_settings", "reached", "samples_per_s",
           "seconds_at", "summarise", "targets", "thread_settings", "trl_settings"]  # fmt: skip

_COLORS = {"async": "#1f5fa8", "sync": "#7fa6d6", "trl": "#c25a00"}
_TARGET = 1.4
_SAME_LOSS: dict[str, Any] = {
    "run.device": "cpu",
    "rollout.workflow": "single_turn",
    "verifier.function": "last_number",
    "data.mix": {},
    "data.curriculum.strength": 0.0,
    "queue.reject": "none",
    "trainer.schedule": "constant",
    "trainer.warmup_steps": 0,
}
"""What a recipe must say, beside the default objective, for `peers_trl.py` to do the same."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """What one run shows."""

    seconds: tuple[float, ...]
    """After each step, the one of step 1 first; evaluations and start-up are left out."""
    accuracies: Mapping[int, float]
    """By steps done, from 0 on; empty in a run of the search."""
    tokens: float
    """Mean completion tokens of a sample."""


# ---------------------------------------------------------------- the same work on both sides


def check_comparable(config: Config) -> None:
    """Check that TRL can be given the same work.

    Raises:
        ConfigError: The recipe says something for which there is no counterpart here.
    """
    content, wanted = config.model_dump(), _SAME_LOSS | changed_objective(config)
    for key, value in wanted.items():
        got: Any = reduce(lambda found, name: found[name], key.split("."), content)
        if got != value:
            raise ConfigError(
                f"bench peers compares recipes with {key}={value}, for which TRL has a counterpart, got {got}: take "
                "another recipe, such as arith_cpu"
            )


def our_settings(side: str, threads: Threads, *, steps: int, every: int, seed: int) -> dict[str, Any]:
    """Return what a run of ours changes in the recipe; `every` so many steps there is a snapshot, 0 = none."""
    return {
        "queue.max_staleness": MAX_STALENESS if side == "async" else 0,
        # Equal gradient work: one optimiser step per batch, and no pass for a proximal policy.
        "trainer.minibatches": 1,
        "objective.proximal": "reuse",
        "trainer.ranks": 1,
        "trainer.threads": threads.training,
        "rollout.workers": 1,
        "rollout.threads": threads.generation,
        "run.steps": steps,
        "run.seed": seed,
        # A snapshot is a checkpoint, and writing it counts; TRL's clock stands still while it evaluates.
        "run.checkpoint_every": every,
        "run.keep_checkpoints": steps + 1,
        "run.eval_every": 0,
        "run.report": False,
        "weights.parity_every": 0,
    }


def trl_settings(config: Config, *, per_device: int) -> dict[str, Any]:
    """Return the arguments of TRL's `GRPOConfig`: one optimiser step per generated batch, on-policy, without KL.

    `per_device` samples make one forward and backward pass.
    """
    return {
        # What is compared: the same as in the recipe.
        "seed": config.run.seed,
        "max_steps": config.run.steps,
        "num_generations": config.queue.samples_per_group,
        "shuffle_dataset": False,
        "max_completion_length": config.rollout.max_new_tokens,
        "temperature": config.rollout.temperature,
        "learning_rate": config.trainer.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": config.trainer.beta1,
        "adam_beta2": config.trainer.beta2,
        "weight_decay": config.trainer.weight_decay,
        "max_grad_norm": config.trainer.max_grad_norm,
        # The loss of the preset `areal` where proximal = current: all tokens of the batch weigh the same.
        "loss_type": "dapo",
        "scale_rewards": "group",
        "beta": 0.0,
        "epsilon": config.objective.clip_low,
        "epsilon_high": config.objective.clip_high,
        # Equal gradient work: each batch is generated at once and trained once, in one optimiser step.
        "num_iterations": 1,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": config.samples_per_step // per_device,
        "steps_per_generation": config.samples_per_step // per_device,
        # float32 on a CPU, as ours; and nothing that would only cost TRL time.
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "optim": "adamw_torch_fused",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def thread_settings(side: str, *, cores: int) -> list[Threads]:
    """Return the splits that are tried for a side of ours: two where there is one, both phases on all cores in turns.

    >>> [str(threads) for threads in thread_settings("async", cores=2)], str(*thread_settings("sync", cores=2))
    (['1+1', '1+2'], '2+2')
    """
    return [Threads(cores, cores)] if side == "sync" else thread_settings_of_mode(MODES["async-eta4"], cores=cores)


def micro_batches(samples: int) -> list[int]:
    """Return the sizes of a pass that are tried in TRL: the whole batch, and a quarter, which may fit into a cache.

    >>> micro_batches(128), micro_batches(6)
    ([128, 32], [6])
    """
    return [samples] if samples % 4 else [samples, samples // 4]


# ---------------------------------------------------------------- figures


def samples_per_s(seconds: Sequence[float], *, samples_per_step: int) -> float:
    """Return the rate over the steps that count, the same on both sides; `seconds` as in `Learning`."""
    first, last = measured_steps(len(seconds), max_staleness=MAX_STALENESS)
    return (last - first) * samples_per_step / (seconds[last - 1] - seconds[first - 1])


def reached(accuracies: Mapping[int, float], accuracy: float) -> float | None:
    """Return the steps after which an accuracy was first reached, linear between two measurements; None if never.

    >>> reached({0: 0.25, 10: 0.5, 20: 1.0}, 0.75), reached({0: 0.2, 10: 0.6}, 0.7), reached({0: 0.8}, 0.7)
    (15.0, None, 0.0)
    """
    points = sorted(accuracies.items())
    if points and points[0][1] >= accuracy:
        return float(points[0][0])
    for (before, low), (after, high) in itertools.pairwise(points):
        if high >= accuracy:
            return before + (after - before) * (accuracy - low) / (high - low)
    return None


def seconds_at(seconds: Sequence[float], steps: float) -> float:
    """Return the time at which so many steps were done, linear between two.

    >>> seconds_at([4.0, 5.0], 1.5), seconds_at([4.0, 5.0], 0.5), seconds_at([4.0, 5.0], 2)
    (4.5, 2.0, 5.0)
    """
    return float(np.interp(steps, range(len(seconds) + 1), [0.0, *seconds]))


def summarise(
    runs: Mapping[str, Sequence[Learning]], *, accuracy: float, samples_per_step: int
) -> list[dict[str, Any]]:
    """Return a row per side, with the values of all repeats; ratios are those inside each repeat.

    `speed_over_trl` is samples/s over TRL's, `sooner_than_trl` TRL's seconds to the accuracy over the side's;
    the latter only of repeats in which both reached it.
    """
    rows: list[dict[str, Any]] = []
    for side, of_side in runs.items():
        steps_to = [reached(run.accuracies, accuracy) for run in of_side]
        reaching = zip(of_side, steps_to, strict=True)
        points = [sorted(run.accuracies.items()) for run in of_side]
        rows.append({
            "side": side,
            "samples_per_s": [samples_per_s(run.seconds, samples_per_step=samples_per_step) for run in of_side],
            "seconds_to": [None if steps is None else seconds_at(run.seconds, steps) for run, steps in reaching],
            "steps_to": steps_to,
            "last_accuracy": [found[-1][1] for found in points],
            "tokens": [run.tokens for run in of_side],
            "curves": [
                [[step, seconds_at(run.seconds, step), value] for step, value in found]
                for run, found in zip(of_side, points, strict=True)
            ],
        })  # fmt: skip
    (trl,) = [row for row in rows if row["side"] == "trl"]
    for row in rows:
        both = [
            pair for pair in zip(trl["seconds_to"], row["seconds_to"], strict=True) if pair[1] and pair[0] is not None
        ]
        row["speed_over_trl"] = ratios(row["samples_per_s"], trl["samples_per_s"])
        row["sooner_than_trl"] = [theirs / mine for theirs, mine in both]
    return rows


def targets(rows: Sequence[Row], *, accuracy: float) -> list[Any]:
    """Return what is aimed at: 1.4 times TRL in samples/s, and in the time to the accuracy, where both reached it."""
    (ours,) = [row for row in rows if row["side"] == "async"]
    measures = {
        "samples/s over TRL": ours["speed_over_trl"],
        f"TRL's seconds to accuracy {accuracy} over ours": ours["sooner_than_trl"],
    }
    return [target(name, values, at_least=_TARGET) for name, values in measures.items() if values]


def draw_peers(rows: Sequence[Row], *, accuracy: float, path: Path) -> None:
    """Draw the held-out accuracy over the seconds of training, a line per run, into an SVG file."""
    with picture(path, size=(6.5, 3.6)) as (_, axes):
        axes.axhline(accuracy, color="#8a8a8a", linewidth=0.8, linestyle="--")
        for row in rows:
            for place, curve in enumerate(row["curves"]):
                _, seconds, values = zip(*curve, strict=True)
                label, color = None if place else PEERS[row["side"]], _COLORS[row["side"]]
                axes.plot(seconds, values, color=color, marker=".", linewidth=1.2, label=label)
        axes.set_xlabel("seconds of training (without start-up and evaluation)")
        axes.set_ylabel("held-out accuracy, greedy")
        axes.legend(frameon=False, loc="lower right")
