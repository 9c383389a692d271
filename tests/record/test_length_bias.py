"""The two warnings on rows of metrics: samples too old to train, and rewards that do not differ."""

from typing import Any

import pytest

from areal_lite.record.length_bias import EDGES, LENGTHS, by_quarter, spread_warning, stale_warning

SHORT, LONG = "17-64", "257-1024"


def row(*, first: int = 25, tokens: int = 25, **ledger: int) -> dict[str, Any]:
    """Four quarters of 100 tokens of short samples and of `tokens` of long ones, of whose first `first` train."""
    counts = {SHORT: [[100] * 4, [100] * 4], LONG: [[tokens] * 4, [first, tokens, tokens, tokens]]}
    return {"tokens_by_quarter": counts, "ledger": {"trained": 100} | ledger}


def test_rows_are_added_up_by_length_and_those_of_earlier_versions_passed_over() -> None:
    """Seen failing in the order of the rows: the longest came first."""
    assert LENGTHS[:3] == ("1-16", "17-64", "65-256")
    assert (LENGTHS[-1], len(LENGTHS)) == ("65537-", len(EDGES) + 1)
    last = {LONG: [[0] * 4, [0] * 4], SHORT: [[1, 2, 3, 4], [0, 0, 0, 4]]}
    found = by_quarter([{"tokens_by_quarter": last}, {"step": 1}, row(first=1)])
    assert list(found) == [SHORT, LONG]
    assert found[SHORT].tolist() == [[101, 102, 103, 104], [100, 100, 100, 104]]
    assert found[LONG].tolist() == [[25] * 4, [1, 25, 25, 25]]


def test_a_quarter_of_which_less_than_half_trains_is_named() -> None:
    """5 of 25 tokens of ten steps; of all 500 tokens a step, 480.

    Seen failing with the shares of the newest row alone, and with a quarter's share of its length's tokens.
    """
    rows = [row()] * 20 + [row(first=10)] * 5 + [row(first=0)] * 5
    assert "only 20% of quarter 1 of the samples of 257-1024 tokens was recent enough" in stale_warning(rows)
    assert "(all tokens: 96%)" in stale_warning(rows)


@pytest.mark.parametrize(
    "rows",
    [
        [row(first=13)] * 10,
        [row(first=0)] * 9,
        [row(first=0, tokens=4)] * 10,
        [row(stale=5)] * 10,
        [{"ledger": {"trained": 1}}] * 10,
    ],
    ids=["half trains", "too soon", "too rare", "few groups", "no figures"],
)
def test_no_warning_while_most_tokens_train(rows: list[dict[str, Any]]) -> None:
    """Seen failing with each of the four limits taken out."""
    assert stale_warning(rows) == ""


def test_groups_too_old_to_train_are_counted_as_well() -> None:
    """What `drop` discards is in no batch. Seen failing with the quarters alone."""
    rows = [row(stale=5, **{"failed(too_slow)": 3})] * 10
    assert stale_warning(rows).startswith("8 groups were too old to train, 100 ")


def rewarded(*rewards: float, varied: float = 0.0) -> list[dict[str, Any]]:
    return [{"reward_mean": reward, "varied_groups_fraction": varied} for reward in rewards]


LEARNED = rewarded(0.1, 0.4, 0.8, varied=0.5)


@pytest.mark.parametrize(
    ("history", "words"),
    [
        (rewarded(*[0.0] * 10), "no sample earned more than 0. Fix"),
        (rewarded(*[-1.0] * 10), "no sample earned more than -1. Fix"),
        (rewarded(0.25, varied=0.5) + rewarded(*[0.0] * 10), "no sample earned more than 0. Fix"),
        (rewarded(*[1.0] * 10), "every sample earned 1. If that is the verifier's maximum, the task is solved"),
        (LEARNED + rewarded(*[0.9] * 10), "every sample earned 0.9. If that is"),
        (rewarded(-5.0, varied=1.0) + rewarded(*[0.0] * 10), "every sample earned 0. If that is"),
        (rewarded(*[0.25, 0.5] * 5), "the samples of a prompt all earned the same, 0.375 on average. Fix: raise roll"),
    ],
    ids=["never right", "punished", "lost", "solved from the start", "learned", "the most is 0", "no sampling"],
)
def test_the_advice_depends_on_what_the_samples_earned(history: list[dict[str, Any]], words: str) -> None:
    """A run that has learned everything does not get the advice for one that is never right.

    Seen failing with the last rewards compared with 0 alone, and without the case of prompts that differ.
    """
    assert words in spread_warning(history)
    assert ("areal-lite sft" in spread_warning(history)) == words.startswith("no sample")


@pytest.mark.parametrize(
    "history",
    [rewarded(*[0.0] * 9), rewarded(*[0.0] * 9) + rewarded(0.1, varied=0.1), [{"reward_mean": 0.0}] * 10],
    ids=["too soon", "a group differed", "no figures"],
)
def test_no_warning_while_rewards_differ(history: list[dict[str, Any]]) -> None:
    """Rows of earlier versions lack the figure. Seen failing with each of the three conditions taken out."""
    assert spread_warning(history) == ""
