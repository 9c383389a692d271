"""What `areal-lite bench queue` carries, in which order, and what its figures show.

Who carries is in `launch/queue_bench.py`, the command in `queue_command.py`.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from areal_lite.launch.bench.output import middle, target, with_spread
from areal_lite.types import Prompt, Sample, Score, StopReason, VersionSpan

__all__ = [
    "COLUMNS",
    "CONTENDERS",
    "Case",
    "EndlessPrompts",
    "QueueBench",
    "cells",
    "make_samples",
    "make_scores",
    "run_cases",
    "summarise",
    "targets",
]

Contender = Literal["areal-lite", "ray", "zeromq"]
CONTENDERS: tuple[Contender, ...] = ("areal-lite", "ray", "zeromq")
SAMPLES_PER_GROUP = 8
COLUMNS = ("carrier", "samples", "clients", "groups/s", "MB/s", "over ray", "over zeromq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement: who carries groups of which size for how many clients."""

    contender: Contender
    tokens: int
    """Of each of the 8 samples of a group."""
    clients: int
    """Connections that generate and verify, spread over at most two processes."""


@dataclass(frozen=True, kw_only=True)
class QueueBench:
    """Settings of the bench."""

    repeats: int = 5
    """Every case is measured once per repeat; the contenders take turns."""
    measured_s: float = 2.0
    warm_s: float = 0.5
    """Seconds of each measurement that do not count."""
    tokens: tuple[int, ...] = (1000, 50)
    clients: tuple[int, ...] = (1, 8, 64)
    groups_per_step: int = 16
    """Groups that the trainer takes at once."""
    max_staleness: int = 8

    @property
    def max_outstanding(self) -> int:
        """Groups under way at most."""
        return (self.max_staleness + 1) * self.groups_per_step


class EndlessPrompts:
    """A data cursor: `bench/0/n`, 100 tokens each."""

    def __init__(self) -> None:
        self._position = 0

    def next(self) -> Prompt:
        """Return the next prompt."""
        self._position += 1
        return self.get(f"bench/0/{self._position}")

    def get(self, prompt_id: str) -> Prompt:
        """Return any prompt."""
        return Prompt(prompt_id=prompt_id, text="7+25=?" * 50, token_ids=tuple(range(100)), answer="32")

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        """Nothing depends on results here."""

    def state(self) -> dict[str, Any]:
        """Return the place."""
        return {"position": self._position}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to a place."""
        self._position = state["position"]


def make_samples(tokens: int) -> list[Sample]:
    """Return a group of samples of so many tokens, with a text of four characters a token."""
    spans = (VersionSpan(version=0, start=0, end=tokens),)
    rng = np.random.default_rng(0)
    return [
        Sample(
            token_ids=rng.integers(0, 150_000, tokens, dtype=np.int32),
            logprobs=-rng.random(tokens, dtype=np.float32),
            spans=spans,
            stop_reason=StopReason.STOP,
            text="word" * tokens,
        )
        for _ in range(SAMPLES_PER_GROUP)
    ]


def make_scores() -> list[Score]:
    """Return one score per sample."""
    return [Score(reward=float(place % 2), parts={"correct": float(place % 2)}) for place in range(SAMPLES_PER_GROUP)]


def group_bytes(tokens: int) -> int:
    """Return what a group must bring: 4 bytes of id, 4 of log-probability and 4 of text a token."""
    return SAMPLES_PER_GROUP * tokens * 12


def run_cases(bench: QueueBench, measure: Callable[[Case], float]) -> list[tuple[Case, list[float]]]:
    """Measure every case once per repeat, the contenders of a case side by side; every other repeat goes backwards."""
    rates: dict[Case, list[float]] = {
        Case(contender=contender, tokens=tokens, clients=clients): []
        for tokens, clients, contender in itertools.product(bench.tokens, bench.clients, CONTENDERS)
    }
    for repeat in range(bench.repeats):
        for case in list(rates)[:: -1 if repeat % 2 else 1]:
            rates[case].append(measure(case))
    return list(rates.items())


def summarise(measured: Iterable[tuple[Case, Sequence[float]]]) -> list[dict[str, Any]]:
    """Return a row per case: groups/s of all repeats, their median, and the ratios to the others'.

    The ratios are those inside each repeat, where both sides saw the same machine.
    """
    rates = dict(measured)
    return [
        {
            **asdict(case),
            "groups_per_s": list(values),
            "median": statistics.median(values),
            "mb_per_s": statistics.median(values) * group_bytes(case.tokens) / 1e6,
            "over": {
                other: [
                    mine / theirs for mine, theirs in zip(values, rates[replace(case, contender=other)], strict=True)
                ]
                for other in CONTENDERS
                if other != case.contender
            },
        }
        for case, values in rates.items()
    ]


def targets(rows: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return what is aimed at: five times Ray's queue where groups are as long as real ones."""
    return [
        target(
            f"queue over ray.util.queue.Queue, 8 x 1,000 tokens, {row['clients']} clients",
            at_least=5.0,
            values=row["over"]["ray"],
        )
        for row in rows
        if row["contender"] == "areal-lite" and row["tokens"] == 1000
    ]


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return one row's cells."""
    return [
        row["contender"],
        f"{SAMPLES_PER_GROUP} x {row['tokens']}",
        str(row["clients"]),
        with_spread(row["groups_per_s"], ".0f"),
        f"{row['mb_per_s']:.1f}",
        *(middle(row["over"].get(other, []), ".2f") for other in ("ray", "zeromq")),
    ]
