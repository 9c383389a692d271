"""What a sample checks about itself, and what a score changes in it."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from ledger_builders import make_sample

from areal_lite.errors import WireError
from areal_lite.types import GIVEN, Sample, Score, StepReward, VersionSpan
from areal_lite.wire import decode, encode


def with_spans(*spans: tuple[int, int, int], **changes: Any) -> Sample:
    """Three tokens with the spans (version, start, end)."""
    made = tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in spans)
    return make_sample(spans=made, **changes)


def test_spans_that_follow_each_other_to_the_end_are_a_sample() -> None:
    assert with_spans((4, 0, 1), (GIVEN, 1, 2), (3, 2, 3)).oldest_version == 3


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(0, 0, 2)],
        [(0, 0, 4)],
        [(0, 1, 3)],
        [(0, 0, 1), (0, 2, 3)],
        [(0, 0, 2), (0, 1, 3)],
        [(0, 0, 3), (0, 4, 5)],
        [(0, 0, 3), (0, 0, 3)],
        [(0, 1, 2), (0, 0, 3)],
    ],
)
def test_spans_with_gaps_overlaps_or_ends_elsewhere_are_refused(spans: list[tuple[int, int, int]]) -> None:
    """Seen failing with the look at the spans ended at the first gap."""
    with pytest.raises(ValueError, match="cover all 3 tokens"):
        with_spans(*spans)


def test_a_sample_ends_with_a_token_of_the_model() -> None:
    with pytest.raises(ValueError, match="must end with a token that the model produced"):
        with_spans((0, 0, 2), (GIVEN, 2, 3))


def test_a_score_replaces_all_that_was_said_before() -> None:
    """Seen failing with each field of the sample left out of `Sample.scored`."""
    score = Score(
        reward=0.5,
        step_rewards=(StepReward(token=1, value=0.25),),
        parts={"correct": 0.5},
        metrics={"words": 7.0},
        feedback="well done",
    )
    generated = with_spans(
        (3, 0, 3), text="abc", messages=({"role": "user", "content": "?"},), routes=np.zeros((2, 1, 1), np.uint8)
    )
    scored = generated.scored(score)
    for field in fields(Sample):
        assert getattr(scored, field.name) is (score if field.name == "score" else getattr(generated, field.name))
    assert (generated.total_reward, scored.total_reward) == (None, 0.75)
    failed = scored.scored(Score(failure="timeout"))
    assert (failed.score, failed.step_rewards, failed.total_reward) == (Score(failure="timeout"), (), None)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1e39])
def test_a_reward_that_cannot_train_is_no_score(wrong: float) -> None:
    """Nor when it comes from another process: its group would be `ready`. Seen failing without the check."""
    for content in ({"reward": wrong}, {"reward": 0.0, "step_rewards": [{"token": 0, "value": wrong}]}):
        with pytest.raises(WireError, match="rewards that float32 can"):
            decode(encode(content), Score)
    steps = (StepReward(token=0, value=3e38), StepReward(token=1, value=3e38))
    with pytest.raises(ValueError, match="rewards that float32 can"):
        Score(reward=1.0, step_rewards=steps)


@pytest.mark.parametrize("routes", [np.zeros((2, 1), np.uint8), np.zeros((2, 1, 1), np.int32)])
def test_routes_are_small_numbers_by_token_layer_and_choice(routes: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"routes must be \[tokens, layers, experts\] uint8 or uint16"):
        with_spans((3, 0, 3), routes=routes)


def test_a_score_must_fit_its_sample() -> None:
    with pytest.raises(ValueError, match=r"tokens 0\.\.2"):
        with_spans((0, 0, 3)).scored(Score(reward=1.0, step_rewards=(StepReward(token=3, value=1.0),)))
