"""Figures of several workers as one, and an evaluation in words."""

from typing import Any

import pytest

from areal_lite.launch.run.collector import _together
from areal_lite.launch.run.evaluation import in_words

FIRST = {
    "calls": 10, "timeouts": 1, "restarts": 2, "busy": 1, "waiting": 0,
    "failures": {"timeout": 1}, "latency_p50_s": 0.01, "latency_p95_s": 0.5,
}  # fmt: skip
SECOND = {
    "calls": 5, "timeouts": 0, "restarts": 0, "busy": 0, "waiting": 3,
    "failures": {"timeout": 1, "nan": 2}, "latency_p50_s": 0.02, "latency_p95_s": 0.3,
}  # fmt: skip


def test_counts_add_up_and_the_worst_latency_stands() -> None:
    assert _together([FIRST, SECOND]) == {
        "calls": 15, "timeouts": 1, "restarts": 2, "busy": 1, "waiting": 3,
        "failures": {"timeout": 2, "nan": 2}, "latency_p50_s": 0.02, "latency_p95_s": 0.5,
    }  # fmt: skip


RESULT = {
    "step": 20,
    "accuracy": 0.25,
    "by_source": {"a": 0.5, "b": 0.0},
    "problems": 8,
    "failures": 0,
    "versions": [20],
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "held-out accuracy at step 20: 0.250 [a 0.500, b 0.000] (8 problems, versions [20])"),
        (
            {"by_source": {"a": 0.25}, "failures": 2},
            "held-out accuracy at step 20: 0.250 (8 problems, versions [20], 2 could not be scored)",
        ),
        (
            {"problems": 0, "failures": 9},
            "held-out accuracy at step 20: none, as not one of 9 completions could be scored",
        ),
    ],
)
def test_an_evaluation_in_words(changes: dict[str, Any], words: str) -> None:
    """An evaluation in which nothing was scored is no accuracy of 0. Seen failing as `0.000 (0 problems`."""
    assert in_words(RESULT | changes) == words
