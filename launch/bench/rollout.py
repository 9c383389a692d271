"""What `areal-lite bench rollout` measures, in which order, and what its figures show.

Who generates is in `launch/rollout_bench.py`, the command in `rollout_command.py`.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal_lite.config.recipe import Config, load_config
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.output import middle, target, with_spread
from areal_lite.launch.bench.rollout_requests import sampling_of

__all__ = [
    "CASES",
    "COLUMNS",
    "OVER",
    "Case",
    "Measurement",
    "RolloutBench",
    "bench_config",
    "cells",
    "run_cases",
    "summarise",
    "targets",
]

Case = Literal["vllm", "worker", "drain", "recompute"]
CASES: dict[Case, str] = {
    "vllm": "vLLM alone",
    "worker": "rollout worker, queue, verifier",
    "drain": "the same, publications that drain",
    "recompute": "the same, publications that interrupt",
}
"""What is measured, in words."""
OVER: dict[Case, Case] = {"worker": "vllm", "drain": "worker", "recompute": "drain"}
"""What each is compared with."""
COLUMNS = ("generating", "tokens/s", "hand-over s", "over line above")

_NEVER_CLOSED = 10**9
"""Steps, and steps of staleness, that no benchmark reaches: without a trainer admission would soon close."""


@dataclass(frozen=True, kw_only=True)
class RolloutBench:
    """Settings of the bench."""

    repeats: int = 5
    """Everything is measured once per repeat."""
    measured_s: float = 10.0
    """At least: with publications a measurement lasts from the beginning of one to the beginning of another."""
    warm_s: float = 4.0
    """Seconds of each measurement that do not count: all requests begin at once, and the longest must have had time."""
    publish_every_s: float = 5.0
    """From the beginning of one publication to that of the next; one that is late begins at once."""

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: A setting is too small.
        """
        if self.repeats < 1 or self.measured_s <= 0 or self.publish_every_s <= 0:
            raise ConfigError(
                f"a measurement needs a repeat, a length and a cadence above 0; got --repeats {self.repeats} "
                f"--seconds {self.measured_s:g} --every {self.publish_every_s:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one measurement saw."""

    tokens: int
    """Generated, by the engine's count."""
    seconds: float
    handovers_s: tuple[float, ...] = ()
    """Seconds of each publication, from the wish to pause until generation goes on."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def bench_config(recipe: str, overrides: Sequence[str]) -> Config:
    """Return the recipe, with one worker and a queue that always lends.

    Args:
        recipe: Path or name.
        overrides: Words of the command line.

    Raises:
        ConfigError: The recipe is wrong, or its workflow makes more than one request.
        PluginError: Its workflow cannot be loaded.
    """
    ours = {
        "rollout.workers": 1,
        "rollout.interrupt": "recompute",
        "queue.max_staleness": _NEVER_CLOSED,
        "queue.on_stale": "mask",
        "run.steps": _NEVER_CLOSED,
    }
    config = load_config(recipe, [*overrides, *(f"{key}={value}" for key, value in ours.items())])
    sampling_of(config)
    return config


def run_cases(bench: RolloutBench, measure: Callable[[Case], Measurement]) -> dict[Case, list[Measurement]]:
    """Measure every case once per repeat; every other repeat goes backwards."""
    measured: dict[Case, list[Measurement]] = {case: [] for case in CASES}
    for repeat in range(bench.repeats):
        for case in list(CASES)[:: -1 if repeat % 2 else 1]:
            measured[case].append(measure(case))
    return measured


def summarise(measured: Mapping[Case, Sequence[Measurement]]) -> list[dict[str, Any]]:
    """Return a row per case: tokens/s of all repeats, and their ratios to what the case is compared with.

    The ratios are those inside each repeat, where both sides saw the same machine.
    """
    rates = {case: [one.tokens_per_s for one in measurements] for case, measurements in measured.items()}
    return [
        {
            "case": case,
            "tokens_per_s": values,
            "handovers_s": list(itertools.chain.from_iterable(one.handovers_s for one in measured[case])),
            "over": [mine / theirs for mine, theirs in zip(values, rates[OVER[case]], strict=True)]
            if case in OVER
            else [],
        }
        for case, values in rates.items()
    ]


def targets(rows: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return what is aimed at: little overhead, and a gain from interrupting."""
    aims = {"worker": ("rollout worker over vLLM alone", 0.95), "recompute": ("interruptible over drain", 1.12)}
    return [
        target(f"{aims[row['case']][0]}, tokens/s", at_least=aims[row["case"]][1], values=row["over"])
        for row in rows
        if row["case"] in aims
    ]


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return one row's cells."""
    return [
        CASES[row["case"]],
        with_spread(row["tokens_per_s"], ".0f"),
        middle(row["handovers_s"], ".3f"),
        middle(row["over"], ".2f"),
    ]
