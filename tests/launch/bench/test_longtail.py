"""The workload of benchmarks: lengths from a log-normal distribution, decoded for real whatever the model says."""

import statistics

import numpy as np
import pytest
from episode_builders import load, play
from scripted_engine import ScriptedEngine

from areal_lite.launch.bench.longtail import draw_length
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.runner import Workflows
from areal_lite.types import StopReason

WORKFLOW = "areal_lite.launch.bench.longtail:drawn_length"
EOS = 1
ROOM = Sampling(max_new_tokens=40, temperature=1.0)


def workflows(median: float = 20, sigma: float = 0.9) -> Workflows:
    return load(WORKFLOW, arguments={"median": median, "sigma": sigma})


def test_lengths_are_log_normal() -> None:
    """Median 64; at sigma 0.9 a length exceeds 64*exp(0.9) = 157 with probability 0.159, and 64*exp(1.8) with 0.023.

    5000 draws: the standard error of a share of 0.16 is 0.005. Seen failing with the median taken for the mean.
    """
    lengths = [draw_length(seed, median=64, sigma=0.9, longest=10_000) for seed in range(5000)]
    assert statistics.median(lengths) == pytest.approx(64, rel=0.05)
    assert statistics.fmean(length > 64 * np.exp(0.9) for length in lengths) == pytest.approx(0.159, abs=0.02)
    assert statistics.fmean(length > 64 * np.exp(1.8) for length in lengths) == pytest.approx(0.023, abs=0.01)


def test_a_length_is_of_its_seed_alone_and_within_bounds() -> None:
    first = [draw_length(seed, median=3, sigma=2.0, longest=7) for seed in range(200)]
    assert first == [draw_length(seed, median=3, sigma=2.0, longest=7) for seed in range(200)]
    assert set(first) == set(range(1, 8))
    assert {draw_length(seed, median=5, sigma=0.0, longest=7) for seed in range(9)} == {5}


def test_a_sample_has_its_drawn_length_whatever_the_model_says() -> None:
    """`play` gives seed 100, and the stand-in ends one of nine tokens. Seen failing with `ignore_end` not handed on."""
    for median in (5, 20, 35):
        sample = play(ScriptedEngine(), workflows(median), sampling=ROOM)
        assert sample.num_tokens == draw_length(100, median=median, sigma=0.9, longest=40)
        assert sample.stop_reason is StopReason.LENGTH
    assert EOS in play(ScriptedEngine(), workflows(sigma=0.0, median=40), sampling=ROOM).token_ids[:-1]
