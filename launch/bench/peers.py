"""What `areal-lite bench peers` runs, ours and TRL's, and what its figures show.

Both sides start from the same model, get the same prompts in the same order, and make one optimiser step from each
batch: `our_settings` and `trl_settings` say it to each. Who runs them is in `launch/peers_bench.py`, the command in
`peers_command.py`, the picture in `peers_view.py`.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.measures import measured_steps
from areal_lite.launch.bench.modes import MAX_STALENESS, MODES, Threads
from areal_lite.launch.bench.modes import thread_settings as thread_settings_of_mode
from areal_lite.launch.bench.output import target, with_spread

__all__ = [
    "COLUMNS",
    "LABELS",
    "SIDES",
    "Learning",
    "PeersBench",
    "Side",
    "cells",
    "check_comparable",
    "micro_batches",
    "our_settings",
    "reached",
    "run_order",
    "samples_per_s",
    "seconds_at",
    "summarise",
    "targets",
    "thread_settings",
    "trl_settings",
]

Side = Literal["async", "sync", "trl"]
SIDES: tuple[Side, ...] = ("async", "sync", "trl")
"""Ours with samples up to four steps old, ours in turns (for information), and TRL."""
LABELS: dict[str, str] = {"async": "areal-lite, eta 4", "sync": "areal-lite, eta 0", "trl": "TRL"}
COLUMNS = (
    "side", "samples/s", "x TRL", "s to it", "steps to it", "x sooner", "accuracy", "tokens",
)  # fmt: skip

_TARGET = 1.4
_SAME_LOSS: dict[str, Any] = {
    "run.device": "cpu",
    "rollout.workflow": "single_turn",
    "verifier.function": "last_number",
    "data.mix": {},
    "data.curriculum.strength": 0.0,
    "queue.reject": "none",
    "objective.reward_scale": 1.0,
    "objective.reward_bias": 0.0,
    "objective.reward_clip": None,
    "objective.overlong_buffer": 0.0,
    "objective.baseline": "group_mean",
    "objective.scale": "group_std",
    "objective.sample_filter": "all",
    "objective.mask_truncated": False,
    "objective.surrogate": "ratio",
    "objective.ratio_level": "token",
    "objective.aggregation": "token_mean",
    "objective.entropy_coef": 0.0,
    "objective.proximal_kl_coef": 0.0,
    "objective.kl": "none",
    "objective.ptx_coef": 0.0,
    "trainer.schedule": "constant",
    "trainer.warmup_steps": 0,
}
"""What a recipe must say for `peers_trl.py` to do the same."""


@dataclass(frozen=True, kw_only=True)
class PeersBench:
    """Settings of the bench."""

    repeats: int = 2
    """Runs of each side, each with a seed of its own."""
    steps: int = 120
    every: int = 10
    """Steps between two measurements of the held-out accuracy."""
    accuracy: float = 0.75
    """Greedy, on held-out problems: the one whose time is taken."""
    search_steps: int = 20
    """Of the short runs that choose threads and micro-batches."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """What one run shows."""

    seconds: tuple[float, ...]
    """After each step, the one of step 1 first; evaluations and start-up are left out."""
    accuracies: Mapping[int, float]
    """By steps done, from 0 on; empty in a run of the search."""
    tokens: float
    """Mean completion tokens of a sample."""


def run_order(repeats: int) -> list[tuple[Side, int]]:
    """Return who runs when: every other repeat goes backwards, so that the machine's drift favours nobody.

    >>> run_order(2)
    [('async', 0), ('sync', 0), ('trl', 0), ('trl', 1), ('sync', 1), ('async', 1)]
    """
    return [(side, repeat) for repeat in range(repeats) for side in SIDES[:: -1 if repeat % 2 else 1]]


def check_comparable(config: Config) -> None:
    """Check that TRL can be given the same work.

    Raises:
        ConfigError: The recipe says something for which there is no counterpart here.
    """
    content = config.model_dump()
    for key, wanted in _SAME_LOSS.items():
        got: Any = content
        for name in key.split("."):
            got = got[name]
        if got != wanted:
            raise ConfigError(
                f"bench peers compares recipes with {key}={wanted}, for which TRL has a counterpart, got {got}: take "
                "another recipe, such as arith_cpu"
            )


def our_settings(side: Side, threads: Threads, *, steps: int, every: int, seed: int) -> dict[str, Any]:
    """Return what a run of ours changes in the recipe.

    Args:
        side: `async` or `sync`.
        threads: Of engines and trainer.
        steps: Of the run.
        every: Steps between two snapshots, whose accuracy is measured after the run; 0 = none.
        seed: Of the run.
    """
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


def trl_settings(
    config: Config,
    *,
    model: str,
    prompts: Sequence[tuple[str, str]],
    problems: Sequence[tuple[str, str]],
    per_device: int,
    threads: int,
    every: int,
) -> dict[str, Any]:
    """Return the settings of `peers_trl.py`.

    Args:
        config: Of the same run of ours.
        model: Folder of the initial policy.
        prompts: Prompt and answer of every group, in the order in which ours takes them.
        problems: The same of the held-out problems.
        per_device: Samples of one forward and backward pass.
        threads: Of torch.
        every: Steps between two measurements of the accuracy; 0 = none.
    """
    return {
        "model": model,
        "prompts": list(prompts),
        "problems": list(problems),
        "steps": config.run.steps,
        "every": every,
        "seed": config.run.seed,
        "groups": config.queue.groups_per_step,
        "samples_per_group": config.queue.samples_per_group,
        "per_device": per_device,
        "threads": threads,
        "temperature": config.rollout.temperature,
        "max_new_tokens": config.rollout.max_new_tokens,
        "lr": config.trainer.lr,
        "beta1": config.trainer.beta1,
        "beta2": config.trainer.beta2,
        "weight_decay": config.trainer.weight_decay,
        "max_grad_norm": config.trainer.max_grad_norm,
        "clip_low": config.objective.clip_low,
        "clip_high": config.objective.clip_high,
    }


def thread_settings(side: Side, *, cores: int) -> list[Threads]:
    """Return the splits that are tried for a side of ours: two where there is one, both phases on all cores in turns.

    >>> [str(threads) for threads in thread_settings("async", cores=2)], str(*thread_settings("sync", cores=2))
    (['1+1', '1+2'], '2+2')
    """
    if side == "sync":
        return [Threads(generation=cores, training=cores)]
    return thread_settings_of_mode(MODES["async-eta4"], cores=cores)


def micro_batches(samples: int) -> list[int]:
    """Return the sizes of a pass that are tried in TRL: the whole batch, and a quarter, which may fit into a cache.

    >>> micro_batches(128), micro_batches(6)
    ([128, 32], [6])
    """
    return [samples] if samples % 4 else [samples, samples // 4]


def samples_per_s(seconds: Sequence[float], *, samples_per_step: int) -> float:
    """Return the rate over the steps that count, the same on both sides.

    Args:
        seconds: After each step, the one of step 1 first.
        samples_per_step: B.
    """
    first, last = measured_steps(len(seconds), max_staleness=MAX_STALENESS)
    return (last - first) * samples_per_step / (seconds[last - 1] - seconds[first - 1])


def reached(accuracies: Mapping[int, float], accuracy: float) -> float | None:
    """Return the steps after which an accuracy was first reached, linear between two measurements; None if never.

    >>> reached({0: 0.2, 10: 0.6, 20: 0.8}, 0.7), reached({0: 0.2, 10: 0.6}, 0.7), reached({0: 0.8}, 0.7)
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

    Args:
        seconds: After each step, the one of step 1 first.
        steps: 0 to as many.

    >>> seconds_at([4.0, 5.0], 1.5), seconds_at([4.0, 5.0], 0.5), seconds_at([4.0, 5.0], 2)
    (4.5, 2.0, 5.0)
    """
    times, below = [0.0, *seconds], int(steps)
    return times[below] + (times[min(below + 1, len(seconds))] - times[below]) * (steps - below)


def summarise(
    runs: Mapping[Side, Sequence[Learning]], *, bench: PeersBench, samples_per_step: int
) -> list[dict[str, Any]]:
    """Return a row per side, with the values of all repeats; ratios are those inside each repeat.

    `speed_over_trl` is samples/s over TRL's, `sooner_than_trl` TRL's seconds to the accuracy over the side's;
    the latter only of repeats in which both reached it.
    """
    rates = {
        side: [samples_per_s(run.seconds, samples_per_step=samples_per_step) for run in of_side]
        for side, of_side in runs.items()
    }
    steps_to = {side: [reached(run.accuracies, bench.accuracy) for run in of_side] for side, of_side in runs.items()}
    seconds_to = {
        side: [
            None if steps is None else seconds_at(run.seconds, steps)
            for run, steps in zip(of_side, steps_to[side], strict=True)
        ]
        for side, of_side in runs.items()
    }
    return [
        {
            "side": side,
            "samples_per_s": rates[side],
            "speed_over_trl": [mine / theirs for mine, theirs in zip(rates[side], rates["trl"], strict=True)],
            "seconds_to": seconds_to[side],
            "steps_to": steps_to[side],
            "sooner_than_trl": [
                theirs / mine
                for mine, theirs in zip(seconds_to[side], seconds_to["trl"], strict=True)
                if mine and theirs is not None
            ],
            "last_accuracy": [run.accuracies[max(run.accuracies)] for run in of_side],
            "tokens": [run.tokens for run in of_side],
            "curves": [
                [[step, seconds_at(run.seconds, step), value] for step, value in sorted(run.accuracies.items())]
                for run in of_side
            ],
        }
        for side, of_side in runs.items()
    ]


def targets(rows: Iterable[Mapping[str, Any]], *, accuracy: float) -> list[Any]:
    """Return what is aimed at: 1.4 times TRL in samples/s, and in the time to the accuracy, where both reached it."""
    (ours,) = [row for row in rows if row["side"] == "async"]
    measures = {
        "samples/s over TRL": ours["speed_over_trl"],
        f"TRL's seconds to accuracy {accuracy} over ours": ours["sooner_than_trl"],
    }
    return [target(name, at_least=_TARGET, values=values) for name, values in measures.items() if values]


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return one row's cells."""
    return [
        LABELS[row["side"]],
        with_spread(row["samples_per_s"], ".0f"),
        _median(row["speed_over_trl"], ".2f"),
        _median(row["seconds_to"], ".1f"),
        _median(row["steps_to"], ".0f"),
        _median(row["sooner_than_trl"], ".2f"),
        _median(row["last_accuracy"], ".3f"),
        _median(row["tokens"], ".1f"),
    ]


def _median(values: Sequence[float | None], spec: str) -> str:
    """Return the median, or `-` where a repeat has no value."""
    known = [value for value in values if value is not None]
    return format(statistics.median(known), spec) if known and len(known) == len(values) else "-"
