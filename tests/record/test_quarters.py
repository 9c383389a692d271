"""What of long samples the staleness bound takes away: the figures of rows added up, and the word on it."""

from typing import Any

import pytest

from areal_lite.record.quarters import EDGES, LENGTHS, by_quarter
from areal_lite.record.quarters import stale_warning as warning

SHORT, LONG = "17-64", "257-1024"


def row(*, first: int = 25, tokens: int = 25, **ledger: int) -> dict[str, Any]:
    """Four quarters of 100 tokens of short samples and of `tokens` of long ones, of whose first `first` train."""
    counts = {SHORT: [[100] * 4, [100] * 4], LONG: [[tokens] * 4, [first, tokens, tokens, tokens]]}
    return {"tokens_by_quarter": counts, "ledger": {"trained": 100} | ledger}


def test_lengths_have_names_in_order() -> None:
    assert LENGTHS[:3] == ("1-16", "17-64", "65-256")
    assert (LENGTHS[-1], len(LENGTHS)) == ("65537-", len(EDGES) + 1)


def test_rows_are_added_up_by_length_and_those_of_earlier_versions_passed_over() -> None:
    """Seen failing in the order of the rows: the longest came first."""
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
    assert "of quarter 1 of the samples of 257-1024 tokens only 20% was young enough" in warning(rows)
    assert "of all tokens 96%" in warning(rows)


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
def test_otherwise_nothing_is_said(rows: list[dict[str, Any]]) -> None:
    """Seen failing with each of the four limits taken out."""
    assert warning(rows) == ""


def test_groups_too_old_to_train_are_counted_as_well() -> None:
    """What `drop` discards is in no batch. Seen failing with the quarters alone."""
    assert warning([row(stale=5, **{"failed(too_slow)": 3})] * 10).startswith("8 groups were too old to train, 100 ")
