"""Warnings of a run: samples too old to train, rewards that do not differ, memory and publications of workers, and a
watched reward that falls while the trained one rises.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.record.length_bias import EDGES, LENGTHS, by_quarter, spread_warning, stale_warning
from areal_lite.record.reward_watch import alarm
from areal_lite.record.worker_warnings import growth_warning, link_warning

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


# --- memory curves and speeds of publications ---


def rows(values: list[float], *, lane: str = "verifier/0") -> list[dict[str, dict[str, float]]]:
    return [{"memory_mb": {"queue": 200.0, lane: value}} for value in values]


@pytest.mark.parametrize(
    ("values", "is_warned"),
    [
        ([1000.0 + 5 * step for step in range(60)], True),
        ([1000.0 + 5 * step + 20 * (step % 2) for step in range(60)], True),  # with noise
        ([1000.0 + 5 * step for step in range(59)], False),  # too early to tell
        ([1000.0] * 10 + [1500.0] * 50, False),  # it has grown once
        ([1000.0 + 1 * step for step in range(60)], False),  # by less than a tenth
        ([100.0 + 1 * step for step in range(60)], False),  # by less than 100 MiB
        ([1000.0 + 50 * (step % 12) for step in range(60)], False),  # it is freed again and again
    ],
)
def test_only_memory_that_grows_steadily_and_by_much_is_warned_of(values: list[float], is_warned: bool) -> None:
    """Seen failing with the first and the last value alone."""
    text = growth_warning(rows(values))
    assert bool(text) == is_warned
    if is_warned:
        assert text.startswith("the memory of verifier/0 grew from 1,0")


def test_a_process_that_was_replaced_is_not_compared_with_its_predecessor() -> None:
    """Rows without its figure, and rows before there was the metric, are skipped."""
    assert growth_warning([{}] * 30 + rows([500.0] * 30)) == ""


def speeds(*mb_s: float, seconds: float = 2.0) -> dict[str, object]:
    return {"publish_s": seconds, "publish_mb_s": {f"rollout/{number}": speed for number, speed in enumerate(mb_s)}}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([speeds(90, 10, 100)] * 5, "rollout/1 received the last 5 publications at 10 MB/s, the others at 95"),
        ([speeds(90, 10)] * 5, "rollout/1 "),
        ([speeds(90, 10)] * 4, ""),  # too early to tell
        ([speeds(90, 40)] * 5, ""),  # less than three times
        ([speeds(90, 10)] * 4 + [speeds(90, 80)], ""),  # once only
        ([speeds(90, 10, seconds=0.5)] * 5, ""),  # it costs nothing
        ([speeds(10)] * 5, ""),  # with nothing to compare with
        ([{"publish_s": 2.0, "publish_mb_s": {}}] * 5, ""),  # one group for all: nccl
    ],
)
def test_an_engine_behind_a_slow_link_is_named(rows: list[dict[str, object]], named: str) -> None:
    text = link_warning(rows)
    assert text.startswith(named)
    assert bool(text) == bool(named)


# --- a watched reward that falls while the trained one rises ---


ROWS = 10


def evaluation(trained: Any, watched: Any, *, names: Any = range(ROWS)) -> dict[str, Any]:
    of_row = [dict(zip(map(str, names), map(float, values), strict=True)) for values in (trained, watched)]
    return {"rewards": of_row[0], "watched": {"truth": of_row[1]}}


BEST = evaluation([0] * ROWS, [1] * ROWS)
GAMED = evaluation([1, 3] * 5, [1, 0] * 5)


def test_an_alarm_names_the_steps_and_both_changes() -> None:
    """Trained changes 1 and 3, watched 0 and -1, five times each: standard errors 1/3 and 1/6 (stdev over root 10).

    Seen failing with the step of the first evaluation that showed it.
    """
    found = alarm({0: evaluation([-1] * ROWS, [0] * ROWS), 10: BEST, 20: GAMED, 30: GAMED})
    assert found is not None
    assert (found.verifier, found.best_step, found.before, found.step) == ("truth", 10, 20, 30)
    assert found.trained == (10, 2.0, pytest.approx(2 - 1.96 / 3), pytest.approx(2 + 1.96 / 3), 10, 0)
    assert found.watched == (10, -0.5, pytest.approx(-0.5 - 1.96 / 6), pytest.approx(-0.5 + 1.96 / 6), 0, 5)
    assert str(found) == (
        "the policy may be gaming its reward: since step 10, held-out trained reward +2.000 (+1.347 to +2.653) and "
        "watched truth -0.500 (-0.827 to -0.173), 95 % intervals, at steps 20 and 30. Fix: use a checkpoint near step "
        "10; raise objective.kl_coef, or improve the reward"
    )


@pytest.mark.parametrize(
    "evaluations",
    [
        [],
        [BEST, GAMED],  # once
        [BEST, GAMED, BEST],
        [GAMED, BEST, GAMED],  # the first one is no fall
        [BEST, evaluation([-1] * ROWS, [0] * ROWS), evaluation([-1] * ROWS, [0] * ROWS)],  # both fall
        [BEST, *[evaluation([1] * ROWS, [1] * 9 + [0])] * 2],  # one row of ten: it may be chance
        [BEST, *[evaluation([1] * 5 + [-1] * 5, [0] * ROWS)] * 2],  # trained reward has not risen
        [BEST, *[evaluation([9] * ROWS, [0] * ROWS, names=range(50, 60))] * 2],  # other rows
        [{"rewards": {"0": 0.0}, "watched": {}}] * 3,
        [evaluation([n], [-n], names=[0]) for n in range(3)],  # one row has no interval
    ],
)
def test_what_is_no_alarm(evaluations: list[dict[str, Any]]) -> None:
    """Seen failing with one evaluation, and with the fall alone."""
    assert alarm(dict(enumerate(evaluations))) is None


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_it_agrees_with_arrays(seed: int, count: int) -> None:
    """Of drifting rewards, computed with numpy from matrices; the order of rows means nothing.

    Seen failing with the last evaluation as the best.
    """
    rng = np.random.default_rng(seed)
    drift = np.arange(count)[:, None]
    trained, watched = rng.normal(0.4 * drift, 1, (count, ROWS)), rng.normal(-0.4 * drift, 1, (count, ROWS))

    def shown(k: int) -> bool:
        if k < 1:
            return False
        best = watched[:k].mean(1).argmax()
        rise, fall = trained[k] - trained[best], watched[best] - watched[k]
        return all(one.mean() > 1.96 * one.std(ddof=1) / np.sqrt(ROWS) for one in (rise, fall))

    def shuffled(k: int) -> dict[str, Any]:
        order = rng.permutation(ROWS)
        return evaluation(trained[k][order], watched[k][order], names=order)

    found = alarm({k: shuffled(k) for k in range(count)})
    assert (found is not None) == (shown(count - 1) and shown(count - 2))
