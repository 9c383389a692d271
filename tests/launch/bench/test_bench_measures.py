"""The arithmetic of `bench modes` on a scripted trace whose answers are worked out by hand."""

from typing import Any

import pytest

from areal_lite.events import Event
from areal_lite.launch.bench.modes_figures import measure, measured_steps, percentiles, reward_at

BEGIN = 1000.0
"""When the trainer began to wait for its first batch."""


def lane(name: str, *rows: tuple[Any, ...]) -> list[Event]:
    """`(time, kind)`, with `n` or `version` behind it for the kinds that have one."""
    names = {"running": ["n"], "published": ["version"]}
    return [
        {"time": BEGIN + time, "lane": name, "kind": kind, **dict(zip(names.get(kind, ()), rest, strict=True))}
        for time, kind, *rest in rows
    ]


def group(time: float, lane: str, lengths: list[int]) -> Event:
    samples = [{"end": BEGIN + time, "tokens": tokens, "spans": []} for tokens in lengths]
    event = {"time": BEGIN + time, "lane": lane, "kind": "group"}
    return event | {"start": BEGIN, "group": "a#0", "samples": samples}


# Four steps, published at 4, 10, 16 and 20 s; measured are the steps 2 and 3, from 4 to 16 s: 12 s.
#
# trainer: waits 4-6, trains 6-9, publishes 9-10; waits 10-14, trains 14-15, publishes 15-16: waits 6 of 12 s.
TRAINER = lane(
    "trainer",
    (0, "wait"), (2, "train"), (3, "trained"), (4, "published", 1),
    (4, "wait"), (6, "train"), (9, "trained"), (10, "published", 2),
    (10, "wait"), (14, "train"), (15, "trained"), (16, "published", 3),
    (16, "wait"), (18, "train"), (19, "trained"), (20, "published", 4),
)  # fmt: skip
# engine 0: 4 run over 4-7, 2 over 7-10.5 (paused 9-10 and drained 9-9.5 before that, which stay on), none over
# 10.5-16: slot seconds 4*3 + 2*3.5 = 19; idle 10.5-15 (paused 15-16): 4.5 s.
# paused: 9.5-10 and 15-16 = 1.5 s; draining 9-9.5 = 0.5 s.
ENGINE_0 = lane(
    "rollout/0",
    (1, "running", 4), (7, "running", 2), (9, "drain"), (9.5, "paused"), (9.6, "update_received"),
    (9.8, "update_loaded"), (10, "resumed"), (10.5, "running", 0), (15, "pause"), (15.2, "paused"), (16, "resumed"),
    (17, "running", 4),
)  # fmt: skip
# engine 1: one sample runs all the time: slot seconds 12, never idle, never paused.
ENGINE_1 = lane("rollout/1", (1, "running", 1))
EVENTS = [*ENGINE_0, *TRAINER, *ENGINE_1, group(5, "rollout/0", [1, 2, 3]), group(6, "rollout/1", [10])]
ROWS: list[dict[str, Any]] = [
    {"step": step, "time_s": time_s, "gen_tokens_per_s": rate, "tokens_trained": trained, "reward_mean": reward,
     "age_histogram": ages}
    for step, time_s, rate, trained, reward, ages in (
        (1, 7.0, 99.0, 500, 0.0, {"0": 100}),
        (2, 13.0, 20.0, 60, 0.2, {"0": 40, "1": 20}),
        (3, 19.0, 10.0, 36, 0.4, {"1": 30, "10": 6}),
        (4, 23.0, 99.0, 500, 0.9, {"0": 100}),
    )
]  # fmt: skip
"""Their clock began 3 s before the trainer's first wait."""


@pytest.fixture
def figures() -> dict[str, Any]:
    return measure(ROWS, EVENTS, first=1, last=3, samples_per_step=6, slots=4)


def test_rates_are_those_of_the_measured_steps_alone(figures: dict[str, Any]) -> None:
    """Two steps of 6 samples in 12 s; 20*6 + 10*6 generated and 60 + 36 trained tokens.

    Seen failing with the row behind the last step counted too.
    """
    assert figures["seconds_per_step"] == 6.0
    assert figures["samples_per_s"] == 1.0
    assert figures["generated_tokens_per_s"] == pytest.approx(180 / 12)
    assert figures["trained_tokens_per_s"] == 8.0
    assert figures["age_histogram"] == {"0": 40, "1": 50, "10": 6}


def test_idle_and_paused_shares(figures: dict[str, Any]) -> None:
    """Of 12 s, averaged over two engines of 4 slots; while one drains (0.5 s), the trainer waits for it.

    Seen failing with clocks that are fed the whole log before they are read, and with the
    wait for draining engines taken for publishing.
    """
    expected = {
        "trainer_idle": (6 + 0.5) / 12,
        "trainer_publishing": (2 - 0.5) / 12,
        "generator_idle": (4.5 / 12 + 0) / 2,
        "generator_paused": (1.5 / 12 + 0) / 2,
        "generator_draining": (0.5 / 12 + 0) / 2,
        "occupancy": (19 + 12) / (12 * 4 * 2),
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_lengths_and_seconds_are_those_of_the_whole_run(figures: dict[str, Any]) -> None:
    assert figures["lengths"] == {"mean": 4.0, "p10": 1, "p50": 2, "p90": 10, "p99": 10, "p100": 10}
    assert figures["seconds"] == 20.0, "from the first wait to the last publication"


def test_rewards_after_as_many_steps_and_after_as_much_time() -> None:
    """Steps 1 to 3 are published by 16 s after the first wait. Seen failing with the rows' own clock, 3 s earlier."""
    assert reward_at(ROWS, EVENTS) == pytest.approx((0.0 + 0.2 + 0.4 + 0.9) / 4)
    assert reward_at(ROWS, EVENTS, seconds=16.0) == pytest.approx((0.0 + 0.2 + 0.4) / 3)
    assert reward_at(ROWS, EVENTS, seconds=3.9) is None


def test_a_reward_is_the_mean_of_five_steps() -> None:
    rows = [{"step": step, "reward_mean": float(step)} for step in range(1, 9)]
    events = lane("trainer", (0, "wait"), *((float(step), "published", step) for step in range(1, 9)))
    assert reward_at(rows, events) == (4 + 5 + 6 + 7 + 8) / 5


@pytest.mark.parametrize(
    ("steps", "eta", "expected"), [(20, 4, (5, 16)), (18, 4, (5, 14)), (17, 4, (1, 17)), (8, 4, (1, 8)), (2, 0, (1, 2))]
)
def test_filling_and_emptying_are_left_out_where_half_the_run_remains(
    steps: int, eta: int, expected: tuple[int, int]
) -> None:
    assert measured_steps(steps, max_staleness=eta) == expected


def test_percentiles_are_values_that_occurred() -> None:
    """Of 10 values, the 90th percentile is the 9th. Seen failing with `>` in place of `>=`."""
    found = percentiles([9, *[1] * 8, 7], (0, 80, 81, 90, 91, 100))
    assert found == {"p0": 1, "p80": 1, "p81": 7, "p90": 7, "p91": 9, "p100": 9}
    assert percentiles([], (50,)) == {"p50": None}
