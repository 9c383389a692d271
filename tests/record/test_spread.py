"""The word on a run that learns nothing: not one group whose rewards differ."""

from typing import Any

import pytest

from areal_lite.record.quarters import spread_warning as warning


def rows(*rewards: float, varied: float = 0.0) -> list[dict[str, Any]]:
    return [{"reward_mean": reward, "varied_groups_fraction": varied} for reward in rewards]


LEARNED = rows(0.1, 0.4, 0.8, varied=0.5)


@pytest.mark.parametrize(
    ("history", "words"),
    [
        (rows(*[0.0] * 10), "no sample earned more than 0; show"),
        (rows(*[-1.0] * 10), "no sample earned more than -1; show"),
        (rows(0.25, varied=0.5) + rows(*[0.0] * 10), "no sample earned more than 0; show"),
        (
            rows(*[1.0] * 10),
            "every sample earned 1; where that is the most that the verifier gives, the task is solved",
        ),
        (LEARNED + rows(*[0.9] * 10), "every sample earned 0.9; where that is the most"),
        (rows(-5.0, varied=1.0) + rows(*[0.0] * 10), "every sample earned 0; where that is the most"),
        (rows(*[0.25, 0.5] * 5), "the samples of a prompt all earned the same, 0.375 in the mean: raise rollout.temp"),
    ],
    ids=["never right", "punished", "lost", "solved from the start", "learned", "the most is 0", "no sampling"],
)
def test_what_is_said_depends_on_what_the_samples_earned(history: list[dict[str, Any]], words: str) -> None:
    """Of a run that has learned all there is nobody says that it is never right.

    Seen failing with the last rewards compared with 0 alone, and without the case of prompts that differ.
    """
    assert words in warning(history)
    assert ("areal-lite sft" in warning(history)) == words.startswith("no sample")


@pytest.mark.parametrize(
    "history",
    [rows(*[0.0] * 9), rows(*[0.0] * 9) + rows(0.1, varied=0.1), [{"reward_mean": 0.0}] * 10],
    ids=["too soon", "a group differed", "no figures"],
)
def test_otherwise_nothing_is_said(history: list[dict[str, Any]]) -> None:
    """Rows of earlier versions lack the figure. Seen failing with each of the three conditions taken out."""
    assert warning(history) == ""
